"""The commands, one file each, and the program's entry point."""

from __future__ import annotations

import errno
import os
import sys
from importlib import import_module
from typing import Final

from agent.console import sockets

_COMPLETE: Final = "_FAIRLEAD_COMPLETE"  # click's name for it: a shell asks for completions


def main() -> None:
    """The program's entry point."""
    if sys.argv[1:] in [["probe", what] for what in sockets.PROBES]:  # as the kubelet asks all the time
        is_well, sentence = sockets.probe(sys.argv[2])
        print(sentence)  # click takes 60 ms to be imported
        sys.exit(not is_well)
    _run()


def _run() -> None:
    import click

    from agent.cli.commands import fairlead
    from agent.runtime.errors import ExitCode, FairleadError
    from backends.printable import printable_lines

    if _COMPLETE in os.environ:
        import_module("agent.cli.completion")
    try:
        fairlead(prog_name="fairlead")
    except FairleadError as error:
        click.echo(printable_lines(error.sentence), err=True)
        sys.exit(error.exit_code)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        click.echo(f"the output cannot be written: {os.strerror(error.errno).lower()}", err=True)
        os._exit(ExitCode.TROUBLE)  # else Python tries to write the rest once more, and complains
