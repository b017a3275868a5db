"""The keys of an `sriov` resource, and what is wrong with impossible values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, Literal, TypeAlias

import msgspec

from backends.base import OptionsError, Resource, Seconds

Vdpa: TypeAlias = Literal["virtio", "vhost"]
DeviceType: TypeAlias = Literal["netDevice", "accelerator", "auxNetDevice"]

UNSEEN_WHEN_AWAY: Final = ("ifname", "link_layer")
"""Attributes that cannot be read while the interface is in another network namespace."""

EVERY: Final = "*"
"""The key in `additional_info` for every device."""

_NOT_FOR: Final[Mapping[str, Sequence[str]]] = {
    "accelerator": ("rdma", "vhost_net", "vdpa", "create"),
    "auxNetDevice": ("vdpa", "create"),
}
_DOWN: Final = Seconds(10)


class SriovOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The keys of an `sriov` resource."""

    device_type: DeviceType = "netDevice"
    """What is offered: network functions, accelerators (PCI class 12), or subfunctions on the auxiliary bus."""
    rdma: bool = False
    """Only functions that can do RDMA, each with its nodes of /dev/infiniband."""
    vhost_net: bool = False
    """Whether a container gets /dev/vhost-net and /dev/net/tun, too."""
    vdpa: Vdpa | None = None
    """Only functions with a vDPA device of this kind; `vhost` with its node."""
    topology: bool = True
    """Whether the kubelet is told the NUMA node of a device."""
    additional_info: Mapping[str, Mapping[str, str]] = {}
    """What else PCIDEVICE_…_INFO says: by the ID of a device, or by `*` for every device."""
    device_info: bool = True
    """Whether a DeviceInfo file is written for Multus and CNI plugins."""
    create: Mapping[str, int] = {}
    """Cards by interface or PCI address, and how many virtual functions Fairlead creates of each that has none."""
    autoprobe: bool = True
    """Whether drivers may bind to the created functions by themselves. Say no for those that you bind to vfio-pci."""
    down_after: Seconds = _DOWN
    """How long the link of the physical function must be down before its virtual ones are unhealthy."""


SriovResource = Resource[SriovOptions]


def complaints(resource: SriovResource) -> Iterator[OptionsError]:
    """What is wrong with a resource, key by key."""
    options = resource.spec.options
    if resource.spec.replicas != 1:
        yield OptionsError(("replicas",), "is not for sriov: a function is one pod's at a time")
    if options.rdma and options.vdpa is not None:
        yield OptionsError(("vdpa",), "is beside rdma; a vDPA device can do no RDMA: keep one of them")
    for key in _NOT_FOR.get(options.device_type, ()):
        if getattr(options, key):
            yield OptionsError((key,), f'is not for device_type = "{options.device_type}"')
    for card, count in options.create.items():
        if count < 1:
            yield OptionsError(("create", card), f"is {count}; leave out a card that is to have no virtual functions")
    if options.create and resource.is_template:
        yield OptionsError(("create",), "is not for names made of attributes, which only functions that are there have")
    if not options.autoprobe and not options.create:
        yield OptionsError(("autoprobe",), "is for what is made by create")
    for name in resource.named_by:
        if name in (*UNSEEN_WHEN_AWAY, "pf"):
            why = f"asks for {name}, which may be out of sight while a pod has the device; physical and device are not"
            yield OptionsError(("name",), why)
