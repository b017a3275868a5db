"""What every source does: it tells what comes, that something was lost, and leaves nothing open."""

from __future__ import annotations

import errno
import os
import socket
import tempfile
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import anyio
import pytest
import pyudev

from agent.discovery import kmsg
from agent.discovery.kmsg import KmsgSource
from agent.discovery.uevents import LinkSource, UeventSource
from agent.runtime.watchdog import BEAT
from backends.base import Host
from tests.discovery import one_child
from tests.discovery.sources.stages import RESYNC, STAGES, Stage
from tests.needs import skip_without
from tests.wait import pass_time, settled, until


def on_stage(name: str, body: Callable[[Stage], Awaitable[None]], *, small: bool = False) -> None:
    """Run a clause on a stage of this name."""

    async def run() -> None:
        with tempfile.TemporaryDirectory() as directory:
            stage = STAGES[name](Path(directory).resolve(), small=small)
            with closing(stage):
                await body(stage)

    anyio.run(run)


def tells_what_comes_in_its_order(name: str) -> None:
    async def body(it: Stage) -> None:
        async with it.running():
            it.told.clear()
            for change in ("a", "b", "c"):
                it.happen(change)
                await it.end()
        assert [told for told, before in zip(it.told, ["", *it.told], strict=False) if told != before] == [*"abc"]

    on_stage(name, body)


def tells_only_what_is_wanted(name: str) -> None:
    async def body(it: Stage) -> None:
        async with it.running():
            it.want(wanted=False)
            it.happen("a")
            await settled()
            assert "a" not in it.told
            it.want(wanted=True)
            it.happen("b")
            await it.end()
        assert "b" in it.told, it.told
        assert ("a" in it.told) is it.remembers, it.told

    on_stage(name, body)


def tells_once_that_some_were_lost_after_what_was_saved_and_before_what_follows(name: str) -> None:
    async def body(it: Stage) -> None:
        async with it.running():
            await it.end()
            before, told = it.losses, len(it.told)
            it.crowd(it.too_many)
            # until then there may be no room for what follows
            await until(lambda: it.losses > before, "the loss is told", lambda: it.told[-5:])
            assert RESYNC not in it.told[told:-1], it.told[-5:]
            it.happen("after")
            await it.end()
        assert it.losses == before + 1, it.told[-5:]
        assert it.told[-1] == "after", it.told[-5:]

    on_stage(name, body, small=True)


def keeps_a_burst_whole_and_leaves_the_loop_its_turns(name: str) -> None:
    async def body(it: Stage) -> None:
        async with it.running():
            await it.end()
            it.takes.clear()
            losses = it.losses
            it.count_turns()
            it.crowd(it.many)
            await it.end()
        assert it.losses == losses
        assert len(it.takes) >= it.many
        assert max(map(it.takes.count, {*it.takes})) <= 600

    on_stage(name, body)


def believes_the_kernel_alone(name: str) -> None:
    async def body(it: Stage) -> None:
        async with it.running():
            it.forge()
            await it.end()
        assert it.told == []

    on_stage(name, body)


def asks_for_a_look_when_it_runs_again_or_tells_what_came_meanwhile_and_leaves_nothing_open(name: str) -> None:
    async def body(it: Stage) -> None:
        async with it.running():
            assert it.files() == 1
            it.happen("a")
            await it.end()
        assert it.files() == 0
        told = len(it.told)
        it.happen("b")
        async with it.running():
            await it.end()
        assert it.files() == 0
        assert [*dict.fromkeys(it.told[told:])] == (["b"] if it.remembers else [RESYNC])

    on_stage(name, body)


def gives_signs_of_life_while_nothing_comes(name: str) -> None:
    async def body(it: Stage) -> None:
        async with it.running():
            for _ in range(3):
                before = it.beats
                await settled()
                pass_time(BEAT)
                await until(lambda before=before: it.beats > before)  # type: ignore[misc]

    on_stage(name, body)


