"""Runs a backend's calls on a pod's hardware while the kubelet waits: in a thread, in turn, within a deadline.

Each piece of hardware has one turn: claim, reset and release never run side by side. A turn lasts until the thread that acts
has come back, also where no caller waits for it any more: a call that hangs costs one thread, however often it is tried again,
and nothing is undone that is still being done.

Whatever goes wrong becomes a refusal with a sentence for the pod's owner. The threads are not those that scan: neither
a scan that hangs refuses a pod, nor the other way round.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Iterable, Sequence, Set
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, Final, TypeVar

import structlog
from msgspec import Struct

from agent.discovery.discoverer import LookError
from agent.runtime import pacing
from agent.runtime.workers import LIMIT, NoWorkerError, Workers
from backends.base import AllocationRefused, Device, Resource

T = TypeVar("T")

LINGERS: Final = 5.0
"""Seconds after an act for which hardware may still go and come because of it: a slot trains its link again within one
second, a look may take as long as a read may hang."""

LASTS: Final = 60.0
"""Seconds after which an act that has not ended is taken to hang: whatever goes and comes then does so by itself."""

ROOMS: Final = LIMIT - 1
"""Threads for jobs that wait for one: the last is for a claim, which is refused where it finds none."""

_LOOK_AGAIN: Final = (0.05, 0.2)  # seconds before what could not be read is read again

Look = Callable[[str, Set[str]], Awaitable[None]]
"""Looks at these units of a backend now; returns when what was found is known."""

log = structlog.get_logger()


# --- turns ---


class HangsError(Exception):
    """A job, or the wait for its turn, has taken too long."""


class Turn:
    """The right to act on some hardware."""

    def __init__(self) -> None:
        self._call: asyncio.Future[Any] | None = None

    @property
    def acts(self) -> bool:
        """Whether a call was made in it."""
        return self._call is not None

    async def run(self, workers: Workers, call: Callable[[], T]) -> T:
        """Make one blocking call in a thread; if the caller is cancelled, the call keeps the turn.

        Raises:
            NoWorkerError: all threads are busy.
        """
        job: asyncio.Future[T] = workers.start(call)
        self._call = job
        await asyncio.wait([job])  # not shield: from Python 3.14 on it complains of an error that no task waits for
        return job.result()

    def when_over(self, then: Callable[[], None]) -> None:
        """Call `then` once the call in this turn has returned; at once where none was made."""

        def is_back(job: asyncio.Future[Any]) -> None:
            if not job.cancelled():
                job.exception()  # reads the error, of which asyncio would complain otherwise
            then()

        if self._call is None:
            then()
        elif self._call.done():
            is_back(self._call)  # the caller may have been cancelled in the very turn in which it failed
        else:
            self._call.add_done_callback(is_back)


class HardwareQueue:
    """Gives turns: at most one for each piece of hardware."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began: dict[Turn, float] = {}  # of those that may move hardware
        self._ended = -math.inf  # the last of them
        self._taken: set[Hashable] = set()
        self._given_back = asyncio.Event()

    @property
    def busy(self) -> bool:
        """Whether any turn is taken."""
        return bool(self._taken)

    def have_effects(self) -> bool:
        """Whether hardware may go or come now because of a call of ours, which runs or ended a moment ago."""
        now = self._clock()
        acting = any(turn.acts and now - began < LASTS for turn, began in self._began.items())
        return acting or now - self._ended < LINGERS

    def is_taken(self, things: Set[Hashable]) -> bool:
        """Whether the turn for any of these is taken."""
        return not self._taken.isdisjoint(things)

    @asynccontextmanager
    async def take(self, things: Set[Hashable], *, moves: bool = True) -> AsyncIterator[Turn]:
        """Wait until no turn for any of these is taken, and take it.

        Args:
            things: what is acted on.
            moves: whether what is done may make hardware go and come.
        """
        while self.is_taken(things):
            await self._given_back.wait()
        self._taken |= things
        turn = Turn()
        if moves:
            self._began[turn] = self._clock()
        try:
            yield turn
        finally:
            turn.when_over(partial(self._give_back, things, turn))

    @asynccontextmanager
    async def take_within(self, seconds: float, things: Set[Hashable], *, moves: bool = True) -> AsyncIterator[Turn]:
        """The same, for so many seconds, the wait included.

        Raises:
            HangsError: they were not enough.
        """
        try:
            async with pacing.running_timeout(seconds) as deadline, self.take(things, moves=moves) as turn:
                yield turn
        except TimeoutError:
            if not deadline.cancel_called:
                raise  # it is a backend's own
            raise HangsError(f"not done within {seconds:g} s") from None

    def _give_back(self, things: Set[Hashable], turn: Turn) -> None:
        self._taken -= things
        if self._began.pop(turn, None) is not None and turn.acts:
            self._ended = self._clock()
        given_back, self._given_back = self._given_back, asyncio.Event()
        given_back.set()


