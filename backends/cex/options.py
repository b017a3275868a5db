"""The keys of a `cex` resource, and what is wrong with impossible values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Literal

import msgspec

from backends.base import OptionsError, Resource

HIGHEST: Final = 255
"""The highest number of an adapter and of a domain (AP_DEVICES and AP_DOMAINS in the kernel's ap_bus.h are 256)."""

_OLDEST: Final = 4  # CEX4 is the oldest card that the driver zcrypt_cex4 has
_MOST_TOKENS: Final = 100  # as APQN_OVERCOMMIT_LIMIT of IBM's plugin


class Apqn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A queue of a card."""

    adapter: int
    """The card's number, from 0 to 255."""
    domain: int
    """The usage domain's number, from 0 to 255."""
    machine: str | None = None
    """Only on this machine: `<Manufacturer>-<Type>-<Sequence Code>` of /proc/sysinfo, as in `IBM-3906-00000000000829E7`."""


class CexOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The keys of a `cex` resource, which is one configuration set."""

    apqns: list[Apqn]
    """The queues that belong to it, as far as this machine has them."""
    mode: Literal["any", "ep11", "cca", "accel"] = "any"
    """What the cards must be configured as."""
    min_generation: int | None = None
    """The oldest generation of cards: 7 for Crypto Express 7."""
    overcommit: int = 1
    """How many containers may share a queue, each through a node of its own."""
    live_sysfs: bool = True
    """Whether a container sees the state and counters of its own queue in /sys, and not those of an unused queue."""


CexResource = Resource[CexOptions]


def complaints(resource: CexResource) -> Iterator[OptionsError]:
    """What is wrong with a resource, key by key."""
    options = resource.spec.options
    seen: list[Apqn] = []
    for index, one in enumerate(options.apqns):
        for key, number in (("adapter", one.adapter), ("domain", one.domain)):
            if not 0 <= number <= HIGHEST:
                yield OptionsError(("apqns", index, key), f"is {number}; it must be from 0 to {HIGHEST}")
        if any(_may_meet(one, before) for before in seen):
            yield OptionsError(("apqns", index), f"is adapter {one.adapter}, domain {one.domain} once more")
        seen.append(one)
    if options.min_generation is not None and options.min_generation < _OLDEST:
        yield OptionsError(
            ("min_generation",), f"is {options.min_generation}; the oldest cards are of generation {_OLDEST}"
        )
    if not 1 <= options.overcommit <= _MOST_TOKENS:
        yield OptionsError(("overcommit",), f"is {options.overcommit}; it must be from 1 to {_MOST_TOKENS}")
    if resource.spec.replicas != 1:
        yield OptionsError(("replicas",), "is not for cex: overcommit says how many containers may share a queue")
    if resource.is_template:
        yield OptionsError(("name",), "is a template, and a cex resource is one set of queues")


def _may_meet(one: Apqn, other: Apqn) -> bool:
    """Whether they are one queue on some machine."""
    same = (one.adapter, one.domain) == (other.adapter, other.domain)
    return same and (one.machine == other.machine or None in (one.machine, other.machine))
