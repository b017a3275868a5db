"""NVIDIA's GPUs, as its k8s-device-plugin and GKE's plugin for Container-Optimized OS hand them out.

The driver names a GPU in /proc/driver/nvidia/gpus; its nodes are made later, by user space (nvidia-modprobe). Neither
sends an event. The control nodes (`/dev/nvidiactl`, …) belong to all GPUs, and so to none.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import ClassVar, Final

from backends.base import (
    AllocationRefused,
    ContainerEdits,
    Device,
    Discovery,
    Grant,
    Host,
    HostPath,
    Mount,
    Node,
    Problem,
    Signal,
    Verdict,
)
from backends.gpu import gke, mig, nodes, nvml, procfs
from backends.gpu.nodes import Wanted
from backends.gpu.options import GpuOptions, GpuResource
from backends.gpu.procfs import Information
from backends.gpu.vendor import described, gpu, unbound, withheld
from backends.linux import pci

DRIVER: Final = "nvidia"
DEV: Final = HostPath("/dev")

_MAJOR: Final = 195  # NV_MAJOR_DEVICE_NUMBER in the driver's nv.h
_CONTROLS: Final = ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset")

_DEVICES_ENV: Final = "NVIDIA_VISIBLE_DEVICES"
_VOLUMES: Final = "/var/run/nvidia-container-devices"  # accept-nvidia-visible-devices-as-volume-mounts
_FEATURES: Final = ("gdrcopy", "gds", "mofed")


class Nvidia:
    """Finds NVIDIA's GPUs and hands them out."""

    group: ClassVar[str | None] = "nvlink"

    def __init__(self, host: Host, resources: Sequence[GpuResource]) -> None:
        self.host = host
        written = (resource.spec.options.device_driver_root.rstrip("/") for resource in resources)
        self.roots: Sequence[HostPath] = tuple(HostPath(root) for root in dict.fromkeys(written) if root)
        self._by_index = any(resource.spec.options.device_id_strategy == "index" for resource in resources)
        self._resources = tuple(resources)

    def found(self, function: pci.Function) -> Discovery:
        """The GPU; in MIG mode also its MIG devices."""
        info = procfs.information(self.host, function.address) or Information()
        minor, gpu_uuid = info.minor, info.uuid or self._uuid_from_nvml(function)
        controls = [one for name in _CONTROLS if self._fault([one := Wanted(DEV / name)]) is None]
        own = [] if minor is None else [Wanted(DEV / f"nvidia{minor}", f"c:{_MAJOR}:{minor}")]
        wanted = (*controls, *own)
        attributes = described(
            function,
            uuid=gpu_uuid,
            model=info.model,
            minor=None if minor is None else str(minor),
            index=self._index(function.address),
            memory=self._memory(function.address),
        )
        device = gpu(function, wanted, attributes, uuid=gpu_uuid, identity=gpu_uuid)
        unusable = unbound(function, DRIVER) or self._obstacle(function, device, info, own)
        if unusable or minor is None:
            return Discovery((withheld(device, unusable),), problems=info.problems)
        found = self._parts(device, minor, wanted)
        return replace(found, problems=(*info.problems, *found.problems))

    def _parts(self, device: Device, minor: int, wanted: Sequence[Wanted]) -> Discovery:
        """The GPU, or what it is divided into, as the resources that take it would have it."""
        takers = [resource.spec.options for resource in self._resources if resource.refuses(device) is None]
        if any(not options.mig_devices for options in takers):
            return Discovery((mig.undivided(self.host, device, minor),))
        if any(options.style == "gke" for options in takers):
            return mig.divided_by_proc(self.host, device, minor, wanted, self.roots) or Discovery((device,))
        return mig.divided(self.host, device, minor, wanted, self.roots) or Discovery((device,))

    def _obstacle(self, function: pci.Function, device: Device, info: Information, own: Sequence[Wanted]) -> str:
        """Why a GPU with NVIDIA's driver cannot be used, or not yet; empty if it can."""
        if function.vgpu_type:
            return (
                f"it has the vGPU type {function.vgpu_type}, and is for a virtual machine: the backend vfio offers it"
            )
        if info.excluded:
            return "the NVIDIA driver excludes it (NVreg_ExcludedGpus)"
        if info == Information():
            return f"the NVIDIA driver has not started it: {procfs.GPUS / device.unit} is not there"
        if info.minor is None:
            return f"its node is not known: {procfs.GPUS / device.unit}/information does not say its Device Minor"
        if device.key == device.unit:
            return "the NVIDIA driver does not know its UUID before its first use; nvidia-persistenced makes that"
        if why := self._fault(own):
            return why
        if any(r.spec.options.style == "gke" and r.refuses(device) is None for r in self._resources):
            return self._fault([Wanted(DEV / name) for name in gke.NEEDED]) or ""
        return ""

    def _fault(self, wanted: Iterable[Wanted]) -> str | None:
        return nodes.fault(self.host, wanted, self.roots)

    def _uuid_from_nvml(self, function: pci.Function) -> str | None:
        """Asking for it starts the GPU."""
        known = self._surveyed(function.address) if function.driver == DRIVER else None
        return known.uuid if known else None

    def _surveyed(self, address: str) -> nvml.Gpu | None:
        if not nvml.is_there(self.host, self.roots):
            return None
        try:
            return nvml.survey(self.host, self.roots).gpus.get(address)
        except nvml.NvmlError:  # told once, by `together`
            return None

    def _memory(self, address: str) -> str | None:
        """In MiB, where a container is to be told its share of it."""
        if not any(r.spec.options.style == "gke" and r.spec.options.sharing == "mps" for r in self._resources):
            return None
        known = self._surveyed(address)
        return str(known.memory >> 20) if known and known.memory else None

    def _index(self, address: str) -> str | None:
        """The number that NVIDIA's library gives it, which counts no GPU that is excluded or drained."""
        if not self._by_index:
            return None
        drained = self._drained()
        listed = [one for one in procfs.counted(self.host) if one not in drained]
        return str(listed.index(address)) if address in listed else None

    def _drained(self) -> frozenset[str]:
        if not nvml.is_there(self.host, self.roots):
            return frozenset()
        try:
            return nvml.drained(self.host, self.roots)
        except nvml.NvmlError:  # told once, by `together`
            return frozenset()

    def together(self) -> Discovery:
        """The NVLinks, where the management library can be asked."""
        if not nvml.is_there(self.host, self.roots) or not procfs.addresses(self.host):
            return Discovery()
        try:
            return Discovery(links=nvml.survey(self.host, self.roots).links)
        except nvml.NvmlError as error:
            return Discovery(problems=(Problem("NVML", f"{error.sentence}; NVLinks are not known"),))

    def probe(self, device: Device) -> Iterator[Signal]:
        """Is it drained? To NVIDIA's library it is gone then, and a container that gets it does not start."""
        whole = f"pci:{device.unit}"
        if whole in device.hardware and device.unit in self._drained():
            yield Signal(whole, "nvidia-drained", Verdict.NOW, f"nvidia-smi drain has taken {device.unit} out of use")

    def directories(self, addresses: Iterable[str]) -> Iterable[HostPath]:
        """Where the driver and nvidia-modprobe make their entries."""
        elsewhere = [HostPath(f"{root}{path}") for root in self.roots for path in (DEV, mig.CAPS)]
        return [DEV, mig.CAPS, *elsewhere, procfs.GPUS, *(procfs.GPUS / address for address in addresses)]

    def concerned(self, path: HostPath, addresses: Sequence[str]) -> Iterable[str]:
        """A GPU's own entry in /proc is about that one; a node may be any's."""
        if path.text.startswith(f"{procfs.GPUS}/"):
            address = path.text.split("/")[5]
            return [address] if pci.ADDRESS.fullmatch(address) else []
        if path == procfs.GPUS or any(
            path.text == f"{root}{DEV}" or path.text.startswith(f"{root}{DEV}/nvidia") for root in ("", *self.roots)
        ):
            return addresses
        return []

    def ids(self, resource: GpuResource, device: Device) -> Sequence[str] | None:
        """The usual ones; GKE's are its own."""
        return gke.ids(resource, device) if resource.spec.options.style == "gke" else None

    def edits(self, resource: GpuResource, grants: Sequence[Grant]) -> ContainerEdits:
        """By the resource's style.

        Raises:
            AllocationRefused: several replicas, where that is not wanted.
        """
        options = resource.spec.options
        if options.style == "gke":
            return gke.edits(resource, grants)
        if options.fail_requests_greater_than_one and resource.spec.replicas > 1 and len(grants) > 1:
            raise AllocationRefused(
                f"A container may ask for one {resource.name} at most, because several pods share each GPU; "
                f"this one asks for {len(grants)}."
            )
        return _edits(options, list({grant.device.key: grant.device for grant in grants}.values()))


