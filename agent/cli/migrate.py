"""`fairlead migrate`: what a node's switch from another plugin to Fairlead means, before anything is changed."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import anyio
import click
from msgspec.structs import asdict, replace

from agent.cli import options, output
from agent.cli.import_options import arguments, imported_from
from agent.cli.output import bold, echo, wrapped
from agent.config import Config, load
from agent.config.file import read_tables
from agent.config.problems import Problems
from agent.console.doctor import other_plugins
from agent.console.doctor.findings import Finding, Level, Patient
from agent.console.migration import Holders, Holding, holders
from agent.discovery.backend_factory import make_backends
from agent.importing import Imported
from agent.inventory.shortfall import not_offered
from agent.inventory.survey import PATIENCE, Survey, survey
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
@options.config
@options.as_json
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
    findings = [it for it in other_plugins.sockets(Patient(loaded)) if it.level is not Level.FINE]
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
