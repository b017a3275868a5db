"""Holds what a plugin is told beside its configuration: by arguments, by its environment and by a chart's values."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct, field

from agent.importing.yaml_tree import Scalar, Table, Tree, plain


class Settings(Struct):
    """What a plugin is told beside its configuration; each value knows its line."""

    arguments: dict[str, Scalar] = field(default_factory=dict)
    """Without their dashes; the last of several."""
    repeated: list[tuple[str, Scalar]] = field(default_factory=list)
    """All of them, in their order."""
    environment: dict[str, Scalar] = field(default_factory=dict)
    values: dict[str, Tree] = field(default_factory=dict)
    """Keys of its Helm chart's values, or of its operator's resource."""
    image: str = ""
    domain: str | None = None
    """As the command's own --domain says."""

    def table(self, names: Mapping[str, tuple[str, str]]) -> Table:
        """What is said of each key, whose argument and variable are named: arguments win, then the environment, then values."""
        found: dict[str, Tree] = {key: self.values[key] for key in names if key in self.values}
        for key, (argument, variable) in names.items():
            if (said := self.arguments.get(argument) or self.environment.get(variable)) is not None:
                found[key] = said
        return Table.of(1, found)

    def plain(self) -> object:
        """All of it without lines."""
        flags = [(name, value.text) for name, value in self.repeated]
        variables = {name: value.text for name, value in self.environment.items()}
        return flags, variables, {name: plain(value) for name, value in self.values.items()}


def together(one: Settings, other: Settings) -> Settings:
    """What both say; where they differ, what the second does."""
    return Settings(
        {**one.arguments, **other.arguments},
        [*one.repeated, *other.repeated],
        {**one.environment, **other.environment},
        {**one.values, **other.values},
        other.image or one.image,
    )


def as_argument(text: str, line: int, *, block: bool = False) -> Scalar:
    """A value from a command line or an environment, where everything is a text, as YAML would read it."""
    kind = "bool" if text.lower() in ("true", "false") else "str"
    return Scalar(line, text.lower() if kind == "bool" else text, kind, block)
