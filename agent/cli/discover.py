"""`fairlead discover`: what the configuration finds on this node, without a kubelet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import anyio
import click
import msgspec

from agent import logs
from agent.cli import options
from agent.config import load
from agent.devices.making import make_backends
from agent.devices.model import Slot
from agent.devices.survey import Survey, survey

_PATIENCE = 10.0  # seconds for each backend


@click.command(epilog="Exit codes: 0 done, 2 the configuration has mistakes.")
@options.config
@options.as_json
def discover(config: Path | None, as_json: bool) -> None:
    """Show the hardware that the configuration takes, and what it leaves.

    With --json it prints {"resources": [{"name", "devices": [{"id", "health", "reason", "numa_node", "hardware",
    "attributes"}]}], "unclaimed": [{"device", "backend", "why"}], "problems": [{"backend", "subject", "message"}]}.
    """
    logs.set_up("error")
    loaded = load(config)
    found = anyio.run(survey, loaded.resources, make_backends(loaded.host, loaded.resources), _PATIENCE)
    if as_json:
        click.echo(msgspec.json.encode(_document(found)))
    else:
        for line in _lines(found):
            click.echo(line)


def _document(found: Survey) -> dict[str, Any]:
    inventory = found.inventory
    return {
        "resources": [
            {"name": name, "devices": [_device(slot) for _, slot in sorted(inventory.slots(name).items())]}
            for name in inventory.names()
        ],
        "unclaimed": [
            {"device": one.device.key, "backend": one.backend, "why": one.why} for one in inventory.unclaimed()
        ],
        "problems": [
            {"backend": kind, "subject": problem.subject, "message": problem.sentence}
            for kind, problem in found.problems
        ],
    }


def _device(slot: Slot) -> dict[str, Any]:
    device, health = slot.device, slot.health
    return {
        "id": slot.id,
        "health": health.state.value,
        "reason": health.reason,
        "numa_node": device.numa_node if device else None,
        "hardware": sorted(device.hardware) if device else [],
        "attributes": device.attributes if device else {},
    }


def _lines(found: Survey) -> Iterator[str]:
    inventory = found.inventory
    if not inventory.names():
        yield "The configuration has no [[resource]]: nothing would be offered."
    for name in inventory.names():
        slots = inventory.slots(name)
        yield f"{name}: {_total(slots)}"
        for device, (count, slot) in _by_device(slots).items():
            ids = slot.id if count == 1 else f"{slot.id} and {count - 1} more"
            numa = (
                "" if slot.device is None or slot.device.numa_node is None else f", NUMA node {slot.device.numa_node}"
            )
            health = slot.health.state.value.lower() + (f": {slot.health.message}" if slot.health.message else "")
            yield f"  {device} ({ids}){numa}, {health}"
    if unclaimed := inventory.unclaimed():
        yield "Not offered:"
        yield from (f"  {one.device.key}: {one.why}" for one in unclaimed)
    if found.problems:
        yield "Problems:"
        yield from (f"  {problem.sentence}" for _, problem in found.problems)


def _total(slots: Mapping[str, Slot]) -> str:
    states = Counter(slot.health.state.value.lower() for slot in slots.values())
    return ", ".join(f"{number} {state}" for state, number in sorted(states.items())) or "nothing"


def _by_device(slots: Mapping[str, Slot]) -> dict[str, tuple[int, Slot]]:
    """Each device with the number of its IDs and the first of them."""
    devices: dict[str, tuple[int, Slot]] = {}
    for _, slot in sorted(slots.items()):
        key = slot.device.key if slot.device else slot.id
        count, first = devices.get(key, (0, slot))
        devices[key] = count + 1, first
    return devices
