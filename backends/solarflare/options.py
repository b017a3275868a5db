"""The keys of a `solarflare` resource, and what is wrong with impossible values."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from backends.base import OptionsError, Resource


class SolarflareOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The keys of a `solarflare` resource."""

    onload_version: str | None = None
    """The version that the module onload is to have; with another one the cards are degraded."""
    libraries: tuple[str, ...] = ()
    """Files and directories of the host that a container gets at the same place, read-only: Onload's libraries."""
    device_info: bool = False
    """Is a DeviceInfo file written for Multus and CNI plugins?"""


SolarflareResource = Resource[SolarflareOptions]


def complaints(resource: SolarflareResource) -> Iterator[OptionsError]:
    """What is wrong with a resource, key by key."""
    options = resource.spec.options
    for index, path in enumerate(options.libraries):
        if not path.startswith("/"):
            yield OptionsError(("libraries", index), f"{path!r} is not an absolute path")
    if options.device_info and resource.spec.replicas != 1:
        yield OptionsError(("device_info",), "is not for replicas: a CNI plugin moves a card into one pod")
    if "ifname" in resource.named_by:
        yield OptionsError(("name",), "asks for ifname, which a card has no more while its interface is in a pod")
