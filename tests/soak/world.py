"""A node with all that can fail on it: hardware, kernel log, kubelet, daemon, backends; and what must always hold there."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Final, Self, get_args

from agent.console.control import Client
from agent.runtime.errors import FairleadError
from agent.simulation.demo_stage import write_stub_file
from agent.simulation.device_manager import KubeletPanicError
from agent.simulation.kubelet import Kubelet
from agent.simulation.model import Change, Container, Kind, Phase, Pod, PodStatus, Version
from agent.simulation.pod_workers import KubeletStoppedError
from agent.simulation.registration import Handler
from tests.backends.machines import CONTROLS, nvidia_gpu, uuid
from tests.backends.trees import planted_host
from tests.deterministic.model import PATIENCE, Model, Units
from tests.e2e.conftest import Trouble
from tests.e2e.kmsg import KernelLog
from tests.e2e.node import Node, chardev
from tests.e2e.process import Line
from tests.pod_cgroups import show_running
from tests.soak.daemon import Daemon, Sample

WIDGET, SHARED, STUB, GPU = "fl.test/widget", "fl.test/shared", "fl.test/stub", "nvidia.com/gpu"
TROUBLED: Final = ("fl.test/troubled0", "fl.test/troubled1")
_REPLICAS: Final = 3
_UNITS: Final[dict[str, Units]] = {
    WIDGET: {f"w{n}": (f"w{n}",) for n in range(6)},
    SHARED: {f"s{n}": tuple(f"s{n}::{m}" for m in range(_REPLICAS)) for n in range(2)},
    STUB: {f"stub-{n}": (f"stub-{n}",) for n in range(4)},
    GPU: {uuid(n): (uuid(n),) for n in range(2)},
    **{name: {unit: (unit,) for unit in units} for name, units in zip(TROUBLED, ("abc", "def"), strict=True)},
}
GPUS: Final = ("0000:3b:00", "0000:5e:00")
KUBELETS: Final[tuple[Version, ...]] = ("1.36", "1.37")
END: Final = "end of: "
"""Before the name of a fault: what all must be well after."""

_BEAT: Final = 0.05  # seconds between two looks at the clock: what is late with them is the machine
_STARTED: Final = 30.0  # seconds until a daemon is ready, on a busy machine
_TOLD: Final = 15.0  # seconds in which the last problem must have gone from `status`
_AT_ALL: Final = 60.0  # seconds in which what is not well in time may become so, before the walk ends
_KEPT: Final = 50  # events before a violation


class LostError(Exception):
    """Nothing more can be learned of this world."""


@dataclass(frozen=True, slots=True)
class Violation:
    """Something that should never be, and what came before it."""

    step: int
    what: str
    events: tuple[str, ...]


@dataclass
class Findings:
    """What the walk has found so far."""

    violations: list[Violation] = field(default_factory=list)
    times: dict[str, list[float]] = field(default_factory=dict)
    """Fault → seconds until all was well, each time."""
    steps: dict[str, tuple[float, float, int]] = field(default_factory=dict)
    """Name of a step of the loop → CPU seconds at most, the wall's, how often it was long."""
    samples: list[Sample] = field(default_factory=list)
    pods: Counter[str] = field(default_factory=Counter)
    lateness: float = 0.0
    """Seconds by which the machine had this process run late, in all."""


