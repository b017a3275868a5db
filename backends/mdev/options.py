"""The keys of an `mdev` resource, and what is wrong with impossible values."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from backends.base import OptionsError, Resource


class MdevOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The keys of an `mdev` resource: none so far."""


MdevResource = Resource[MdevOptions]


def complaints(resource: MdevResource) -> Iterator[OptionsError]:
    """What is wrong with a resource, key by key."""
    if resource.spec.replicas != 1:
        yield OptionsError(("replicas",), "is not for mdev: a device serves one virtual machine at a time")
