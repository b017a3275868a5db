"""`fairlead explain`: all that is known of one device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import click

from agent.cli import commands, connection, device_history, output
from agent.cli.output import advised, bold, echo, wrapped
from agent.console import advice
from agent.console.control import NoDaemonError, WrongNameError
from agent.console.views import ENDS, Explanation, Fault, Gift, Signal
from agent.inventory.lookup import name_of
from agent.runtime.errors import some

_NOTES: Final = 10
"""Of what happened, the last; the history has all."""
OWN_LOOK: Final = "This command has looked at the hardware itself; it knows neither drains nor what pods hold."
"""What stands before an answer without a daemon; `kubectl fairlead` takes such an answer for none."""


@click.command(epilog="Exit codes: 0 done, 2 there is no such device, or no daemon and a configuration with mistakes.")
@connection.device
@connection.config
@commands.as_json
def explain(device: str, config: Path | None, as_json: bool) -> None:
    """Show what was read of DEVICE, which resource took or refused it and why, how it is, and what a pod would get.

    DEVICE is an ID, a key, a PCI address, its hardware, or what it alone is called: mlx5_0, nvidia3, uverbs1. Without a
    daemon it looks by itself. With --json it prints one document, {"key", "backend", "resource", "state", "reason",
    "message", "decisions", "signals", "gift", ...}; "gift" has what a pod would get.
    """
    try:
        explained = connection.ask(config, lambda client: client.explain(device))
    except NoDaemonError as error:
        output.note(f"{error.sentence}. {OWN_LOOK}")
        explained = _look(config, device)
    if as_json:
        output.echo_json(explained)
        return
    for line in lines(explained):
        echo(line)


def _look(config: Path | None, device: str) -> Explanation:
    """Explain it without a daemon.

    Raises:
        FairleadError: the configuration has mistakes, or there is no such device.
    """
    import time

    import anyio
    from msgspec.structs import replace

    from agent.config import load
    from agent.console.control import NoSuchDeviceError
    from agent.console.device_facts import Knowledge, find
    from agent.console.device_facts import explain as explained
    from agent.discovery.backend_answers import make_backends
    from agent.inventory.shortfall import not_offered
    from agent.inventory.survey import PATIENCE, survey
    from agent.runtime import logs

    logs.set_up("error")
    loaded = load(config)
    backends = make_backends(loaded.host, loaded.resources)
    found = anyio.run(survey, loaded.resources, backends, PATIENCE)
    now = time.monotonic()
    known = Knowledge(
        found.inventory,
        backends,
        lambda hardware: found.health.signals_of(hardware, now),
        lambda kind, unit: found.problems_of.get((kind, unit), ()),
        lambda monotonic: monotonic + output.now() - now,
        selectable=lambda: ((kind, device) for kind, every in found.selectable.items() for device in every),
    )
    try:
        it = explained(known, anyio.run(find, known, device), device)
    except NoSuchDeviceError as error:
        raise WrongNameError(str(error)) from error
    assert it is not None  # nothing has a name here but what is there
    missing = (one.missing for one in not_offered(found.inventory) if not it.resource)
    why = next((one for one in missing if one and (one.backend, one.device) == (it.backend, it.key)), None)
    return it if why is None else replace(it, reason=why.reason, message=why.message)


def lines(it: Explanation) -> Iterator[str]:
    """The explanation as a person reads it: the verdict first."""
    yield from _verdict(it)
    yield from _section(
        "Decisions", (wrapped(f"{one.resource or 'any resource'}: {one.why}", 2, 4) for one in it.decisions)
    )
    said = (it.reason, it.besides)  # the advice says what ends these
    yield from _section("Signals", (_signal(one, ends=one.reason not in said) for one in it.signals))
    yield from _section(
        "Happened in the last 24 hours", (wrapped(device_history.happened(one), 2, 4) for one in it.notes[-_NOTES:])
    )
    yield from _section("Last fault", map(_fault, (it.fault,) if it.fault is not None else ()))
    yield from _section("Problems", (wrapped(one.message, 2, 4) for one in it.problems))
    yield from _section("Read", _read(it))
    if it.gift is not None:
        yield from _section("A container would get", _gift(it.gift))
    if it.refusal:
        yield wrapped(f"A pod that asks for it would be refused: {it.refusal}", 0, 2)


def _verdict(it: Explanation) -> Iterator[str]:
    if not it.resource:
        yield bold(it.key) + " is not offered"
    else:
        ids = f" as {some(it.ids, 1)}" if it.ids != (it.key,) else ""
        yield f"{bold(it.key)} is offered in {it.resource}{ids}: {output.state(it.condition, it.condition.lower())}"
    if it.reason:
        since = f" since {output.moment(it.since)}" if it.since else ""
        yield wrapped(f"{it.reason}{since}: {it.message}", 2, 2)
    yield from _advice(it)
    for held in it.held:
        who = ", ".join(map(str, held.holders))
        yield wrapped(
            f"{held.id} is held by {who or 'a pod that the kubelet does not name: it starts, or has ended'}", 2, 4
        )


def _advice(it: Explanation) -> Iterator[str]:
    """What its reason means, what to do, and what ends it; what its signals wait for is said with each."""
    found = advice.of_device(it, name_of(it.attributes), it.node)
    return advised(advice.told(found) if found is not None else ())


def _section(heading: str, inner: Iterator[str]) -> Iterator[str]:
    listed = list(inner)
    if listed:
        yield ""
        yield bold(heading)
        yield from listed


def _signal(one: Signal, *, ends: bool) -> str:
    counts = "" if one.counts else ", does not count now"
    with_ = " or ".join(ENDS.get(name, name) for name in one.clears_on) if ends else ""
    ending = f", ends with {with_}" if with_ else ""
    said = f"{one.reason} ({one.verdict}{counts}{ending}) since {output.moment(one.since)}: {one.message}"
    return wrapped(said, 2, 4)


def _fault(it: Fault) -> str:
    when = f"from {output.moment(it.begins)} until {output.moment(it.ends)}"
    return wrapped(f"{it.reason} {when}, {it.by}: {it.message}", 2, 4)


def _read(it: Explanation) -> Iterator[str]:
    known = {
        "backend": it.backend,
        "unit": it.unit if it.unit != it.key else "",
        "hardware": ", ".join(it.hardware),
        "depends on": ", ".join(it.depends),
        "identity": it.identity,
        "NUMA node": "" if it.numa_node is None else str(it.numa_node),
        "below": " ".join(it.ancestry),
        **{name: ", ".join(filter(None, values)) for name, values in sorted(it.attributes.items())},
    }
    width = max(map(len, known))
    for name, value in known.items():
        if value:
            yield wrapped(f"{name:<{width}}  {value}", 2, width + 4)


def _gift(gift: Gift) -> Iterator[str]:
    for node in gift.devices:
        renamed = f" as {node.container_path}" if node.container_path != node.host_path else ""
        yield wrapped(f"device {node.host_path}{renamed} ({node.permissions})", 2, 4)
    for mount in gift.mounts:
        mode = ", read-only" if mount.read_only else ""
        yield wrapped(f"mount {mount.host_path} at {mount.container_path}{mode}", 2, 4)
    for kind, pairs in (("env", gift.envs), ("annotation", gift.annotations)):
        yield from (wrapped(f"{kind} {name}={value}", 2, 4) for name, value in pairs.items())
    yield from (f"  CDI device {name}" for name in gift.cdi_devices)
    if gift.cdi_spec:
        yield f"  devices and mounts by {gift.cdi_spec}"
    if gift == Gift():
        yield "  nothing"
