"""Finds NVIDIA's GPUs, and the MIG devices of those that are divided.

The driver lists a GPU in /proc/driver/nvidia/gpus; user space (nvidia-modprobe) makes its nodes later. Neither sends an
event. The control nodes (`/dev/nvidiactl`, …) belong to all GPUs. /proc tells which MIG devices there are and which nodes they
have; only the management library knows their UUIDs (`nvml`). Machines whose GPU is not on PCI have one device, as with
NVIDIA's plugin: Tegra, and WSL, to which Windows lends its GPUs (source: its `internal/rm/tegra_manager.go` and
`wsl_devices.go`, and `pkg/nvlib/info` of go-nvlib).
"""

from __future__ import annotations

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
    Problem,
    Signal,
    Verdict,
)
from backends.gpu import nodes, nvidia_edits, nvml
from backends.gpu import nvidia_procfs as procfs
from backends.gpu.nodes import Wanted
from backends.gpu.nvidia_edits import IMEX_CHANNEL
from backends.gpu.nvidia_procfs import Information, Instance
from backends.gpu.options import GpuOptions, GpuResource
from backends.gpu.vendor import (
    LIBRARY_ATTRIBUTES,
    NVIDIA,
    Attributes,
    Vendor,
    described,
    driven_as,
    driver_fault,
    gpu,
    part,
    stripped,
)
from backends.linux import pci, sysfs

DRIVER: Final = "nvidia"
DEV: Final = HostPath("/dev")

_MAJOR: Final = 195  # NV_MAJOR_DEVICE_NUMBER in the driver's nv.h
_CONTROLS: Final = ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset")

