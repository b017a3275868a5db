"""`fairlead import`: another device plugin's configuration as ours, and what could not be carried over."""

from __future__ import annotations

from pathlib import Path

import click

from agent.importing import FORMATS, ImportRefusedError, import_text
from agent.importing.tree import MOST_BYTES
from agent.runtime.errors import ExitCode
from backends.printable import printable


@click.command(
    "import",
    epilog="Exit codes: 0 everything was carried over, 1 something was lost, 2 the file cannot be read or recognised.",
)
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--from", "source", type=click.Choice(FORMATS), help="Whose configuration it is; by default seen from its shape."
)
@click.option("--domain", help="generic-device-plugin's --domain, or the sriov plugin's --resource-prefix.")
def import_(file: Path, source: str | None, domain: str | None) -> None:
    """Turn another plugin's configuration into Fairlead's.

    It prints TOML (`fairlead import old.yaml > config.toml`), and on the standard error, as FILE:LINE: sentence, what
    could not be carried over and why.
    """
    try:
        imported = import_text(_text(file), source, domain)
    except ImportRefusedError as error:
        _say(file, error.line, error.sentence)
        raise click.exceptions.Exit(error.exit_code) from error
    click.echo(imported.toml.encode(), nl=False)
    for remark in imported.remarks:
        _say(file, remark.line, str(remark))
    if not imported.lossless:
        raise click.exceptions.Exit(ExitCode.TROUBLE)


def _say(file: Path, line: int | None, sentence: str) -> None:
    place = str(file) if line is None else f"{file}:{line}"
    click.echo(f"{place}: {printable(sentence)}", err=True)


def _text(file: Path) -> str:
    try:
        with file.open("rb") as stream:
            data = stream.read(MOST_BYTES + 1)
    except OSError as error:
        raise ImportRefusedError(f"the file cannot be read: {error.strerror}") from error
    if len(data) > MOST_BYTES:
        raise ImportRefusedError(f"the file has more than {MOST_BYTES // 1024} KiB; no node's configuration does")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ImportRefusedError("the file is not written in UTF-8", line) from error
