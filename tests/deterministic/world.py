"""A node in one process: kubelet, agents, hardware, and what must always hold there."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import signal
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping, MutableMapping
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any, Final, get_args

import structlog

from agent.config import load
from agent.daemon.control import AgentControl
from agent.daemon.supervisor import Agent
from agent.discovery.backend_answers import make_backends
from agent.runtime.watchdog import Notifier
from agent.simulation import checkpoint
from agent.simulation.demo_stage import write_stub_file
from agent.simulation.device_manager import DeviceManager, KubeletPanicError
from agent.simulation.kubelet import Kubelet
from agent.simulation.model import Change, Container, Kind, Phase, Pod, PodStatus, Version
from agent.simulation.pod_workers import KubeletStoppedError
from agent.simulation.registration import Handler
from backends.chardev import CharDev
from backends.stub import Stub
from tests.deterministic.claims import CLAIMED, Claims
from tests.deterministic.loop import Loop, Thread, this_thread
from tests.deterministic.machine import PROCESS, SLOW, Machine, send
from tests.deterministic.model import Model, Units
from tests.e2e.node import Node, chardev
from tests.pod_cgroups import show_running

WIDGET, SHARED, STUB, LATE = "fl.test/widget", "fl.test/shared", "fl.test/stub", "fl.test/late"
_REPLICAS: Final = 3
_ACCESSES: Final = 5  # to the disk by one thread: it opens, writes, syncs and renames a file, and syncs its directory
_UNITS: Final[dict[str, Units]] = {
    WIDGET: {f"w{n}": (f"w{n}",) for n in range(6)},
    SHARED: {f"s{n}": tuple(f"s{n}::{m}" for m in range(_REPLICAS)) for n in range(2)},
    STUB: {f"stub-{n}": (f"stub-{n}",) for n in range(4)},
}
KUBELETS: Final[tuple[Version, ...]] = ("1.36", "1.37")
RIVALS: Final = ("theirs-0", "theirs-1")
"""The devices of a plugin that has registered a name of ours: a list with them is not ours."""


class UnfitError(Exception):
    """It cannot be done as the world is now."""


_RIVAL_SEEN: Final = 3.0
"""Seconds in which an agent knows that another plugin has a name of its own. What that plugin's first list lacks of ours may be
in flight, and the kubelet crashes at our reply (A7.1): no agent can keep it from that before."""

_SEEN_TO_END: Final = 10.0
"""Seconds until an agent sees that a pod has ended that the kubelet has forgotten: by looks each 5 s."""

CLAIMS_END: Final = 120.0
"""Seconds in which both witnesses know that a pod has ended (agent.claims.ledger, agent.kubelet.pod_claims)."""


class World:
    """The node, and what has happened on it."""

    def __init__(
        self, root: Path, loop: Loop, machine: Machine, rng: random.Random, *, has_claims: bool = False
    ) -> None:
        self.loop, self.machine, self.rng = loop, machine, rng
        self.trace: list[str] = []
        self.violations: list[str] = []
        self.model = Model({name: dict(units) for name, units in _UNITS.items()})
        self.root = root
        self.node = Node(root)
        version, handler = rng.choice(KUBELETS), rng.choice(get_args(Handler))
        chance = random.Random(rng.random())
        self.kubelet = Kubelet(root, version=version, handler=handler, rng=chance, serves_dra=has_claims)
        self.kubelet.subscribe(self._changed)
        self.kubelet_process = machine.process("kubelet")
        loop.processes.append(self.kubelet_process)
        self.agents: list[AgentProcess] = []
        self.states: dict[str, str] = {}
        self.touched: set[str] = set()
        self.numbers = count(1)
        self._rival_listed = 0.0
        self._ended: dict[tuple[str, str], float] = {}
        """(Resource, ID) → when a pod ended that had it, though the kubelet had forgotten that."""
        self._admissions: set[asyncio.Task[None]] = set()
        self.disturbed_at = machine.now
        self.extra: list[str] = []
        """Tables that reloads have added to the configuration."""
        self.hanging: set[str] = set()
        """Units of backends whose reads do not come back."""
        self._hung: list[Thread] = []
        self.record_delays: tuple[float, float] | None = None
        """Seconds, at least and at most, by which the kubelet writes its record late; None: at once."""
        self._claims = Claims(self) if has_claims else None

    @property
    def claims(self) -> Claims:
        """What is there of dynamic resource allocation.

        Raises:
            UnfitError: nothing.
        """
        if self._claims is None:
            raise UnfitError
        return self._claims

    # --- what happens ---

    def note(self, text: str) -> None:
        """Remember that this has happened."""
        self.trace.append(f"{self.machine.now:12.6f} {PROCESS.get().name:8} {text}".replace(str(self.root), ""))

    def violate(self, what: str) -> None:
        """This should never be."""
        self.note(f"VIOLATION {what}")
        self.violations.append(what)
        self.loop.stop()

    def disturb(self) -> None:
        """Something has happened that the kubelet must show in time."""
        self.disturbed_at = self.machine.now

    def logged(self, _logger: object, level: str, line: MutableMapping[str, Any]) -> Mapping[str, Any]:
        """Take a line of an agent's log."""
        words = {key: value for key, value in line.items() if key not in ("event", "exc_info")}
        self.note(f"log {level} {line['event']} {words}")
        if line["event"] == "ready":
            for agent in self.agents:
                agent.ready = agent.ready or agent.process is PROCESS.get()
        if level in ("exception", "critical") or line.get("exc_info"):
            import sys
            import traceback

            text = "".join(traceback.format_exception(*sys.exc_info()))
            self.violate(f"the log has a traceback: {line} {text}")
        raise structlog.DropEvent

    def _changed(self, change: Change) -> None:
        if change.kind is Kind.CHECKPOINT and not change.text:
            return
        self.note(f"kubelet {change.kind} {change.resource} {change.text} {change.devices() or ''}")
        if change.kind is Kind.POD:
            self._show_running()
        if change.kind is Kind.PANIC and self.machine.now - self._rival_listed > _RIVAL_SEEN:
            self.violate(f"the kubelet panicked: {change.text}")
        if change.kind is Kind.LIST and change.after is not None and self.model.is_served(change.resource):
            listed = change.after.healthy | change.after.unhealthy
            if not listed.isdisjoint(RIVALS):
                self._rival_listed = self.machine.now
            elif lacking := self.held(change.resource) - listed:
                self.violate(f"a list of {change.resource} lacks {sorted(lacking)}, which running pods hold")
        self._look()

    # --- what must hold ---

    def differences(self) -> list[str]:
        """In what the kubelet's view differs from the hardware."""
        return self.model.differences(self.kubelet.resources, self._forgotten)

    def _look(self) -> None:
        if self.machine.now - self.disturbed_at > self.model.patience() and (found := self.differences()):
            self.violate(f"{self.machine.now - self.disturbed_at:.3f} s after the last fault: {'; '.join(found)}")
            self.disturb()
        claims = self._claims
        if claims and self.machine.now - self.disturbed_at > claims.patience() and (found := claims.differences()):
            self.violate(f"{self.machine.now - self.disturbed_at:.3f} s after it, in slices: {'; '.join(found)}")
            self.disturb()

    async def watch(self) -> None:
        """Look at the kubelet's view whenever it must be right."""
        while True:
            due = self.disturbed_at + self.model.patience()
            await asyncio.sleep(max(due - self.machine.now, 0.0) + 0.01)
            self._look()
            if self.machine.now > self.disturbed_at + self.model.patience():
                await asyncio.sleep(1.0)

    # --- pods ---

    def running(self) -> list[PodStatus]:
        """Pods that may hold devices."""
        return [status for status in self.kubelet.pods.values() if status.active]

    def held(self, resource: str) -> set[str]:
        """What running pods hold of a resource, as the kubelet believes."""
        with suppress(KubeletStoppedError):
            pods = (self.kubelet.held(status.pod, "main") for status in self.running())
            return {device for held in pods for device in held.get(resource, ())}
        return set()

    def _forgotten(self) -> set[tuple[str, str]]:
        """(Resource, ID) of what pods have and the kubelet would give again.

        One that begins with a record which was written last, and is older than a pod, knows nothing of the pod (A11.1): until
        the pod has ended, its devices are kept from others.
        """
        lately = {it for it, ended in self._ended.items() if self.machine.now - ended < _SEEN_TO_END}
        return lately.union(*map(self._forgotten_of, self.running()))

    def _forgotten_of(self, status: PodStatus) -> set[tuple[str, str]]:
        known = {(resource, one) for resource, ids in self.kubelet.held(status.pod, "main").items() for one in ids}
        given = status.containers["main"].given.items()
        return {(resource, one) for resource, ids in given for one in ids} - known

    def pod_comes(self, rng: random.Random) -> None:
        """A pod asks for devices; it gets them, or not, in its own time."""
        self.pod_asks(rng.choice(sorted(self.model.hardware)), rng.choice([1, 1, 1, 2]))

    def pod_asks(self, resource: str, number: int) -> None:
        """A pod asks for so many of these."""
        wanted = Pod(f"pod{next(self.numbers)}", (Container("main", {resource: number}),))
        self.admitting(lambda: self._admit(wanted))

    def admitting(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Have the kubelet do this in its own time."""

        async def admit() -> None:
            with suppress(KubeletStoppedError):
                await work()

        task = self.loop.spawn(self.kubelet_process, admit)
        self._admissions.add(task)
        task.add_done_callback(self._admissions.discard)

    async def _admit(self, wanted: Pod) -> None:
        with suppress(KubeletStoppedError, KubeletPanicError):
            if (await self.kubelet.admit(wanted)).phase is Phase.RUNNING:
                self._one_pod_each()

    def _one_pod_each(self) -> None:
        """Also where the kubelet has forgotten that a pod which runs has something, but for tokens: pods may share what they are of."""
        given = (it.containers["main"].given.items() for it in self.running())
        users = Counter((resource, device) for each in given for resource, ids in each for device in ids)
        for (resource, device), number in users.items():
            if number > 1 and (resource != SHARED or (resource, device) not in self._forgotten()):
                self.violate(f"{number} pods have {device} of {resource}")
        if self._claims is not None:
            self._claims.one_pod_each()

    def pod_goes(self, rng: random.Random) -> None:
        """One of the pods comes to its end."""
        if pods := [status for status in self.running() if status.phase is Phase.RUNNING]:
            self.end_pod(rng.choice(sorted(pods, key=lambda status: status.pod.name)))

    def end_pod(self, status: PodStatus) -> None:
        """The pod comes to its end; what the kubelet had forgotten of it, an agent finds out later."""
        with suppress(KubeletStoppedError):
            self._ended |= dict.fromkeys(self._forgotten_of(status), self.machine.now)
        self.kubelet.end(status.pod)

    def _show_running(self) -> None:
        show_running(self.root / "sys", [it.uid for it in self.running() if it.phase is Phase.RUNNING])

    # --- hardware ---

    def free_units(self, resource: str) -> list[str]:
        """Units that no fault has."""
        return [unit for unit in self.model.hardware[resource] if f"{resource} {unit}" not in self.touched]

    @contextmanager
    def some(self, rng: random.Random, resource: str, most: int = 3) -> Iterator[list[str]]:
        """Some units of a resource that no other fault has; perhaps none."""
        free = self.free_units(resource)
        units = rng.sample(free, rng.randint(1, min(most, len(free)))) if free else []
        keys = {f"{resource} {unit}" for unit in units}
        self.touched |= keys
        try:
            yield units
        finally:
            self.touched -= keys

    def say_states(self) -> None:
        """Write how the stub's devices are."""
        lines = "".join(f"{name} {state}\n" for name, state in self.states.items())
        write_stub_file(self.node.dev / "how", lines or "* healthy\n")

    # --- the processes ---

    def configure(self, text: str | None = None) -> None:
        """Write the configuration; `text` instead of a sound one."""
        stub = f'[[resource]]\nname = "{STUB}"\nbackend = "stub"\ndevices = [{{ count = 4, numa_node = 0 }}]\n'
        resources = [
            chardev("/dev/w*", WIDGET),
            chardev("/dev/s*", SHARED, _REPLICAS),
            f'{stub}file = "/dev/how"\n',
        ]
        host = {"sys": str(self.root / "sys"), "proc": str(self.root / "proc")}
        if self._claims is not None:
            resources += self._claims.tables
            host["run"] = str(self.root)
        path = self.node.config(*resources, *self.extra, **host, probe="30s", resync="5m")
        if text is not None:
            path.write_text(text)
        os.utime(path)

    def read(self, unit: str) -> None:
        """A backend reads a unit now, in a thread; it may hang."""
        while unit in self.hanging and (thread := this_thread()) is not None:
            self._hung.append(thread)
            thread.wait()

    def let_go(self) -> None:
        """Let those go on whose reads hang no more."""
        for thread in self._hung:
            thread.wake()
        self._hung.clear()

    async def on_kubelet(self, work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """Have the kubelet's process do this."""
        return await self.loop.spawn(self.kubelet_process, work)

    async def in_process(self, name: str, work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """Have another process do this."""
        process = next((it for it in self.loop.processes if it.name == name), None) or self.machine.process(name)
        return await self.loop.spawn(process, work)

    async def begin(self) -> None:
        """Make the hardware, and start the kubelet and an agent."""
        _hang_where_told(self)
        _write_records_late(self)
        for resource in (WIDGET, SHARED):
            self.node.mknod(*self.model.hardware[resource])
        if self._claims is not None:
            self.node.mknod(*self._claims.model.hardware[CLAIMED])
        (self.root / "proc").mkdir()
        self._show_running()
        self.say_states()
        self.configure()
        await self.on_kubelet(self.kubelet.start)
        self.start_agent()
        self.disturb()

    def start_agent(self) -> AgentProcess:
        """Start an agent beside those that run."""
        started = AgentProcess(self)
        self.agents.append(started)
        return started

    @property
    def agent(self) -> AgentProcess:
        """The one that was started first."""
        if not self.agents:
            raise UnfitError
        return self.agents[0]

    async def at_rest(self) -> None:
        """Without any fault: nothing is left of pods that ended, and a pod gets a device of each resource."""
        for status in self.running():
            self.end_pod(status)
        await asyncio.sleep(CLAIMS_END)
        for resource in self.model.hardware:
            wanted = Pod(f"pod{next(self.numbers)}", (Container("main", {resource: 1}),))
            status = await self.on_kubelet(lambda wanted=wanted: self.kubelet.admit(wanted))  # type: ignore[misc]
            if status.phase is not Phase.RUNNING:
                self.violate(f"without any fault, a pod that asks for {resource} is refused: {status.message}")
            self.kubelet.end(wanted)
        if self._claims is not None:
            await self._claims.at_rest()

    async def end(self) -> None:
        """End the agents, then the kubelet."""
        self.model.blind += 1
        for agent in list(self.agents):
            await agent.end()
        if left := self.node.leftovers():
            self.violate(f"agents left in their directory: {sorted(left)}")
        for task in list(self._admissions):
            task.cancel()
        await self.on_kubelet(self.kubelet.stop)


class AgentProcess:
    """One agent of the world."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.process = world.machine.process(f"agent{next(world.numbers)}")
        self.process.disk = str(world.node.state)
        self.agent: Agent | None = None
        self.ready = False
        self._task = world.loop.spawn(self.process, self._main)

    async def is_ready(self) -> None:
        """Wait until it is, or dead, and the kubelet may have its lists: they wait for a read until that counts as hanging."""
        for _ in range(600):
            if self.ready or self.process.is_dead:
                break
            await asyncio.sleep(0.1)
        else:
            self.world.violate(f"{self.process} is not ready after a minute")
        if self.world.hanging:
            await asyncio.sleep(6.0)

    async def ask(self, what: Callable[[AgentControl], Coroutine[Any, Any, Any]]) -> Any:
        """Ask it in its own process, as an operator does; a minute at most."""
        agent = self.agent
        if agent is None or self.process.is_dead:
            raise LookupError("it has not started")
        task = self.world.loop.spawn(self.process, lambda: what(agent.control))
        await asyncio.wait([task], timeout=60.0)
        if not task.done():
            raise LookupError("it does not answer")
        return task.result()

    async def _main(self) -> None:
        config = load(self.world.root / "config.toml")
        self.agent = Agent(config, make_backends(config.host, config.resources), Notifier(None))
        await self.agent.run_until_signal()

    def get(self, number: int) -> None:
        """Send it a signal; before it has handlers, it ends by it."""
        self.world.note(f"{self.process.name} gets {signal.Signals(number).name}")
        if number == signal.SIGKILL or (number not in self.process.signals and number == signal.SIGTERM):
            self.world.loop.kill(self.process)
            self.world.agents.remove(self)
        else:
            send(self.process, number)

    async def end(self, number: int = signal.SIGTERM) -> None:
        """End it; what it left open, or goes on doing, is a violation."""
        self.get(number)
        if self.process.is_dead:
            return
        await asyncio.wait([self._task])
        self.world.agents.remove(self)
        if error := self._task.exception():
            self.world.violate(f"{self.process} ended by {error!r}")
        await asyncio.sleep(0.1)
        if left := self.world.loop.tasks_of(self.process):
            self.world.violate(f"{self.process} left tasks: {left}")
        if any(
            it.process.is_stopped for it in self.world.agents
        ):  # a socket whose other end reads nothing closes later
            self.world.loop.kill(self.process)
            return
        if self._files():
            gc.collect()  # asyncio leaves to it what it accepts while a server closes (Server._attach asserts, in 3.11)
        for _ in range(_ACCESSES):  # a thread that waits for a slow disk is no leak: it ends with the process
            if self._files():
                await asyncio.sleep(SLOW[-1])
        if names := self._files():
            self.world.violate(f"{self.process} left files open: {names}")
        self.world.loop.kill(self.process)

    def _files(self) -> list[str]:
        """What it has open, but for the state files and their directory, whose thread lives as long as the process."""
        names = [str(Path(f"/proc/self/fd/{fd}").readlink()) for fd in self.world.machine.descriptors(self.process)]
        return [name for name in names if name.rpartition("/")[2].lstrip(".").partition(".")[0] != "state"]


def _hang_where_told(world: World) -> None:
    """Have each backend ask the world before and after it reads a unit."""
    for backend in (Stub, CharDev):
        discover, probe = backend.discover, backend.probe

        def reading(self: Any, unit: str, discover: Any = discover) -> Any:
            world.read(unit)
            found = discover(self, unit)
            world.read(unit)
            return found

        def probing(self: Any, device: Any, probe: Any = probe) -> Any:
            world.read(device.unit)
            return probe(self, device)

        backend.discover, backend.probe = reading, probing  # type: ignore[method-assign]


def _write_records_late(world: World) -> None:
    """Have the kubelet write what it believed when a list came, perhaps after what it believed later."""
    write = DeviceManager.write_checkpoint

    async def writing(self: DeviceManager) -> None:
        if world.record_delays is None:
            await write(self)
            return
        healthy = {name: it.view.healthy for name, it in self._resources.items()}
        content = checkpoint.encode(self.held.entries, healthy)
        least, most = world.record_delays
        await asyncio.sleep(least + (most - least) * world.machine.rng.random())
        if not self._stopped:
            checkpoint.write(self._directory, content)

    DeviceManager.write_checkpoint = writing  # type: ignore[method-assign]