_VERSION: Final = HostPath("/sys/module/nvidia/version")
_OF_LIBRARY: Final = frozenset({"memory", *LIBRARY_ATTRIBUTES})

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
            return Discovery((stripped(device, unusable),), problems=info.problems)
        found = self._parts(device, minor, wanted, takers)
        return replace(found, problems=(*info.problems, *found.problems))

    def _imex(self, takers: Sequence[GpuOptions]) -> list[Wanted]:
        """IMEX channel 0, if it is there and a resource that may take the GPU hands it out."""
        channel = [Wanted(IMEX_CHANNEL)]
        return channel if any(it.imex != "none" for it in takers) and self._fault(channel) is None else []

    def _parts(self, device: Device, minor: int, wanted: Sequence[Wanted], takers: Sequence[GpuOptions]) -> Discovery:
        """The GPU, or its MIG devices, as the resources that may take it want it."""
        if any(not options.mig_devices for options in takers):
            return Discovery((undivided(self.host, device, minor),))
        by = divided_by_proc if any(options.style == "gke" for options in takers) else divided
        return by(self.host, device, minor, wanted, self.roots) or Discovery((device,))

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
        needed = [DEV / name for name in nvidia_edits.GKE_NEEDED if any(options.style == "gke" for options in takers)]
        needed += [IMEX_CHANNEL] if any(options.imex == "required" for options in takers) else []
        return self._fault(map(Wanted, needed)) or ""

    def _fault(self, wanted: Iterable[Wanted]) -> str | None:
        return nodes.fault(self.host, wanted, self.roots)

    def _uuid_from_nvml(self, function: pci.Function) -> str | None:
        """The UUID that /proc does not have. To ask the library for it starts the GPU."""
        try:
            known = self._surveyed(function.address) if function.driver == DRIVER else None
        except nvml.UnansweredError:
            if not _is_gkes([it.spec.options for it in self._resources]):
                raise
            known = None
        return known.uuid if known else None

    def _surveyed(self, address: str) -> nvml.Gpu | None:
        survey = self._asked(nvml.survey)
        return survey.gpus.get(address) if survey else None

    def _asked(self, question: Callable[[Host, Sequence[HostPath]], _Answer]) -> _Answer | None:
        """The answer of NVIDIA's library; None if it is missing or fails, which `together` reports.

        Raises:
            UnansweredError: it is busy: the GPU stays as it was seen last.
        """
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
        if (alone := without_pci(self.host, "nvlink")) is not None:
            return Discovery((alone,))
        if len(procfs.addresses(self.host)) < 2 or not nvml.is_there(self.host, self.roots):  # both ends
            return Discovery()
        try:
            return Discovery(links=nvml.survey(self.host, self.roots).links)
        except nvml.NvmlError as error:
            return Discovery(problems=(Problem("NVML", f"{error}; NVLinks are not known"),))

    def probe(self, device: Device) -> Iterator[Signal]:
        """Signals if its MPS control daemon is not ready, or if it is drained, and so gone for NVIDIA's library."""
        if not device.unusable:  # another driver's, say vfio-pci's: its `vfio` resource needs no MPS
            yield from nvidia_edits.mps_signals(self.host, self._resources, device, min(device.hardware))
        whole = f"pci:{device.unit}"
        try:
            is_drained = whole in device.hardware and device.unit in self._drained()
        except nvml.UnansweredError:  # nor was it before: what else is seen of it counts more
            is_drained = False
        if is_drained:
            yield Signal(whole, "nvidia-drained", Verdict.NOW, f"nvidia-smi drain has taken {device.unit} out of use")

    def directories(self, addresses: Iterable[str]) -> Iterable[HostPath]:
        """Where the driver and nvidia-modprobe make their entries."""
        with_imex = any(resource.spec.options.imex != "none" for resource in self._resources)
        here = [DEV, CAPS, *([IMEX_CHANNEL.parent] if with_imex else [])]
        elsewhere = [HostPath(f"{root}{path}") for root in self.roots for path in here]
        mine = [procfs.GPUS, *(procfs.GPUS / address for address in addresses)]
        return [*here, *elsewhere, *mine, *nvidia_edits.mps_directories(self._resources)]

    def concerned(self, path: HostPath, addresses: Sequence[str]) -> Iterable[str]:
        """One GPU for its own entry in /proc; all GPUs for a node."""
        if path.text.startswith(f"{procfs.GPUS}/"):
            address = path.text.split("/")[5]
            return [address] if pci.ADDRESS.fullmatch(address) else []
        if path == procfs.GPUS or {path, path.parent} & {*nvidia_edits.mps_directories(self._resources)}:
            return addresses
        if any(
            path.text == f"{root}{DEV}" or path.text.startswith(f"{root}{DEV}/nvidia") for root in ("", *self.roots)
        ):
            return addresses
        return []

    def ids(self, resource: GpuResource, device: Device) -> Sequence[str] | None:
        """The usual ones, or GKE's."""
        return nvidia_edits.gke_ids(resource, device) if resource.spec.options.style == "gke" else None

    def edits(self, resource: GpuResource, grants: Sequence[Grant]) -> ContainerEdits:
        """As the `style` of the resource says.

        Raises:
            AllocationRefused: several replicas, where that is not wanted.
        """
        options = resource.spec.options
        if options.style == "gke":
            return nvidia_edits.gke_edits(resource, grants)
        if resource.spec.replicas > 1 and len(grants) > 1 and options.is_one_at_most:
            raise AllocationRefused(
                f"A container may ask for one {resource.name} at most, because several pods share each GPU; "
                f"this one asks for {len(grants)}."
            )
        devices = list({grant.device.key: grant.device for grant in grants}.values())
        edits = nvidia_edits.edits(options, devices)
        return edits.merge(nvidia_edits.mps_edits(resource, devices)) if nvidia_edits.is_by_mps(resource) else edits


def _is_gkes(takers: Sequence[GpuOptions]) -> bool:
    """Whether only resources with GKE's style take the GPU."""
    return bool(takers) and all(options.style == "gke" for options in takers)


# --- MIG devices ---


CAPS: Final = HostPath("/dev/nvidia-caps")


def divided(
    host: Host, whole: Device, minor: int, wanted: Sequence[Wanted], roots: Sequence[HostPath]
) -> Discovery | None:
    """A GPU in MIG mode and its MIG devices; None if it is not. `wanted` are the nodes that every part needs."""
    (address,) = whole.attributes["address"]
    found = procfs.instances(host, minor)
    if not found and not nvml.is_there(host, roots):
        return None
    try:
        known = nvml.survey(host, roots).gpus.get(address)
    except nvml.UnansweredError:
        if found:
            raise
        return None
    except nvml.NvmlError as error:
        if not found:
            return None
        sentence = f"{address} is in MIG mode and is not offered: {error}"
        return Discovery((stripped(whole, "it is in MIG mode"),), problems=(Problem(address, sentence),))
    if not found and not (known and known.mig_mode):
        return None
    why = "it is in MIG mode, and offered as its MIG devices" if found else "it is in MIG mode and not divided"
    listed = known.mig if known else {}
    parts = [
        _part(host, whole, one, mig, wanted, roots)
        for one in found
        if (mig := listed.get((one.gi, one.ci))) is not None
    ]
    unlisted = [one.name for one in found if (one.gi, one.ci) not in listed]
    problems = [Problem(address, f"{address}: NVML does not know the MIG device {name}") for name in unlisted]
    gpu = stripped(undivided(host, whole, minor), why)
    return Discovery((gpu, *parts), problems=tuple(problems))


