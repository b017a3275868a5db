"""`fairlead migrate`: what a node's switch from another plugin to Fairlead means, before anything is changed."""

from __future__ import annotations

import tomllib
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import anyio
import click
from msgspec import Struct
from msgspec.structs import asdict, replace

from agent.claims.ledger import Tracer
from agent.cli import commands, output
from agent.cli.import_ import arguments, imported_from
from agent.cli.output import bold, echo, wrapped
from agent.config import Config, load
from agent.config.file import read_tables
from agent.config.problems import Problems
from agent.console.doctor import Finding, Level, Patient
from agent.console.doctor.kubelet import other_plugins
from agent.discovery.backend_answers import make_backends
from agent.importing import Imported
from agent.inventory.inventory import Inventory
from agent.inventory.shortfall import not_offered
from agent.inventory.survey import PATIENCE, Survey, survey
from agent.kubelet import witnesses
from agent.kubelet.witnesses import CheckpointEntry, CheckpointError, PodResourcesError, list_pods
from agent.runtime import logs
from agent.runtime.errors import ExitCode, some
from backends import registry

_STEPS: Final = (
    "Write the configuration above to a file, and check it: fairlead validate config.toml",
    "Let no new pod come to the node; those that run stay: kubectl cordon NODE",
    "Take away {peer}. Pods keep what they have; new ones would be refused until Fairlead is there, hence the cordon.",
    "Start Fairlead with the file. It takes up what pods hold from the kubelet's record, and keeps it from others.",
    "Look at it: fairlead doctor, and fairlead status --pods",
    "Let pods come again: kubectl uncordon NODE",
)


@click.command(
    epilog="Exit codes: 0 everything can be carried over, 1 something is lost or cannot be mapped, 2 the files cannot be read."
)
@arguments
@commands.config
@commands.as_json
def migrate(files: tuple[Path, ...], config: Path | None, as_json: bool, **how: Any) -> None:
    """Show what switching this node from another plugin to Fairlead means; it changes nothing.

    It takes files as `fairlead import` does, and prints the configuration, which pods hold which devices of it, what
    cannot be mapped, and the steps in their order. [agent] and [host] of --config say where the kubelet and the node are.
    With --json it prints {"configuration", "remarks": [{"file", "line", "sentence", "lost"}], "holdings": [{"resource",
    "ids", "pod", "container", "devices", "same_ids", "ours"}], "unread", "not_offered", "findings", "steps"}.
    """
    logs.set_up("error")
    imported = imported_from(files, **how)
    loaded = _configured(imported, config)
    found, held = anyio.run(_look, loaded)
    findings = [it for it in other_plugins(Patient(loaded)) if it.level is not Level.FINE]
    if as_json:
        output.echo_json(_document(imported, found, held, findings))
    else:
        for line in _lines(imported, found, held, findings):
            echo(line)
    if not imported.lossless or any(_is_unmapped(it) for it in held.holdings):
        raise click.exceptions.Exit(ExitCode.TROUBLE)


def _configured(imported: Imported, config: Path | None) -> Config:
    """The imported resources on this node."""
    tables = tomllib.loads(imported.toml)
    new = read_tables(tables, Problems(Path(), imported.toml), registry, source=None)
    here = load(config)
    agent = replace(here.agent, plugin_dir=new.agent.plugin_dir) if "agent" in tables else here.agent
    return replace(new, agent=agent, host=here.host)


async def _look(config: Config) -> tuple[Survey, Holders]:
    found = await survey(config.resources, make_backends(config.host, config.resources), PATIENCE)
    return found, await holders(found.inventory, config.agent.plugin_dir, config.agent.pod_resources)


def _is_unmapped(holding: Holding) -> bool:
    return not holding.devices


def _steps(imported: Imported) -> list[str]:
    return [step.format(peer=some(imported.peers)) for step in _STEPS]


def _document(imported: Imported, found: Survey, held: Holders, findings: Sequence[Finding]) -> dict[str, Any]:
    remarks = [
        {"file": file, "line": line, "sentence": remark.sentence, "lost": remark.lost}
        for remark in imported.remarks
        for file, line in [imported.places.place(remark.line)]
    ]
    return {
        "configuration": imported.toml,
        "remarks": remarks,
        "holdings": [asdict(it) for it in held.holdings],
        "unread": list(held.unread),
        "not_offered": [{"device": it.found.device.key, "why": it.why} for it in not_offered(found.inventory)],
        "findings": [it.found for it in findings],
        "steps": _steps(imported),
    }


