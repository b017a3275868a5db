"""What it costs to have the agent running with 100 devices: `rss`, `idle_cpu`."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

from bench.figures import Figure, figure
from bench.kubelet import Kubelet
from bench.names import resource_names
from bench.processes import Agent, Baseline, Offer, Process

_RESOURCES: Final = 4
_DEVICES: Final = 25  # of each
_SETTLE: Final = 2.0  # seconds after the registration
_CPUCLOCK_SCHED: Final = 2  # include/linux/posix-timers.h
_RESYNC: Final = "30s"  # so that the time measured has at least one in it; it is 5m by default

_RSS: Final = "VmRSS of the process with 4 resources of 25 devices each, without HTTP"
_CPU: Final = "user and system time while nothing happens, probes every 30 s and a full look every 30 s included"


def idle(seconds: float) -> list[Figure]:
    """Both figures, of the same processes in the same time."""
    with tempfile.TemporaryDirectory() as home, ExitStack() as running:
        agent, baseline = _agent(Path(home, "a")), Baseline(Path(home, "b"), _RESOURCES, _DEVICES)
        sides: tuple[Process, Process] = agent, baseline
        for process in sides:
            running.enter_context(_registered(process))
        time.sleep(_SETTLE)
        before = [_cpu_seconds(process.pid) for process in sides]
        time.sleep(seconds)
        shares = [
            (_cpu_seconds(process.pid) - used) / seconds * 100 for process, used in zip(sides, before, strict=True)
        ]
        rss = [_status(process.pid, "status", "VmRSS") for process in sides]
        pss = _status(agent.pid, "smaps_rollup", "Pss")
        threads = len(os.listdir(f"/proc/{agent.pid}/task"))  # noqa: PTH208
    how = f"{_RSS}; its PSS is {pss:.1f} MB, it has {threads} threads"
    return [
        figure("rss", "100", "MB", rss[:1], rss[1:], how),
        figure("idle_cpu", "100", "%", shares[:1], shares[1:], f"{_CPU}; {seconds:g} s"),
    ]


def _agent(home: Path) -> Agent:
    agent = Agent(home, [Offer(name, f"/dev/r{n}-*") for n, name in enumerate(resource_names(_RESOURCES))], _RESYNC)
    for resource in range(_RESOURCES):
        for device in range(_DEVICES):
            agent.make_node(f"r{resource}-{device}", resource * _DEVICES + device)
    return agent


@contextmanager
def _registered(process: Process) -> Iterator[None]:
    kubelet = Kubelet(process.plugin_dir)
    kubelet.start()
    try:
        process.start()
        kubelet.await_registered(_RESOURCES)
        yield
    finally:
        process.stop()
        kubelet.stop()


def _cpu_seconds(pid: int) -> float:
    """User and system time of all its threads, to the nanosecond (clock_getcpuclockid(3))."""
    return time.clock_gettime((~pid << 3) | _CPUCLOCK_SCHED)


def _status(pid: int, file: str, key: str) -> float:
    """A size in MB (of 2^20 bytes) from one of the kernel's files with lines `key: value kB`."""
    for line in Path(f"/proc/{pid}/{file}").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) / 1024
    raise LookupError(f"{file} of process {pid} has no {key}")
