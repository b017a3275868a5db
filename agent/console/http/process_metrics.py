"""Tells what this process takes of the machine, as metrics that every Prometheus client has (`process_*`)."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Literal

_PAGE: Final = os.sysconf("SC_PAGE_SIZE")


def process(started: float) -> Iterator[str]:
    """The samples; `started` is in seconds since 1970. Where /proc is not to be read, without what it would tell."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    yield _sample("cpu_seconds_total", "counter", "User and system CPU time.", usage.ru_utime + usage.ru_stime)
    yield _sample("start_time_seconds", "gauge", "When it started.", started)
    yield _sample("max_fds", "gauge", "How many files it may open.", resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    try:
        virtual, resident = map(int, Path("/proc/self/statm").read_text().split()[:2])
        files, threads = (sum(1 for _ in Path("/proc/self", it).iterdir()) for it in ("fd", "task"))
    except OSError:
        return
    yield _sample("virtual_memory_bytes", "gauge", "Virtual memory.", virtual * _PAGE)
    yield _sample("resident_memory_bytes", "gauge", "Resident memory.", resident * _PAGE)
    yield _sample("open_fds", "gauge", "Open files.", files)
    yield _sample("threads", "gauge", "Threads.", threads)


def _sample(name: str, kind: Literal["gauge", "counter"], meaning: str, value: float) -> str:
    return f"# HELP process_{name} {meaning}\n# TYPE process_{name} {kind}\nprocess_{name} {value}\n"
