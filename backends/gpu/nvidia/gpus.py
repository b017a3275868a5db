"""Finds NVIDIA's GPUs and hands them out as NVIDIA's k8s-device-plugin, or GKE's for Container-Optimized OS, does.

The driver lists a GPU in /proc/driver/nvidia/gpus; user space (nvidia-modprobe) makes its nodes later. Neither sends an
event. The control nodes (`/dev/nvidiactl`, …) belong to all GPUs.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, TypeVar

from msgspec.structs import replace

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
from backends.gpu import nodes
from backends.gpu.nodes import Wanted
from backends.gpu.nvidia import gke, mig, mps, nvml, procfs, tegra_and_wsl
from backends.gpu.nvidia.procfs import Information
from backends.gpu.options import GpuOptions, GpuResource
from backends.gpu.vendor import LIBRARY_ATTRIBUTES, Attributes, Vendor, described, driver_fault, gpu, withheld
from backends.linux import pci, sysfs

DRIVER: Final = "nvidia"
DEV: Final = HostPath("/dev")

IMEX_CHANNEL: Final = DEV / "nvidia-caps-imex-channels/channel0"
"""The node by which GPUs of several machines share memory over NVLink ("IMEX channels" in NVIDIA's IMEX guide)."""

_MAJOR: Final = 195  # NV_MAJOR_DEVICE_NUMBER in the driver's nv.h
_CONTROLS: Final = ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset")

_VERSION: Final = HostPath("/sys/module/nvidia/version")
_OF_LIBRARY: Final = frozenset({"memory", *LIBRARY_ATTRIBUTES})

_DEVICES_ENV: Final = "NVIDIA_VISIBLE_DEVICES"
_CHANNELS_ENV: Final = "NVIDIA_IMEX_CHANNELS"
_VOLUMES: Final = "/var/run/nvidia-container-devices"  # accept-nvidia-visible-devices-as-volume-mounts
_FEATURES: Final = ("gdrcopy", "gds", "mofed")
_Answer = TypeVar("_Answer")


class Nvidia(Vendor):
    """Finds NVIDIA's GPUs and hands them out."""

    group = "nvlink"

    def __init__(self, host: Host, resources: Sequence[GpuResource]) -> None:
        super().__init__(host, resources)
        written = (resource.spec.options.device_driver_root.rstrip("/") for resource in resources)
        self.roots = tuple(HostPath(root) for root in dict.fromkeys(written) if root)
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
        )
        bare = gpu(function, (), attributes, uuid=gpu_uuid, identity=gpu_uuid)
        taking = [resource for resource in self._resources if resource.might_take(bare)]
        takers = [resource.spec.options for resource in taking]
        if _is_gkes(takers):  # GKE's IDs need no UUID, which may become known later
            bare = replace(bare, key=function.address, identity=gpu_uuid or "")
        wanted = (*controls, *self._imex(takers), *own)
        told = {**attributes, **self._from_library(function.address, taking), **nodes.numbers(wanted)}
        device = replace(bare, nodes=nodes.handed_out(wanted), attributes=told)
        unusable = driver_fault(function, DRIVER) or self._obstacle(function, device, info, own, takers)
        if unusable or minor is None:
            return Discovery((withheld(device, unusable),), problems=info.problems)
        found = self._parts(device, minor, wanted, takers)
        return replace(found, problems=(*info.problems, *found.problems))

    def _imex(self, takers: Sequence[GpuOptions]) -> list[Wanted]:
        """IMEX channel 0, if it is there and a resource that may take the GPU hands it out."""
        channel = [Wanted(IMEX_CHANNEL)]
        return channel if any(it.imex != "none" for it in takers) and self._fault(channel) is None else []

    def _parts(self, device: Device, minor: int, wanted: Sequence[Wanted], takers: Sequence[GpuOptions]) -> Discovery:
        """The GPU, or its MIG devices, as the resources that may take it want it."""
        if any(not options.mig_devices for options in takers):
            return Discovery((mig.undivided(self.host, device, minor),))
        divided = mig.divided_by_proc if any(options.style == "gke" for options in takers) else mig.divided
        return divided(self.host, device, minor, wanted, self.roots) or Discovery((device,))

    def _obstacle(
        self,
        function: pci.Function,
        device: Device,
        info: Information,
        own: Sequence[Wanted],
        takers: Sequence[GpuOptions],
    ) -> str:
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
        if device.key == device.unit and not _is_gkes(takers):
            return "the NVIDIA driver does not know its UUID before its first use; nvidia-persistenced makes that"
        if why := self._fault(own):
            return why
        needed = [DEV / name for name in gke.NEEDED if any(options.style == "gke" for options in takers)]
        needed += [IMEX_CHANNEL] if any(options.imex == "required" for options in takers) else []
        return self._fault(map(Wanted, needed)) or ""

    def _fault(self, wanted: Iterable[Wanted]) -> str | None:
        return nodes.fault(self.host, wanted, self.roots)

    def _uuid_from_nvml(self, function: pci.Function) -> str | None:
        """The UUID that /proc does not have. To ask the library for it starts the GPU."""
        known = self._surveyed(function.address) if function.driver == DRIVER else None
        return known.uuid if known else None

    def _surveyed(self, address: str) -> nvml.Gpu | None:
        survey = self._asked(nvml.survey)
        return survey.gpus.get(address) if survey else None

    def _asked(self, question: Callable[[Host, Sequence[HostPath]], _Answer]) -> _Answer | None:
        """The answer of NVIDIA's library; None if it is missing or fails, which `together` reports."""
        if not nvml.is_there(self.host, self.roots):
            return None
        try:
            return question(self.host, self.roots)
        except nvml.NvmlError:
            return None

    def _from_library(self, address: str, taking: Sequence[GpuResource]) -> Attributes:
        """The memory in MiB, if a container is told its share of it; where pods choose by what a GPU is, that, too."""
        is_chosen = any(it.spec.serve == "dra" or not _OF_LIBRARY.isdisjoint(it.asks_for) for it in taking)
        is_shared = any(it.spec.options.style == "gke" and it.spec.options.sharing == "mps" for it in taking)
        known = self._surveyed(address) if is_chosen or is_shared else None
        told = {"memory": str(known.memory >> 20)} if known and known.memory else {}
        if is_chosen:
            told |= {"driver_version": sysfs.attribute(self.host, _VERSION) or "", **(known.told if known else {})}
        return {name: (value,) for name, value in told.items() if value}

    def _index(self, address: str) -> str | None:
        """Its number in NVIDIA's library, which counts no GPU that is excluded or drained."""
        if not self._by_index:
            return None
        drained = self._drained()
        listed = [one for one in procfs.counted(self.host) if one not in drained]
        return str(listed.index(address)) if address in listed else None

    def _drained(self) -> frozenset[str]:
        return self._asked(nvml.drained) or frozenset()

    def together(self) -> Discovery:
        """The NVLinks, if the library tells them; on a machine without PCI its one device."""
        if (alone := tegra_and_wsl.device(self.host, "nvlink")) is not None:
            return Discovery((alone,))
        if len(procfs.addresses(self.host)) < 2 or not nvml.is_there(self.host, self.roots):  # both ends
            return Discovery()
        try:
            return Discovery(links=nvml.survey(self.host, self.roots).links)
        except nvml.NvmlError as error:
            return Discovery(problems=(Problem("NVML", f"{error}; NVLinks are not known"),))

    def probe(self, device: Device) -> Iterator[Signal]:
        """Is its MPS control daemon ready? Is it drained, and so gone for NVIDIA's library?"""
        yield from mps.signals(self.host, self._resources, device, min(device.hardware))
        whole = f"pci:{device.unit}"
        if whole in device.hardware and device.unit in self._drained():
            yield Signal(whole, "nvidia-drained", Verdict.NOW, f"nvidia-smi drain has taken {device.unit} out of use")

    def directories(self, addresses: Iterable[str]) -> Iterable[HostPath]:
        """Where the driver and nvidia-modprobe make their entries."""
        with_imex = any(resource.spec.options.imex != "none" for resource in self._resources)
        here = [DEV, mig.CAPS, *([IMEX_CHANNEL.parent] if with_imex else [])]
        elsewhere = [HostPath(f"{root}{path}") for root in self.roots for path in here]
        mine = [procfs.GPUS, *(procfs.GPUS / address for address in addresses)]
        return [*here, *elsewhere, *mine, *mps.directories(self._resources)]

    def concerned(self, path: HostPath, addresses: Sequence[str]) -> Iterable[str]:
        """One GPU for its own entry in /proc; all GPUs for a node."""
        if path.text.startswith(f"{procfs.GPUS}/"):
            address = path.text.split("/")[5]
            return [address] if pci.ADDRESS.fullmatch(address) else []
        if path == procfs.GPUS or {path, path.parent} & {*mps.directories(self._resources)}:
            return addresses
        if any(
            path.text == f"{root}{DEV}" or path.text.startswith(f"{root}{DEV}/nvidia") for root in ("", *self.roots)
        ):
            return addresses
        return []

    def ids(self, resource: GpuResource, device: Device) -> Sequence[str] | None:
        """The usual ones, or GKE's."""
        return gke.ids(resource, device) if resource.spec.options.style == "gke" else None

    def edits(self, resource: GpuResource, grants: Sequence[Grant]) -> ContainerEdits:
        """As the `style` of the resource says.

        Raises:
            AllocationRefused: several replicas, where that is not wanted.
        """
        options = resource.spec.options
        if options.style == "gke":
            return gke.edits(resource, grants)
        if resource.spec.replicas > 1 and len(grants) > 1 and options.is_one_at_most:
            raise AllocationRefused(
                f"A container may ask for one {resource.name} at most, because several pods share each GPU; "
                f"this one asks for {len(grants)}."
            )
        devices = list({grant.device.key: grant.device for grant in grants}.values())
        edits = _edits(options, devices)
        return edits.merge(mps.edits(resource, devices)) if mps.is_shared(resource) else edits


def _is_gkes(takers: Sequence[GpuOptions]) -> bool:
    """Do only resources with GKE's style take the GPU?"""
    return bool(takers) and all(options.style == "gke" for options in takers)


def _edits(options: GpuOptions, devices: Sequence[Device]) -> ContainerEdits:
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