def _edits(options: GpuOptions, devices: Sequence[Device]) -> ContainerEdits:
    """What NVIDIA's plugin answers."""
    by_index = options.device_id_strategy == "index"
    ids = [device.attributes.get("index", (device.key,))[0] if by_index else device.key for device in devices]
    strategies = options.strategies
    features = [name for name in _FEATURES if getattr(options, f"{name}_enabled")]
    cdi = [f"{options.cdi_vendor}/gpu={one}" for one in ids] + [f"{options.cdi_vendor}/{name}=all" for name in features]
    env = {f"NVIDIA_{name.upper()}": "enabled" for name in features}
    if "envvar" in strategies:
        env[_DEVICES_ENV] = ",".join(ids)
    if "volume-mounts" in strategies:
        env[_DEVICES_ENV] = _VOLUMES
    passed = options.pass_device_specs and any(not strategy.startswith("cdi-") for strategy in strategies)
    return ContainerEdits(
        nodes=tuple(_below(options.device_driver_root, devices)) if passed else (),
        mounts=tuple(Mount(HostPath("/dev/null"), f"{_VOLUMES}/{one}") for one in ids)
        if "volume-mounts" in strategies
        else (),
        env=env,
        annotations={_annotation(options, devices): ",".join(cdi)} if "cdi-annotations" in strategies else {},
        cdi_devices=tuple(cdi) if "cdi-cri" in strategies else (),
    )


def _below(root: str, devices: Iterable[Device]) -> Iterator[Node]:
    for node in dict.fromkeys(node for device in devices for node in device.nodes):
        yield Node(HostPath(f"{root.rstrip('/')}{node.path}"), node.container_path, node.permissions)


def _annotation(options: GpuOptions, devices: Iterable[Device]) -> str:
    """NVIDIA's ends in a random UUID. Ours tells the GPUs: no two resources of a container have the same."""
    name = uuid.uuid5(uuid.NAMESPACE_URL, " ".join(device.key for device in devices))
    return f"{options.cdi_annotation_prefix}nvidia-device-plugin_{name}"
