"""The keys of an `mdev` resource, and what is wrong with impossible values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import msgspec

from backends.base import OptionsError, Resource

_OF_TYPE: Final = {"type", "type_name", "type_id"}


class MdevOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The keys of an `mdev` resource."""

    create: bool = False
    """Are devices of the selected types offered that do not exist yet? They are made for a pod, and removed after it."""


MdevResource = Resource[MdevOptions]


def complaints(resource: MdevResource) -> Iterator[OptionsError]:
    """What is wrong with a resource, key by key."""
    if resource.spec.replicas != 1:
        yield OptionsError(("replicas",), "is not for mdev: a device serves one virtual machine at a time")
    if not resource.spec.options.create:
        return
    if not resource.spec.select:
        yield OptionsError(("select",), 'must say what to create, as in select = { type = "GRID T4-1Q" }')
    for index, selector in enumerate(resource.spec.select):
        if not _OF_TYPE & selector.keys():
            yield OptionsError(("select", index), "names no type, and create would make devices of every type")
        for key in sorted({"uuid", "iommu_group"} & selector.keys()):
            yield OptionsError(("select", index, key), "is known of a device only once it has been made (see create)")
