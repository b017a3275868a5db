"""Hands out GPUs that containers share by NVIDIA's MPS control daemon, and checks whether that daemon is ready.

The daemon is part of NVIDIA's device plugin (`mps-control-daemon`, one for each resource). It sets the limits; its files are
in `mps_root`, below the name of the resource. Source: that program's `root.go` and `daemon.go`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Final

from backends.base import AllocationRefused, ContainerEdits, Device, Host, HostPath, Mount, Signal, Verdict
from backends.gpu.options import GpuResource

_READY: Final = (".started", "pipe/nvidia-cuda-mps-control.pid")
"""The first is made after the limits are set; the second is there while nvidia-cuda-mps-control runs."""


def is_shared(resource: GpuResource) -> bool:
    """Do pods share the GPUs of this resource by MPS, as with NVIDIA's plugin?"""
    return resource.spec.options.sharing == "mps" and resource.spec.options.style != "gke"


def directories(resources: Sequence[GpuResource]) -> Iterator[HostPath]:
    """Where the control daemons make and remove the files that say they are ready."""
    for resource in resources:
        if is_shared(resource):
            yield from (_below(resource), _below(resource) / "pipe")


def edits(resource: GpuResource, devices: Sequence[Device]) -> ContainerEdits:
    """Where a container finds the control daemon, and the memory that both share.

    Raises:
        AllocationRefused: one of the devices is a MIG device.
    """
    if any("gi" in device.attributes for device in devices):
        raise AllocationRefused(f"{resource.name} shares GPUs by MPS, which MIG devices cannot be.")
    inside = f"/mps/{resource.name}/pipe"
    shm = HostPath(resource.spec.options.mps_root) / "shm"
    return ContainerEdits(
        mounts=(Mount(_below(resource) / "pipe", inside), Mount(shm, "/dev/shm")),  # noqa: S108  # the container's
        env={"CUDA_MPS_PIPE_DIRECTORY": inside},
    )


def signals(host: Host, resources: Sequence[GpuResource], device: Device, hardware: str) -> Iterator[Signal]:
    """A signal if the control daemon is not ready: that of the first resource that takes the device."""
    taker = next((resource for resource in resources if resource.refuses(device) is None), None)
    if taker is None or not is_shared(taker):
        return
    missing = [path for name in _READY if not os.path.exists(host.local(path := _below(taker) / name))]  # noqa: PTH110
    if missing:
        why = f"the MPS control daemon of {taker.name} is not ready: {missing[0]} is not there"
        yield Signal(hardware, "mps-down", Verdict.NOW, why)


def _below(resource: GpuResource) -> HostPath:
    return HostPath(resource.spec.options.mps_root) / resource.name
