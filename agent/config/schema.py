"""The configuration as a JSON Schema, for editors: made from the types that read it, their docstrings included.

It says what a file may have in it; what only all keys together can be right about, `fairlead validate` tells. TOML has
no null, so a key that may be None is one that may be left out.
"""

from __future__ import annotations

import ast
import functools
import inspect
import operator
import re
import textwrap
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Final, Literal

import msgspec

from agent.config.file import TABLES
from agent.config.resources import RESOURCE_KEYS, RESOURCE_TYPES
from agent.config.typed import DriverName, Listen, PathOrNone, PathOrOff
from backends import registry
from backends.base import TEXT, Attribute, Backend, Seconds

_DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"
_REF: Final = "#/$defs/{name}"
_TEXTS: Final[Mapping[Any, Any]] = {
    Seconds: Annotated[
        str,
        msgspec.Meta(
            pattern=r"^(\d+h)?(\d+m)?(\d+(\.\d+)?s)?(\d+ms)?$",  # no look-ahead: Go's and Rust's have none
            min_length=1,
            extra_json_schema={"examples": ["250ms", "5s", "1h30m"]},
        ),
    ],
    Listen: Annotated[
        str, msgspec.Meta(extra_json_schema={"examples": ["127.0.0.1:9440", "unix:/run/fairlead/http.sock", "off"]})
    ],
    DriverName: Annotated[str, msgspec.Meta(pattern=f"^{DriverName.PATTERN}$", max_length=DriverName.MOST)],
    Path: Annotated[str, msgspec.Meta(pattern="^/")],
    PathOrOff: Annotated[str, msgspec.Meta(pattern="^/|^off$")],
    PathOrNone: Annotated[str, msgspec.Meta(pattern="^/|^$")],
}
"""How what `agent.config.typed` reads from texts is written."""

_LETTERS: Final = re.compile(r"\\.|[A-Za-z]-[A-Za-z]|[A-Za-z]")  # an escaped one, a range in a set, one by itself

_Schema = dict[str, Any]


def schema() -> _Schema:
    """The whole schema, with every backend that is installed and can be loaded."""
    kinds = {name: backend for name in registry.names() if (backend := _load(name)) is not None}
    types = [*TABLES.values(), *(backend.options_type for backend in kinds.values())]
    roots, definitions = msgspec.json.schema_components([_written(one) for one in types], ref_template=_REF)
    described = _descriptions(types)
    definitions = {name: _without_null(_described(one, described.get(name, {}))) for name, one in definitions.items()}
    by_type = dict(zip(types, roots, strict=True))
    return {
        "$schema": _DIALECT,
        "title": "Fairlead's configuration",
        "type": "object",
        "additionalProperties": False,
        "properties": {
            **{name: by_type[wanted] for name, wanted in TABLES.items()},
            "resource": {
                "type": "array",
                "description": "A device joins the first resource that takes it.",
                "items": {
                    "type": "object",
                    "required": ["name", "backend"],
                    "properties": {"backend": {"enum": list(kinds)}},
                    # not oneOf: where nothing fits, an editor would show what each of the others complains about
                    "allOf": [
                        {
                            "if": {"properties": {"backend": {"const": name}}, "required": ["backend"]},
                            "then": _resource(name, backend, definitions, by_type[backend.options_type]),
                        }
                        for name, backend in kinds.items()
                    ],
                },
            },
        },
        "$defs": definitions,
    }


def _load(name: str) -> Any:
    try:
        return registry.load(name)
    except registry.BrokenBackendError:
        return None  # `validate` says what is wrong with it as soon as a file names it


def _resource(name: str, backend: type[Backend[Any]], definitions: Mapping[str, _Schema], options: _Schema) -> _Schema:
    """A `[[resource]]` of one backend: its keys flat, or under `options`."""
    own = definitions[options["$ref"].removeprefix(_REF.format(name=""))]
    return {
        "title": f"a resource of the backend {name}",
        "additionalProperties": False,
        "properties": {
            **own.get("properties", {}),
            **{key: _common(key, backend) for key in RESOURCE_KEYS},
            "backend": {"const": name},
            "options": {key: value for key, value in own.items() if key != "required"},
        },
    }


def _common(key: str, backend: type[Backend[Any]]) -> _Schema:
    if key in ("select", "exclude"):
        selector = {"type": "object", "minProperties": 1, **_attributes(backend.attributes)}
        return _one_or_several(selector)
    wanted = RESOURCE_TYPES.get(key)
    return {} if wanted is None else msgspec.json.schema(wanted)


