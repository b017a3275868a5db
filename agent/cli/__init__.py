"""The program's entry point, and how the daemon starts; the commands are in `commands.py` and a file each."""

from __future__ import annotations

import errno
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

from agent.runtime.errors import ExitCode, FairleadError
from backends.errors import printable_lines

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agent.runtime.logs import Level

LEVELS: Final = ("debug", "info", "warning", "error")
"""Of `run --log-level`."""

_COMPLETE: Final = "_FAIRLEAD_COMPLETE"  # click's name for it: a shell asks for completions


def main() -> None:
    """The program's entry point."""
    if sys.argv[1:2] == ["probe"]:  # the kubelet asks all the time
        from agent.console import sockets

        if sys.argv[1:] in [["probe", what] for what in sockets.PROBES]:
            is_well, sentence = sockets.probe(sys.argv[2])
            print(sentence)  # click takes 60 ms to be imported
            sys.exit(not is_well)
    try:
        _run(sys.argv[1:])
    except FairleadError as error:
        print(printable_lines(_folded(error.sentence)), file=sys.stderr)
        sys.exit(error.exit_code)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        print(f"the output cannot be written: {os.strerror(error.errno).lower()}", file=sys.stderr)
        os._exit(ExitCode.TROUBLE)  # else Python tries to write the rest once more, and complains


def _folded(sentence: str) -> str:
    """As a terminal of this width shows it; elsewhere each of its lines is one."""
    if not sys.stderr.isatty():
        return sentence
    from textwrap import fill

    columns = min(os.get_terminal_size(sys.stderr.fileno()).columns or 80, 120)
    lines = sentence.split("\n")
    return "\n".join(fill(it, columns, break_long_words=False, break_on_hyphens=False) for it in lines)


def _run(arguments: Sequence[str]) -> None:
    """Run a command; the daemon without click, which takes a fifteenth of its start, where that says nothing."""
    if _COMPLETE in os.environ:
        import_module("agent.cli.manual")
    elif (options := _options_of_run(arguments)) is not None:
        config, level = options.get("--config"), options.get("--log-level", "info")
        try:
            run_daemon(None if config is None else Path(config), cast("Level", level))
        except KeyboardInterrupt:  # before the daemon listens to signals
            print("Aborted!", file=sys.stderr)  # as click says it
            sys.exit(ExitCode.TROUBLE)
        return
    from agent.cli.commands import fairlead

    fairlead(prog_name="fairlead")


def _options_of_run(arguments: Sequence[str]) -> dict[str, str] | None:
    """The options of `run`, where all is as a unit writes it; None: click reads it, and says what is wrong."""
    if arguments[:1] != ["run"]:
        return None
    options, rest = dict[str, str](), iter(arguments[1:])
    for word in rest:
        name, is_whole, value = word.partition("=")
        value = value if is_whole else next(rest, "")
        is_known = name == "--config" or (name == "--log-level" and value in LEVELS)
        if not is_known or not value or value.startswith("-"):
            return None
        options[name] = value
    return options


def run_daemon(config: Path | None, log_level: Level) -> None:
    """Run the daemon until SIGTERM or SIGINT; what is set up comes before the rest is imported, which takes long.

    Raises:
        FairleadError: the configuration has mistakes.
    """
    from agent.runtime import process

    process.put_off_tls()
    process.use_one_heap()
    process.switch_threads_often()
    process.put_off_collecting()

    from agent.runtime import logs  # before all else that imports structlog: see there

    process.raise_limits()

    import asyncio
    import faulthandler

    import anyio

    from agent.config import load
    from agent.daemon.event_log import Events
    from agent.daemon.supervisor import Agent
    from agent.discovery.backend_answers import make_backends
    from agent.runtime.logs import QueuedLines
    from agent.runtime.watchdog import Notifier

    stderr = QueuedLines(sys.stderr.fileno())
    stderr.when_room = _tell_of_lost
    events = Events(lost=lambda: stderr.lost)
    logs.set_up(log_level, stderr, note=events.note)
    faulthandler.enable()  # systemd's watchdog ends us with SIGABRT: the journal then shows where the loop hung
    loaded = load(config)

    async def main() -> None:
        agent = Agent(loaded, make_backends(loaded.host, loaded.resources), Notifier.from_environment(), events)
        asyncio.get_running_loop().set_exception_handler(process.Shortage(agent.problems).handle)
        agent.counts.lost_lines = events.lost
        await agent.run_until_signal()

    try:
        anyio.run(main)
    finally:
        stderr.close()


def _tell_of_lost(count: int) -> None:
    import structlog

    log = structlog.get_logger()
    log.warning("log-lines-lost", count=count, reason="stderr took no more lines for a while")
