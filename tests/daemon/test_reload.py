"""Reading the configuration again: one after the other, whoever asks, with every mistake told once."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

import anyio
import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from agent.config import Config, compare, load
from agent.console.control import RefusedError
from agent.console.views import Reloaded
from agent.daemon import reload
from agent.daemon.reload import Change, ConfigurationSwap, Reloader
from agent.daemon.serving import Serving
from agent.inventory.inventory import Inventory
from agent.model import Held, SlotKey
from agent.runtime.watchdog import Notifier
from tests.background import running
from tests.wait import PATIENCE, limit, pass_time, settled, until

STUB = '[[resource]]\nname = "{name}"\nbackend = "stub"\ndevices = [{{ count = 1 }}]\n'
A, B = "a.example/x", "b.example/x"


class House:
    """A reloader, and the configuration that it changes."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.write(A)
        self.config = load(file)
        self.applied: list[Change] = []
        self.apply: Callable[[Change], Awaitable[None]] = self._apply
        self.systemd = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.systemd.bind(str(file.with_name("notify")))
        self.systemd.setblocking(False)
        notifier = Notifier(str(file.with_name("notify")))
        self.stuck: set[str] = set()
        self.discovery = SimpleNamespace(stuck=lambda: self.stuck)
        self.it = Reloader(cast(ConfigurationSwap, self), notifier, cast(Serving, SimpleNamespace(status="well")))

    def write(self, *names: str, more: str = "") -> None:
        self.file.write_text("".join(STUB.format(name=name) for name in names) + more)

    async def _apply(self, change: Change) -> None:
        self.applied.append(change)
        self.config = change.difference.config

    def told(self) -> list[str]:
        """What systemd was told since the last time, the first line of each."""
        messages = []
        with suppress(BlockingIOError):
            while True:
                messages.append(self.systemd.recv(4096).decode().partition("\n")[0])
        return messages

    def running(self) -> AbstractAsyncContextManager[None]:
        return running(self.it.run)

    async def reload(self) -> Reloaded:
        async with limit("the reload ends"):
            return await self.it.request()


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    house = House(tmp_path / "config.toml")
    yield house
    house.systemd.close()


async def test_what_is_new_is_applied_with_new_instances_of_its_backends_and_said(house: House) -> None:
    async with house.running():
        house.write(A, B)
        with capture_logs() as lines:
            assert await house.reload() == Reloaded(added=(B,))
            assert await house.reload() == Reloaded()
    (change, nothing) = house.applied
    assert [resource.name for resource in change.backends["stub"].resources] == [A, B]
    assert not nothing.backends
    assert [line["event"] for line in lines] == ["config-reloaded", "config-unchanged"]
    assert house.told() == ["RELOADING=1", "READY=1"] * 2


async def test_every_mistake_is_refused_with_all_others_and_said_once_until_they_change(house: House) -> None:
    async with house.running():
        house.write("no name", more="colour = 1\n")
        with capture_logs() as lines:
            for _ in range(2):
                with pytest.raises(RefusedError) as refused:
                    await house.reload()
            assert str(refused.value).split("\n") == list(house.it.mistakes)
            assert len(house.it.mistakes) == 2
            house.write("no name")
            with pytest.raises(RefusedError):
                await house.reload()
        assert [line["event"] for line in lines] == ["config-invalid"] * 3
        assert house.applied == []
        house.write(A)
        assert await house.reload() == Reloaded()
        assert not list(house.it.mistakes)
    assert house.told() == ["RELOADING=1", "READY=1"] * 4