CLAUSES = [
    tells_what_comes_in_its_order,
    tells_only_what_is_wanted,
    tells_once_that_some_were_lost_after_what_was_saved_and_before_what_follows,
    keeps_a_burst_whole_and_leaves_the_loop_its_turns,
    believes_the_kernel_alone,
    asks_for_a_look_when_it_runs_again_or_tells_what_came_meanwhile_and_leaves_nothing_open,
    gives_signs_of_life_while_nothing_comes,
]


@pytest.fixture(scope="module")
def results() -> dict[str, dict[str, Any]]:
    """Source → clause → what went wrong; one child process for each source that needs one."""
    return {}


@pytest.mark.parametrize(
    ("source", "clause"),
    [(name, it) for name in STAGES for it in CLAUSES if STAGES[name].forges or it is not believes_the_kernel_alone],
)
def test_every_source(results: dict[str, dict[str, Any]], source: str, clause: Callable[[str], None]) -> None:
    stage = STAGES[source]
    skip_without(*stage.needs)
    if not stage.isolated:
        clause(source)
        return
    if source not in results:
        results[source] = one_child.run(__name__, {it.__name__: (source,) for it in CLAUSES})
    assert results[source][clause.__name__] is None, results[source][clause.__name__]


NETLINK = r"NETLINK_KOBJECT_UEVENT\) was refused \(%s\); allow AF_NETLINK"


def uevents(mode: Any) -> Any:
    return UeventSource(print, Host(), mode)


def links(_mode: Any) -> Any:
    source = LinkSource(print)
    source.watch(wanted=True)
    return source


def log(_mode: Any) -> Any:
    source = KmsgSource(print, Host())
    source.watch(frozenset({"NVRM"}))
    return source


PERMISSION = OSError(errno.EPERM, os.strerror(errno.EPERM))
FAMILY = OSError(errno.EAFNOSUPPORT, os.strerror(errno.EAFNOSUPPORT))


@pytest.mark.parametrize(
    ("make", "mode", "refusing", "error", "sentence"),
    [
        (uevents, "kernel", (socket, "socket"), PERMISSION, NETLINK % PERMISSION.strerror),
        (uevents, "kernel", (socket, "socket"), FAMILY, NETLINK % FAMILY.strerror),
        (uevents, "udev", (pyudev.Monitor, "from_netlink"), PERMISSION, NETLINK % PERMISSION.strerror),
        (uevents, "udev", (pyudev.Monitor, "from_netlink"), ValueError("Invalid argument"), "allow AF_NETLINK"),
        (uevents, "udev", (pyudev, "Context"), ImportError("No library named udev"), "libudev is missing"),
        (
            uevents,
            "udev",
            (pyudev, "Context"),
            OSError("libudev.so.1: Input/output error"),
            "cannot be loaded: .*Input",
        ),
        (links, "", (socket, "socket"), PERMISSION, r"NETLINK_ROUTE\) was refused \(Operation not.*; allow AF_NETLINK"),
        (links, "", (socket, "socket"), FAMILY, r"NETLINK_ROUTE\) was refused \(Address family.*; allow AF_NETLINK"),
        (log, False, (os, "open"), PERMISSION, r"Operation not permitted; .*give it CAP_SYSLOG"),
        (log, True, (os, "open"), PERMISSION, r"not permitted: the device cgroup .* denies it.*; .* device 1:11"),
    ],
)
async def test_what_is_refused_is_told_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[[Any], Any],
    mode: Any,
    refusing: tuple[object, str],
    error: Exception,
    sentence: str,
) -> None:
    def refuse(*_: object) -> None:
        raise error

    source = make(mode)
    monkeypatch.setattr(kmsg, "is_denied_by_cgroup", lambda _error: mode)
    monkeypatch.setattr(*refusing, refuse)
    with pytest.raises(OSError, match=sentence):
        await source.run()
