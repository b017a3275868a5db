"""Reads the `[[resource]]` tables: the keys that all resources have, and their backend's own.

A name may be a template: `nvidia.com/mig-{profile}` gives a name for each value of an attribute. Values that differ may make
the same name; who has it then is decided where devices are assigned.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Final, Protocol

import msgspec
from msgspec import Struct

from agent.config import typed
from agent.config.problems import KeyPath, Problems
from agent.discovery.backend_answers import ask
from agent.runtime.errors import shown, unknown
from agent.runtime.limits import MESSAGE_LIMIT, most_tokens, resource_name_problem, slot_bytes
from backends.base import (
    PLACEHOLDER,
    TEXT,
    Adopt,
    Attribute,
    Backend,
    Edits,
    OptionsError,
    Placement,
    PreStart,
    Resource,
    ResourceSpec,
    Selector,
    Serve,
)
from backends.interface.patterns import pattern
from backends.interface.written import mistake
from backends.registry import BrokenBackendError, UnknownBackendError

_STRANGE: Final = re.compile(r"[^-A-Za-z0-9_.]+")
_VALUE: Final = "[A-Za-z0-9](?:[-A-Za-z0-9_.]*[A-Za-z0-9])?"  # what `sanitised` makes
_ANY, _MANY = "?", "*"  # one character of a name, and any number of them; neither can be in one

RESOURCE_KEYS: Final = (
    "name",
    "backend",
    "select",
    "exclude",
    "replicas",
    "placement",
    "pre_start",
    "edits",
    "adopt",
    "serve",
    "options",
)
"""What every resource may have; the rest are its backend's options."""

RESOURCE_TYPES: Final[Mapping[str, Any]] = {
    "name": Annotated[
        str,
        msgspec.Meta(
            description="What pods ask for; after the '/' attributes in braces stand for a resource for each value.",
            examples=["nvidia.com/gpu", "nvidia.com/mig-{profile}"],
        ),
    ],
    "replicas": Annotated[int, msgspec.Meta(ge=1)],
    "placement": Placement,
    "pre_start": PreStart,
    "edits": Edits,
    "adopt": Adopt,
    "serve": Serve,
}
"""Of those, the ones that are a single value."""
_Attributes = Mapping[str, Attribute] | None
"""`Backend.attributes`."""


# --- names that are templates ---


class NamelessError(ValueError):
    """A template cannot name a device; the sentence says why."""


class Named(Struct, frozen=True):
    """The name that a template gives a device."""

    name: str
    """Valid to a kubelet."""
    value: str
    """What it is made of, as a person reads it: `profile '1g.10gb+me'`. No two values look alike."""


def is_template(name: str) -> bool:
    """Whether this name has a brace, and so is a template, well written or not."""
    return "{" in name or "}" in name


def name_problem(name: str) -> str | None:
    """Why a kubelet would refuse this name, or any that this template gives; None if it would not."""
    if not is_template(name):
        return resource_name_problem(name)
    if is_template(PLACEHOLDER.sub("", name)):
        return f"{name!r} must have braces only around the name of an attribute, as in 'nvidia.com/mig-{{profile}}'"
    if is_template(name.partition("/")[0]):
        return f"{name!r} may have an attribute only after the '/': the domain is fixed"
    if problem := resource_name_problem(PLACEHOLDER.sub("x", name)):
        return f"as a template it must leave valid names, and with an 'x' for each attribute {problem}"
    return None


def sanitised(value: str) -> str:
    """What of a value can be in a name; empty if nothing can.

    `+` becomes `.`, as NVIDIA's plugin writes it (mig-1g.10gb.me); blanks and `/` become `_`, as KubeVirt does; what
    else a name cannot have is left out, and at its ends everything but letters and digits.
    """
    return _STRANGE.sub("", re.sub(r"[\s/]+", "_", value.replace("+", "."))).strip("-_.")


def name_of(template: str, attributes: Mapping[str, tuple[str, ...]]) -> Named:
    """The name for a device with these attributes.

    Raises:
        NamelessError: one of them is missing, has several values, or one that makes no valid name.
    """
    values = {name: _only_value(name, attributes.get(name, ())) for name in PLACEHOLDER.findall(template)}
    said = " and ".join(f"{name} {value!r}" for name, value in values.items())
    parts = {name: sanitised(value) for name, value in values.items()}
    if empty := [name for name, part in parts.items() if not part]:
        raise NamelessError(f"its {empty[0]} is {values[empty[0]]!r}, of which nothing can be in a resource's name")
    name = PLACEHOLDER.sub(lambda found: parts[found[1]], template)
    if problem := resource_name_problem(name):
        raise NamelessError(f"its {said} makes no valid name: {problem}")
    return Named(name, said)


def _only_value(name: str, values: tuple[str, ...]) -> str:
    match tuple(dict.fromkeys(values)):
        case ():
            raise NamelessError(f"it has no {name}, after which it would be named")
        case (value,):
            return value
        case several:
            raise NamelessError(f"it has more than one {name}, after which it would be named: {', '.join(several)}")