def _lines(imported: Imported, found: Survey, held: Holders, findings: Sequence[Finding]) -> Iterator[str]:
    yield bold("CONFIGURATION")
    yield from imported.toml.splitlines()
    yield from ("", bold("WHAT PODS HOLD"))
    if not held.holdings and not held.unread:
        yield "nothing of it"
    yield from (wrapped(_held(it), 0, 2) for it in held.holdings if not _is_unmapped(it))
    yield from (wrapped(sentence, 0, 2) for sentence in held.unread)
    lost = [f"{file}:{line}: {remark}" for remark in imported.remarks if remark.lost
            for file, line in [imported.places.place(remark.line)]]  # fmt: skip
    unmapped = [_unmapped(it) for it in held.holdings if _is_unmapped(it)]
    yield from ("", bold("WHAT CANNOT BE MAPPED"))
    yield from (wrapped(sentence, 0, 2) for sentence in [*lost, *unmapped] or ["nothing"])
    if left := not_offered(found.inventory):
        yield from ("", bold("NOT OFFERED"))
        yield from (wrapped(f"{one.found.device.key}: {one.why}", 0, 2) for one in left)
    yield from ("", bold("STEPS"))
    yield from (wrapped(f"{it.check}: {it.found}", 0, 2) for it in findings)
    yield from (wrapped(f"{number}. {step}", 0, 3) for number, step in enumerate(_steps(imported), 1))


def _held(it: Holding) -> str:
    what = f"{it.resource} {', '.join(it.ids)}: {it.pod} ({it.container}) has {', '.join(it.devices)}"
    if it.same_ids:
        return f"{what}, under the same ID"
    if it.ours:
        return f"{what}; the foreign ID stays listed, and the device is kept from others, until the pod ends"
    return f"{what}; the resource is not one of these, and the device is kept from others until the pod ends"


def _unmapped(it: Holding) -> str:
    return (
        f"{it.resource} {', '.join(it.ids)}: what {it.pod} ({it.container}) was given leads to no device of this node; end "
        "the pod first, or give the resource adopt = 'strict', else its hardware may be given away once more"
    )


# --- what pods hold through other plugins ---


_PATIENCE: Final = 5.0  # seconds for the kubelet's answer


class Holding(Struct, frozen=True):
    """What one container has of one resource."""

    resource: str
    ids: tuple[str, ...]
    pod: str
    """Namespace and name; its UID where the kubelet does not list it."""
    container: str
    devices: tuple[str, ...]
    """Keys of ours that are the same hardware; empty if nothing that the container got leads to any."""
    same_ids: bool
    """Whether each ID names the same device with us."""
    ours: bool
    """Whether the resource is one of the configuration's."""


class Holders(Struct, frozen=True):
    """All holdings, as far as the kubelet tells."""

    holdings: tuple[Holding, ...] = ()
    unread: tuple[str, ...] = ()
    """Why a witness could not be asked, whole sentences."""


async def holders(inventory: Inventory, plugin_dir: Path, pod_resources: Path) -> Holders:
    """What pods of this node hold of the inventory's resources, or of hardware that its devices have.

    Args:
        inventory: of the configuration that is to come.
        plugin_dir: where the kubelet's checkpoint lies.
        pod_resources: the kubelet's podresources socket, which knows pods by name.
    """
    unread: list[str] = []
    entries: Iterable[CheckpointEntry] = ()
    try:
        if (found := witnesses.read_checkpoint(plugin_dir)) is not None:
            entries = found.entries
        else:
            unread.append(
                f"{plugin_dir} has no checkpoint: no pod of this node has ever had a device, or it is elsewhere."
            )
    except CheckpointError as error:
        unread.append(f"{error}.")
    names: dict[tuple[str, str, str], str] = {}
    try:
        for it in await list_pods(pod_resources, _PATIENCE):
            names.update({(it.resource, device_id, it.container): f"{it.namespace}/{it.pod}" for device_id in it.ids})
    except PodResourcesError as error:
        unread.append(f"{error}: pods are shown by their UIDs, and some may have ended.")
    holdings = [it async for it in _holdings(inventory, entries, names)]
    return Holders(tuple(sorted(holdings, key=lambda it: (it.resource, it.pod, it.container, it.ids))), tuple(unread))


async def _holdings(
    inventory: Inventory, entries: Iterable[CheckpointEntry], names: dict[tuple[str, str, str], str]
) -> AsyncIterator[Holding]:
    tracer = Tracer(inventory)
    for entry in entries:
        kind, trace = inventory.kind(entry.resource), await entry.trace()
        slots = [inventory.slot(entry.resource, device_id) for device_id in entry.ids] if kind else []
        known = {slot.device.key for slot in slots if slot and slot.device}
        hardware = frozenset[str]().union(*(led_to for _, led_to in tracer.ours(trace)))
        if kind is not None:
            hardware |= tracer.hardware(trace, kind)
        if kind is None and not hardware:
            continue
        devices = known | {found.device.key for found in inventory.on(hardware)}
        pod = next(
            (name for i in entry.ids if (name := names.get((entry.resource, i, entry.container)))), entry.pod_uid
        )
        yield Holding(
            entry.resource,
            entry.ids,
            pod,
            entry.container,
            tuple(sorted(devices)),
            same_ids=bool(slots) and all(slot is not None and slot.device is not None for slot in slots),
            ours=kind is not None,
        )
