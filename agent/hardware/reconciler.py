"""Retries work on hardware until it is done: a few jobs at a time, in threads, later each time, each failure told once.

What is wanted is known by a key: to want it again replaces what was wanted before, and starts over at once. Wants of one
lane share a few threads; what hangs in a lane holds up no other lane.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
from collections.abc import Awaitable, Callable, Hashable
from typing import Final

import anyio
from anyio.abc import TaskGroup
from msgspec import Struct, field

from agent.hardware.jobs import HangsError, HardwareQueue
from agent.runtime.errors import words
from agent.runtime.pacing import Backoff, Doorbell
from agent.runtime.problems import Problems, Trouble
from agent.runtime.workers import LIMIT, AllBusyError, NoWorkerError, Workers
from backends.base import AllocationRefused, NotReady

RETRY_FIRST, RETRY_MOST = 1.0, 60.0
"""Seconds before what failed, or could not be done yet, is tried again, doubling."""

_EXPLAINED: Final = AllocationRefused, NotReady, NoWorkerError, HangsError
"""Errors whose sentence is enough; of others the log says where they come from."""


class Want(Struct, frozen=True):
    """Work that is wanted."""

    lane: str
    """Whose threads it takes: `release vfio`."""
    attempt: Callable[[Workers], Awaitable[bool]]
    """Tries once; false where it cannot be done yet. Whatever it raises is reported, and it is tried again."""
    make_trouble: Callable[[], Trouble]
    """What is reported when it fails for the first time."""


class _Case(Struct, eq=False):
    """A want that is not done yet."""

    want: Want
    backoff: Backoff
    at: float = -math.inf
    """When to try."""
    queued: float = math.inf
    """The time under which it stands in its lane's queue; infinite: not at all."""
    under_way: bool = False


class _Lane(Struct):
    workers: Workers
    trouble: Trouble
    """All its threads hang."""
    queue: list[tuple[float, int, Hashable]] = field(default_factory=list)
    """A heap: when to try which; what is outdated is passed over."""
    acting: int = 0


class Reconciler:
    """Tries the work that is wanted until it is done."""

    def __init__(self, turns: HardwareQueue, problems: Problems | None = None) -> None:
        self.turns = turns
        """Who may act on which hardware."""
        self.problems = problems or Problems()
        """Where troubles are reported."""
        self.troubled: dict[Hashable, Trouble] = {}
        """What failed and is tried again."""
        self._cases: dict[Hashable, _Case] = {}
        self._lanes: dict[str, _Lane] = {}
        self._order = itertools.count()
        self._changed = Doorbell()

    def want(self, key: Hashable, want: Want) -> None:
        """Want this, in the place of what the key wanted before; it is tried at once."""
        case = self._cases.get(key)
        if case is None:
            case = self._cases[key] = _Case(want, Backoff(RETRY_FIRST, RETRY_MOST))
        else:
            case.want, case.at = want, -math.inf
            case.backoff.reset()
        self._enqueue(key, case)
        self._changed.set()

    def drop(self, key: Hashable) -> None:
        """Forget what the key wanted."""
        self._cases.pop(key, None)
        self._heal(key)

    async def run(self) -> None:
        """Try what is wanted, now and later, until cancelled; only where no other agent serves the node."""
        try:
            async with anyio.create_task_group() as tasks:
                while True:
                    await self._changed.rung(self._begin(tasks))
        finally:
            for lane in self._lanes.values():
                lane.workers.close()

    def _begin(self, tasks: TaskGroup) -> float:
        """Start what is due; returns the seconds until something else is."""
        now, following = asyncio.get_running_loop().time(), math.inf
        for lane in self._lanes.values():
            while lane.queue and lane.acting < LIMIT:
                at, _, key = lane.queue[0]
                case = self._cases.get(key)
                is_outdated = case is None or case.queued != at
                if not is_outdated and at > now:
                    following = min(following, at)
                    break
                heapq.heappop(lane.queue)
                if case is not None and not is_outdated:
                    case.queued, case.under_way = math.inf, True
                    lane.acting += 1
                    tasks.start_soon(self._try, key, case, lane)
            if not (lane.queue or lane.acting):
                lane.workers.close()
                lane.trouble.healed()  # nothing waits for its threads, even if a call still hangs
        return following - now

    async def _try(self, key: Hashable, case: _Case, lane: _Lane) -> None:
        want, is_so = case.want, False
        try:
            is_so = await want.attempt(lane.workers)
            lane.trouble.healed()
        except AllBusyError as error:
            lane.trouble.report_once(str(error))  # once for all that wait
        except Exception as error:  # noqa: BLE001  # whatever a backend raises; reported, once, and tried again
            if self._cases.get(key) is case:
                if key not in self.troubled:
                    self.troubled[key] = want.make_trouble()
                self.troubled[key].report_once(words(error), None if isinstance(error, _EXPLAINED) else error)
        finally:
            case.under_way = False
            lane.acting -= 1
            self._ended(key, case, want, is_so)
            self._changed.set()

    def _ended(self, key: Hashable, case: _Case, want: Want, is_so: bool) -> None:
        if self._cases.get(key) is not case:
            return  # it was dropped meanwhile
        if case.want is want:  # else there is something else to try, at once
            if is_so:
                self.drop(key)
                return
            case.at = asyncio.get_running_loop().time() + case.backoff.next()
        self._enqueue(key, case)

    def _enqueue(self, key: Hashable, case: _Case) -> None:
        """Put it into its lane's queue."""
        if case.at >= case.queued or case.under_way:
            return
        case.queued = case.at
        if (lane := self._lanes.get(case.want.lane)) is None:
            lane = self._lanes[case.want.lane] = self._make_lane(case.want.lane)
        heapq.heappush(lane.queue, (case.at, next(self._order), key))

    def _make_lane(self, name: str) -> _Lane:
        trouble = self.problems.trouble(
            "hardware",
            f"{name} waits",
            "hardware-waits",
            "hardware-goes-on",
            part=name,
            then="trying again later and later",
        )
        return _Lane(Workers(name), trouble)

    def _heal(self, key: Hashable) -> None:
        if (trouble := self.troubled.pop(key, None)) is not None:
            trouble.healed()
