"""The keys of a `gpu` resource, and what is wrong with impossible values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Literal, TypeAlias

import msgspec

from backends.base import OptionsError, Resource

Strategy: TypeAlias = Literal["envvar", "volume-mounts", "cdi-annotations", "cdi-cri"]
Xids: TypeAlias = list[int] | Literal["all"]


MOST_MPS_REPLICAS: Final = 48
"""Clients of one GPU from compute capability 7.5 on (16 before), by NVIDIA's MPS documentation."""


class GpuOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The keys of a `gpu` resource. Most are NVIDIA's, under NVIDIA's names; the last are Intel's, AMD's GPUs need none."""

    style: Literal["vendor", "gke"] = "vendor"
    """The plugin whose IDs, nodes and mounts are used: NVIDIA's own, or GKE's for Container-Optimized OS."""
    device_list_strategy: Strategy | list[Strategy] = "envvar"
    """How the container's runtime learns of its GPUs."""
    device_id_strategy: Literal["uuid", "index"] = "uuid"
    """How it names a GPU there."""
    pass_device_specs: bool = False
    """Whether nodes are handed out, too. The runtime adds them by itself, but the kubelet's CPU manager removes them."""
    device_driver_root: str = "/"
    """Where the host has the driver's device nodes, `/run/nvidia/driver` in a driver container."""
    gds_enabled: bool = False
    """GPUDirect Storage: `NVIDIA_GDS=enabled`, and its CDI device."""
    gdrcopy_enabled: bool = False
    """GDRCopy: `NVIDIA_GDRCOPY=enabled`, and its CDI device."""
    mofed_enabled: bool = False
    """Mellanox's drivers: `NVIDIA_MOFED=enabled`, and its CDI device."""
    cdi_annotation_prefix: str = "cdi.k8s.io/"
    """What the annotation of "cdi-annotations" begins with."""
    cdi_vendor: str = "k8s.device-plugin.nvidia.com"
    """The vendor of the CDI devices: this is that of NVIDIA's plugin; `nvidia-ctk` writes `nvidia.com`."""
    fail_requests_greater_than_one: bool | None = None
    """Whether a container that asks for several replicas, mostly of one GPU, is refused. None: only with MPS."""
    sharing: Literal["time-slicing", "mps"] | None = None
    """How pods share a GPU; None: by time-slicing where there are replicas."""
    mps_root: str = "/run/nvidia/mps"
    """Where NVIDIA's MPS control daemons have their directories."""
    imex: Literal["none", "optional", "required"] = "none"
    """Whether a container gets IMEX channel 0 with its GPUs, if it is there. `required`: without it none is offered."""
    dev_char_links: bool = False
    """Whether /dev/char gets links to the GPU's nodes, so that `systemctl daemon-reload` takes no GPU from a pod."""
    mig_devices: bool = True
    """Whether a GPU in MIG mode is offered as its MIG devices; else as a whole, as with NVIDIA's `migStrategy: none`."""
    driver_path: str = "/home/kubernetes/bin/nvidia"
    """GKE's `-host-path`: where the host has the driver's libraries."""
    driver_mount: str = "/usr/local/nvidia"
    """GKE's `-container-path`."""
    vulkan_path: str = "/home/kubernetes/bin/nvidia/vulkan/icd.d"
    """GKE's `-host-vulkan-icd-path`."""
    vulkan_mount: str = "/etc/vulkan/icd.d"
    """GKE's `-container-vulkan-icd-path`."""
    xids: Literal["plugin", "catalog"] = "plugin"
    """Which XIDs make a GPU unhealthy: those of the plugin that `style` names, or those after which NVIDIA's XID catalog
    has the GPU reset, or more."""
    xid_critical: Xids | None = None
    """Further XIDs that make a GPU unhealthy; "all": every XID that is not ignored. Those since the boot count at a daemon's
    first start, too: with XIDs of applications (13, 31, 43, 45) each wrong program that has run by then."""
    xid_ignored: Xids | None = None
    """Further XIDs that are ignored, which makes them events only; "all": every XID that `xid_critical` does not list."""
    nvml_events: Literal["auto", "always", "never"] = "auto"
    """Whether XIDs come from NVIDIA's library. That takes a process of 35 MB and keeps the driver in use. "auto": only while
    the kernel's log, which tells the same and more, cannot be read."""

    card_ids: bool = False
    """Whether Intel's GPUs are named as by Intel's plugin, `card0-0`, where the number follows the order of binding."""
    by_path: Literal["single", "all", "none"] = "single"
    """Which of udev's links in /dev/dri/by-path a container gets with Intel's GPUs: theirs, the directory, or none."""

    @property
    def strategies(self) -> frozenset[str]:
        """`device_list_strategy`, one or several."""
        written = self.device_list_strategy
        return frozenset([written] if isinstance(written, str) else written)

    @property
    def is_one_at_most(self) -> bool:
        """Whether a container that asks for several replicas is refused."""
        written = self.fail_requests_greater_than_one
        return self.sharing == "mps" if written is None else written

    @property
    def xid_set(self) -> Literal["plugin", "gke", "catalog"]:
        """The set of XIDs that `xids` and `style` say."""
        return "gke" if self.style == "gke" and self.xids == "plugin" else self.xids


