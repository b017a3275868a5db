"""Checks that HTTP is answered where it is configured, and that Fairlead answers there."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Final

from agent.console.doctor.findings import Finding, Patient, failure, fine, warning
from backends.errors import reason_of

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