async def test_a_file_that_is_written_right_after_it_was_read_empty_takes_nothing_away(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load_and_write(path: Path | None, *, default: Path) -> Config:
        found = load(path, default=default)
        house.write(A)
        return found

    monkeypatch.setattr(reload, "load", load_and_write)
    async with house.running():
        house.write()
        with pytest.raises(RefusedError, match="the file is empty"):
            await house.reload()
        assert house.applied == []
        assert await house.reload() == Reloaded()


async def test_what_waits_for_a_restart_is_said_when_it_changes_and_kept_for_whoever_asks(house: House) -> None:
    async with house.running():
        with capture_logs() as lines:
            for directory, waits in (("/one", 1), ("/two", 1), (str(house.config.agent.state_dir), 0)):
                house.write(A, more=f'[agent]\nstate_dir = "{directory}"\n')
                reloaded = await house.reload()
                assert list(reloaded.needs_restart) == list(house.it.needs_restart) == ["agent.state_dir"] * waits
        assert [line["event"] for line in lines].count("config-needs-restart") == 1


async def test_those_who_ask_while_one_is_under_way_all_get_the_next(house: House) -> None:
    go_on = asyncio.Event()

    async def slowly(change: Change) -> None:
        await house._apply(change)
        await go_on.wait()

    house.apply = slowly
    async with house.running():
        first = house.it.request()
        await until(lambda: len(house.applied) == 1)
        house.write(A, B)
        others = [house.it.request() for _ in range(3)]
        go_on.set()
        assert await first == Reloaded()
        assert [await other for other in others] == [Reloaded(added=(B,))] * 3
        assert len(house.applied) == 2


async def _wait_for(answer: asyncio.Future[Reloaded]) -> None:
    await asyncio.shield(answer)


async def test_one_who_stops_waiting_stops_no_reload(house: House) -> None:
    async with house.running():
        house.write(A, B)
        waiting = asyncio.ensure_future(_wait_for(house.it.request()))
        await asyncio.sleep(0)
        waiting.cancel()
        await until(lambda: len(house.applied) == 1)
        assert await house.reload() == Reloaded()


async def test_a_file_whose_reading_hangs_is_refused_and_the_next_one_too(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    monkeypatch.setattr(reload, "READ_DEADLINE", 0.01)
    monkeypatch.setattr(reload, "load", lambda *_, **__: go_on.wait() and house.config)
    async with house.running():
        for _ in range(2):
            with pytest.raises(RefusedError, match="hangs"):
                await house.reload()
        go_on.set()
        monkeypatch.setattr(reload, "load", load)
        monkeypatch.setattr(reload, "READ_DEADLINE", PATIENCE)
        await until(lambda: not house.it._workers._threads)
        assert await house.reload() == Reloaded()


async def test_an_error_of_ours_before_it_is_in_force_is_a_mistake_and_the_next_is_another(house: House) -> None:
    async def fail(_change: Change) -> None:
        raise ZeroDivisionError

    house.apply = fail
    async with house.running():
        house.write(A, B)
        with capture_logs() as lines, pytest.raises(RefusedError, match="cannot be put into force: ZeroDivisionError"):
            await house.reload()
        assert [line["event"] for line in lines] == ["part-failed", "config-invalid"]
        assert len(house.it.mistakes) == 1
        house.apply = house._apply
        assert await house.reload() == Reloaded(added=(B,))
        assert not list(house.it.mistakes)


async def test_an_error_of_ours_when_it_is_in_force_is_told_to_whoever_asked(house: House) -> None:
    async def fail(change: Change) -> None:
        await house._apply(change)
        raise ZeroDivisionError

    house.apply = fail
    asked = house.it.request()
    with pytest.raises(ZeroDivisionError):
        await house.it.run()
    assert isinstance(asked.exception(), ZeroDivisionError)
    assert not list(house.it.mistakes)
    house.apply = house._apply
    async with house.running():
        assert await house.reload() == Reloaded()


async def test_what_is_stuck_gets_a_new_instance_though_the_file_is_the_same_and_other_timers_have_all_look_anew(
    house: House,
) -> None:
    async with house.running():
        house.stuck = {"stub"}
        assert await house.reload() == Reloaded()
        house.stuck = {"gone meanwhile"}
        assert await house.reload() == Reloaded()
        house.write(A, more='[agent]\nprobe = "7s"\n')
        assert await house.reload() == Reloaded()
    assert [list(change.backends) for change in house.applied] == [["stub"], [], ["stub"]]


async def test_a_backend_that_cannot_be_started_is_a_mistake_unless_it_was_stuck(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_arguments: object) -> None:
        raise OSError("no such luck")

    monkeypatch.setattr("backends.stub.Stub.__init__", refuse)
    async with house.running():
        house.write(A, B)
        with pytest.raises(RefusedError, match="the backend stub: it could not be started"):
            await house.reload()
        assert not house.applied
        house.stuck = {"stub"}
        assert await house.reload() == Reloaded(added=(B,))
        assert await house.reload() == Reloaded()
    assert [list(change.backends) for change in house.applied] == [["stub"], []], "what it was is as good"


async def test_at_the_end_nobody_is_left_waiting(house: House) -> None:
    async def never(_change: Change) -> None:
        await anyio.sleep_forever()

    house.apply = never
    async with house.running():
        asked = house.it.request()
        await until(lambda: house.told() == ["RELOADING=1"])
    assert asked.cancelled()


async def test_a_configuration_that_another_program_made_up_cannot_be_read_again(house: House) -> None:
    house.config = replace(house.config, read_at=0.0)
    async with house.running():
        with pytest.raises(RefusedError, match="has no file to read"):
            await house.reload()


# --- the file ---


async def test_a_file_is_read_once_it_has_been_left_alone_and_an_empty_one_later_still(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    hour = 3600.0
    for name, seconds in (("_QUIET", 2 * hour), ("_QUIET_IF_EMPTY", 20 * hour), ("_RESTLESS", 1000 * hour)):
        monkeypatch.setattr(reload, name, seconds)

    async def after(hours: float) -> int:
        """How often it has been read when so many hours have passed."""
        await settled()
        pass_time(hours * hour)
        await settled()
        return len(house.applied)

    async with house.running(), anyio.create_task_group() as tasks:
        house.write(A, B)
        tasks.start_soon(house.it.watch)
        assert await after(1) == 0
        house.write(A)  # it is still being written
        assert await after(1) == 0
        house.write()
        assert await after(2) == 0
        assert await after(10) == 0, "it is empty"
        house.write(B)
        for hours in (10, 10, 1):
            assert await after(hours) == 0
        await after(1)
        await until(lambda: house.applied)
        tasks.cancel_scope.cancel()
    assert [change.difference.added for change in house.applied] == [(B,)]


async def test_a_file_that_changes_all_the_time_is_read_all_the_same(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reload, "_QUIET", 3600.0)  # which it never is for so long
    monkeypatch.setattr(reload, "_RESTLESS", 0.01)
    async with house.running(), anyio.create_task_group() as tasks:
        house.write(A, B)
        tasks.start_soon(house.it.watch)
        await until(lambda: house.applied)
        tasks.cancel_scope.cancel()
    assert house.applied[0].difference.added == (B,)


async def test_what_pods_get_while_a_reload_is_decided_is_decided_beside_the_loop_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, inventory, left = tmp_path / "config.toml", Inventory([], {}), list[tuple[bool, int]]()
    file.write_text("")
    before = load(file)
    file.write_text(STUB.format(name=A))
    learn = Inventory.learn

    def learn_and_see(it: Inventory, units: Any, links: Any, health: Any, claims: Mapping[SlotKey, Held]) -> None:
        left.append((threading.current_thread() is threading.main_thread(), len(claims) - len(it.told()[1])))
        learn(it, units, links, health, claims)
        if len(left) == 1:
            inventory.claim([Held(A, f"x{n}", "stub", frozenset()) for n in range(1000)])

    @asynccontextmanager
    async def on_trial(*_: object) -> AsyncIterator[Mapping[str, object]]:
        yield {}

    monkeypatch.setattr(Inventory, "learn", learn_and_see)
    parts: dict[str, Any] = {name: MagicMock() for name in ConfigurationSwap.__struct_fields__}
    parts |= {"config": before, "node": MagicMock(inventory=inventory)}
    swap = ConfigurationSwap(**parts | {"discovery": MagicMock(on_trial=on_trial, discoverers={})})
    await swap.apply(Change(compare(before, load(file)), {}))
    assert left == [(False, 0), (False, 1000), (True, 0)]
