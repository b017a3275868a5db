"""What a backend hears by a way of its own, in the daemon: beside the kernel's log, in its place, and where it hangs."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import ClassVar

import msgspec
import pytest

from agent.config import Difference
from agent.daemon.reload import Change
from agent.daemon.supervisor import Agent
from agent.discovery import sources
from backends.base import (
    Backend,
    ContainerEdits,
    Device,
    Discovery,
    Grant,
    Heard,
    Host,
    Record,
    Resource,
    ResourceSpec,
    Signal,
    Verdict,
    Watches,
)
from tests.daemon.node import Node, put_in_force
from tests.wait import pass_time, until

CARDS = "example.com/card"
LOG = "the kernel's log"


class NoOptions(msgspec.Struct, frozen=True):
    pass


class Cards(Backend[NoOptions]):
    """Two cards, whose faults the kernel's log tells, and a library; what is told, one of its listeners hears."""

    options_type: ClassVar = NoOptions
    hears: ClassVar = "the library"

    def __init__(self, *, always: bool = False) -> None:
        super().__init__(Host(), [Resource(CARDS, ResourceSpec("cards", NoOptions()))])
        self.always = always
        self.told: queue.SimpleQueue[Heard | Exception | None] = queue.SimpleQueue()
        self.listening: list[frozenset[str]] = []
        self.opened, self.ended = threading.Event(), threading.Event()
        self.wait = self.told.get
        self.records: list[str] = []

    def units(self) -> Iterable[str]:
        return ["card 0", "card 1"]

    def discover(self, unit: str) -> Discovery:
        return Discovery((Device(unit, unit, frozenset({f"pci:{unit[-1]}"})),))

    def watches(self, known: object) -> Watches:
        every = frozenset({"pci:0", "pci:1"})
        lines = frozenset({"XID"})
        return (
            Watches(kernel_lines=lines, listen=every)
            if self.always
            else Watches(kernel_lines=lines, listen_without_log=every)
        )

    def listen(self, hardware: frozenset[str]) -> Iterator[Heard | None]:
        self.listening.append(hardware)
        try:
            yield None
            self.opened.set()
            while True:
                it = self.wait()
                if isinstance(it, Exception):
                    raise it
                yield it
        finally:
            self.ended.set()

    def woken(self) -> list[frozenset[str]]:
        """What it listened to, one after the other; a listener that waits returns, and ends if it was told to."""
        self.told.put(None)
        return self.listening

    def signals(self, record: Record) -> Iterable[Signal]:
        self.records.append(record.source)
        message = "XID 79: it has fallen off the bus"
        yield Signal(f"pci:{record.text[-1]}", "xid-79", Verdict.NOW, message, fault=f"xid-79 of {record.text[-1]}")

    def edits(self, resource: Resource[NoOptions], grants: Sequence[Grant]) -> ContainerEdits:
        return ContainerEdits()


def xid(card: int) -> Heard:
    return Heard("library", f"XID 79 of {card}")


def line(sequence: int, card: int) -> bytes:
    return f"3,{sequence},{sequence},-;XID 79 of {card}\n".encode()


def bad(agent: Agent) -> list[str]:
    return sorted(it.id for it in agent.inventory.slots(CARDS).values() if not it.health.offered)


async def witnesses(agent: Agent) -> dict[str, tuple[bool, bool, str]]:
    return {it.name: (it.heard, it.needed, it.why) for it in (await agent.control.status()).witnesses}


@asynccontextmanager
async def running(node: Node, cards: Cards) -> AsyncIterator[Agent]:
    """The daemon; whatever waits in a thread comes back when it has ended."""
    try:
        async with node.running(*cards.resources, backends={"cards": cards}) as agent:
            await node.has(CARDS, healthy=2)
            yield agent
    finally:
        for _ in cards.listening:
            cards.told.put(None)


@pytest.fixture
def log(node: Node) -> Iterator[int]:
    """A kernel's log that can be read."""
    os.mkfifo(node.root / "dev/kmsg")
    descriptor = os.open(node.root / "dev/kmsg", os.O_RDWR | os.O_NONBLOCK)
    yield descriptor
    os.close(descriptor)


