"""Checks a running daemon: is everything registered, was the configuration taken, does it answer over HTTP?"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Final

from agent.console.doctor.findings import Finding, Patient, failure, fine, warning
from agent.console.doctor.kubelet import MEND
from agent.console.views import Status
from agent.model import FORGOTTEN, TWO_PODS
from backends.errors import reason_of

_MENDS: Final = {
    "log": "See to it that whatever reads its stderr goes on reading.",
    "restarts": "Its log says more (`part-failed`, `part-restarts`).",
    "http": "Its log has the traceback (`http-failed`); please report it.",
    "kernel-log": "Raise log_buf_len= of the kernel if it comes again; what these lines said is lost.",
    "claims": "Look at the kubelet's log; pods keep what they have meanwhile.",
    "connections": "Raise its limit of open files: LimitNOFILE= of the service.",
}
"""What to do about the problems of a part; of the others, their own sentence says it."""


def daemon(said: Status | str) -> Iterator[Finding]:
    """Findings from its status, or from why there is none."""
    if isinstance(said, str):
        mend = "Start it, or run this as root; if it runs, its log says what keeps it from that socket."
        yield warning(f"{said[:1].upper()}{said[1:].rstrip('.')}.", mend)
        return
    for mistake in said.configuration.mistakes:
        yield failure(f"It runs with an earlier configuration: {mistake}", "Mend the file.")
    if said.configuration.needs_restart:
        yield warning(
            f"It was started with other settings: {', '.join(said.configuration.needs_restart)}.",
            "Restart it: systemctl restart fairlead, or delete the pod.",
        )
    for problem in said.problems:
        if problem.backend:
            continue  # of hardware, which the checks above have looked at
        if problem.subject == "state":
            yield failure(
                f"{problem.message}.", "Mend state_dir's disk; `fairlead drain` again what is missing.", "state"
            )
        else:
            mend = _MENDS.get(problem.subject, "Mend what it names; Fairlead tries again by itself.")
            yield warning(f"{problem.message}.", mend, problem.subject.replace(" ", "-"))
    yield from _held_twice(said)
    for it in said.witnesses:
        if it.heard:
            yield fine(f"It hears {it.name}.", "witnesses")
        elif not it.needed:
            yield fine(f"It need not hear {it.name}: {it.why}.", "witnesses")
        else:
            yield warning(f"It does not hear {it.name}: {it.why.rstrip('.')}.", "Mend what it names.", "witnesses")
    missing = [resource for resource in said.resources if not resource.served]
    if waiting := said.kubelet.waiting_for:
        without = f" {len(missing)} of its {len(said.resources)} resources are not registered." if missing else ""
        yield failure(f"It is {waiting}.{without}", "The checks above say what is wrong there.")
    for resource in missing:
        if waiting and not resource.complaint:
            continue
        why = f": {resource.complaint.rstrip('.')}" if resource.complaint else ""
        yield failure(
            f"{resource.name} is not registered with the kubelet{why}.",
            MEND
            if resource.overtaken
            else "Look at the kubelet's log for the name; the checks above say whether it answers.",
        )
    if not missing:
        yield fine(f"All its {len(said.resources)} resources are registered, and the kubelet listens to each.")


def _held_twice(said: Status) -> Iterator[Finding]:
    """What two pods hold, or will, if the kubelet that has forgotten the first one has its way."""
    for resource, device in ((one, it) for one in said.resources for it in one.devices):
        who = " and ".join(dict.fromkeys(it.name for held in device.held for it in held.holders)) or "nobody knows who"
        about = f"{device.key} of {resource.name} is {device.reason}: {device.message} ({who})."
        if device.reason == TWO_PODS:
            yield failure(about, "Delete one of these pods; its next one gets another device.")
        elif device.reason == FORGOTTEN:
            yield warning(about, f"Delete that pod, or, if no pod has it: fairlead undrain {device.ids[0]}.")


# --- does it answer over HTTP? ---


_PATIENCE: Final = 1.0  # seconds for a connection, and for each part of an answer
_READS: Final = 8  # what is ours says so in the first two: headers, and the first metric
_OURS: Final = b"fairlead_build_info"


def http(patient: Patient) -> Iterator[Finding]:
    """Is it Fairlead that answers at [http] listen?"""
    listen = patient.config.http.listen
    if not patient.config.http.is_on:
        yield fine("It is off.")
        return
    try:
        said = _metrics(listen)
    except OSError as error:
        yield warning(
            f"Nobody answers at {listen}: {reason_of(error)}; probes and metrics fail.",
            "Start Fairlead; if it runs, its log says why it cannot listen there.",
        )
        return
    if _OURS in said:
        yield fine(f"Fairlead answers at {listen}.")
    else:
        yield failure(
            f"Something else answers at {listen}: Fairlead cannot listen there, and probes fail.",
            "Set another port in [http] listen, and in the probes; `ss -lptn` names who has this one.",
        )


def _metrics(listen: str) -> bytes:
    """The beginning of what is answered to a scraper."""
    with _connected(listen) as link:
        link.settimeout(_PATIENCE)
        link.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        return b"".join(link.recv(4096) for _ in range(_READS))


def _connected(listen: str) -> socket.socket:
    scheme, _, path = listen.partition(":")
    if scheme != "unix":
        host, _, port = listen.rpartition(":")
        return socket.create_connection((host.strip("[]"), int(port)), _PATIENCE)
    link = socket.socket(socket.AF_UNIX)
    try:
        link.settimeout(_PATIENCE)
        link.connect(path)
    except OSError:
        link.close()
        raise
    return link
