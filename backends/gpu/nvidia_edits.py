"""What a container gets of NVIDIA's GPUs: as NVIDIA's k8s-device-plugin answers, or GKE's; and where they are shared by MPS.

GKE's: source is GoogleCloudPlatform/container-engine-accelerators, pkg/gpu/nvidia. The MPS control daemon is part of NVIDIA's
device plugin (`mps-control-daemon`, one for each resource). It sets the limits; its files are in `mps_root`, below the name of
the resource. Source: that program's `root.go` and `daemon.go`.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from backends.base import AllocationRefused, ContainerEdits, Device, Grant, Host, HostPath, Mount, Node, Signal, Verdict
from backends.gpu.options import GpuOptions, GpuResource

# --- NVIDIA's plugin ---


IMEX_CHANNEL: Final = HostPath("/dev/nvidia-caps-imex-channels/channel0")
"""The node by which GPUs of several machines share memory over NVLink ("IMEX channels" in NVIDIA's IMEX guide)."""


_DEVICES_ENV: Final = "NVIDIA_VISIBLE_DEVICES"
_CHANNELS_ENV: Final = "NVIDIA_IMEX_CHANNELS"
_VOLUMES: Final = "/var/run/nvidia-container-devices"  # accept-nvidia-visible-devices-as-volume-mounts
_FEATURES: Final = ("gdrcopy", "gds", "mofed")


def edits(options: GpuOptions, devices: Sequence[Device]) -> ContainerEdits:
    """As NVIDIA's plugin answers."""
    by_index = options.device_id_strategy == "index"
    ids = [device.attributes.get("index", (device.key,))[0] if by_index else device.key for device in devices]
    strategies = options.strategies
    features = [name for name in _FEATURES if getattr(options, f"{name}_enabled")]
    has_imex = any(node.path == IMEX_CHANNEL for device in devices for node in device.nodes)
    channels = ["0"] if options.imex != "none" and has_imex else []
    cdi = [f"gpu={one}" for one in ids] + [f"imex-channel={one}" for one in channels]
    cdi = [f"{options.cdi_vendor}/{name}" for name in (*cdi, *(f"{feature}=all" for feature in features))]
    env = {f"NVIDIA_{name.upper()}": "enabled" for name in features}
    if "envvar" in strategies:
        env[_DEVICES_ENV] = ",".join(ids)
        env |= {_CHANNELS_ENV: ",".join(channels)} if channels else {}
    if "volume-mounts" in strategies:
        env[_DEVICES_ENV] = _VOLUMES
    passed = options.pass_device_specs and any(not strategy.startswith("cdi-") for strategy in strategies)
    own = dict.fromkeys(n for device in devices for n in device.nodes if channels or n.path != IMEX_CHANNEL)
    return ContainerEdits(
        nodes=tuple(_below(options.device_driver_root, own)) if passed else (),
        mounts=tuple(
            Mount(HostPath("/dev/null"), f"{_VOLUMES}/{one}") for one in (*ids, *(f"imex/{one}" for one in channels))
        )
        if "volume-mounts" in strategies
        else (),
        env=env,
        annotations={_annotation(options, devices): ",".join(cdi)} if "cdi-annotations" in strategies else {},
        cdi_devices=tuple(cdi) if "cdi-cri" in strategies else (),
    )


def _below(root: str, nodes: Iterable[Node]) -> Iterator[Node]:
    for node in nodes:
        yield Node(HostPath(f"{root.rstrip('/')}{node.path}"), node.container_path, node.permissions)


def _annotation(options: GpuOptions, devices: Iterable[Device]) -> str:
    """Ends in a UUID of the GPUs' keys, where NVIDIA's is random: no two resources of a container have the same."""
    name = uuid.uuid5(uuid.NAMESPACE_URL, " ".join(device.key for device in devices))
    return f"{options.cdi_annotation_prefix}nvidia-device-plugin_{name}"


# --- GKE's plugin for Container-Optimized OS ---


GKE_NEEDED: Final = ("nvidiactl", "nvidia-uvm")
_GKE_CONTROLS: Final = (*GKE_NEEDED, "nvidia-modeset", "nvidia-uvm-tools")
_GKE_MPS: Final = "/tmp/nvidia-mps"  # noqa: S108  # where GKE's control daemon has its pipes


def gke_ids(resource: GpuResource, device: Device) -> Sequence[str]:
    """`nvidia0`, of a MIG device `nvidia0/gi1`; where GPUs are shared, also by one client, `nvidia0/vgpu0`."""
    (minor,) = device.attributes["minor"]
    name = "/".join((f"nvidia{minor}", *(f"gi{gi}" for gi in device.attributes.get("gi", ()))))
    return [name] if _gke_sharing(resource) is None else [f"{name}/vgpu{n}" for n in range(resource.spec.replicas)]


def gke_edits(resource: GpuResource, grants: Sequence[Grant]) -> ContainerEdits:
    """The nodes of each GPU before those of all; with MPS also the limits, which grow with the shares of a GPU.

    Raises:
        AllocationRefused: several shares, where that would mean nothing.
    """
    options, sharing = resource.spec.options, _gke_sharing(resource)
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
        mounts.append(Mount(HostPath(_GKE_MPS), _GKE_MPS))
        env = _gke_limits(devices[0], len(grants), resource.spec.replicas)
    return ContainerEdits(nodes=_gke_nodes(devices), mounts=tuple(mounts), env=env)


def _gke_sharing(resource: GpuResource) -> str | None:
    """How pods share a GPU; None: they do not."""
    return resource.spec.options.sharing or ("time-slicing" if resource.spec.replicas > 1 else None)


def _gke_nodes(devices: Sequence[Device]) -> tuple[Node, ...]:
    controls = [f"/dev/{name}" for name in _GKE_CONTROLS]
    every = dict.fromkeys(node for device in devices for node in device.nodes)
    ordered = sorted(every, key=lambda n: controls.index(n.path.text) if n.path.text in controls else -1)
    return tuple(Node(node.path, node.container_path, "mrw") for node in ordered)


def _gke_limits(device: Device, shares: int, clients: int) -> dict[str, str]:
    """The part of its GPU that MPS lets the container use; the GPU is number 0 there."""
    env = {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(shares * 100 // clients)}
    for memory in device.attributes.get("memory", ()):
        env["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] = f"0={shares * int(memory) // clients}M"
    return env


# --- MPS ---


_MPS_READY: Final = (".started", "pipe/nvidia-cuda-mps-control.pid")
"""The first is made after the limits are set; the second is there while nvidia-cuda-mps-control runs."""


def is_by_mps(resource: GpuResource) -> bool:
    """Whether pods share the GPUs of this resource by MPS, as with NVIDIA's plugin."""
    return resource.spec.options.sharing == "mps" and resource.spec.options.style != "gke"


def mps_directories(resources: Sequence[GpuResource]) -> Iterator[HostPath]:
    """Where the control daemons make and remove the files that say they are ready."""
    for resource in resources:
        if is_by_mps(resource):
            yield from (_mps_files(resource), _mps_files(resource) / "pipe")


def mps_edits(resource: GpuResource, devices: Sequence[Device]) -> ContainerEdits:
    """Where a container finds the control daemon, and the memory that both share.

    Raises:
        AllocationRefused: one of the devices is a MIG device.
    """
    if any("gi" in device.attributes for device in devices):
        raise AllocationRefused(f"{resource.name} shares GPUs by MPS, which MIG devices cannot be.")
    inside = f"/mps/{resource.name}/pipe"
    shm = HostPath(resource.spec.options.mps_root) / "shm"
    return ContainerEdits(
        mounts=(Mount(_mps_files(resource) / "pipe", inside), Mount(shm, "/dev/shm")),  # noqa: S108  # the container's
        env={"CUDA_MPS_PIPE_DIRECTORY": inside},
    )


def mps_signals(host: Host, resources: Sequence[GpuResource], device: Device, hardware: str) -> Iterator[Signal]:
    """A signal if the control daemon is not ready: that of the first resource that takes the device."""
    taker = next((resource for resource in resources if resource.refuses(device) is None), None)
    if taker is None or not is_by_mps(taker):
        return
    missing = [path for name in _MPS_READY if not os.path.exists(host.local(path := _mps_files(taker) / name))]  # noqa: PTH110
    if missing:
        why = f"the MPS control daemon of {taker.name} is not ready: {missing[0]} is not there"
        yield Signal(hardware, "mps-down", Verdict.NOW, why)


def _mps_files(resource: GpuResource) -> HostPath:
    return HostPath(resource.spec.options.mps_root) / resource.name
