"""Sends the notices that wait as Events, one after the other; the same again raises the count of the Event that is there."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import Final

import anyio
from msgspec import Struct

from agent.kubernetes import notices
from agent.kubernetes.api import STRATEGIC, Api, ApiError, pause
from agent.kubernetes.event_queue import Bucket, EventQueue, Waiting, key_of
from agent.kubernetes.notices import Notice
from agent.runtime.supervision.problems import Trouble

_REMEMBERED: Final = 1000  # Events of ours; client-go remembers 4096
_LONGEST_NAME: Final = 200  # characters of a Node's or Pod's in that of an Event, which has 253 at most
_LIFETIME: Final = 3000.0  # seconds for which an Event is taken to be there: API servers forget them after an hour


class _Sent(Struct, frozen=True):
    """An Event that the API server has."""

    path: str
    count: int
    at: float
    """Monotonic seconds."""


class EventSender:
    """Sends notices as Events, one after the other."""

    def __init__(
        self,
        node: str,
        refused: Trouble,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """`node` is the Node's name; `refused` is told when the API server refuses an Event."""
        self._node, self._refused, self._clock, self._wall = node, refused, clock, wall
        self._queue = EventQueue(notices.node(node))
        self._bucket = Bucket()
        self._come = asyncio.Event()
        self._sent: OrderedDict[object, _Sent] = OrderedDict()
        self._number = 0

    def tell(self, those: Iterable[Notice]) -> None:
        """Queue notices to be sent."""
        wall = self._wall()
        for notice in those:
            self._queue.put(notice, wall)
        self._come.set()

    async def run(self, api: Api) -> None:
        """Send, until cancelled."""
        failures = 0
        while True:
            if (wait := self._bucket.wait(self._clock())) > 0:
                await anyio.sleep(wait)
                continue
            if (waiting := self._queue.take()) is None:
                self._come.clear()
                await self._come.wait()
                continue
            self._bucket.take()
            failures = 0 if await self._send(api, waiting) else failures + 1
            if failures:
                await anyio.sleep(pause(failures))

    async def _send(self, api: Api, waiting: Waiting) -> bool:
        """Send one; False where it has to be sent again."""
        try:
            await self._write(api, waiting)
        except ApiError as error:
            if error.status:
                self._refused.report_once(error.sentence)
            if error.is_final:  # as of a namespace that is being removed: it must not keep the others waiting
                return True
            self._queue.put_back(waiting)
            return False
        except BaseException:
            self._queue.put_back(waiting)  # a reload goes on with it
            raise
        self._refused.healed()
        return True

    async def _write(self, api: Api, waiting: Waiting) -> None:
        key, now = key_of(waiting.notice), self._clock()
        before = self._sent.pop(key, None)
        if before is not None and now - before.at < _LIFETIME:
            count = before.count + waiting.count
            try:
                await api.call("PATCH", before.path, notices.again(waiting.notice, waiting.last, count), STRATEGIC)
            except ApiError as error:
                if error.status != HTTPStatus.NOT_FOUND:  # the Event was removed
                    self._sent[key] = before
                    raise
            else:
                self._remember(key, _Sent(before.path, count, now))
                return
        about = waiting.notice.subject
        self._number += 1
        moment = int(waiting.first * 1e9) + self._number
        name = f"{about.name[:_LONGEST_NAME].rstrip('-.')}.{moment:x}"  # as client-go names them
        path = f"/api/v1/namespaces/{about.namespace or 'default'}/events"
        event = notices.event(waiting.notice, name, waiting.first, waiting.last, waiting.count, self._node)
        await api.call("POST", path, event)
        self._remember(key, _Sent(f"{path}/{name}", waiting.count, now))

    def _remember(self, key: object, sent: _Sent) -> None:
        self._sent[key] = sent
        if len(self._sent) > _REMEMBERED:
            self._sent.popitem(last=False)
