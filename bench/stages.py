"""Shows where the time of an event, an Allocate and a start goes, and the memory of imports: `python -m bench.stages`.

The daemon's own functions are wrapped, which adds some 2 us to each stage. A stage is the time from the mark before it, in
any thread, to its own; medians over rounds that are 110 ms apart.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # before grpcio is imported: it tells of every connection's end

from bench import messages, processes
from bench.kubelet import Kubelet
from bench.measures.allocate import request
from bench.measures.lists import forget, running_with
from bench.names import device_names, resource_names
from bench.processes import Agent, many_nodes

_DEVICES: Final = 8
_ROUNDS: Final = 100
_GAP: Final = 0.11  # seconds
_WITHIN: Final = 10.0  # seconds
_METHOD: Final = "/v1beta1.DevicePlugin/Allocate"

_WRAPPED: Final = (
    ("agent.daemon.supervisor", "Agent.__init__", "imports and configuration"),
    ("agent.discovery.paths", "DirectoryWatch._receive", "system call, loop woken"),
    ("agent.discovery.discoverer", "Discoverer.hint", "inotify read, backends that it concerns"),
    ("agent.discovery.reading", "Schedule.ask", "affects()"),
    ("agent.discovery.reading", "_work", "schedule, thread woken"),
    ("agent.discovery.discoverer", "changes_of", "walk of the units, loop woken"),
    ("agent.daemon.node", "Node.scanned", "what has changed"),
    ("agent.daemon.node", "Node._commit", "inventory and health"),
    ("agent.kubelet.plugin", "Plugin.publish", "snapshots"),
    ("agent.kubelet.plugin", "EncodedList.message", "stream woken, what pods hold"),
    ("agent.kubelet.server", "Connection.data_received", "loop woken"),
    ("agent.kubelet.plugin", "Plugin._allocate", "HTTP/2 in"),
    ("agent.kubelet.allocation", "Allocator.allocate", "request read"),
    ("agent.daemon.node", "Node.allocated", "slots and claims"),
    ("agent.kubelet.wire", "encode_allocate", "claim written, edits"),
    ("agent.kubelet.client", "GatheringTransport._send", "HTTP/2 out"),
)
"""Module, function, and the stage that ends when it is called."""

_PRELUDE: Final = """
import atexit, importlib, json, sys, time
marks = [("interpreter", time.perf_counter())]
def wrap(module, name, label):
    owner = importlib.import_module(module)
    *classes, last = name.split(".")
    for each in classes:
        owner = getattr(owner, each)
    function = getattr(owner, last)
    def wrapped(*arguments, **more):
        marks.append((label, time.perf_counter()))
        return function(*arguments, **more)
    setattr(owner, last, wrapped)
from agent.runtime import logs, process
process.put_off_collecting()
import agent.cli.commands
for it in WRAPPED:
    wrap(*it)
atexit.register(lambda: open(FILE, "w").write(json.dumps(marks)))
from agent.cli import main
main()
"""

_IMPORTS: Final = """
import sys
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4
found, stack, find = {}, [], sys.modules["_frozen_importlib"]._find_and_load
import builtins
original = builtins.__import__
def counted(name, *arguments, **more):
    if name in sys.modules:
        return original(name, *arguments, **more)
    before = resident()
    stack.append(0)
    try:
        return original(name, *arguments, **more)
    finally:
        grown = resident() - before
        top = name.split(".")[0]
        found[top] = found.get(top, 0) + grown - stack.pop()
        if stack:
            stack[-1] += grown
builtins.__import__ = counted
from agent.runtime import logs, process
process.put_off_collecting()
import agent.cli.commands, agent.daemon.supervisor, agent.config, backends.chardev
for name, size in sorted(found.items(), key=lambda it: -it[1])[:25]:
    print(f"{size / 1024:8.2f} MB  {name}")
"""


def _traced(home: Path, devices: int) -> Agent:
    agent = many_nodes(home, devices)
    code = f"WRAPPED = {_WRAPPED!r}\nFILE = {str(home / 'marks')!r}\n{_PRELUDE}"
    agent.command = [sys.executable, "-c", code, *agent.command[1:]]
    return agent


def _rounds(cause: Callable[[Agent, Kubelet, int], float], devices: int) -> list[tuple[str, float]]:
    """Median milliseconds of each stage; `cause` makes one round and tells when its effect was there."""
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        agent, spans = _traced(home, devices), list[tuple[float, float]]()
        kubelet = Kubelet(agent.plugin_dir)
        with running_with(agent, kubelet):
            for number in range(_ROUNDS):
                forget(kubelet)
                began = time.perf_counter()
                spans.append((began, cause(agent, kubelet, number)))
                time.sleep(_GAP)
        return _medians(json.loads((home / "marks").read_text()), spans)


def _medians(marks: list[tuple[str, float]], spans: list[tuple[float, float]]) -> list[tuple[str, float]]:
    stages: dict[str, list[float]] = {}
    for began, ended in spans:
        last, seen = began, set[str]()
        for label, at in sorted(marks, key=lambda mark: mark[1]):
            if began < at < ended and label not in seen:
                seen.add(label)
                stages.setdefault(label, []).append((at - last) * 1e3)
                last = at
        stages.setdefault("client", []).append((ended - last) * 1e3)
    often = {label: taken for label, taken in stages.items() if len(taken) * 2 > len(spans)}
    return [(label, statistics.median(taken)) for label, taken in often.items()]


def _event(agent: Agent, kubelet: Kubelet, number: int) -> float:
    name = device_names(_DEVICES)[-1]
    if number % 2:
        agent.make_node(name, _DEVICES - 1)
    else:
        agent.node(name).unlink()
    return kubelet.lists.get(timeout=_WITHIN).at


def _allocate(_: Agent, kubelet: Kubelet, number: int) -> float:
    kubelet.channel(resource_names(1)[0]).unary_unary(_METHOD)(request(device_names(_ROUNDS)[number]))
    return time.perf_counter()


def _start() -> list[tuple[str, float]]:
    with tempfile.TemporaryDirectory() as name:
        agent = _traced(Path(name), _DEVICES)
        kubelet = Kubelet(agent.plugin_dir)
        kubelet.start()
        began = agent.start()
        ended = kubelet.lists.get(timeout=_WITHIN).at
        agent.stop()
        kubelet.stop()
        return _medians(json.loads((Path(name) / "marks").read_text()), [(began, ended)])


def _memory() -> None:
    environment: dict[str, Any] = {**os.environ, "PYTHONPATH": str(messages.ROOT)}
    subprocess.run([sys.executable, "-c", _IMPORTS], env=environment, check=True)


def main() -> None:
    argparse.ArgumentParser(prog="python -m bench.stages", description=__doc__).parse_args()
    processes.set_up()
    for title, stages in (
        ("event", _rounds(_event, _DEVICES)),
        ("Allocate", _rounds(_allocate, _ROUNDS)),
        ("start", _start()),
    ):
        print(f"\n{title}: {sum(taken for _, taken in stages):.2f} ms, Python {sys.version.split()[0]}")
        for label, taken in stages:
            print(f"{taken:8.3f} ms  {label}")
    print("\nmemory of imports, that of what they import not counted", flush=True)
    _memory()


if __name__ == "__main__":
    main()
