"""What two agents tell each other in a hand-over, and who answers the kubelet meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from agent.daemon.handover import Giver
from agent.kubelet.handover_socket import SOCKET, End, Predecessor, Relay, StandbyLostError, Standbys
from agent.kubelet.kubelet_socket import Kubelet
from agent.kubelet.lock import exclusive
from agent.kubelet.plugin import Plugin
from agent.kubelet.registration import Registrar
from tests.background import running as background
from tests.kubelet.plugins import TOY, nothing
from tests.wait import limit, until


async def test_what_the_kubelet_asks_after_a_standby_was_lost_is_ours_to_answer_again_at_once(tmp_path: Path) -> None:
    relay = Relay(tmp_path)
    relay.close()
    async with limit():
        with pytest.raises(StandbyLostError):
            await relay.allocate("fl.test/never-there", ["a"])


@asynccontextmanager
async def serving_before(path: Path, *answers: str) -> AsyncIterator[list[str]]:
    """An agent that hands over with these words: the first at once, each later one for an `end`; what it was told."""
    told: list[str] = []

    async def meet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        first, *others = answers
        writer.write(f"{first}\n".encode())
        while line := await reader.readline():
            told.append(line.decode().strip())
            if line.startswith(b"end "):
                if not others:
                    break
                writer.write(f"{others.pop(0)}\n".encode())
        writer.close()

    server = await asyncio.start_unix_server(meet, str(path))
    yield told
    server.close()


@pytest.mark.parametrize(
    ("answers", "told", "how"),
    [
        (["take 3", "ended a/b closed"], "end a/b fairlead/1-a_b.sock", End.CLOSED),
        (["take 2", "ended a/b kept"], "end a/b fairlead/1-a_b.sock", End.KEPT),
        (["take", "ended a/b"], "end a/b", End.UNKNOWN),  # one that registers at fixed paths
        (["take 3"], "end a/b fairlead/1-a_b.sock", End.UNKNOWN),  # it dies
    ],
)
async def test_the_agent_before_is_told_where_we_are_in_its_own_words_and_says_what_became_of_its_stream(
    tmp_path: Path, answers: list[str], told: str, how: End
) -> None:
    predecessor = Predecessor(tmp_path, lambda: "1 0.1.0")
    async with serving_before(tmp_path / SOCKET, *answers) as said, background(predecessor.run):
        await until(lambda: predecessor.gives)
        predecessor.ready()
        assert predecessor.has_fixed_paths == (answers[0] == "take")
        assert await predecessor.end("a/b", "fairlead/1-a_b.sock") is how
        await until(lambda: said == ["ready 1 0.1.0 3", told])


@pytest.mark.parametrize(
    ("ready", "take", "end", "ended"),
    [
        ("ready 7 0.1.0 4", "take 3", f"end {TOY} fairlead/1-x.sock", f"ended {TOY} closed"),
        ("ready 7 0.1.0 3", "take 3", f"end {TOY} fairlead/1-x.sock", f"ended {TOY} closed"),
        ("ready 7 0.1.0 2", "take 2", f"end {TOY} fairlead/1-x.sock", f"ended {TOY} closed"),
        ("ready 7 0.1.0", "take 1", f"end {TOY}", f"ended {TOY}"),
    ],
    ids=["a later one", "as we do", "without `given`", "at fixed paths"],
)
async def test_a_standby_is_answered_in_its_own_words_and_one_that_knows_better_finds_us_at_work_until_it_has_the_lock(
    tmp_path: Path, ready: str, take: str, end: str, ended: str
) -> None:
    said: list[str] = []

    async def stop() -> None:
        said.append("stopped")

    standbys = Standbys()
    async with standbys.listening(tmp_path), exclusive(tmp_path / "lock", said.append) as lock:
        reader, writer = await asyncio.open_unix_connection(str(tmp_path / SOCKET))
        writer.write(f"{ready}\n".encode())
        await until(standbys.ready)
        standby = standbys.ready(7)
        assert standby is not None
        assert standby.who == "7 0.1.0"
        plugin = Plugin(TOY, nothing)
        registrars = {TOY: Registrar(plugin, Kubelet(tmp_path / "kubelet.sock"), tmp_path)}
        async with limit():
            giver = Giver(registrars, {TOY: plugin}, Relay(tmp_path), lock, stop)
            given = asyncio.ensure_future(giver.give(standby))
            assert (await reader.readline()).decode().strip() == take
            assert said == ([] if take == "take 3" else ["stopped"])
            async with exclusive(tmp_path / "lock", said.append):  # it is free
                writer.write(b"taking\n")
                if take == "take 3":
                    assert await reader.readline() == b"given\n"
                assert said == ["stopped"]
            writer.write(f"{end}\n".encode())
            assert (await reader.readline()).decode().strip() == ended
            writer.write(b"done\n")
            assert await given
        writer.close()
