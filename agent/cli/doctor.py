"""`fairlead doctor`: what is wrong with this node, and how to mend it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import anyio
import click
from msgspec.structs import replace

from agent.cli import commands, connection, output
from agent.cli.output import echo, wrapped
from agent.config import DEFAULT_PATH, Config, ConfigError, load
from agent.console.control import Client
from agent.console.doctor import Check, Finding, Level, Patient, failure, fine, host, kubelet, named, warning
from agent.console.doctor.hardware import hardware, node_links
from agent.console.sockets import node_name
from agent.console.views import Status
from agent.discovery.backend_answers import make_backends
from agent.inventory.survey import PATIENCE, survey
from agent.kubernetes.runner import excess_rights
from agent.runtime import logs
from agent.runtime.errors import FairleadError

CHECKS: Final[Mapping[str, Check]] = {
    "plugin-directory": kubelet.plugin_directory,
    "kubelet-socket": kubelet.kubelet_socket,
    "agent": kubelet.agent,
    "podresources": kubelet.podresources,
    "checkpoint": kubelet.checkpoint,
    "other-plugins": kubelet.other_plugins,
    "state-directory": host.state_directory,
    "sysfs": host.sysfs,
    "dev": host.dev,
    "modules": host.modules,
    "kernel-log": host.kernel_log,
    "events": host.events,
    "network": host.network,
    "inotify": host.inotify,
    "boot": host.boot,
    "capabilities": host.capabilities,
    "selinux": host.selinux,
    "cdi": host.cdi,
    "http": kubelet.http,
}
"""In the order in which a person would look."""

_ON_ITS_WAY: Final = 1.0  # seconds in which a list reaches the kubelet and its record, many times over
_MARKS: Final = {Level.FINE: ("ok", "green"), Level.WARNING: ("warning", "yellow"), Level.FAILURE: ("failure", "red")}


@click.command(epilog="Exit codes: 0 all is well, 1 there are warnings, 2 something does not work.")
@commands.config
@click.option("--all", "everything", is_flag=True, help="Show also what is well.")
@commands.as_json
def doctor(config: Path | None, everything: bool, as_json: bool) -> None:
    """Look for what keeps this node's hardware from pods, and say how to mend it. It changes nothing.

    With --json it prints {"findings": [{"check", "level", "found", "mend"}]}, level 0, 1 or 2 as the exit codes.
    """
    logs.set_up("error")
    file, its = connection.in_force(config)
    findings = [*named("configuration", _another(file, its)), *anyio.run(_findings, file, its)]
    worst = max(finding.level for finding in findings)
    if as_json:
        output.echo_json({"findings": findings})
    else:
        for line in _lines(findings, everything=everything):
            echo(line)
    raise click.exceptions.Exit(int(worst))


def _another(file: Path | None, its: str | None) -> Iterator[Finding]:
    """Warns if the daemon runs with another file than the one that this looks at."""
    looked_at = (file or DEFAULT_PATH).absolute()
    if its and Path(its).resolve() != looked_at.resolve():
        yield warning(
            f"The daemon runs with {its}, and this looks at {looked_at}.",
            f"fairlead doctor --config {its}, where that file is: in the daemon's pod, if it runs in one.",
        )


async def _findings(config: Path | None, its: str | None) -> list[Finding]:
    try:
        loaded = load(config)
    except ConfigError as error:
        mend = "Mend the file; `fairlead validate` checks it. A daemon that runs goes on with what it had."
        wrong = [failure(str(problem), mend, "configuration") for problem in error.problems]
        if isinstance(said := await _status(connection.admin_socket(config)), str):
            return wrong
        without = replace(said, configuration=replace(said.configuration, mistakes=()))  # they are found already
        return [*wrong, *named("daemon", kubelet.daemon(without))]
    valid = f"There is no {DEFAULT_PATH}: KubeVirt's devices are offered."
    if loaded.source:
        with_it = ", and the daemon runs with it" if its == str(loaded.source.absolute()) else ""
        valid = f"{loaded.source} is valid{with_it}."
    found = [*named("configuration", [fine(valid)])]
    found += examine(Patient(loaded))
    said, different = await _compared(loaded, await _status(connection.admin_socket(config)))
    found += named("daemon", kubelet.daemon(said))
    found += named("policies", await _policies(loaded))
    found += named("other-plugins", kubelet.taken_over(different))
    seen = await survey(loaded.resources, make_backends(loaded.host, loaded.resources), PATIENCE)
    found += named("node-links", node_links(loaded.host, seen.inventory))
    return [*found, *named("hardware", hardware(seen, None if isinstance(said, str) else said))]


def examine(patient: Patient) -> Iterator[Finding]:
    """Run every check; one that fails itself is a warning, and ends no other."""
    for name, check in CHECKS.items():
        try:
            yield from list(named(name, check(patient)))
        except Exception as error:  # noqa: BLE001  # a strange node must not keep the other checks from running
            yield warning(f"This could not be checked: {error!r}.", "Please report it, with the whole output.", name)


async def _policies(config: Config) -> list[Finding]:
    """What binds the token of the pod, where it has one: a kubeconfig names another user."""
    if config.kubernetes.kubeconfig.path or not (config.kubernetes.events or config.kubernetes.condition):
        return []
    try:
        return [*host.policies(await excess_rights(config.kubernetes, node_name()))]
    except FairleadError as error:
        return [*host.policies(error.sentence.rstrip("."))]


async def _compared(config: Config, said: Status | str) -> tuple[Status | str, Mapping[str, str]]:
    """What the daemon says, and how what the kubelet has differs from it.

    Where it does, the daemon is asked again, for a list may be on its way; the daemon may have noticed by then, too.
    """
    if isinstance(said, str) or not (different := kubelet.differences(said, config.agent.plugin_dir)):
        return said, {}
    await anyio.sleep(_ON_ITS_WAY)
    again = await _status(config.agent.admin_socket)
    still = {} if isinstance(again, str) else kubelet.differences(again, config.agent.plugin_dir)
    return again, {name: how for name, how in still.items() if name in different}


async def _status(socket: Path) -> Status | str:
    """What the daemon says, or why it says nothing."""
    client = Client(socket)
    try:
        return await client.status()
    except FairleadError as error:
        return error.sentence
    finally:
        client.close()


def _lines(findings: list[Finding], *, everything: bool) -> Iterator[str]:
    for finding in findings:
        if finding.level is Level.FINE and not everything and finding.check != "configuration":  # what was looked at
            continue
        mark, color = _MARKS[finding.level]
        yield f"{click.style(mark, fg=color, bold=True)} {finding.check}"
        yield wrapped(finding.found, 2)
        if finding.mend:
            yield wrapped(f"→ {finding.mend}", 2, 4)
    counts = {level: sum(finding.level is level for finding in findings) for level in Level}
    yield f"{counts[Level.FINE]} {'check is' if counts[Level.FINE] == 1 else 'checks are'} well, {counts[Level.WARNING]} warn, {counts[Level.FAILURE]} fail."