def fits(template: str, name: str) -> bool:
    """Whether the template could have given this name."""
    domain, _, rest = template.partition("/")
    its_domain, _, its_rest = name.partition("/")
    if domain != its_domain or resource_name_problem(name) is not None:
        return False
    fixed = map(re.escape, PLACEHOLDER.split(rest)[::2])
    return pattern(f"^{_VALUE.join(fixed)}$").is_in(its_rest)


def is_distinctive(template: str) -> bool:
    """Whether the template fixes part of a name after the '/'. If not, it fits every name of the domain, also others'."""
    return bool(PLACEHOLDER.sub("", template).partition("/")[2])


def can_meet(one: str, other: str) -> bool:
    """Whether there is a name that both templates could give."""
    domain, _, mine = one.partition("/")
    other_domain, _, theirs = other.partition("/")
    return domain == other_domain and _overlap(_tokens(mine), _tokens(theirs))


def _tokens(text: str) -> str:
    """A placeholder as one character and any number more."""
    return PLACEHOLDER.sub(_ANY + _MANY, text)


@functools.cache
def _overlap(one: str, other: str) -> bool:
    """Whether there is a text that both patterns match."""
    if not one and not other:
        return True
    if (one[:1] == _MANY and _overlap(one[1:], other)) or (other[:1] == _MANY and _overlap(one, other[1:])):
        return True
    heads = {one[:1], other[:1]}
    if "" in heads or heads == {_MANY} or (len(heads) == 2 and heads.isdisjoint({_ANY, _MANY})):
        return False
    return _overlap(one if one[0] == _MANY else one[1:], other if other[0] == _MANY else other[1:])


# --- [[resource]] tables ---


class Registry(Protocol):
    """Where backends are found: `backends.registry`, or a test's own."""

    def names(self) -> list[str]:
        """Every backend's name."""

    def load(self, name: str) -> type[Backend[Any]]:
        """The backend of a name; raises as `backends.registry.load` does."""


def read_resources(tables: object, registry: Registry, problems: Problems) -> tuple[Resource[Any], ...]:
    """The resources in their order; those with problems are left out."""
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        problems.add(("resource",), "a resource is a table of its own: write [[resource]] above its keys")
        return ()
    readers = [_Table(("resource", index), table, registry, problems) for index, table in enumerate(tables)]
    found = [reader.resource() for reader in readers]
    _refuse_duplicates(tables, problems)
    return tuple(resource for resource in found if resource is not None)


def _refuse_duplicates(tables: Sequence[Mapping[str, object]], problems: Problems) -> None:
    first: dict[object, int] = {}
    for index, table in enumerate(tables):
        name = table.get("name")
        if isinstance(name, str) and first.setdefault(name, index) != index:
            where = problems.place(("resource", first[name]))
            problems.add(
                ("resource", index, "name"), f"{where} has the name {name!r} already; give one of them another"
            )
    templates = [(name, index) for name, index in first.items() if isinstance(name, str) and is_template(name)]
    for (one, number), (other, index) in itertools.combinations(templates, 2):
        if can_meet(one, other):
            where = problems.place(("resource", number))
            sentence = f"could give the same name as {one!r} of {where}: begin or end one of them otherwise"
            problems.add(("resource", index, "name"), f"{other!r} {sentence}")


