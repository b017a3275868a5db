"""A restart with devices allocated, after a kill: `exec_to_whole`."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any, Final

from agent.simulation import checkpoint
from agent.simulation.checkpoint import Allocation
from bench import messages
from bench.figures import Figure, figure
from bench.kubelet import Kubelet
from bench.names import resource_names
from bench.processes import Baseline, Process, one_node_each

_METHOD: Final = "/v1beta1.DevicePlugin/Allocate"
_SETTLE: Final = 0.3  # seconds after the lists, and after the kill

_HOW: Final = (
    "from before the process is made, after a kill -9 with a device of each resource allocated, until the last resource's "
    "list is whole; the baseline remembers nothing"
)


def exec_to_whole(resources: int, starts: int) -> Figure:
    """One after the other; each start finds what the one before left."""
    with tempfile.TemporaryDirectory() as home:
        processes: tuple[Process, Process] = (
            one_node_each(Path(home, "a"), resources),
            Baseline(Path(home, "b"), resources, 1),
        )
        samples = [_restarts(process, resources, starts) for process in processes]
    return figure("exec_to_whole", f"{resources}", "ms", samples[0], samples[1], _HOW)


def _restarts(process: Process, resources: int, starts: int) -> list[float]:
    kubelet, taken = Kubelet(process.plugin_dir), []
    kubelet.start()
    try:
        _start(process, kubelet, resources)
        for _ in range(starts):
            _allocate(kubelet, resources)
            process.kill()
            time.sleep(_SETTLE)
            taken.append(_start(process, kubelet, resources) * 1e3)
    finally:
        process.stop()
        kubelet.stop()
    return taken


def _start(process: Process, kubelet: Kubelet, resources: int) -> float:
    """Until every resource lists its device, the time that this took."""
    before = process.start()
    kubelet.await_registered(resources)
    lists = [kubelet.lists.get(timeout=10.0) for _ in range(resources)]
    time.sleep(_SETTLE)
    if not all(_is_whole(arrival.data) for arrival in lists):
        raise RuntimeError("a first list is not whole")
    return max(arrival.at for arrival in lists) - before


def _is_whole(data: bytes) -> bool:
    pb: Any = messages.load()
    return [device.health for device in pb.ListAndWatchResponse.FromString(data).devices] == ["Healthy"]


def _allocate(kubelet: Kubelet, resources: int) -> None:
    """The one ID of each resource, the first token of its node; again and again, as where a pod has ended."""
    pb: Any = messages.load()
    held = {}
    for number, name in enumerate(resource_names(resources)):
        device = f"bench-{number}0"
        container = pb.ContainerAllocateRequest(device_ids=[device])
        request = pb.AllocateRequest(container_requests=[container]).SerializeToString()
        held[f"pod-{number}", "main", name] = Allocation(
            {-1: (device,)}, kubelet.channel(name).unary_unary(_METHOD)(request)
        )
    # as a real one does; an agent offers nothing that a pod holds and the kubelet's record lacks
    checkpoint.write(kubelet.directory, checkpoint.encode(held, {}))
