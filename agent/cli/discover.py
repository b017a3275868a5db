"""`fairlead discover`: what the configuration finds on this node, without a kubelet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, Final

import anyio
import click

from agent.cli import commands, connection
from agent.cli.output import echo, echo_json, wrapped
from agent.cli.suggest import Found, look
from agent.config import load
from agent.console.doctor.hardware import problems_of
from agent.console.views import NAMES_NOTHING
from agent.discovery.backend_answers import make_backends
from agent.inventory.shortfall import not_offered
from agent.inventory.survey import PATIENCE, Survey, survey
from agent.model import Slot
from agent.runtime import logs
from backends.base import Device, Problem

_NO_FILE: Final = (
    "There is no configuration file: Fairlead offers what KubeVirt asks for, which comes first here. What this machine has "
    "beside follows, each with the [[resource]] that would offer it; `fairlead suggest > config.toml` writes a whole file, "
    "with comments."
)
_BESIDE_A_DAEMON: Final = "As the hardware looks now; drains and what the kernel said: `fairlead status`."
_MOST_NAMES: Final = 8  # of the adapters of a pool, on its line


@click.command(epilog="Exit codes: 0 done, 2 the configuration has mistakes.")
@commands.config
@click.option("--all", "everything", is_flag=True, help="Look with every backend; show what could be offered, too.")
@commands.as_json
def discover(config: Path | None, everything: bool, as_json: bool) -> None:
    """Show the hardware that the configuration takes, and what it leaves; without one, what this machine could offer.

    What could be offered stands with the [[resource]] that would offer it; `fairlead suggest` writes all of them.

    With --json it prints {"resources": [{"name", "devices": [{"id", "health", "reason", "numa_node", "hardware",
    "attributes"}]}], "unclaimed": [{"device", "backend", "why"}], "problems": [{"backend", "subject", "message"}]};
    where names are made of attributes, "templates": [{"name", "resources"}] too; with --all, or without a configuration,
    "proposals": [{"title", "name", "backend", "devices", "toml"}].
    """
    logs.set_up("error")
    file, its = connection.in_force(config)
    loaded = load(file)
    if everything or loaded.source is None:
        found, proposed = look(loaded)
    else:
        found, proposed = (
            anyio.run(survey, loaded.resources, make_backends(loaded.host, loaded.resources), PATIENCE),
            None,
        )
    configured = frozenset(resource.name for resource in loaded.resources)
    if as_json:
        echo_json(_document(found, configured, proposed))
        return
    if its is not None:
        echo(wrapped(_BESIDE_A_DAEMON, 0))
    if loaded.source is None:
        echo(wrapped(_NO_FILE, 0))
    elif config is None:
        echo(wrapped(f"By {loaded.source}{', which the daemon runs with' if its == str(loaded.source) else ''}:", 0))
    for line in _lines(found, configured, proposed):
        echo(line)


def _names(found: Survey, configured: Set[str]) -> list[str]:
    """The resources that the configuration has, or whose templates it has; the others are proposals."""
    written = ((name, found.inventory.resource(name)) for name in found.inventory.names())
    return [name for name, it in written if it is None or it.configured in configured]


def _document(found: Survey, configured: Set[str], proposed: Sequence[Found] | None) -> dict[str, Any]:
    inventory = found.inventory
    given = {name: it for name, it in inventory.selection.given().items() if name in configured}
    return (
        {
            "resources": [
                {"name": name, "devices": [_device(slot) for _, slot in sorted(inventory.slots(name).items())]}
                for name in _names(found, configured)
            ],
            "unclaimed": [
                {"device": one.found.device.key, "backend": one.found.backend, "why": one.why}
                for one in not_offered(inventory)
            ],
            "problems": [
                {"backend": kind, "subject": problem.subject, "message": problem.sentence}
                for kind, problem in found.problems
            ],
        }
        | ({"templates": [{"name": name, "resources": it} for name, it in given.items()]} if given else {})
        | ({"proposals": [_proposal(it) for it in proposed]} if proposed is not None else {})
    )


def _proposal(it: Found) -> dict[str, Any]:
    return {
        "title": it.proposal.title,
        "name": it.proposal.resource["name"],
        "backend": it.proposal.resource["backend"],
        "devices": [_device(slot) for slots in it.devices.values() for slot in slots],
        "toml": it.proposal.toml,
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


def _lines(found: Survey, configured: Set[str], proposed: Sequence[Found] | None) -> Iterator[str]:
    inventory = found.inventory
    if not configured:
        yield "The configuration has no [[resource]]: nothing would be offered."
    told = list[Problem]()  # of a resource, in its line
    for name in _names(found, configured):
        slots = inventory.slots(name)
        yield _line(name, _total(slots), own := [] if slots else problems_of(found, name))
        told += own
        yield from (wrapped(_offer(key, count, slot), 2, 4) for key, (count, slot) in _by_device(slots).items())
    for template, given in inventory.selection.given().items():
        if not given and template in configured:
            yield _line(template, NAMES_NOTHING, own := problems_of(found, template))
            told += own
    for it in proposed or ():
        yield ""
        yield wrapped(f"{it.headline()}.", 0, 2)
        for name, of_one in it.devices.items():
            yield f"  {name}: {_total({slot.id: slot for slot in of_one})}"
            slots = {slot.id: slot for slot in of_one}
            yield from (wrapped(_offer(key, count, slot), 4, 6) for key, (count, slot) in _by_device(slots).items())
        yield from (
            f"    {line}".rstrip() for line in it.proposal.toml.rstrip().split("\n") if not line.startswith("#")
        )
    if proposed is not None and not proposed:
        yield "Nothing else was found that pods could have."
    elif proposed:
        yield ""
    if left := not_offered(inventory):
        yield "Not offered:"
        yield from (wrapped(f"{one.found.device.key}: {one.why}", 2, 4) for one in left)
    if others := [it for _, it in found.problems if it not in told]:
        yield "Problems:"
        yield from (wrapped(problem.sentence, 2, 4) for problem in others)


def _line(name: str, what: str, problems: Sequence[Problem]) -> str:
    """What a resource has; where that is nothing, why."""
    return wrapped("; ".join((f"{name}: {what}", *(it.sentence.removeprefix(f"{name}: ") for it in problems))), 0, 2)


def _offer(key: str, count: int, slot: Slot) -> str:
    """A device: its name, its IDs where they differ, what a person knows it by, and how it is."""
    ids = slot.id if count == 1 else f"{slot.id} and {count - 1} more"
    health = slot.health.state.value.lower() + (f": {slot.health.message}" if slot.health.message else "")
    named = key if ids == key else f"{key} ({ids})"
    return ", ".join((named, *(_facts(slot.device) if slot.device else ()), health))


def _facts(device: Device) -> Iterator[str]:
    """Its address, unless it has several; what it is; its NUMA node."""
    said = device.attributes
    address = said.get("address", ())
    what = next((said[name] for name in ("model", "hca", "id", "type_name") if name in said), ())
    if len(address) == 1 and address != (device.key,):
        yield address[0]
    if what:
        yield " ".join(what[:_MOST_NAMES]) + (" …" if len(what) > _MOST_NAMES else "")
    if device.numa_node is not None:
        yield f"NUMA node {device.numa_node}"


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