class _Table(Struct, frozen=True):
    """One `[[resource]]` on its way to a `Resource`."""

    at: KeyPath
    table: Mapping[str, object]
    registry: Registry
    problems: Problems

    def resource(self) -> Resource[Any] | None:
        """The resource, or None where it has problems."""
        before = len(self.problems)
        name = self._name()
        backend = self._backend()
        known = None if backend is None else backend.attributes
        select, exclude = self._selectors("select", known), self._selectors("exclude", known)
        for attribute in PLACEHOLDER.findall(name):
            self._attribute(("name",), attribute, known)
        read = {key: self._common(key, wanted) for key, wanted in RESOURCE_TYPES.items() if key != "name"}
        if backend is not None and (options := self._options(backend)) is not None:
            common = {key: value for key, value in read.items() if value is not None}
            spec = ResourceSpec(str(self.table["backend"]), options, select, exclude, **common)
            resource = Resource(name, spec)
            self._check(backend, resource)
            self._check_reset(backend, resource)
            if len(self.problems) == before:
                return resource
        return None

    def _add(self, key: str, sentence: str) -> None:
        self.problems.add((*self.at, key) if key in self.table else self.at, sentence)

    def _common(self, key: str, wanted: Any) -> Any:
        """The value of a key; None if it is missing or a problem."""
        if key not in self.table:
            return None
        value, mistakes = typed.convert(self.table[key], wanted)
        for path, sentence in mistakes:
            self.problems.add((*self.at, key, *path), sentence)
        return value

    def _name(self) -> str:
        if "name" not in self.table:
            self._add("name", "the key 'name' is missing: the resource that pods ask for, as in 'example.com/widget'")
        name: str = self._common("name", str) or ""
        if name and (problem := name_problem(name)):
            self._add("name", problem)
        return name

    def _backend(self) -> type[Backend[Any]] | None:
        if "backend" not in self.table:
            self._add("backend", f"the key 'backend' is missing: one of {', '.join(self.registry.names())}")
        name: str = self._common("backend", str) or ""
        try:
            return self.registry.load(name) if name else None
        except UnknownBackendError:
            self._add("backend", unknown("backend", name, self.registry.names()))
        except BrokenBackendError as error:
            self._add("backend", str(error))
        return None

    def _selectors(self, key: str, known: _Attributes) -> tuple[Selector, ...]:
        if key not in self.table:
            return ()
        written = self.table[key]
        tables = written if isinstance(written, list) else [written]
        if not tables:
            self._add(key, "an empty list selects nothing; leave the key out")
        return tuple(
            self._selector((key, index) if isinstance(written, list) else (key,), table, known)
            for index, table in enumerate(tables)
        )

    def _selector(self, path: KeyPath, table: object, known: _Attributes) -> Selector:
        if not isinstance(table, dict) or not table:
            self.problems.add((*self.at, *path), "expected a table of attributes, as in { vendor = '10de' }")
            return {}
        kinds = {name: self._attribute((*path, name), name, known) for name in table}
        return {name: tuple(self._wanted((*path, name), wanted, kinds[name])) for name, wanted in table.items()}

    def _attribute(self, path: KeyPath, name: str, known: _Attributes) -> Attribute:
        """How the attribute's values are written; one that no device of the backend has is a problem."""
        if known is None:
            return TEXT
        if name not in known:
            self.problems.add((*self.at, *path), unknown("attribute", name, known))
        return known.get(name, TEXT)

    def _wanted(self, path: KeyPath, wanted: object, kind: Attribute) -> Iterator[str]:
        values = wanted if isinstance(wanted, list) else [wanted]
        if not values:
            self.problems.add((*self.at, *path), "an empty list matches nothing; leave the attribute out")
        for value in values:
            if isinstance(value, str) or type(value) is int:
                if (sentence := mistake(str(path[-1]), value, kind)) is not None:
                    self.problems.add((*self.at, *path), sentence)
                yield from kind.wanted(str(value))
            else:
                self.problems.add((*self.at, *path), "expected a string or a list of strings; put the value in quotes")

    def _options(self, backend: type[Backend[Any]]) -> Any:
        """The backend's own keys as its type, or None where they have problems."""
        options_type: Any = backend.options_type
        known = typed.keys(options_type)
        flat = {key: value for key, value in self.table.items() if key not in RESOURCE_KEYS}
        below: dict[str, Any] = self._common("options", dict[str, Any]) or {}
        for key in flat.keys() & below.keys():
            self._add(key, "is also in [resource.options]; keep one of them")
        for key in [key for key in flat if key not in known]:
            self._add(key, unknown("key", key, {*RESOURCE_KEYS, *known}))
            del flat[key]
        options, mistakes = typed.convert({**flat, **below}, options_type)
        for path, sentence in mistakes:
            self.problems.add(self._place(path), sentence)
        return options

    def _place(self, path: KeyPath) -> KeyPath:
        """Where an option's path is written: flat or below `options`."""
        options = self.table.get("options")
        if path and isinstance(options, dict) and path[0] in options:
            return (*self.at, "options", *path)
        return (*self.at, *path)

    def _check(self, backend: type[Backend[Any]], resource: Resource[Any]) -> None:
        before, fits = len(self.problems), None
        try:
            ask(lambda: backend.check(resource))
            for path, count in ask(lambda: list(backend.tokens(resource))):
                if count > most_tokens():
                    self.problems.add(
                        self._place(path),
                        f"is {count:,}; a kubelet receives 4 MiB, and at most {most_tokens():,} IDs of one device fit",
                    )
            if len(self.problems) == before:  # else none of them is to be made
                fits = ask(lambda: _how_many_fit(backend.fixed_ids(resource)))
        except Exception as error:  # noqa: BLE001  # anyone's code; the other resources are still read
            for one in error.exceptions if isinstance(error, ExceptionGroup) else (error,):
                self._refused(resource, one)
        else:
            if fits is not None:
                self.problems.add(
                    self.at,
                    f"its list of devices would pass the 4 MiB that a kubelet receives: at most {fits:,} of them fit",
                )

    def _check_reset(self, backend: type[Backend[Any]], resource: Resource[Any]) -> None:
        if resource.spec.pre_start != "reset":
            return
        if backend.prepare is Backend.prepare:
            self._add("pre_start", f"the backend {resource.spec.backend!r} cannot reset its hardware; 'check' works")
        if resource.spec.replicas > 1:
            self._add("pre_start", "'reset' would reset hardware under the other pods that share it; use 'check'")

    def _refused(self, resource: Resource[Any], error: Exception) -> None:
        if isinstance(error, OptionsError):
            self.problems.add(self._place(error.path), error.sentence)
        else:
            self._add("backend", f"the backend {resource.spec.backend!r} failed to check this resource: {shown(error)}")


def _how_many_fit(ids: Iterable[str]) -> int | None:
    """How many of these IDs a list can hold, or None if it holds them all."""
    size = 0
    for count, device_id in enumerate(ids):
        size += slot_bytes(device_id, None)
        if size > MESSAGE_LIMIT:
            return count
    return None
