"""One run: a seed's steps, one after the other, in a world of its own; and the shortest of them that still fail."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import logging
import os
import random
import re
import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec
import structlog
from msgspec import Struct

from agent.discovery.paths import Inotify
from agent.health import drains
from agent.kubelet.lock import identity
from agent.runtime import process
from tests.deterministic import machine as machines
from tests.deterministic.faults import FAULTS, Fault
from tests.deterministic.loop import LivelockError, Loop, take_place
from tests.deterministic.world import UnfitError, World

STEPS: Final = 150
"""Of one run: half a minute to an hour of its time."""

_WAITS: Final = (0.0, 0.001, 0.02, 0.3, 0.3, 1.0, 1.0, 3.0, 3.0, 30.0)
_LASTS: Final = (0.0, 0.01, 0.3, 1.0, 3.0, 10.0, 30.0)
_PACES: Final = (0.0, 0.0, 0.00002, 0.0002)
_WITH_CLAIMS: Final = 3  # of so many runs one has a resource that is served by dynamic resource allocation
_STARTED: Final = 4.0  # seconds until the kubelet must have the first lists


class Step(Struct, frozen=True):
    """Something that happens."""

    wait: float
    """Seconds since the step before."""
    fault: str
    lasts: float
    """Seconds from its beginning to its end."""
    seed: int
    """Of its own choices."""


class Case(Struct, frozen=True):
    """A shortest sequence that failed once, with the seed that decides its order; the steps of a seed change with the faults."""

    seed: int
    found: str
    steps: list[Step]
    sabotage: str = ""
    """What was wrong in the agent, where it was put there on purpose."""


def known_cases() -> list[Case]:
    """Every one that ever failed."""
    lines = Path(__file__).with_name("cases.jsonl").read_bytes().splitlines()
    return [msgspec.json.decode(line, type=Case) for line in lines]


class Result(Struct):
    """What came of a run."""

    violations: list[str] = []
    trace: list[str] = []
    seconds: float = 0.0
    """That passed in it."""
    turns: int = 0
    order: int = 0
    """Another wherever anything ran in another order, or at another time."""
    steps: int = 0
    """That were made."""
    cpu: float = 0.0


def steps_of(seed: int, number: int = STEPS) -> list[Step]:
    """What happens in the run of a seed."""
    rng = random.Random(seed)
    has_claims = random.Random(seed ^ 0xC1A1).randrange(_WITH_CLAIMS) == 0
    rows = [it for it in FAULTS.values() if has_claims or not it.of_claims]
    weights = [it.weight for it in rows]
    return [
        Step(
            rng.choice(_WAITS) * rng.random(),
            rng.choices(rows, weights)[0].name,
            rng.choice(_LASTS) * rng.random(),
            rng.getrandbits(32),
        )
        for _ in range(number)
    ]


class _Walk:
    """Makes steps in a world."""

    def __init__(self, world: World, result: Result) -> None:
        self._world, self._result = world, result
        self._lasting: dict[asyncio.Task[None], Fault] = {}

    async def go(self, steps: Sequence[Step]) -> None:
        world = self._world
        await world.begin()
        world.disturb()
        await asyncio.sleep(_STARTED)
        watching = asyncio.create_task(world.watch())
        for step in steps:
            await asyncio.sleep(step.wait)
            self._begin(step)
            self._result.steps += 1
        while self._lasting:
            await asyncio.wait(self._lasting)
        await asyncio.sleep(3.0)
        await world.at_rest()
        watching.cancel()
        await world.end()

    def _begin(self, step: Step) -> None:
        fault = FAULTS[step.fault]
        if any(fault.touches & other.touches or (fault.touches and fault is other) for other in self._lasting.values()):
            return
        task = asyncio.create_task(self._happen(fault, step))
        self._lasting[task] = fault
        task.add_done_callback(self._lasting.pop)

    async def _happen(self, fault: Fault, step: Step) -> None:
        world = self._world
        world.note(f"BEGINS {fault.name} ({step.lasts:.3f} s)")
        try:
            async with fault.happen(world, random.Random(step.seed)):
                if fault.touches:
                    world.disturb()
                await asyncio.sleep(step.lasts)
                if fault.touches:
                    world.note(f"ENDS {fault.name}")
        except UnfitError:
            return
        except Exception as error:  # noqa: BLE001
            import traceback

            world.violate(f"the step itself failed: {''.join(traceback.format_exception(error))}")
        if fault.touches:
            world.disturb()


def run(seed: int, steps: Sequence[Step], root: Path) -> Result:
    """Make these steps, in an order that the seed decides; in a process that does nothing else afterwards."""
    result = Result()
    machine = machines.boot(seed)
    loop = Loop(machine)
    rng = random.Random(seed ^ 0x5EED)
    loop.pace = rng.choice(_PACES)
    take_place()
    _tame_inotify(machine, root)
    process.settle = process.hide = lambda: None
    drains.FAILURES = 10**9  # type: ignore[misc]  # everything here fails more often than any hardware may
    world = World(root, loop, machine, rng, has_claims=any(FAULTS[it.fault].of_claims for it in steps))
    structlog.configure(
        processors=[world.logged],
        wrapper_class=structlog.make_filtering_bound_logger(20),
        cache_logger_on_first_use=True,
    )
    logging.disable()  # grpclib tells of each connection that a killed process leaves
    loop.set_exception_handler(lambda _, context: world.violate(f"the event loop says: {context}"))
    asyncio.set_event_loop(loop)
    began = machine.now
    try:
        loop.run_until_complete(_Walk(world, result).go(steps))
    except LivelockError as error:
        world.violations.append(str(error))
    except RuntimeError:
        if not world.violations:  # at the first one the loop is stopped
            raise
    return msgspec.structs.replace(
        result,
        violations=world.violations,
        trace=world.trace,
        seconds=machine.now - began,
        turns=loop.turns,
        order=loop.order,
    )


def _tame_inotify(machine: machines.Machine, root: Path) -> None:
    """Watch nothing above the run's directory, where others may change something; and use instances again.

    The kernel takes 10 ms to close one (synchronize_srcu, fsnotify_destroy_group in fs/notify/group.c).
    """
    start, watch = Inotify.__init__, Inotify.add_watch
    close = os.close
    free: list[Inotify] = []
    made: dict[int, Inotify] = {}
    watched: dict[int, set[int]] = {}

    def starting(self: Inotify) -> None:
        if free:
            self._fd = free.pop()._fd
            with suppress(BlockingIOError):
                while self.read()[1]:
                    pass
        else:
            try:
                start(self)
            except OSError as error:
                raise LivelockError(f"other processes have all inotify instances of this user: {error}") from error
        made[self._fd], watched[self._fd] = self, set()
        machine.own(self._fd)

    def add_watch(self: Inotify, path: str, mask: int) -> int:
        if not path.startswith(str(root)):
            return 1 << 20
        if "no-watches" in machines.PROCESS.get().faults:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        watched[self._fd].add(wd := watch(self, path, mask))
        return wd

    def closing(fd: int) -> None:
        if (instance := made.pop(fd, None)) is None:
            close(fd)
            return
        for wd in watched.pop(fd):
            with suppress(OSError):
                instance.rm_watch(wd)
        machine.disown(fd)
        free.append(instance)

    os.close = closing
    Inotify.__init__, Inotify.add_watch = starting, add_watch  # type: ignore[method-assign]


# --- runs in processes of their own ---


def _place(seed: int) -> tuple[Path, int]:
    """A directory that has the same name whenever this seed runs: others who run it wait for the lock."""
    place = Path("/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir(), f"fl{seed & 0xFFFFFFFF:08x}")
    while True:
        lock = os.open(f"{place}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        if identity(Path(f"{place}.lock")) == (os.fstat(lock).st_dev, os.fstat(lock).st_ino):
            break
        os.close(lock)  # who had it has removed it
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    return place, lock


class Child:
    """A run in a process of its own, which is as fresh as this one."""

    def __init__(self, seed: int, steps: Sequence[Step]) -> None:
        self.seed, self.steps = seed, steps
        self._place, self._lock = _place(seed)
        self.reading, writing = os.pipe()
        self._pid = os.fork()
        if not self._pid:
            os.close(self.reading)
            self._be(writing)
        os.close(writing)
        self._data = bytearray()

    def _be(self, writing: int) -> None:
        import time
        import traceback

        began = time.process_time()
        try:
            result = run(self.seed, self.steps, self._place)
        except BaseException:  # noqa: BLE001
            result = Result([f"the run itself failed: {traceback.format_exc()}"])
        result.cpu = time.process_time() - began
        if not (result.violations or "FULL" in os.environ):
            result.trace = []
        with os.fdopen(writing, "wb") as out:
            out.write(msgspec.json.encode(result))
        os._exit(0)

    def read(self) -> bool:
        """Take in what it says; False once it has ended."""
        data = os.read(self.reading, 1 << 20)
        self._data += data
        return bool(data)

    def result(self) -> Result:
        """Wait for its end; what came of it."""
        while self.read():
            pass
        os.close(self.reading)
        _, status = os.waitpid(self._pid, 0)
        shutil.rmtree(self._place, ignore_errors=True)
        Path(f"{self._place}.lock").unlink()
        os.close(self._lock)
        if not self._data:
            return Result([f"the run's process ended with status {status}"])
        return msgspec.json.decode(self._data, type=Result)


def try_out(seed: int, steps: Sequence[Step]) -> Result:
    """A run in a process of its own."""
    return Child(seed, steps).result()


def _kind(result: Result) -> str:
    """What sort of violation it is."""
    return re.sub(r"[\d.]+", "", result.violations[0])[:24]


def shortest(seed: int, steps: Sequence[Step], told: Callable[[str], None]) -> tuple[list[Step], Result]:
    """Fewer of these steps that still fail; each is left out in its turn, in ever smaller groups (delta debugging)."""
    found = try_out(seed, steps)
    steps = list(steps[: found.steps])
    size = max(1, len(steps) // 2)
    while size:
        at = 0
        while at < len(steps):
            fewer = steps[:at] + steps[at + size :]
            if at + size < len(steps):  # what follows happens when it did
                gap = sum(it.wait for it in steps[at : at + size])
                fewer[at] = msgspec.structs.replace(fewer[at], wait=fewer[at].wait + gap)
            result = try_out(seed, fewer)
            if result.violations and _kind(result) == _kind(found):
                steps, found = fewer, result
                told(f"{len(steps)} steps still fail")
            else:
                at += size
        size //= 2
    return steps, found
