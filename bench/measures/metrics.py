"""A scrape of 1,000 devices, in this process: `metrics` from request to reply, `metrics_hold` of the event loop by it."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from agent.runtime import process
from bench.figures import Figure, figure
from tests.console.fakes import FakeDaemon
from tests.console.http import nodes
from tests.console.http.serving import served

_DEVICES: Final = 1_000
_REST: Final = 0.4  # seconds between two scrapes: those within ten times what one takes share it

_METRICS: Final = (
    "wall time from the request to the whole reply on a unix socket; baseline: prometheus_client writes the same"
)
_HOLD: Final = (
    "the longest turn of the loop during a scrape, in CPU time, the client's own work included; baseline as for metrics"
)


def metrics(scrapes: int) -> list[Figure]:
    """Both figures; watching the loop slows a scrape down, so each has scrapes of its own."""
    taken, held, text = asyncio.run(_scrape(scrapes))
    collector = _Same(text)
    baseline = [_milliseconds(collector) for _ in range(scrapes)]
    return [
        figure("metrics", "1,000", "ms", taken, baseline, _METRICS),
        figure("metrics_hold", "1,000", "ms", held, baseline, _HOLD),
    ]


async def _scrape(scrapes: int) -> tuple[list[float], list[float], str]:
    taken, held, text = list[float](), list[float](), ""
    with tempfile.TemporaryDirectory() as home:
        async with served(Path(home), FakeDaemon(shown=nodes.many(_DEVICES))) as face:
            process.settle()
            for _ in range(scrapes):
                await asyncio.sleep(_REST)
                before = time.perf_counter()
                text = (await face.get("/metrics")).body
                taken.append((time.perf_counter() - before) * 1e3)
                await asyncio.sleep(_REST)
                watched = asyncio.ensure_future(_longest_turn())
                await face.get("/metrics")
                watched.cancel()
                held.append(await watched)
    return taken, held, text


async def _longest_turn() -> float:
    """In milliseconds, until cancelled."""
    longest, last = 0.0, time.thread_time()
    try:
        while True:
            await asyncio.sleep(0)
            now = time.thread_time()
            longest, last = max(longest, now - last), now
    except asyncio.CancelledError:
        return longest * 1e3


class _Same(Collector):
    """The metrics of a scrape, for prometheus_client to write."""

    def __init__(self, text: str) -> None:
        self._metrics = list(text_string_to_metric_families(text))

    def collect(self) -> Iterator[object]:  # type: ignore[override]
        return iter(self._metrics)


def _milliseconds(collector: Collector) -> float:
    before = time.perf_counter()
    generate_latest(collector)
    return (time.perf_counter() - before) * 1e3