async def test_where_the_log_cannot_be_read_faults_are_heard_by_the_library_alone(node: Node) -> None:
    cards = Cards()
    async with running(node, cards) as agent:
        cards.told.put(xid(1))
        await until(lambda: bad(agent) == ["card 1"])
        said = await witnesses(agent)
        assert said["the library"] == (True, True, "")
        assert said[LOG][:2] == (False, True)
        assert "cannot be read" in said[LOG][2]


async def test_where_the_log_is_read_a_library_that_only_takes_its_place_is_not_opened(node: Node, log: int) -> None:
    cards = Cards()
    async with running(node, cards) as agent:
        os.write(log, line(1, 0))
        await until(lambda: bad(agent) == ["card 0"])
        assert cards.listening == []
        assert await witnesses(agent) == {
            LOG: (True, True, ""),
            "the library": (False, False, "the kernel's log tells the same"),
        }


async def test_what_log_and_library_tell_of_one_fault_is_told_once(node: Node, log: int) -> None:
    cards = Cards(always=True)
    async with running(node, cards) as agent:
        taken: list[str] = []
        recorded = agent.node.recorded

        def take(signals: Sequence[Signal], record: Record) -> None:
            taken.append(record.source)
            recorded(signals, record)

        agent.node.recorded = take  # type: ignore[method-assign]
        os.write(log, line(1, 0))
        await until(lambda: cards.records == ["kmsg"])
        cards.told.put(xid(0))
        await until(lambda: cards.records == ["kmsg", "library"])
        assert taken == ["kmsg"]
        cards.told.put(xid(1))
        await until(lambda: bad(agent) == ["card 0", "card 1"])
        os.write(log, line(2, 1))
        await until(lambda: len(cards.records) == 4)
        assert taken == ["kmsg", "library"]


async def test_a_card_that_an_operator_drains_is_let_go_so_that_its_driver_can_be_unloaded(node: Node) -> None:
    cards = Cards()
    async with running(node, cards) as agent:
        await until(lambda: cards.listening)
        await agent.control.drain("card 0", "a new driver", None)
        await until(lambda: cards.woken() == [frozenset({"pci:0", "pci:1"}), frozenset({"pci:1"})])
        await until(lambda: cards.woken() and cards.ended.is_set())
        await agent.control.undrain("card 0")
        await until(lambda: cards.woken()[2:] == [frozenset({"pci:0", "pci:1"})])


async def test_a_library_that_fails_is_told_and_tried_again(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_FIRST_DELAY", 1000.0)
    cards = Cards()
    async with running(node, cards) as agent:
        await until(lambda: cards.listening)
        cards.told.put(RuntimeError("the GPU is lost"))
        await until(lambda: "the library cannot be heard: the GPU is lost" in _why(agent))
        assert (await witnesses(agent))["the library"] == (False, True, "the GPU is lost")
        pass_time(1000.0)
        await until(lambda: len(cards.listening) == 2 and not _why(agent))
        cards.told.put(xid(1))
        await until(lambda: bad(agent) == ["card 1"])


async def test_a_library_that_hangs_hinders_neither_a_reload_nor_the_end(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "_LOOK", 0.01)
    hanging, other = Cards(), Cards()
    async with running(node, hanging) as agent:
        await until(hanging.opened.is_set)
        monkeypatch.setattr(sources, "SILENCE", 0.0)
        await until(lambda: "no sign of life" in _why(agent))
        monkeypatch.setattr(sources, "SILENCE", 3600.0)
        await put_in_force(agent, Change(Difference(agent.config), {"cards": other}))
        other.told.put(xid(1))
        await until(lambda: bad(agent) == ["card 1"])
        assert not hanging.ended.is_set()
    other.told.put(None)


def _why(agent: Agent) -> str:
    return "".join(it.sentence for it in agent.problems.lasting() if it.part == "listening")
