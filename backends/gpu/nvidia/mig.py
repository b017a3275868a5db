"""Makes a device of each part of an NVIDIA GPU in MIG mode, with the nodes that it needs.

/proc tells which parts there are and which nodes they have; only the management library knows their UUIDs (see `nvml`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from msgspec.structs import replace

from backends.base import Device, Discovery, Host, HostPath, Problem
from backends.gpu import nodes
from backends.gpu.nodes import Wanted
from backends.gpu.nvidia import nvml, procfs
from backends.gpu.nvidia.procfs import Instance
from backends.gpu.vendor import driven_as, part, withheld

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
    except nvml.NvmlError as error:
        if not found:
            return None
        sentence = f"{address} is in MIG mode and is not offered: {error}"
        return Discovery((withheld(whole, "it is in MIG mode"),), problems=(Problem(address, sentence),))
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
    gpu = withheld(undivided(host, whole, minor), why)
    return Discovery((gpu, *parts), problems=tuple(problems))


def divided_by_proc(
    host: Host, whole: Device, minor: int, wanted: Sequence[Wanted], roots: Sequence[HostPath]
) -> Discovery | None:
    """As `divided`, without the library and as GKE does: the first compute instance of each GPU instance."""
    found = [one for one in procfs.instances(host, minor) if one.ci == 0]
    if not found:
        return None
    gpu = withheld(undivided(host, whole, minor), "it is in MIG mode, and offered as its GPU instances")
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
    return withheld(replace(device, identity=identity, depends=device.depends | instance), unusable)
