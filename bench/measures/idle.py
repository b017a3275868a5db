"""What it costs to have the agent running with 100 devices: `rss`, `idle_cpu`; of HCAs, which are polled, the latter."""

from __future__ import annotations

import os
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

from bench import whole_node
from bench.figures import Figure, figure
from bench.kubelet import Kubelet
from bench.names import resource_names
from bench.processes import Agent, Bare, Baseline, Offer, Process, many_nodes, resident, size_of
from tests.backends.machines import HEALTHY_LINK, hgx_h100
from tests.backends.rdma_trees import RDMA_CM, adapter
from tests.backends.trees import plant

_RESOURCES: Final = 4
_DEVICES: Final = 25  # of each
_HCAS: Final = 100  # of one resource of another agent
_EVERYTHING: Final = """\
nfd_features = "{home}/features"
[http]
listen = "unix:{home}/http.sock"
[[resource]]
name = "{name}"
backend = "vfio"
select = {{ vendor = "8086" }}
"""
_MANY: Final = 5_000  # nodes of one resource
_FEW: Final = 8  # GPUs, and as many HCAs, where everything is on
_ANSWERS_WITHIN: Final = 10.0  # seconds
_SETTLE: Final = 2.0  # seconds after the registration
_CPUCLOCK_SCHED: Final = 2  # include/linux/posix-timers.h
_RESYNC: Final = "30s"  # so that the time measured has at least one in it; it is 5m by default

_RSS: Final = "VmRSS of the process with 4 resources of 25 devices each, without HTTP"
_ALL: Final = (
    "the same with 8 GPUs, 8 HCAs and 84 nodes, all backends loaded, HTTP and NFD's file on, after the page, its stream and "
    "the metrics were asked for"
)
_WHOLE: Final = (
    "VmRSS on a node with 8 GPUs, 4 HCAs of 64 VFs, 16 APQNs, 20 mediated devices and 1,002 tokens, without HTTP"
)
_EACH: Final = "VmRSS with 5,001 nodes less that with one, by five; the plugin beside it is the bare one"
_CPU: Final = "user and system time while nothing happens, probes every 30 s and a full look every 30 s included"
_POLLED: Final = (
    "the same with a glance at each HCA's port every 2 s and probes every 30 s, of files in memory, where a real HCA asks its "
    "firmware; a full look every 5 min, which takes 70 ms, is not in it"
)


def idle(seconds: float) -> list[Figure]:
    """The figures of processes to which nothing happens, taken in the same time."""
    with tempfile.TemporaryDirectory() as home, ExitStack() as running:
        agent, baseline = _agent(Path(home, "a")), Baseline(Path(home, "b"), _RESOURCES, _DEVICES)
        sides: tuple[Process, ...] = agent, baseline, _agent_of_hcas(Path(home, "c"))
        for process in sides:
            running.enter_context(_registered(process, 1 if process is sides[2] else _RESOURCES))
        time.sleep(_SETTLE)
        before = [cpu_seconds(process.pid) for process in sides]
        time.sleep(seconds)
        shares = [
            (cpu_seconds(process.pid) - used) / seconds * 100 for process, used in zip(sides, before, strict=True)
        ]
        rss = [resident(process.pid) for process in (agent, baseline)]
        pss = size_of(agent.pid, "smaps_rollup", "Pss")
        threads = len(os.listdir(f"/proc/{agent.pid}/task"))  # noqa: PTH208
    how = f"{_RSS}; its PSS is {pss:.1f} MB, it has {threads} threads"
    return [
        figure("rss", "100", "MB", rss[:1], rss[1:], how),
        figure("idle_cpu", "100", "%", shares[:1], shares[1:2], f"{_CPU}; {seconds:g} s"),
        figure("idle_cpu", "100 HCAs", "%", shares[2:], shares[1:2], f"{_POLLED}; {seconds:g} s"),
    ]


def each_device() -> Figure:
    """The memory of 1,000 devices."""
    with tempfile.TemporaryDirectory() as home:
        few = _rss_with(many_nodes(Path(home, "a"), 1)), _rss_with(Bare(Path(home, "b"), 1, 1))
        many = _rss_with(many_nodes(Path(home, "c"), 1 + _MANY)), _rss_with(Bare(Path(home, "d"), 1, 1 + _MANY))
    agent, bare = ((after - before) * 1000 / _MANY for before, after in zip(few, many, strict=True))
    return figure("rss", "1,000 devices more", "MB", [agent], [bare], _EACH, [bare])