def _attributes(known: Mapping[str, Attribute] | None) -> _Schema:
    if known is None:
        return {"additionalProperties": _one_or_several(_value(TEXT))}
    return {
        "additionalProperties": False,
        "properties": {name: _one_or_several(_value(attribute)) for name, attribute in known.items()},
    }


def _value(attribute: Attribute) -> _Schema:
    """A value of an attribute; a pattern of JSON Schema matches anywhere in a text, and tells upper case from lower."""
    described = {"description": attribute.written} if attribute.written else {}
    pattern = _LETTERS.sub(_of_either_case, attribute.pattern)
    limited = {"pattern": f"^({pattern})$"} if pattern else {}
    return {"type": "string" if attribute.quoted else ["string", "integer"], **described, **limited}


def _of_either_case(found: re.Match[str]) -> str:
    match found[0]:
        case str(escaped) if escaped.startswith("\\"):
            return escaped
        case str(letter) if len(letter) == 1:
            return f"[{letter.lower()}{letter.upper()}]"
    return found[0].lower() + found[0].upper()


def _one_or_several(one: _Schema) -> _Schema:
    return {"anyOf": [one, {"type": "array", "minItems": 1, "items": one}]}


@functools.cache
def _written(wanted: Any) -> Any:
    """The type as TOML has it: texts in the place of what `agent.config.typed` reads from texts."""
    if wanted in _TEXTS:
        return _TEXTS[wanted]
    if isinstance(wanted, type) and issubclass(wanted, msgspec.Struct):
        return _written_record(wanted)
    origin, parts = typing.get_origin(wanted), typing.get_args(wanted)
    if origin is typing.Annotated:
        return Annotated[(_written(parts[0]), *wanted.__metadata__)]
    if origin in (UnionType, typing.Union):
        return functools.reduce(operator.or_, map(_written, parts))
    if origin is None or origin is Literal:
        return wanted
    return origin[tuple(part if part is ... else _written(part) for part in parts)]


def _written_record(record: Any) -> type:
    hints = typing.get_type_hints(record, include_extras=True)
    described = msgspec.inspect.type_info(record)
    assert isinstance(described, msgspec.inspect.StructType)
    fields = [(field.encode_name, _written(hints[field.name]), *_default(field)) for field in described.fields]
    return msgspec.defstruct(
        record.__name__, fields, kw_only=True, forbid_unknown_fields=True, namespace={"__doc__": record.__doc__}
    )


def _default(field: msgspec.inspect.Field) -> Iterator[Any]:
    """What a field is when it is left out, as it would be written; nothing for one that must be there."""
    if field.default_factory is not msgspec.NODEFAULT:
        yield msgspec.field(default_factory=field.default_factory)
    elif not field.required:
        yield _plain(field.default)


def _plain(default: Any) -> Any:
    match default:
        case Seconds():
            return default.written()
        case Path() | str():
            return str(default)
    return default


def _described(definition: _Schema, texts: Mapping[str, str]) -> _Schema:
    properties = {
        key: {**value, "description": texts[key]} if key in texts else value
        for key, value in definition.get("properties", {}).items()
    }
    return {**definition, "properties": properties} if properties else definition


def _without_null(value: Any) -> Any:
    """The same without what only JSON could write."""
    if isinstance(value, list):
        return [_without_null(item) for item in value if item != {"type": "null"}]
    if not isinstance(value, dict):
        return value
    kept = {key: _without_null(inner) for key, inner in value.items() if not (key == "default" and inner is None)}
    if len(choices := kept.get("anyOf", [])) == 1:
        del kept["anyOf"]
        kept |= choices[0]
    return kept


def _descriptions(types: list[Any]) -> dict[str, dict[str, str]]:
    """Type's name → key → the docstring below it in the source, of these types and of all that they consist of."""
    found: dict[str, dict[str, str]] = {}
    todo = list(types)
    while todo:
        one = todo.pop()
        if one.__name__ not in found:
            found[one.__name__] = {key: text for base in reversed(one.__mro__) for key, text in _below_fields(base)}
            todo += _parts(one)
    return found


def _parts(record: Any) -> Iterator[type]:
    """The records among the types of its fields."""
    todo = list(typing.get_type_hints(record).values())
    while todo:
        hint = todo.pop()
        todo += typing.get_args(hint)
        if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
            yield hint


def _below_fields(record: Any) -> Iterator[tuple[str, str]]:
    """The fields that a class itself defines, with what stands below them; nothing where there is no source."""
    if not issubclass(record, msgspec.Struct) or record is msgspec.Struct:
        return
    try:
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(record))).body
    except (OSError, TypeError):
        return
    assert isinstance(definition, ast.ClassDef)
    for field, below in zip(definition.body, definition.body[1:], strict=False):
        match field, below:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                yield name, inspect.cleandoc(text).replace("\n", " ")
