"""The admin service and its client, over a real socket."""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import cast

import anyio
import pytest
from grpclib.const import Handler
from grpclib.const import Status as Code
from grpclib.exceptions import GRPCError

from agent.console.control import Client, Codec, NoDaemonError, WrongNameError
from agent.console.service import AdminService, served
from agent.console.views import Drained, Event, Gift, History, Period, Reloaded, Undrained
from agent.kubelet.server import SocketServer
from agent.runtime.errors import ExitCode, FairleadError
from tests.console.fakes import FakeDaemon, status
from tests.wait import limit


@pytest.fixture
def daemon() -> FakeDaemon:
    return FakeDaemon()


@pytest.fixture
async def client(daemon: FakeDaemon, tmp_path: Path) -> AsyncIterator[Client]:
    async with served(daemon, tmp_path / "run/admin.sock"):
        asking = Client(tmp_path / "run/admin.sock")
        yield asking
        asking.close()


async def test_the_status_arrives_as_it_is(client: Client) -> None:
    assert await client.status() == status()


async def test_a_device_is_explained(client: Client) -> None:
    explained = await client.explain("GPU-1")
    assert (explained.resource, explained.gift) == ("nvidia.com/gpu", Gift({"A": "b"}))


async def test_how_a_device_was_is_told_and_an_older_daemon_is_to_be_restarted(
    client: Client, daemon: FakeDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon.past["GPU-1"] = (Period(1.0, 2.0, "Unhealthy", "xid-79", "It is off the bus.", ("default/train",)),)
    assert await client.history("GPU-1") == History("GPU-1", "nvidia.com/gpu", daemon.past["GPU-1"])
    everything = AdminService.__mapping__

    def older(service: AdminService) -> Mapping[str, Handler]:
        return {name: it for name, it in everything(service).items() if not name.endswith("/History")}

    monkeypatch.setattr(AdminService, "__mapping__", older)
    async with served(daemon, tmp_path / "old.sock"):
        asking = Client(tmp_path / "old.sock")
        with pytest.raises(FairleadError, match="older than this command; restart it"):
            await asking.history("GPU-1")
        asking.close()


async def test_an_unknown_device_is_a_wrong_name_with_the_nearest(client: Client) -> None:
    with pytest.raises(WrongNameError, match="did you mean 'GPU-1'") as caught:
        await client.explain("GPU-2")
    assert caught.value.exit_code is ExitCode.USAGE


async def test_a_drain_and_its_end(client: Client, daemon: FakeDaemon) -> None:
    daemon.unkept = "the disk is full"
    assert await client.drain("GPU-1", "new fan", None) == Drained(("GPU-1",), (), "the disk is full")
    assert await client.undrain("GPU-1") == Undrained(("GPU-1",), ("drained",))
    assert daemon.asked == [("drain", "GPU-1", "new fan", None), ("undrain", "GPU-1")]


async def test_a_drain_until_a_time_that_is_past_is_refused(client: Client) -> None:
    with pytest.raises(FairleadError, match="that time is past"):
        await client.drain("GPU-1", "", 1.0)


async def test_a_reload_and_one_that_is_refused(client: Client, daemon: FakeDaemon) -> None:
    assert await client.reload() == Reloaded(added=("a.b/new",))
    daemon.mistakes = "config.toml:3: there is no key 'resinc'"
    with pytest.raises(FairleadError, match="resinc"):
        await client.reload()


async def test_events_are_told_from_the_past_and_on(client: Client, daemon: FakeDaemon) -> None:
    daemon.events = [Event(n, 1.0, "device-changed") for n in (1, 2, 3)]
    seen: list[int] = []
    async with limit("the news comes", lambda: seen):
        async for event in client.watch(2, follow=True):
            seen.append(event.number)
            if len(seen) == 2:
                daemon.news.put_nowait(Event(4, 2.0, "device-changed"))
            if len(seen) == 3:
                break
    assert seen == [2, 3, 4]


async def test_a_watch_that_does_not_follow_ends_with_the_past(client: Client, daemon: FakeDaemon) -> None:
    daemon.events = [Event(n, 1.0, "device-changed") for n in (1, 2, 3)]
    async with limit("it ends"):
        assert [event.number async for event in client.watch(9, follow=False)] == [1, 2, 3]


async def test_a_watcher_that_hangs_up_ends_its_watch(client: Client, daemon: FakeDaemon) -> None:
    daemon.events = [Event(1, 1.0, "device-changed")]
    async for _ in client.watch(1, follow=True):
        break
    client.close()  # the fixture's end would hang, or complain of a task, if the watch went on


async def test_whoever_is_not_root_is_refused(daemon: FakeDaemon, tmp_path: Path) -> None:
    service = AdminService(daemon, allowed=frozenset({os.geteuid() + 1}))
    server = SocketServer([service], tmp_path / "admin.sock", Codec())
    await server.open()
    asking = Client(tmp_path / "admin.sock")
    with pytest.raises(FairleadError, match="may not ask this of Fairlead") as caught:
        await asking.status()
    asking.close()
    await server.shut_down()
    assert isinstance(caught.value.__cause__, GRPCError)
    assert caught.value.__cause__.status is Code.PERMISSION_DENIED


async def test_an_answer_that_makes_no_sense_is_of_another_version(client: Client, daemon: FakeDaemon) -> None:
    daemon.changed = cast("Reloaded", Undrained(("a",), ()))
    assert await client.reload() == Reloaded()  # it says nothing of what is asked
    daemon.changed = Reloaded(added=cast("tuple[str, ...]", 7))
    with pytest.raises(FairleadError, match="is of another version than this command"):
        await client.reload()


async def test_the_socket_is_for_its_owner_and_goes_with_the_server(daemon: FakeDaemon, tmp_path: Path) -> None:
    path = tmp_path / "run/admin.sock"
    async with served(daemon, path):
        assert path.stat().st_mode & 0o777 == 0o600
    assert not path.exists()


async def test_no_daemon_is_a_sentence(tmp_path: Path) -> None:
    asking = Client(tmp_path / "nobody.sock")
    with pytest.raises(NoDaemonError, match="no Fairlead answers"):
        await asking.status()
    asking.close()


async def test_a_socket_that_says_nothing_of_sense_is_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "odd.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        listener.setblocking(False)

        async def hang_up() -> None:
            await anyio.wait_readable(listener)
            listener.accept()[0].close()

        asking = Client(path)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(hang_up)
            with pytest.raises(NoDaemonError, match="was lost"):
                await asking.status()
        asking.close()