def _rss_with(process: Process) -> float:
    with _registered(process, 1):
        time.sleep(_SETTLE)
        return resident(process.pid)


def everything(seconds: float) -> Figure:
    """Its memory with everything on, after that time; apart from `idle`, whose CPU time it would disturb."""
    with tempfile.TemporaryDirectory() as home:
        agent, baseline = _agent_with_everything(Path(home, "a")), Baseline(Path(home, "b"), _RESOURCES, _DEVICES)
        with _registered(agent, _RESOURCES), _registered(baseline, _RESOURCES), _looked_at(Path(home, "a")):
            time.sleep(seconds)
            rss = [resident(process.pid) for process in (agent, baseline)]
    return figure("rss", "100, all on", "MB", rss[:1], rss[1:], _ALL)


def whole(seconds: float) -> Figure:
    """Its memory on a node that has every kind of hardware."""
    with tempfile.TemporaryDirectory() as home:
        baseline = Baseline(Path(home, "b"), whole_node.RESOURCES, whole_node.DEVICES // whole_node.RESOURCES)
        agent = whole_node.make(Path(home, "a"), _RESYNC)
        with _registered(agent, whole_node.RESOURCES), _registered(baseline, whole_node.RESOURCES):
            time.sleep(seconds)
            rss = [resident(process.pid) for process in (agent, baseline)]
    return figure("rss", whole_node.SIZE, "MB", rss[:1], rss[1:], _WHOLE)


def _agent(home: Path) -> Agent:
    agent = Agent(home, [Offer(name, f"/dev/r{n}-*") for n, name in enumerate(resource_names(_RESOURCES))], _RESYNC)
    for resource in range(_RESOURCES):
        for device in range(_DEVICES):
            agent.make_node(f"r{resource}-{device}", resource * _DEVICES + device)
    return agent


def _agent_of_hcas(home: Path) -> Agent:
    agent = Agent(home, [Offer(resource_names(1)[0], backend="infiniband")])
    plant(home, RDMA_CM)
    for n in range(_HCAS):
        address = f"0000:{n:02x}:00.0"
        files = {**HEALTHY_LINK, "power_state": "D0", "power/runtime_status": "active"}
        of_function = (f"sys/devices/pci0000:00/{address}/{name} = {value}\n" for name, value in files.items())
        plant(home, adapter(f"mlx5_{n}", address, number=n) + "".join(of_function))
    return agent


def _agent_with_everything(home: Path) -> Agent:
    nodes, gpus, hcas, functions = resource_names(_RESOURCES)
    offers = [Offer(nodes, "/dev/bench*"), Offer(gpus, backend="gpu"), Offer(hcas, backend="infiniband")]
    agent = Agent(home, offers, more=_EVERYTHING.format(home=home, name=functions))
    plant(home, hgx_h100() + RDMA_CM)
    for n in range(_FEW):
        plant(home, adapter(f"mlx5_{n}", f"0000:{n:02x}:00.0", number=n))
    for n in range(_DEVICES * _RESOURCES - 2 * _FEW):
        agent.make_node(f"bench{n}", n)
    return agent


@contextmanager
def _looked_at(home: Path) -> Iterator[None]:
    """Ask for the page and the metrics as a browser and a scraper do, and stay on the page."""
    for path in ("/", "/metrics", "/status.json"):
        with _asked(home, path) as client:
            while client.recv(65536):
                pass
    with _asked(home, "/events") as client:
        client.recv(1)
        yield


@contextmanager
def _asked(home: Path, path: str) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(_ANSWERS_WITHIN)
        until = time.monotonic() + _ANSWERS_WITHIN
        while client.connect_ex(str(home / "http.sock")) and time.monotonic() < until:
            time.sleep(0.01)  # it is served a moment after the resources are registered
        client.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        yield client


@contextmanager
def _registered(process: Process, resources: int) -> Iterator[None]:
    kubelet = Kubelet(process.plugin_dir)
    kubelet.start()
    try:
        process.start()
        kubelet.await_registered(resources)
        yield
    finally:
        process.stop()
        kubelet.stop()


def cpu_seconds(pid: int) -> float:
    """User and system time of all its threads, to the nanosecond (clock_getcpuclockid(3))."""
    return time.clock_gettime((~pid << 3) | _CPUCLOCK_SCHED)
