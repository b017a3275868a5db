"""Until every resource is registered: `exec_to_registered`, `kubelet_to_registered`."""

from __future__ import annotations

import os
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from bench import messages, whole_node
from bench.figures import Figure, figure
from bench.kubelet import Kubelet
from bench.processes import Bare, Baseline, Process, one_node_each, resident

_GONE: Final = 0.2  # seconds without a kubelet: a real one takes longer to restart
_SETTLE: Final = 0.2  # seconds between a registration and the next start

_EXEC: Final = "from before the process is made until the last resource's ListAndWatch is open, the kubelet running"
_COLD: Final = "the same, after the kernel was told to forget all files of Python and its packages (posix_fadvise), not its own tables"
_WHOLE: Final = f"the same with every kind of hardware on the node, {whole_node.DEVICES:,} devices"
_RESTARTED: Final = "VmRSS of the process after so many restarts of the kubelet"
_KUBELET: Final = (
    "from before kubelet.sock is bound until the last resource's ListAndWatch is open; the baseline is told by a byte"
)


def exec_to_registered(resources: int, starts: int) -> Figure:
    """Our own start."""
    samples = _starts(_processes, resources, starts)
    return figure("exec_to_registered", f"{resources}", "ms", samples[0], samples[1], _EXEC, samples[2])


def cold_to_registered(starts: int) -> Figure:
    """The same, of files that have to be read from the disk."""
    samples: list[list[float]] = [[], [], []]
    for _ in range(starts):
        with tempfile.TemporaryDirectory() as home:
            for process, taken in zip(_processes(home, 1), samples, strict=True):
                _evict()
                taken.append(_start(process, 1))
    return figure("exec_to_registered", "1, cold", "ms", samples[0], samples[1], _COLD, samples[2])


def _evict() -> None:
    """Have the kernel forget the files of Python and its packages; what some process has mapped stays."""
    os.sync()  # what is not written stays, too
    for tree in {
        sys.prefix,
        sysconfig.get_path("stdlib"),
        str(messages.ROOT / "agent"),
        str(messages.ROOT / "backends"),
    }:
        for place, _, names in os.walk(tree):
            for name in names:
                if name.endswith((".pyc", ".py", ".so")):
                    file = os.open(f"{place}/{name}", os.O_RDONLY)
                    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
                    os.close(file)


def whole_node_to_registered(starts: int) -> Figure:
    """Our own start on a node that has everything."""
    samples = _starts(_whole_nodes, whole_node.RESOURCES, starts)
    return figure("exec_to_registered", whole_node.SIZE, "ms", samples[0], samples[1], _WHOLE)


def _starts(make: Callable[[str, int], Sequence[Process]], resources: int, starts: int) -> list[list[float]]:
    samples: list[list[float]] = []
    for _ in range(starts):
        with tempfile.TemporaryDirectory() as home:
            processes = make(home, resources)
            samples = samples or [[] for _ in processes]
            for process, taken in zip(processes, samples, strict=True):
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


def kubelet_to_registered(resources: int, restarts: int) -> Iterator[Figure]:
    """The kubelet's start, while we run; and the memory after all of them."""
    with tempfile.TemporaryDirectory() as home:
        samples, memory = kubelet_restarts(_processes(home, resources), resources, restarts)
    yield figure("kubelet_to_registered", f"{resources}", "ms", samples[0], samples[1], _KUBELET, samples[2])
    size = f"{resources} resources, {restarts} restarts"
    yield figure("rss", size, "MB", memory[:1], memory[1:2], _RESTARTED, memory[2:])


def kubelet_restarts(
    processes: Sequence[Process], resources: int, restarts: int
) -> tuple[list[list[float]], list[float]]:
    """The milliseconds that each of these processes took, and its memory after all, in MB."""
    samples: list[list[float]] = [[] for _ in processes]
    with ExitStack() as running:
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
                if isinstance(process, Baseline | Bare):
                    process.register()
                taken.append((kubelet.await_registered(resources) - before) * 1e3)
                _see_lists(kubelet, resources)
                time.sleep(_SETTLE)
        memory = [resident(process.pid) for process in processes]
        for kubelet in kubelets:
            kubelet.stop()
    return samples, memory


def _processes(home: str, resources: int) -> list[Process]:
    return [
        one_node_each(Path(home, "a"), resources),
        Baseline(Path(home, "b"), resources, 1),
        Bare(Path(home, "c"), resources, 1),
    ]


def _whole_nodes(home: str, resources: int) -> tuple[Process, Process]:
    baseline = Baseline(Path(home, "b"), resources, whole_node.DEVICES // resources)
    return whole_node.make(Path(home, "a")), baseline


def _see_lists(kubelet: Kubelet, resources: int) -> None:
    """Every resource lists its device."""
    lists = [kubelet.lists.get(timeout=10.0).data for _ in range(resources)]
    if not all(lists):
        raise RuntimeError(f"{lists.count(b'')} of {resources} resources list no device")
