"""Until every resource is registered: `exec_to_registered`, `kubelet_to_registered`."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from bench import whole_node
from bench.figures import Figure, figure
from bench.kubelet import Kubelet
from bench.processes import Baseline, Process, one_node_each

_GONE: Final = 0.2  # seconds without a kubelet: a real one takes longer to restart
_SETTLE: Final = 0.2  # seconds between a registration and the next start

_EXEC: Final = "from before the process is made until the last resource's ListAndWatch is open, the kubelet running"
_WHOLE: Final = f"the same with every kind of hardware on the node, {whole_node.DEVICES:,} devices"
_KUBELET: Final = (
    "from before kubelet.sock is bound until the last resource's ListAndWatch is open; the baseline is told by a byte"
)


def exec_to_registered(resources: int, starts: int) -> Figure:
    """Our own start."""
    samples = _starts(_processes, resources, starts)
    return figure("exec_to_registered", f"{resources}", "ms", *samples, _EXEC)


def whole_node_to_registered(starts: int) -> Figure:
    """Our own start on a node that has everything."""
    samples = _starts(_whole_nodes, whole_node.RESOURCES, starts)
    return figure("exec_to_registered", whole_node.SIZE, "ms", *samples, _WHOLE)


def _starts(
    make: Callable[[str, int], tuple[Process, Process]], resources: int, starts: int
) -> tuple[list[float], list[float]]:
    samples: tuple[list[float], list[float]] = [], []
    for _ in range(starts):
        with tempfile.TemporaryDirectory() as home:
            for process, taken in zip(make(home, resources), samples, strict=True):
                taken.append(_start(process, resources))
    return samples


def _start(process: Process, resources: int) -> float:
    kubelet = Kubelet(process.plugin_dir)
    kubelet.start()
    try:
        before = process.start()
        took = kubelet.await_registered(resources) - before
        _see_lists(kubelet, resources)
    finally:
        process.stop()
        kubelet.stop()
    return took * 1e3


def kubelet_to_registered(resources: int, restarts: int) -> Figure:
    """The kubelet's start, while we run."""
    samples: tuple[list[float], list[float]] = [], []
    with tempfile.TemporaryDirectory() as home, ExitStack() as running:
        processes = _processes(home, resources)
        kubelets = [Kubelet(process.plugin_dir) for process in processes]
        for process, kubelet in zip(processes, kubelets, strict=True):
            kubelet.start()
            process.start()
            running.callback(process.stop)
            kubelet.await_registered(resources)
            _see_lists(kubelet, resources)
        for _ in range(restarts):
            for process, kubelet, taken in zip(processes, kubelets, samples, strict=True):
                kubelet.stop()
                time.sleep(_GONE)
                before = kubelet.start()
                if isinstance(process, Baseline):
                    process.register()
                taken.append((kubelet.await_registered(resources) - before) * 1e3)
                _see_lists(kubelet, resources)
                time.sleep(_SETTLE)
        for kubelet in kubelets:
            kubelet.stop()
    return figure("kubelet_to_registered", f"{resources}", "ms", *samples, _KUBELET)


def _processes(home: str, resources: int) -> tuple[Process, Process]:
    return one_node_each(Path(home, "a"), resources), Baseline(Path(home, "b"), resources, 1)


def _whole_nodes(home: str, resources: int) -> tuple[Process, Process]:
    baseline = Baseline(Path(home, "b"), resources, whole_node.DEVICES // resources)
    return whole_node.make(Path(home, "a")), baseline


def _see_lists(kubelet: Kubelet, resources: int) -> None:
    """Every resource lists its device."""
    lists = [kubelet.lists.get(timeout=10.0).data for _ in range(resources)]
    if not all(lists):
        raise RuntimeError(f"{lists.count(b'')} of {resources} resources list no device")