GpuResource = Resource[GpuOptions]

_DEFAULTS: Final = GpuOptions()
_OF_GKE: Final = ("driver_path", "driver_mount", "vulkan_path", "vulkan_mount")
_OF_BOTH: Final = (
    "style",
    "sharing",
    "fail_requests_greater_than_one",
    "mig_devices",
    "xids",
    "xid_critical",
    "xid_ignored",
    "nvml_events",
)
_PATHS: Final = ("device_driver_root", "mps_root", *_OF_GKE)


def complaints(resource: GpuResource) -> Iterator[OptionsError]:
    """What is wrong with a resource, key by key."""
    options = resource.spec.options
    if options.sharing == "mps" and options.style != "gke":
        yield from _mps_complaints(resource)
    if not options.strategies:
        yield OptionsError(("device_list_strategy",), 'is empty; "envvar" is the usual one')
    for key in _PATHS:
        if not (path := getattr(options, key)).startswith("/"):
            yield OptionsError((key,), f"{path!r} is not an absolute path")
    for key in GpuOptions.__struct_fields__:
        if key in _OF_BOTH or getattr(options, key) == getattr(_DEFAULTS, key):
            continue
        if options.style == "gke" and key not in _OF_GKE:
            yield OptionsError((key,), 'is for NVIDIA\'s own style; with style = "gke" it would do nothing')
        if options.style != "gke" and key in _OF_GKE:
            yield OptionsError((key,), 'is for style = "gke"; without it, it would do nothing')
    yield from _xid_complaints(options)


def _mps_complaints(resource: GpuResource) -> Iterator[OptionsError]:
    if not 2 <= resource.spec.replicas <= MOST_MPS_REPLICAS:
        yield OptionsError(
            ("replicas",), f'is {resource.spec.replicas}; with sharing = "mps" it is 2 to {MOST_MPS_REPLICAS}'
        )
    if resource.is_template:
        yield OptionsError(
            ("sharing",), 'is "mps", whose control daemon serves one name; write the resource\'s name out'
        )


def _xid_complaints(options: GpuOptions) -> Iterator[OptionsError]:
    if options.xid_critical == options.xid_ignored == "all":
        yield OptionsError(("xid_ignored",), 'is "all", and so is xid_critical; keep one of them')
    for key in ("xids", "xid_critical", "xid_ignored"):
        written = getattr(options, key)
        for index, xid in enumerate(written if isinstance(written, list) else ()):
            if xid < 1:
                yield OptionsError((key, index), f"is {xid}; XIDs are numbers from 1")
    if isinstance(options.xid_critical, list) and isinstance(options.xid_ignored, list):
        for index, xid in enumerate(options.xid_ignored):
            if xid in options.xid_critical:
                yield OptionsError(("xid_ignored", index), f"{xid} is among xid_critical too; keep one of them")