# --- jobs ---


class Kind(Struct, frozen=True):
    """A kind of job."""

    call: str
    """The backend's method."""
    failed: str
    """What could not be done, as it follows the IDs in a sentence."""
    advice: str
    """What the pod's owner can do."""
    seconds: float
    """All of it may take."""
    waits_for_thread: bool = False
    """Where all threads are busy; else it is refused at once, since the kubelet gives nothing to others meanwhile."""


class Jobs:
    """Makes jobs, and keeps the threads for them."""

    def __init__(self, turns: HardwareQueue, look: Look) -> None:
        self.turns = turns
        self.rooms: defaultdict[str, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(ROOMS))
        self.look = look
        self._workers: dict[str, Workers] = {}  # by the backends' kinds

    def workers(self, kind: str) -> Workers:
        """The threads for a backend."""
        return self._workers.setdefault(kind, Workers(f"{kind} for pods"))

    @asynccontextmanager
    async def job(self, kind: Kind, resource: Resource[Any], ids: Iterable[str]) -> AsyncIterator[Job]:
        """Run the body within the deadline; any failure of it becomes a refusal.

        Raises:
            AllocationRefused: with a sentence for the pod's owner.
        """
        job = Job(self, resource.spec.backend, kind)
        named, backend = f"{', '.join(ids)} of {resource.name}", resource.spec.backend
        try:
            async with pacing.running_timeout(kind.seconds) as deadline:
                yield job
        except AllocationRefused:
            raise
        except Exception as error:
            if not (deadline.cancel_called or isinstance(error, (NoWorkerError, LookError))):
                log.exception("backend-failed", backend=backend, call=kind.call, resource=resource.name)
                raise AllocationRefused(broken(named, kind.failed, backend, error)) from error
            why = str(error) or f"{job.awaited} within {kind.seconds:g} s"
            log.warning(
                "backend-hangs", backend=backend, call=kind.call, resource=resource.name, ids=list(ids), reason=why
            )
            raise AllocationRefused(
                f"{named} {kind.failed}: {why}. {kind.advice}; "
                "if it happens again, this node's administrator must look at the device."
            ) from None

    def close(self) -> None:
        """Let the idle threads end."""
        for workers in self._workers.values():
            workers.close()


class Job:
    """One job; `awaited` says what it waits for."""

    _TURN: Final = "an earlier call for the same hardware has not ended"
    _ROOM: Final = "as much as can be done at a time is being done for other pods, and has not ended"
    _CALL: Final = "not done"
    _LOOK: Final = "looking at it has not ended"

    def __init__(self, jobs: Jobs, backend: str, kind: Kind) -> None:
        self.awaited = self._CALL
        self._jobs = jobs
        self._backend = backend
        self._kind = kind

    @asynccontextmanager
    async def turn(self, things: Set[Hashable]) -> AsyncIterator[Turn]:
        """Hold the turn for these things: nothing else acts on them meanwhile."""
        self.awaited = self._TURN
        async with self._jobs.turns.take(things) as turn:
            yield turn

    async def run(self, turn: Turn, call: Callable[[], T]) -> T:
        """Make the backend's call in a thread."""
        room = self._jobs.rooms[self._backend] if self._kind.waits_for_thread else None
        if room is not None:
            self.awaited = self._ROOM
            await room.acquire()
        try:
            self.awaited = self._CALL
            return await turn.run(self._jobs.workers(self._backend), call)
        finally:
            if room is not None:
                turn.when_over(room.release)  # not before: its thread may hang on after the deadline

    async def look(self, devices: Iterable[Device]) -> None:
        """Look at these devices again, so that their health is that of now.

        Hardware that is just being made ready may be half there for a moment, and a refused pod fails for good (A4).

        Raises:
            LookError: they cannot be read, nor a moment later.
        """
        self.awaited = self._LOOK
        units = {device.unit for device in devices}
        for pause in _LOOK_AGAIN:
            with suppress(LookError):
                await self._jobs.look(self._backend, units)
                return
            await asyncio.sleep(pause)
        await self._jobs.look(self._backend, units)

    async def look_as_far_as_possible(self, units: Sequence[str]) -> dict[str, str]:
        """Look at these units again, side by side; those that cannot be looked at, and why."""
        self.awaited = self._LOOK
        problems = await asyncio.gather(*map(self._try_to_look, units))
        return {unit: problem for unit, problem in zip(units, problems, strict=True) if problem}

    async def _try_to_look(self, unit: str) -> str:
        try:
            await self._jobs.look(self._backend, {unit})
        except LookError as error:
            return str(error)
        return ""


def broken(named: str, failed: str, backend: str, error: Exception) -> str:
    """What a pod's owner reads when a backend raised something."""
    return (
        f"{named} {failed}: the backend {backend} failed ({error}). "
        "This node's administrator finds the details in Fairlead's log."
    )
