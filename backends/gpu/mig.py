"""The parts that an NVIDIA GPU in MIG mode is divided into: each a device of its own, with the nodes that let it be used.

What there is, /proc says; under which UUID, only the management library (see `nvml`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from backends.base import Device, Discovery, Host, HostPath, Problem
from backends.gpu import nodes, nvml, procfs
from backends.gpu.nodes import Wanted
from backends.gpu.procfs import Instance
from backends.gpu.vendor import driven_as, part, withheld

CAPS: Final = HostPath("/dev/nvidia-caps")


def divided(
    host: Host, whole: Device, minor: int, wanted: Sequence[Wanted], roots: Sequence[HostPath]
) -> Discovery | None:
    """A GPU in MIG mode and its MIG devices, if it is; `whole` is the GPU, `wanted` are the nodes that all parts need."""
    (address,) = whole.attributes["address"]
    found = procfs.instances(host, minor)
    if not found and not nvml.is_there(host, roots):
        return None
    try:
        known = nvml.survey(host, roots).gpus.get(address)
    except nvml.NvmlError as error:
        if not found:
            return None
        sentence = f"{address} is in MIG mode and is not offered: {error.sentence}"
        return Discovery((withheld(whole, "it is in MIG mode"),), problems=(Problem(address, sentence),))
    if not found and not (known and known.mig_mode):
        return None
    why = "it is in MIG mode, and offered as its MIG devices" if found else "it is in MIG mode and not divided"
    instances = frozenset(f"mig:{address}/gi{gi}" for gi in procfs.gpu_instances(host, minor))
    bindings = {**whole.bindings, **driven_as(whole, *instances)}
    gpu = replace(withheld(whole, why), hardware=whole.hardware | instances, bindings=bindings)
    minors = procfs.capability_minors(host)
    listed = known.mig if known else {}
    parts = [
        _part(host, whole, one, mig, minors, wanted, roots)
        for one in found
        if (mig := listed.get((one.gi, one.ci))) is not None
    ]
    unlisted = [one.name for one in found if (one.gi, one.ci) not in listed]
    problems = [Problem(address, f"{address}: NVML does not know the MIG device {name}") for name in unlisted]
    return Discovery((gpu, *parts), problems=tuple(problems))


def _part(
    host: Host,
    whole: Device,
    one: Instance,
    mig: nvml.MigDevice,
    minors: dict[str, int],
    wanted: Sequence[Wanted],
    roots: Sequence[HostPath],
) -> Device:
    (address,) = whole.attributes["address"]
    caps = [minors.get(name) for name in (one.gi_name, one.name)]
    needed = [*wanted, *(Wanted(CAPS / f"nvidia-cap{number}") for number in caps if number is not None)]
    unusable = nodes.fault(host, needed, roots) or ""
    if None in caps:
        unusable = f"{procfs.MIG_MINORS} does not name its nodes"
    told = {"uuid": mig.uuid, "parent": whole.key, "profile": mig.profile, "gi": str(one.gi), "ci": str(one.ci)}
    if index := whole.attributes.get("index"):
        told["index"] = f"{index[0]}:{mig.index}"
    attributes = {**whole.attributes, **{name: (value,) for name, value in told.items() if value}}
    device = part(whole, mig.uuid, needed, attributes)
    instance = frozenset({f"mig:{address}/gi{one.gi}"})
    return withheld(replace(device, identity=mig.uuid, depends=device.depends | instance), unusable)
