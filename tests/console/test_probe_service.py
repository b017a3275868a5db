"""Probes over a unix socket: the same verdicts as over HTTP, from a program that starts in milliseconds."""

from __future__ import annotations

import asyncio
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from agent.console import sockets
from agent.console.service import answer_probes
from tests.background import running as background
from tests.console.fakes import FakeDaemon
from tests.e2e.process import MAIN
from tests.wait import limit, until

# what asyncio accepts while a server closes is collected in the test that follows
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


class Watchdog:
    ailment = ""

    def alive(self) -> str:
        return self.ailment


def config(root: Path) -> Path:
    file = root / "config.toml"
    file.write_text(f'[agent]\nadmin_socket = "{root / "admin.sock"}"\n')
    return file


async def asked(what: str, root: Path) -> tuple[bool, str]:
    async with limit(what):
        return await asyncio.to_thread(sockets.probe, what, config(root))


async def test_of_two_agents_in_one_namespace_the_later_answers_and_the_earlier_once_that_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent.console.service._LOOK_AGAIN", 0.0)
    path, earlier, later = tmp_path / "admin.sock", Watchdog(), Watchdog()
    earlier.ailment, later.ailment = "the earlier", "the later"
    async with background(lambda: answer_probes(FakeDaemon(), earlier, path)):
        await until(sockets.probe_socket(path).exists)
        async with background(lambda: answer_probes(FakeDaemon(), later, path)):
            for _ in range(20):
                if (await asked("live", tmp_path))[1] == "the later":
                    break
            for _ in range(20):
                assert await asked("live", tmp_path) == (False, "the later")
        async with limit():
            while await asked("live", tmp_path) != (False, "the earlier"):
                pass


async def test_each_probe_has_the_daemons_verdict_and_a_socket_that_went_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent.console.service._LOOK_AGAIN", 0.0)
    daemon, watchdog = FakeDaemon(), Watchdog()
    path = sockets.probe_socket(tmp_path / "admin.sock")
    left = tmp_path / "probe-1.sock"
    subprocess.run(
        [sys.executable, "-c", f"import socket; socket.socket(socket.AF_UNIX).bind({str(left)!r})"], check=True
    )
    async with background(lambda: answer_probes(daemon, watchdog, tmp_path / "admin.sock")):
        await until(path.exists)
        assert not left.exists()  # of a container that was killed
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert await asked("live", tmp_path) == (True, "ok")
        watchdog.ailment = "the loop stands still"
        assert await asked("live", tmp_path) == (False, "the loop stands still")
        unready = daemon.shown.unready()
        assert await asked("ready", tmp_path) == (not unready, "\n".join(unready) or "ready")
        daemon.shown = replace(daemon.shown, standing_by=True)
        assert await asked("ready", tmp_path) == (True, "standby")
        path.unlink()
        await until(path.exists, "the socket again")
        assert (await asked("ready", tmp_path))[0]
    assert not path.exists()
    is_well, sentence = await asked("live", tmp_path)
    assert not is_well
    assert sentence.startswith(f"no Fairlead answers at {path}: ")


def test_a_probe_imports_next_to_nothing_as_the_kubelet_starts_one_every_few_seconds() -> None:
    heavy = ("asyncio", "click", "grpclib", "msgspec", "structlog", "anyio")
    code = f"import atexit, sys; atexit.register(lambda: print([m for m in {heavy} if m in sys.modules])); {MAIN}"
    done = subprocess.run([sys.executable, "-c", code, "probe", "live"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    sentence, imported = done.stdout.splitlines()
    assert sentence.startswith("no Fairlead answers at /run/fairlead/probe-")
    assert imported == "[]"
