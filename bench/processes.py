"""The agent and the baseline as processes, each in a directory of its own, and what they need before they start."""

from __future__ import annotations

import compileall
import os
import stat
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench import messages
from bench.names import device_names, resource_names

_MAJOR: Final = 240  # for local and experimental use (Documentation/admin-guide/devices.txt)
_PLUGIN: Final = messages.BUILD / "bench" / "plugin"
_STOP_WITHIN: Final = 10.0  # seconds
_BACKEND: Final = "four-nodes"


def compile_all(root: Path) -> None:
    """Byte-code of a checkout, as an installed package has it."""
    for package in ("agent", "backends", "bench"):
        compileall.compile_dir(root / package, quiet=1)


def set_up() -> None:
    """Byte-code for the agent, Google's messages, and the benchmark's backend with its entry point.

    What only the tests need is hidden from the agent: structlog imports greenlet where it is, 1.2 MB.
    """
    compile_all(messages.ROOT)
    messages.generate()
    about = _PLUGIN / "fairlead_bench-1.dist-info"
    about.mkdir(parents=True, exist_ok=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: fairlead-bench\nVersion: 1\n")
    (_PLUGIN / "greenlet.py").write_text('raise ImportError("it is not in requirements/run.txt")\n')
    (about / "entry_points.txt").write_text(f"[fairlead.backends]\n{_BACKEND} = bench.four_nodes:FourNodes\n")


@dataclass(frozen=True, slots=True)
class Offer:
    """One resource for the agent's configuration."""

    name: str
    path: str = ""
    """Of its nodes; without one it is all that `backend` finds."""
    count: int = 1
    backend: str = _BACKEND
    replicas: int = 1
    options: str = ""
    """Further lines of a resource without a path."""

    def toml(self) -> str:
        if not self.path:
            return (
                f'[[resource]]\nname = "{self.name}"\nbackend = "{self.backend}"\n'
                f"replicas = {self.replicas}\n{self.options}"
            )
        return (
            f'[[resource]]\nname = "{self.name}"\nbackend = "chardev"\n'
            f'paths = [{{ path = "{self.path}" }}]\ncount = {self.count}\n'
        )


class Process:
    """One of the two that are measured: it offers resources in a plugin directory of its own."""

    def __init__(self, plugin_dir: Path, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.plugin_dir = plugin_dir
        plugin_dir.mkdir(parents=True, exist_ok=True)
        self.command, self._environment = list(command), {**os.environ, **environment}
        self._running: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def _process(self) -> subprocess.Popen[bytes]:
        assert self._running is not None, "it was not started"
        return self._running

    def start(self) -> float:
        """Run it; the moment before that."""
        with self.plugin_dir.with_suffix(".log").open("ab") as log:
            before = time.perf_counter()
            self._running = subprocess.Popen(
                self.command, stdin=subprocess.PIPE, stdout=log, stderr=log, bufsize=0, env=self._environment
            )
        return before

    def stop(self) -> None:
        """End it; nothing happens if it does not run."""
        if self._running is None:
            return
        with self._running as process:
            process.terminate()
            try:
                process.wait(_STOP_WITHIN)
            except subprocess.TimeoutExpired:
                process.kill()
        self._running = None

    def order(self, order: bytes) -> None:
        """For a baseline, on its standard input."""
        assert self._process.stdin is not None
        self._process.stdin.write(order)

    def kill(self) -> None:
        """End it as `kill -9` does."""
        with self._process as process:
            process.kill()
        self._running = None


class OnNodes(Process):
    """One that hears by itself of what comes and goes in a /dev and a /sys of its own."""

    def __init__(self, home: Path, command: Sequence[str], environment: Mapping[str, str]) -> None:
        super().__init__(home / "kubelet" / "device-plugins", command, environment)
        self._dev, self._sys = home / "dev", home / "sys"
        for tree in (self._dev, self._sys, home / "proc"):
            tree.mkdir()

    def node(self, name: str) -> Path:
        """Where its `/dev/<name>` lies."""
        return self._dev / name

    def make_node(self, name: str, minor: int) -> None:
        self.node(name).parent.mkdir(exist_ok=True)  # /dev/net
        os.mknod(self.node(name), stat.S_IFCHR | 0o600, os.makedev(_MAJOR, minor))

    def numa_node(self, minor: int) -> Path:
        """The attribute from which it learns where a node's hardware is."""
        return self._sys / "dev" / "char" / f"{_MAJOR}:{minor}" / "device" / "numa_node"


class Bare(OnNodes):
    """`bench.bare_server`: grpclib, without anything that Fairlead does beyond sending its list."""

    def __init__(self, home: Path, resources: int, devices: int) -> None:
        super().__init__(
            home,
            [sys.executable, "-m", "bench.bare_server", str(home), str(resources)],
            {"PYTHONPATH": str(messages.ROOT)},
        )
        for minor, name in enumerate(device_names(devices)):
            self.make_node(name, minor)

    def register(self) -> None:
        self.order(b"r")


class Agent(OnNodes):
    """`fairlead run` with a /dev, a /sys and a /proc of its own."""

    def __init__(
        self, home: Path, offers: Sequence[Offer], resync: str = "5m", more: str = "", code: Path = messages.ROOT
    ) -> None:
        """Prepare; `more` is added to the [agent] table of its configuration, and may have tables of its own.

        `code` is the checkout that runs.
        """
        config = home / "config.toml"
        command = [str(Path(sys.executable).with_name("fairlead")), "run", "--config", str(config)]
        path = os.pathsep.join(map(str, (_PLUGIN, code)))
        super().__init__(home, command, {"PYTHONPATH": path})
        config.write_text(
            f'[agent]\nplugin_dir = "{self.plugin_dir}"\nkubelet_root = "{home}/kubelet"\n'
            f'state_dir = "{home}/state"\nadmin_socket = "{home}/admin.sock"\nresync = "{resync}"\n{more}'
            f'[host]\ndev = "{self._dev}"\nsys = "{self._sys}"\n'
            f'proc = "{home}/proc"\n' + "".join(offer.toml() for offer in offers)
        )


class Baseline(Process):
    """`bench.baseline_server` with as many resources and devices."""

    def __init__(self, home: Path, resources: int, devices: int, change: str = "one") -> None:
        arguments = [str(home), str(resources), str(devices), change]
        command = [sys.executable, "-m", "bench.baseline_server", *arguments]
        super().__init__(home, command, {"PYTHONPATH": str(messages.ROOT)})

    def change(self) -> None:
        self.order(b"c")

    def register(self) -> None:
        self.order(b"r")


def one_node_each(home: Path, resources: int, code: Path = messages.ROOT) -> Agent:
    """An agent whose resources have one device each."""
    offers = [Offer(name, f"/dev/bench-{n}") for n, name in enumerate(resource_names(resources))]
    agent = Agent(home, offers, code=code)
    for n in range(resources):
        agent.make_node(f"bench-{n}", n)
    return agent


def many_nodes(home: Path, devices: int, code: Path = messages.ROOT) -> Agent:
    """An agent with one resource of many devices."""
    agent = Agent(home, [Offer(resource_names(1)[0], "/dev/bench*")], code=code)
    for n, name in enumerate(device_names(devices)):
        agent.make_node(name, n)
    return agent


def resident(pid: int) -> float:
    """The memory of a process, VmRSS, in MB."""
    return size_of(pid, "status", "VmRSS")


def size_of(pid: int, file: str, key: str) -> float:
    """A size in MB (of 2^20 bytes) from one of the kernel's files with lines `key: value kB`."""
    for line in Path(f"/proc/{pid}/{file}").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) / 1024
    raise LookupError(f"{file} of process {pid} has no {key}")