def divided_by_proc(
    host: Host, whole: Device, minor: int, wanted: Sequence[Wanted], roots: Sequence[HostPath]
) -> Discovery | None:
    """As `divided`, without the library and as GKE does: the first compute instance of each GPU instance."""
    found = [one for one in procfs.instances(host, minor) if one.ci == 0]
    if not found:
        return None
    gpu = stripped(undivided(host, whole, minor), "it is in MIG mode, and offered as its GPU instances")
    return Discovery((gpu, *(_part(host, whole, one, None, wanted, roots) for one in found)))


def undivided(host: Host, whole: Device, minor: int) -> Device:
    """The GPU as a whole. It owns its instances, so that a fault of one of them is a fault of the GPU."""
    (address,) = whole.attributes["address"]
    instances = frozenset(f"mig:{address}/gi{gi}" for gi in procfs.gpu_instances(host, minor))
    bindings = {**whole.bindings, **driven_as(whole, *instances)}
    return replace(whole, hardware=whole.hardware | instances, bindings=bindings)


def _part(
    host: Host,
    whole: Device,
    one: Instance,
    known: nvml.MigDevice | None,
    wanted: Sequence[Wanted],
    roots: Sequence[HostPath],
) -> Device:
    (address,) = whole.attributes["address"]
    caps = [procfs.capability_minor(host, name) for name in (one.gi_name, one.name)]
    needed = [*wanted, *(Wanted(CAPS / f"nvidia-cap{number}") for number in caps if number is not None)]
    unusable = nodes.fault(host, needed, roots) or ""
    if None in caps:
        unusable = f"{procfs.CAPABILITIES} does not name its nodes"
    told = {"parent": whole.key, "gi": str(one.gi), "ci": str(one.ci)}
    if known is not None:
        told |= {"uuid": known.uuid, "profile": known.profile or ""}
        if "memory" in whole.attributes:
            told["memory"] = str((known.memory or 0) >> 20 or "")
        if index := whole.attributes.get("index"):
            told["index"] = f"{index[0]}:{known.index}"
    of_gpu = {name: values for name, values in whole.attributes.items() if name not in ("uuid", *told)}
    attributes = {**of_gpu, **{name: (value,) for name, value in told.items() if value}}
    key, identity = (
        (known.uuid,) * 2 if known else (f"{it}/gi{one.gi}" if it else "" for it in (whole.key, whole.identity))
    )
    device = part(whole, key, needed, attributes)
    instance = frozenset({f"mig:{address}/gi{one.gi}"})
    return stripped(replace(device, identity=identity, depends=device.depends | instance), unusable)


# --- Tegra and WSL ---


_DXG: Final = HostPath("/dev/dxg")
_FAMILY: Final = HostPath("/sys/devices/soc0/family")
_RELEASE: Final = HostPath("/etc/nv_tegra_release")


def without_pci(host: Host, unit: str) -> Device | None:
    """The one device of such a machine; None on any other."""
    if nodes.fault(host, [Wanted(_DXG)]) is None:
        return _alone("all", unit, [Wanted(_DXG)], platform="wsl")
    if _is_tegra(host) and not procfs.addresses(host):
        return _alone("tegra", unit, [], platform="tegra", index="0")
    return None


def _is_tegra(host: Host) -> bool:
    family = sysfs.attribute(host, _FAMILY) or ""
    return family.lower().startswith("tegra") or host.local(_RELEASE).exists()


def _alone(key: str, unit: str, wanted: list[Wanted], **more: str) -> Device:
    attributes = {"vendor": (NVIDIA,), **{name: (value,) for name, value in more.items()}}
    return Device(
        key=key,
        unit=unit,
        hardware=frozenset({f"platform:{key}"}),
        identity=key,
        nodes=nodes.handed_out(wanted),
        attributes={**attributes, **nodes.numbers(wanted)},
    )
