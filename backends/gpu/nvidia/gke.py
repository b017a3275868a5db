"""Hands out NVIDIA's GPUs as GKE's plugin for Container-Optimized OS does.

Source: GoogleCloudPlatform/container-engine-accelerators, pkg/gpu/nvidia.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from backends.base import AllocationRefused, ContainerEdits, Device, Grant, HostPath, Mount, Node
from backends.gpu.options import GpuResource

NEEDED: Final = ("nvidiactl", "nvidia-uvm")
_CONTROLS: Final = (*NEEDED, "nvidia-modeset", "nvidia-uvm-tools")
_MPS: Final = "/tmp/nvidia-mps"  # noqa: S108  # where GKE's control daemon has its pipes


def ids(resource: GpuResource, device: Device) -> Sequence[str]:
    """`nvidia0`, of a MIG device `nvidia0/gi1`; where GPUs are shared, also by one client, `nvidia0/vgpu0`."""
    (minor,) = device.attributes["minor"]
    name = "/".join((f"nvidia{minor}", *(f"gi{gi}" for gi in device.attributes.get("gi", ()))))
    return [name] if _sharing(resource) is None else [f"{name}/vgpu{n}" for n in range(resource.spec.replicas)]


def edits(resource: GpuResource, grants: Sequence[Grant]) -> ContainerEdits:
    """The nodes of each GPU before those of all; with MPS also the limits, which grow with the shares of a GPU.

    Raises:
        AllocationRefused: several shares, where that would mean nothing.
    """
    options, sharing = resource.spec.options, _sharing(resource)
    devices = list({grant.device.key: grant.device for grant in grants}.values())
    if (sharing == "time-slicing" and len(grants) > 1) or (sharing == "mps" and len(devices) > 1):
        raise AllocationRefused(
            f"A container may ask for one {resource.name} at most, because several containers share each GPU; "
            f"this one asks for {len(grants)}."
        )
    mounts = [Mount(HostPath(options.driver_path), options.driver_mount, read_only=True)]
    mounts.append(Mount(HostPath(options.vulkan_path), options.vulkan_mount, read_only=True))
    env = {}
    if sharing == "mps":
        mounts.append(Mount(HostPath(_MPS), _MPS))
        env = _limits(devices[0], len(grants), resource.spec.replicas)
    return ContainerEdits(nodes=_nodes(devices), mounts=tuple(mounts), env=env)


def _sharing(resource: GpuResource) -> str | None:
    """How pods share a GPU; None: they do not."""
    return resource.spec.options.sharing or ("time-slicing" if resource.spec.replicas > 1 else None)


def _nodes(devices: Sequence[Device]) -> tuple[Node, ...]:
    controls = [f"/dev/{name}" for name in _CONTROLS]
    every = dict.fromkeys(node for device in devices for node in device.nodes)
    ordered = sorted(every, key=lambda n: controls.index(n.path.text) if n.path.text in controls else -1)
    return tuple(Node(node.path, node.container_path, "mrw") for node in ordered)


def _limits(device: Device, shares: int, clients: int) -> dict[str, str]:
    """The part of its GPU that MPS lets the container use; the GPU is number 0 there."""
    env = {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(shares * 100 // clients)}
    for memory in device.attributes.get("memory", ()):
        env["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] = f"0={shares * int(memory) // clients}M"
    return env
