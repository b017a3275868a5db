"""The keys of a `vfio` resource, and what is wrong with impossible values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Literal, TypeAlias

import msgspec

from backends.base import OptionsError, Resource
from backends.linux import pci

MODULE: Final = "vfio-pci"

Iommu: TypeAlias = Literal["legacy", "iommufd", "both"]


class VfioOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The keys of a `vfio` resource."""

    iommu: Iommu = "both"
    """The nodes a container gets: the group's (`/dev/vfio/12`), the function's own (`/dev/vfio/devices/vfio3`), or the
    group's, and the function's own where the kernel has it."""
    bind: Literal["never", "start", "allocate"] = "never"
    """When hardware is bound to vfio-pci: by others; when Fairlead starts or the hardware appears; for a pod."""
    ids: Literal["address", "group"] = "address"
    """The ID of a device: the address of its first selected function, or, as in KubeVirt's plugin, the group's number."""
    companions: Literal["card", "group"] = "card"
    """Which other functions of the group may be bound with it: those of the same card, or all."""
    release: Literal["keep", "restore"] = "keep"
    """What happens to what was bound for a pod when no pod holds it: it stays bound, or gets its own driver back."""
    vgpu_type: int | None = None
    """The vGPU type that a virtual function of an NVIDIA GPU is given for a pod, and loses after it; None: you give types."""
    overlap: bool = False
    """Whether other resources with this option may select other functions of the same group. One machine can then have
    them together, as KubeVirt's own plugin offers a GPU and its sound; two machines cannot."""
    force: list[str] = []
    """Addresses of functions that may be taken although the host needs them."""


VfioResource = Resource[VfioOptions]


def complaints(resource: VfioResource) -> Iterator[OptionsError]:
    """What is wrong with a resource, key by key."""
    options = resource.spec.options
    if not resource.spec.select:
        yield OptionsError(
            ("select",),
            'must say which functions are meant, as in select = { id = "10de:1eb8" }; without it, all would be',
        )
    for index, selector in enumerate(resource.spec.select):
        if options.bind != "never" and MODULE not in (drivers := selector.get("driver", (MODULE,))):
            yield OptionsError(
                ("select", index, "driver"),
                f"is {' or '.join(drivers)}, which bind would change: nothing would be selected any more; add {MODULE}",
            )
    if options.bind != "never" and "driver" in resource.named_by:
        yield OptionsError(("name",), "asks for the driver, which bind would change, and the name with it")
    if options.vgpu_type is not None:
        yield from _vgpu_complaints(resource, options.vgpu_type)
    if resource.spec.replicas != 1:
        yield OptionsError(("replicas",), "is not for vfio: a function serves one virtual machine at a time")
    if options.release == "restore" and options.bind != "allocate":
        yield OptionsError(("release",), 'is for bind = "allocate": what is not bound for a pod is not undone after it')
    if options.overlap and options.bind != "never":
        yield OptionsError(("overlap",), 'is for bind = "never": what is bound for one pod would be taken from another')
    if options.force and options.bind == "never":
        yield OptionsError(
            ("force",), 'is for bind = "start" and "allocate"; nothing is taken from its driver otherwise'
        )
    for index, address in enumerate(options.force):
        if not pci.ADDRESS.fullmatch(address):
            yield OptionsError(("force", index), f"{address!r} is no PCI address; write it as in '0000:3b:00.0'")


def _vgpu_complaints(resource: VfioResource, wanted: int) -> Iterator[OptionsError]:
    if wanted < 1:
        yield OptionsError(("vgpu_type",), f"is {wanted}; the numbers of types are in nvidia/creatable_vgpu_types")
    if resource.spec.options.bind != "never":
        yield OptionsError(("vgpu_type",), "is beside bind; what has a vGPU type is never bound to vfio-pci")
    if resource.spec.pre_start == "reset":
        yield OptionsError(
            ("vgpu_type",), 'is beside pre_start = "reset"; the driver alone resets what has a vGPU type'
        )
    if "vgpu_type" in resource.asks_for:
        yield OptionsError(
            ("vgpu_type",), "is also what it is selected or named by, which it has only while a pod has it"
        )
