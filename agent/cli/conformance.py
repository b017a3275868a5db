"""`fairlead conformance`: tries a device plugin, anybody's, beside a simulated kubelet, and says what it does wrong."""

from __future__ import annotations

import asyncio
import errno
import os
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import IO, Any, Final

import anyio
import click

from agent.cli import output
from agent.cli.output import bold, echo, wrapped
from agent.runtime import logs
from agent.runtime.errors import ExitCode, FairleadError, unknown
from agent.simulation.conformance.checks import CHECKS
from agent.simulation.conformance.process import KUBELET, Command
from agent.simulation.conformance.stage import Terms
from agent.simulation.conformance.suite import FORMATS, Check, Outcome, Result, counts, run

_COLORS: Final = {Outcome.PASS: "green", Outcome.FAIL: "red", Outcome.SKIPPED: "yellow"}
_TABLE: Final = "table"
_SUFFIXES: Final = {".tap": "tap", ".xml": "junit", ".json": "json"}
_HEADING: Final = "=== "
"""Begins the line before each process's output in the log."""
_LAST: Final = 10
"""Lines of the plugin's output that are shown where it registered nothing."""


class _WrongUseError(FairleadError):
    exit_code = ExitCode.USAGE


@click.command(
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    epilog="Exit codes: 0 no check failed, 1 one did or the plugin could not be started, 2 wrong usage.",
)
@click.option("--kubelet", type=click.Choice(["1.36", "1.37"]), default="1.36", show_default=True,
              help="Behave as this kubelet and those before it, or as this one and those after it.")  # fmt: skip
@click.option(
    "--only", multiple=True, metavar="CHECK", help="Make this check, or all that match; a subject is all of its checks."
)
@click.option("--list", "listed", is_flag=True, help="Print the checks with what a kubelet does, and make none.")
@click.option("--on", "hooks", nargs=2, multiple=True, metavar="unplug|plug COMMAND",
              help="What takes a device away, and gives it back; a shell runs it.")  # fmt: skip
@click.option("--plugin-dir", type=click.Path(path_type=Path, file_okay=False), metavar="DIR",
              help="An empty directory that the plugin takes for the kubelet's; no root is needed then.")  # fmt: skip
@click.option("--report", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
              help="Write a report; its format is --format, or as FILE ends: .tap, .xml (JUnit) or .json.")  # fmt: skip
@click.option(
    "--format",
    "form",
    type=click.Choice([_TABLE, *FORMATS]),
    help="The report's format, or what is printed if there is none.",
)
@click.option("--patience", type=click.FloatRange(min=0.1), default=20.0, show_default=True, metavar="SECONDS",
              help="How long to wait for what must come.")  # fmt: skip
@click.option("--restarts", type=click.IntRange(min=1), default=200, show_default=True,
              help="Restarts of the kubelet in the checks of many.")  # fmt: skip
@click.option("--state", multiple=True, type=click.Path(path_type=Path, file_okay=False), metavar="DIR",
              help="Where the plugin keeps what it remembers; emptied before each scenario, since its pods are others.")  # fmt: skip
@click.option("--respawn", is_flag=True, help="Start the plugin again when it ends by itself, as a DaemonSet does.")
@click.option(
    "--log",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Keep what the plugin prints, below a line of its scenario for each start.",
)
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def conformance(
    kubelet: Any, only: tuple[str, ...], hooks: tuple[tuple[str, str], ...], command: tuple[str, ...], **how: Any
) -> None:
    """Try a device plugin, anybody's, beside a simulated kubelet: fairlead conformance -- COMMAND [ARGS...].

    The plugin runs as it does on a node, in a mount namespace where /var/lib/kubelet is a temporary directory; that takes
    root. As another user, give it an empty directory that it looks for the kubelet in, and name it with --plugin-dir.
    """
    logs.set_up("error")
    checks = _chosen(only)
    if how["listed"]:
        for line in _listed(checks):
            echo(line)
        return
    if not command:
        raise click.UsageError("Which plugin? Put its command line behind --")
    if odd := [name for name, _ in hooks if name not in ("unplug", "plug")]:
        raise click.UsageError(f"--on takes `unplug` or `plug` and a command, not {odd[0]!r}.")
    form = how["form"] or (_SUFFIXES.get(how["report"].suffix, "junit") if how["report"] else _TABLE)
    if how["report"] and form == _TABLE:
        raise click.UsageError(f"A report is one of {', '.join(FORMATS)}.")
    with _place(how["plugin_dir"]) as (root, namespace), _log(how["log"]) as printed:
        began = time.monotonic()

        def heading(title: str) -> None:
            os.write(
                printed.fileno(), f"{_HEADING}{time.monotonic() - began:.1f} s, kubelet {kubelet}: {title}\n".encode()
            )

        terms = Terms(
            launch=lambda at: Command(command, at if namespace else None, printed),
            root=root,
            version=kubelet,
            patience=how["patience"],
            rounds=how["restarts"],
            hooks={name: _hook(name, line) for name, line in hooks},
            state=how["state"],
            respawn=how["respawn"],
            heading=heading,
        )
        results = anyio.run(_run, checks, terms, command)
        _report(results, form, how["report"], {"kubelet": kubelet, "command": shlex.join(command)}, printed)
    if any(it.outcome is Outcome.FAIL for it in results):
        raise click.exceptions.Exit(ExitCode.TROUBLE)


