"""Finds selectors and templates that match nothing, and says what is there instead.

A selector is judged against what its backend found, selected or not. Where that is nothing at all, there is nothing to say.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from backends.base import Device, Problem, Resource, Selector

_SHOWN: Final = 8  # values of an attribute in one sentence: a node has hundreds of addresses


def unmatched(resources: Iterable[Resource[Any]], found: Mapping[str, Sequence[Device]]) -> list[tuple[str, Problem]]:
    """Each with its backend.

    Args:
        resources: as configured.
        found: backend → all that could be selected; of a backend that is not there nothing is said.
    """
    return [
        (resource.spec.backend, Problem(resource.name, f"{resource.name}: {sentence}"))
        for resource in resources
        if (devices := [it for it in found.get(resource.spec.backend, ()) if it.resource in (None, resource.name)])
        for sentence in _sentences(resource, devices)
    ]


def _sentences(resource: Resource[Any], devices: Sequence[Device]) -> Iterator[str]:
    backend = resource.spec.backend
    attributes = sorted({name for device in devices for name in device.attributes})
    for name in resource.named_by:
        if name not in attributes and difflib.get_close_matches(name, attributes):  # else hardware may come that has it
            yield "it names nothing; " + _no_such(name, backend, attributes)
    for word, selectors in (("selector", resource.spec.select), ("exclude", resource.spec.exclude)):
        for selector in selectors:
            if strangers := [name for name in selector if name not in attributes]:
                yield f"its {word} {_written(selector)} matches nothing; " + _no_such(strangers[0], backend, attributes)
            elif word == "selector" and (why := _mismatch(selector, backend, devices)):
                yield f"its selector {_written(selector)} matches nothing; {why}"


def _no_such(name: str, backend: str, attributes: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, attributes, n=1)
    meant = f" (did you mean {near[0]!r}?)" if near else ""
    known = f"they have {', '.join(attributes)}" if attributes else "they have no attributes"
    return f"no device that the {backend} backend found has an attribute {name!r}{meant}; {known}"


def _mismatch(selector: Selector, backend: str, devices: Sequence[Device]) -> str | None:
    """Which attribute leaves no device of those that match the attributes before it, and what these have instead."""
    before: dict[str, tuple[str, ...]] = {}
    for name, wanted in selector.items():
        matching = [device for device in devices if _has(device, name, wanted)]
        if not matching:
            where = f" where {_written(before)}" if before else ""
            return f"the {backend} backend found {name} {_values(name, wanted, devices)}{where}"
        devices, before[name] = matching, wanted
    return None


def _has(device: Device, name: str, wanted: Sequence[str]) -> bool:
    """As `Resource.refuses` compares them."""
    return not {value.lower() for value in wanted}.isdisjoint(
        value.lower() for value in device.attributes.get(name, ())
    )


def _values(name: str, wanted: Sequence[str], devices: Sequence[Device]) -> str:
    """The values there are, with the number of devices; the one that was probably meant comes first."""
    had = {(it.unit, it.key, value) for it in devices for value in it.attributes.get(name) or ("unknown",)}
    counts = Counter(value for _, _, value in had)  # a device may be built for several resources
    near = [value for want in wanted for value in difflib.get_close_matches(want, counts, n=1)]
    ordered = sorted(counts, key=lambda value: (value not in near, -counts[value], value))
    shown = ", ".join(f"{value} ({counts[value]})" for value in ordered[:_SHOWN])
    return shown + (f" and {len(ordered) - _SHOWN} more" if len(ordered) > _SHOWN else "")


def _written(selector: Selector) -> str:
    return " and ".join(f"{name} = {' or '.join(map(repr, wanted))}" for name, wanted in selector.items())
