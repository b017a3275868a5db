"""`fairlead import`: another device plugin's configuration as ours, and what could not be carried over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from agent.importing import FORMATS, Imported, ImportRefusedError, import_files
from agent.importing.model import Places
from agent.importing.yaml_tree import MOST_BYTES
from agent.runtime.errors import ExitCode
from backends.errors import printable


def arguments(command: Callable[..., Any]) -> Callable[..., Any]:
    """`files`, and what `imported_from` takes beside them."""
    for add in (
        click.option("--env", metavar="NAME=VALUE", multiple=True, help="A variable of the plugin's environment."),
        click.option("--entry", help="The key of the one that is meant, where a ConfigMap has several."),
        click.option("--domain", help="generic-device-plugin's --domain, or the sriov plugin's --resource-prefix."),
        click.option(
            "--from", "source", type=click.Choice(FORMATS), help="Whose it is; by default all that are recognised."
        ),
        click.argument("files", metavar="FILE...", nargs=-1, required=True, type=click.Path(path_type=Path)),
    ):
        command = add(command)
    return command


def imported_from(
    files: Sequence[Path], source: str | None, domain: str | None, entry: str | None, env: Sequence[str]
) -> Imported:
    """Import these files; where that is impossible, print why and end the command.

    Raises:
        click.exceptions.Exit: it has been said why.
    """
    texts: dict[str, str] = {}
    for file in files:
        try:
            texts[str(file)] = _text(file)
        except ImportRefusedError as error:
            _say(file, error.line, error.sentence)
            raise click.exceptions.Exit(error.exit_code) from error
    environment = dict(variable.partition("=")[::2] for variable in env)
    try:
        return import_files(texts, source, domain, entry, environment)
    except ImportRefusedError as error:
        _say(*Places.of(texts).place(error.line), error.sentence)
        raise click.exceptions.Exit(error.exit_code) from error


def say(imported: Imported) -> None:
    """Print what is to be said of each line."""
    for remark in imported.remarks:
        _say(*imported.places.place(remark.line), str(remark))


def _say(file: Path | str, line: int | None, sentence: str) -> None:
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


@click.command(
    "import",
    epilog="Exit codes: 0 everything was carried over, 1 something was lost, 2 the file cannot be read or recognised.",
)
@arguments
def import_(files: tuple[Path, ...], **how: Any) -> None:
    """Turn another plugin's configuration into Fairlead's.

    A FILE is the configuration, a ConfigMap or Helm values that have it, or the DaemonSet whose arguments and environment
    count, too; several together are one import. It prints TOML (`fairlead import old.yaml > config.toml`), and on the
    standard error, as FILE:LINE: sentence, what could not be carried over and why.
    """
    imported = imported_from(files, **how)
    click.echo(imported.toml.encode(), nl=False)
    say(imported)
    if not imported.lossless:
        raise click.exceptions.Exit(ExitCode.TROUBLE)