def _chosen(only: Sequence[str]) -> list[Check]:
    """The checks of these names, patterns and subjects; all if there are none."""
    for wanted in only:
        if not any(fnmatch(it.name, wanted) or it.subject == wanted for it in CHECKS):
            raise _WrongUseError(unknown("check", wanted, [it.name for it in CHECKS], {it.subject for it in CHECKS}))
    return [it for it in CHECKS if not only or any(fnmatch(it.name, one) or it.subject == one for one in only)]


def _listed(checks: Sequence[Check]) -> Iterator[str]:
    for it in checks:
        yield f"{bold(it.name)}  ({it.subject}, {it.line})"
        yield wrapped(it.sentence, 4)


@contextmanager
def _place(plugin_dir: Path | None) -> Iterator[tuple[Path, bool]]:
    """The kubelet's root, and whether the plugin needs a namespace to see it where it looks."""
    if plugin_dir is not None:
        if plugin_dir.name != "device-plugins":
            raise _WrongUseError(
                f"{plugin_dir} must be called device-plugins, as the kubelet's is: podresources lie beside it"
            )
        if plugin_dir.exists() and any(plugin_dir.iterdir()):
            raise _WrongUseError(f"{plugin_dir} is not empty, and all in it would be removed; name another directory")
        beside = plugin_dir.absolute().parent / "pod-resources"
        ours = [plugin_dir, *(() if beside.exists() else (beside,))]
        try:
            yield beside.parent, False
        finally:
            for directory in ours:
                shutil.rmtree(directory, ignore_errors=True)
        return
    if os.geteuid() != 0:
        raise _WrongUseError(
            f"only root can have the plugin see another {KUBELET}; run this as root, or give the plugin an empty directory and "
            "name it with --plugin-dir"
        )
    # In the host's tree there must be something to mount upon. It stays: to remove it would unmount it for another run, too.
    KUBELET.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="fairlead-") as directory:
        yield Path(directory), True


@contextmanager
def _log(path: Path | None) -> Iterator[IO[bytes]]:
    with path.open("w+b") if path is not None else tempfile.TemporaryFile() as file:
        yield file


def _hook(name: str, line: str) -> Callable[[], Awaitable[None]]:
    async def call() -> None:
        process = await asyncio.create_subprocess_shell(line, stdin=asyncio.subprocess.DEVNULL)
        if code := await process.wait():
            raise FairleadError(f"the command of --on {name} ended with code {code}: {line}")

    return call


async def _run(checks: Sequence[Check], terms: Terms, command: Sequence[str]) -> list[Result]:
    if shutil.which(command[0]) is None:
        raise FairleadError(f"{command[0]}: {os.strerror(errno.ENOENT).lower()}, or it may not be executed")
    results = []
    with anyio.CancelScope() as scope:
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, scope.cancel)
        async for result in run(checks, terms):
            results.append(result)
            _progress(f"{len(results)}/{len(checks)} {result.check.name}")
    _progress("")
    if scope.cancelled_caught:
        raise FairleadError("stopped before the last check")
    order = {it.name: n for n, it in enumerate(checks)}
    return sorted(results, key=lambda it: order[it.check.name])


def _progress(text: str) -> None:
    """One line on a terminal that the next one replaces."""
    if sys.stderr.isatty():
        click.echo(f"\r{text:<60}\r", err=True, nl=False)


def _report(
    results: Sequence[Result], form: str, file: Path | None, facts: Mapping[str, str], printed: IO[bytes]
) -> None:
    if form != _TABLE:
        text = FORMATS[form](results, facts)
        if file is None:
            click.echo(text)
            return
        file.write_text(text + "\n")
    for line in _lines(results):
        echo(line)
    if results and results[0].check.name == "registration-arrives" and results[0].outcome is Outcome.FAIL:
        printed.seek(0)
        said_by_it = (it for it in printed.read().decode(errors="replace").splitlines() if not it.startswith(_HEADING))
        for said in [*dict.fromkeys(said_by_it)][-_LAST:]:
            output.note(f"the plugin said: {said}")


def _lines(results: Sequence[Result]) -> Iterator[str]:
    rows = [(it.check.subject, it.check.name, click.style(it.outcome, fg=_COLORS.get(it.outcome))) for it in results]
    yield from output.table(("SUBJECT", "CHECK", "OUTCOME"), rows, left=3)
    for outcome, heading in (
        (Outcome.FAIL, "FAILED"),
        (Outcome.SKIPPED, "SKIPPED"),
        (Outcome.NOT_APPLICABLE, "NOT APPLICABLE"),
    ):
        found = [it for it in results if it.outcome is outcome]
        if not found:
            continue
        yield from ("", bold(heading))
        for it in found:
            yield wrapped(f"{it.check.name}: {it.why}", 0, 4)
            if outcome is Outcome.FAIL:
                yield wrapped(f"{it.check.sentence} ({it.check.line} of docs/conformance.md)", 4)
    yield from ("", counts(results))
