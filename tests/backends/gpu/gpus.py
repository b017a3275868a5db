"""The `gpu` backend on a pretended machine: made, looked at, asked what a pod gets."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from backends.base import ContainerEdits, Device, Discovery, Grant, Resource, ResourceSpec, Serve
from backends.gpu import Gpu, GpuOptions, GpuResource
from tests.backends.trees import planted_host


def resource(
    name: str = "nvidia.com/gpu",
    *,
    replicas: int = 1,
    select: Mapping[str, tuple[str, ...]] | None = None,
    serve: Serve = "device-plugin",
    **options: Any,
) -> GpuResource:
    """A resource with these options; it takes every GPU unless told otherwise."""
    selectors = () if select is None else (select,)
    spec = ResourceSpec("gpu", GpuOptions(**options), select=selectors, replicas=replicas, serve=serve)
    return Resource(name, spec)


def backend(tmp_path: Path, machine: str, *resources: GpuResource) -> Gpu:
    """The backend on a machine."""
    return Gpu(planted_host(tmp_path, machine), resources or (resource(),))


def look(gpu: Gpu) -> dict[str, Discovery]:
    """All that there is, by unit."""
    return {unit: gpu.discover(unit) for unit in gpu.units()}


def devices(gpu: Gpu) -> dict[str, Device]:
    """Every device, by its key."""
    return {device.key: device for found in look(gpu).values() for device in found.devices}


def offered(gpu: Gpu) -> list[str]:
    """The keys of the devices that can be had."""
    return sorted(key for key, device in devices(gpu).items() if not device.unusable)


def given(gpu: Gpu, wanted: GpuResource, *ids: str) -> ContainerEdits:
    """What a container gets with these IDs."""
    by_id = {one: d for d in devices(gpu).values() if not d.unusable for one in gpu.ids(wanted, d)}
    return gpu.edits(wanted, [Grant(one, by_id[one]) for one in ids])


def nodes(edits: ContainerEdits) -> list[str]:
    """Host path, container path where it differs, permissions; one node a line."""
    return [
        f"{n.path} {n.permissions}"
        if n.path.text == n.container_path
        else f"{n.path} -> {n.container_path} {n.permissions}"
        for n in edits.nodes
    ]
