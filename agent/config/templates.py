"""Names of resources that are templates: `nvidia.com/mig-{profile}` gives a name for each value of an attribute; pure.

Values that differ may make the same name; who has it then is decided where devices are assigned.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Final

from msgspec import Struct

from agent.runtime.limits import resource_name_problem
from backends.base import PLACEHOLDER
from backends.interface.patterns import pattern

_STRANGE: Final = re.compile(r"[^-A-Za-z0-9_.]+")
_VALUE: Final = "[A-Za-z0-9](?:[-A-Za-z0-9_.]*[A-Za-z0-9])?"  # what `sanitised` makes
_ANY, _MANY = "?", "*"  # one character of a name, and any number of them; neither can be in one


class NamelessError(ValueError):
    """A template cannot name a device; the sentence says why."""


class Named(Struct, frozen=True):
    """The name that a template gives a device."""

    name: str
    """Valid to a kubelet."""
    value: str
    """What it is made of, as a person reads it: `profile '1g.10gb+me'`. No two values look alike."""


def is_template(name: str) -> bool:
    """Is this name one, well written or not?"""
    return "{" in name or "}" in name


def name_problem(name: str) -> str | None:
    """Why a kubelet would refuse this name, or any that this template gives; None if it would not."""
    if not is_template(name):
        return resource_name_problem(name)
    if is_template(PLACEHOLDER.sub("", name)):
        return f"{name!r} must have braces only around the name of an attribute, as in 'nvidia.com/mig-{{profile}}'"
    if is_template(name.partition("/")[0]):
        return f"{name!r} may have an attribute only after the '/': a domain is nobody's to be made up"
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
    """Could the template have given this name?"""
    domain, _, rest = template.partition("/")
    its_domain, _, its_rest = name.partition("/")
    if domain != its_domain or resource_name_problem(name) is not None:
        return False
    fixed = map(re.escape, PLACEHOLDER.split(rest)[::2])
    return pattern(f"^{_VALUE.join(fixed)}$").is_in(its_rest)


def is_distinctive(template: str) -> bool:
    """Does it fix any part of a name after the '/'? If not, it fits every name of the domain, another plugin's too."""
    return bool(PLACEHOLDER.sub("", template).partition("/")[2])


def can_meet(one: str, other: str) -> bool:
    """Is there a name that both templates could give?"""
    domain, _, mine = one.partition("/")
    other_domain, _, theirs = other.partition("/")
    return domain == other_domain and _overlap(_tokens(mine), _tokens(theirs))


def _tokens(text: str) -> str:
    """A placeholder as one character and any number more."""
    return PLACEHOLDER.sub(_ANY + _MANY, text)


@functools.cache
def _overlap(one: str, other: str) -> bool:
    """Is there a text that both patterns match?"""
    if not one and not other:
        return True
    if (one[:1] == _MANY and _overlap(one[1:], other)) or (other[:1] == _MANY and _overlap(one, other[1:])):
        return True
    heads = {one[:1], other[:1]}
    if "" in heads or heads == {_MANY} or (len(heads) == 2 and heads.isdisjoint({_ANY, _MANY})):
        return False
    return _overlap(one if one[0] == _MANY else one[1:], other if other[0] == _MANY else other[1:])