class World:
    """Enter it: the kubelet and the daemon run then."""

    def __init__(self, root: Path, rng: random.Random, prelude: str = "", *, hurried: bool = True) -> None:
        """`prelude` breaks the daemon; `hurried`: what is not well in time is a violation."""
        self.rng, self.model, self.found = rng, Model(dict(_UNITS)), Findings()
        self.root, self.prelude, self.hurried = root, prelude, hurried
        self.node = Node(root)
        self.node.dev.rmdir()
        planted_host(root, CONTROLS + "".join(nvidia_gpu(f"{at}.0", n, numa_node=n) for n, at in enumerate(GPUS)))
        version, handler = rng.choice(KUBELETS), rng.choice(get_args(Handler))
        self.node.kubelet = Kubelet(root, version=version, handler=handler, rng=random.Random(rng.random()))
        self.node.kubelet.subscribe(self._changed)
        self.kmsg = KernelLog(root / "dev/kmsg")
        self.trouble = Trouble(root / "trouble", self.node)
        self.http = root / "http.sock"
        self.states: dict[str, str] = {}
        """How the stub's devices are, where they are not healthy."""
        self.hanging: Counter[int] = Counter()
        self.touched: set[str] = set()
        """Parts and units that faults have to themselves while they last."""
        self.daemon: Daemon
        self.ended_on_purpose = False
        self.step = 0
        self._events: deque[str] = deque(maxlen=_KEPT)
        self._began = time.monotonic()
        self.excused: set[str] = set()
        """What `status` may go on telling of until the daemon's next start: the `log` has lost lines, the `state` was damaged."""
        self._complained: set[str] = set()
        self.numbers = count(1)
        self._ready = asyncio.Event()
        self._admissions: set[asyncio.Task[None]] = set()
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        for resource in (WIDGET, SHARED):
            self.node.mknod(*self.model.hardware[resource])
        for number, resource in enumerate(TROUBLED):
            self.node.mknod(*(f"t{number}/{unit}" for unit in self.model.hardware[resource]))
        self.say_states()
        self._show_running()
        await self._stack.enter_async_context(self.node.kubelet)
        self._stack.enter_context(self.kmsg)
        beat = asyncio.create_task(self._beat())
        self._stack.callback(beat.cancel)
        self.configure()
        await self.start()
        await self.well("its start")
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._admissions:
            task.cancel()
        self.ended_on_purpose = True
        if hasattr(self, "daemon"):
            await self.daemon.__aexit__()
        await self._stack.aclose()

    # --- time and events ---

    @property
    def now(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self._began

    async def _beat(self) -> None:
        """Measure how late the machine is; let go on what hangs without an order."""
        while True:
            before = time.monotonic()
            await asyncio.sleep(_BEAT)
            self.found.lateness += max(0.0, time.monotonic() - before - 1.2 * _BEAT)
            if hasattr(self, "daemon"):
                self.daemon.listen()
            for number in range(len(TROUBLED)):
                if not self.hanging[number]:
                    with suppress(OSError):  # nobody hangs
                        fifo = self.root / "trouble" / str(number) / "release"
                        os.close(os.open(fifo, os.O_WRONLY | os.O_NONBLOCK))

    def note(self, text: str) -> None:
        """Remember that this has happened."""
        self._events.append(f"{self.now:9.3f} step {self.step}: {text}")

    def violate(self, what: str) -> None:
        """This should never be."""
        self.note(f"VIOLATION {what}")
        self.found.violations.append(Violation(self.step, what, tuple(self._events)))

    def _logged(self, line: Line) -> None:
        words = {key: value for key, value in line.items() if key not in ("timestamp", "event", "level", "exception")}
        self.note(f"log {line.get('level', '')} {line['event']} {words}"[:400])
        if line["event"] == "ready":
            self._ready.set()
        told = line.get("backend", "").startswith("troubled") or "told to" in str(line)  # by us
        if ("exception" in line or line["event"] in ("no-json", "part-failed")) and not told:
            self.violate(f"the log has a traceback: {line}"[:4000])

    def _stepped(self, took: float, wall: float, name: str) -> None:
        most, longest, times = self.found.steps.get(name, (0.0, 0.0, 0))
        self.found.steps[name] = max(most, took), max(longest, wall), times + 1
        self.note(f"step of {took * 1e3:.0f} ms, {wall * 1e3:.0f} ms on the wall's clock: {name}")

    def _changed(self, change: Change) -> None:
        if change.kind is Kind.CHECKPOINT and not change.text:
            return
        self.note(f"kubelet {change.kind} {change.resource} {change.text} {change.devices() or ''}")
        if change.kind is Kind.POD:
            self._show_running()
        if change.kind is Kind.PANIC:
            self.violate(f"the kubelet panicked: {change.text}")
        if change.kind is Kind.LIST and change.after is not None and self.model.is_served(change.resource):
            listed = change.after.healthy | change.after.unhealthy
            if lacking := self.held(change.resource) - listed:
                self.violate(f"a list of {change.resource} lacks {sorted(lacking)}, which running pods hold")

    # --- the daemon ---

    def configure(self) -> None:
        """Write the configuration."""
        stub = f'[[resource]]\nname = "{STUB}"\nbackend = "stub"\ndevices = [{{ count = 4, numa_node = 0 }}]\n'
        resources = [
            chardev("/dev/w*", WIDGET),
            chardev("/dev/s*", SHARED, _REPLICAS),
            f'{stub}file = "/dev/how"\n',
            f'[[resource]]\nname = "{GPU}"\nbackend = "gpu"\n',
            *map(self.trouble.resource, range(len(TROUBLED))),
            f'[http]\nlisten = "unix:{self.http}"\n',
        ]
        host = {"sys": str(self.root / "sys"), "proc": str(self.root / "proc")}
        self.node.config(*resources, **host, probe="30s", resync="5m")

    async def make_daemon(self) -> Daemon:
        """A daemon that has been started, whatever it does."""
        place = self.root / f"daemon{next(self.numbers)}"
        config = self.root / "config.toml"
        daemon = Daemon(config, place, self.trouble.environment, self._logged, self._stepped, self.prelude)
        return await daemon.__aenter__()

    async def start(self) -> None:
        """Start the daemon; returns when it is ready."""
        self._ready.clear()
        self.excused.clear()
        self.ended_on_purpose = False
        self.daemon = await self.make_daemon()
        await self.is_so(self._ready.is_set, _STARTED, "the daemon is ready")

    async def end(self, number: int) -> None:
        """End the daemon by a signal."""
        self.ended_on_purpose = True
        self.daemon.signal(number)
        code = await self.daemon.ended()
        await self.daemon.__aexit__()
        if code not in (0, -number):
            self.violate(f"the daemon ended with {code}")

    @asynccontextmanager
    async def asking(self) -> AsyncIterator[Client]:
        """A connection to the daemon."""
        client = Client(self.node.admin)
        try:
            yield client
        finally:
            client.close()

    # --- waiting ---

    def differences(self) -> list[str]:
        """In what the kubelet's view differs from the hardware."""
        return self.model.differences(self.node.kubelet.resources)

    async def well(self, after: str) -> None:
        """Wait until the kubelet shows what is there; what takes too long is a violation.

        Raises:
            LostError: it never does.
        """
        if not self.daemon.runs and not self.ended_on_purpose:
            self.violate("the daemon ended by itself")
            raise LostError
        patience = self.model.patience()
        took = await self.is_so(lambda: not self.differences(), patience, f"well after {after}")
        if patience == PATIENCE and not self.model.blind:
            self.found.times.setdefault(after, []).append(took)

    async def is_so(self, holds: Callable[[], object], patience: float, what: str) -> float:
        """Wait until it is so; seconds in which this process could run. Too many are a violation.

        Raises:
            LostError: it never is.
        """
        began, late, told = self.now, self.found.lateness, False
        while True:
            spent = max(0.0, self.now - began - self.found.lateness + late)
            if holds():
                return spent
            if spent > patience and self.hurried and not told:
                told = True
                await asyncio.sleep(2 * _BEAT)  # a machine that was late just now says so with the next beat
                if self.now - began - self.found.lateness + late <= patience:
                    told = False
                    continue
                self.violate(f"not {what} within {patience:g} s: {'; '.join(self.differences())}")
            if spent > patience + _AT_ALL:
                self.violate(f"never {what}: {'; '.join(self.differences())}")
                raise LostError
            await asyncio.sleep(0.01)

    # --- hardware ---

    def say_states(self) -> None:
        """Write how the stub's devices are."""
        lines = "".join(f"{name} {state}\n" for name, state in self.states.items())
        write_stub_file(self.node.dev / "how", lines or "* healthy\n")

    def make_event(self, number: int) -> None:
        """Something happens in the directory of this third party's backend."""
        self.node.mknod(f"t{number}/event")
        self.node.unlink(f"t{number}/event")

    def free_units(self, resource: str) -> list[str]:
        """Units that no fault has."""
        return [unit for unit in self.model.hardware[resource] if f"{resource} {unit}" not in self.touched]

    # --- pods ---

    def _show_running(self) -> None:
        show_running(self.root / "sys", [it.uid for it in self.running() if it.phase is Phase.RUNNING])

    def running(self) -> list[PodStatus]:
        """Pods that may hold devices."""
        return [status for status in self.node.kubelet.pods.values() if status.active]

    def held(self, resource: str) -> set[str]:
        """What running pods hold of a resource, as the kubelet believes."""
        with suppress(KubeletStoppedError):
            pods = (self.node.kubelet.held(status.pod, "main") for status in self.running())
            return {device for held in pods for device in held.get(resource, ())}
        return set()

    @property
    def admitting(self) -> bool:
        """Whether a pod waits to be admitted."""
        return bool(self._admissions)

    def pod_comes(self) -> None:
        """A pod asks for devices; it gets them, or not, in its own time."""
        resource = self.rng.choice(sorted(self.model.hardware))
        wanted = Pod(f"pod{next(self.numbers)}", (Container("main", {resource: self.rng.choice([1, 1, 1, 2])}),))
        self._admissions.add(task := asyncio.create_task(self._admit(wanted)))
        task.add_done_callback(self._admissions.discard)

    async def _admit(self, wanted: Pod) -> None:
        try:
            status = await self.node.kubelet.admit(wanted)
        except (KubeletStoppedError, KubeletPanicError) as error:
            self.found.pods[type(error).__name__] += 1
            return
        self.found.pods[str(status.phase)] += 1
        if status.phase is Phase.RUNNING:
            self._one_pod_each()

    def _one_pod_each(self) -> None:
        """No two pods have one device."""
        with suppress(KubeletStoppedError):
            for (resource, device), number in self.node.kubelet.shared("main").items():
                self.violate(f"{number} pods have {device} of {resource}")

    def pod_goes(self) -> None:
        """One of the pods comes to its end."""
        if pods := [status for status in self.running() if status.phase is Phase.RUNNING]:
            self.node.kubelet.end(min(pods, key=lambda status: status.pod.name).pod)

    async def admissions(self) -> None:
        """Wait until no pod waits to be admitted."""
        await self.is_so(lambda: not self.admitting, 30.0, "every pod admitted or refused")

    # --- rest ---

    async def at_rest(self) -> None:
        """Without any fault: everything is well in every face, a pod gets a device, and nothing is left of pods that ended."""
        await self.admissions()
        for status in self.running():
            self.node.kubelet.end(status.pod)
        await self.well("rest")
        if await self.problems():
            for number in range(len(TROUBLED)):  # what failed for an event is well once it has answered the next
                self.make_event(number)
            await asyncio.sleep(0.5)
            await self.daemon.order("pass_time(61.0)")  # what a probe or another try finds out
            end = self.now + _TOLD
            while (problems := await self.problems()) and self.now < end:
                await asyncio.sleep(0.5)
            for problem in set(problems) - self._complained:
                self._complained.add(problem)
                self.violate(f"without any fault, status says: {problem}")
        await self.is_so(lambda: not self._unhealthy(), 30.0, "rid of all that is unhealthy")
        for resource in self.model.hardware:
            wanted = Pod(f"pod{next(self.numbers)}", (Container("main", {resource: 1}),))
            status = await self.node.kubelet.admit(wanted)
            if status.phase is not Phase.RUNNING:
                self.violate(f"without any fault, a pod that asks for {resource} is refused: {status.message}")
            self.node.kubelet.end(wanted)

    def _unhealthy(self) -> Mapping[str, frozenset[str]]:
        views = self.node.kubelet.resources
        return {name: views[name].unhealthy for name in self.model.hardware if views[name].unhealthy}

    async def problems(self) -> list[str]:
        """What the daemon itself says is wrong."""
        async with self.asking() as client:
            try:
                found = (await client.status()).problems
                return [f"{it.backend} {it.subject}: {it.message}" for it in found if it.subject not in self.excused]
            except FairleadError as error:
                return [str(error)]

    async def sample(self) -> None:
        """Remember what the daemon takes, with nothing in flight."""
        await self.daemon.order("collect()")
        samples = []
        for _ in range(5):
            await asyncio.sleep(0.1)
            samples.append(self.daemon.sample(self.now))
        least = (min(it.rss for it in samples), min(it.files for it in samples), min(it.threads for it in samples))
        self.found.samples.append(Sample(self.now, *least))
