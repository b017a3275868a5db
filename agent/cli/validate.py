"""`fairlead validate`: every mistake in a configuration, or what it means."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from agent.cli import commands
from agent.cli.output import echo, echo_json
from agent.config import Config, ConfigError, ConfigProblem, load
from agent.runtime.errors import ExitCode


@click.command(epilog="Exit codes: 0 it is valid, 2 it has problems.")
@click.argument("file", required=False, type=click.Path(path_type=Path))
@commands.config
@commands.as_json
def validate(file: Path | None, config: Path | None, as_json: bool) -> None:
    """Check a configuration file and say what it means.

    FILE is another way to say --config FILE.

    With --json it prints {"valid": bool, "problems": [{"file", "line", "path", "message"}],
    "resources": [{"name", "backend"}]}; "line" is null where a problem is about the whole file.
    """
    if file is not None and config is not None:
        raise click.UsageError("name one file, as an argument or as --config")
    problems: tuple[ConfigProblem, ...] = ()
    loaded: Config | None = None
    try:
        loaded = load(file or config)
    except ConfigError as error:
        problems = error.problems
    if as_json:
        echo_json(_document(loaded, problems))
    else:
        for line in map(str, problems) if loaded is None else _meaning(loaded):
            echo(line)
    if problems:
        raise click.exceptions.Exit(ExitCode.USAGE)


def _document(config: Config | None, problems: tuple[ConfigProblem, ...]) -> dict[str, Any]:
    return {
        "valid": config is not None,
        "problems": [
            {"file": str(problem.file), "line": problem.line, "path": problem.path, "message": problem.sentence}
            for problem in problems
        ],
        "resources": [
            {"name": resource.name, "backend": resource.spec.backend}
            for resource in (config.resources if config is not None else ())
        ],
    }


def _meaning(config: Config) -> Iterator[str]:
    yield (
        f"{config.source} is valid."
        if config.source
        else "There is no configuration file: Fairlead offers KubeVirt's devices."
    )
    if not config.resources:
        yield "It has no [[resource]]: nothing would be offered."
    width = max((len(resource.name) for resource in config.resources), default=0)
    for resource in config.resources:
        spec = resource.spec
        shared = f", each device for {spec.replicas} pods" if spec.replicas > 1 else ""
        chosen = ", selected" if spec.select or spec.exclude else ""
        named = f", a resource for each {' and '.join(resource.named_by)}" if resource.is_template else ""
        yield f"  {resource.name:<{width}}  {spec.backend}{chosen}{shared}{named}"
