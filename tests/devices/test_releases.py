from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from structlog.testing import capture_logs

from agent.devices import releases
from agent.devices.claims import Ledger
from agent.devices.model import Held
from agent.devices.releases import Releaser
from backends import registry
from backends.base import Host, Released
from tests.devices.fakes import Fake, device

A = "a.example/one"


class Releasing(Fake):
    """Remembers what it was told."""

    def __init__(self, *_ignored: Any) -> None:
        super().__init__()
        self.told: list[tuple[list[Released], frozenset[str]]] = []
        self.do: Callable[[], object] = lambda: None

    def release(self, ended: Sequence[Released], idle: frozenset[str]) -> None:
        self.told.append((list(ended), idle))
        self.do()


def claim(device_id: str, *hardware: str, kind: str = "fake") -> Held:
    return Held(A, device_id, kind, frozenset(hardware))


async def test_a_backend_is_told_what_ended_and_what_nobody_holds_any_more() -> None:
    backend, ledger = Releasing(), Ledger()
    ledger.allocate([claim("z", "shared")], 0.0)
    await Releaser(Host(), {"fake": backend}, ledger).release([claim("x", "shared", "x"), claim("y", "y")])
    assert backend.told == [
        (
            [Released(A, "x", frozenset({"shared", "x"})), Released(A, "y", frozenset({"y"}))],
            frozenset({"x", "y"}),
        )
    ]


async def test_each_backend_is_told_its_own_and_one_that_fails_takes_none_with_it() -> None:
    broken, well = Releasing(), Releasing()
    broken.do = lambda: 1 / 0
    with capture_logs() as logs:
        await Releaser(Host(), {"broken": broken, "well": well}, Ledger()).release(
            [claim("x", kind="broken"), claim("y", kind="well")]
        )
    assert [ended[0].id for ended, _ in well.told] == ["y"]
    assert [(line["event"], line["backend"], line["ids"]) for line in logs] == [("release-failed", "broken", ["x"])]


async def test_a_backend_that_hangs_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(releases, "RELEASE_DEADLINE", 0.01)
    gate, backend = threading.Event(), Releasing()
    backend.do = lambda: gate.wait(10)
    with capture_logs() as logs:
        await Releaser(Host(), {"fake": backend}, Ledger()).release([claim("x")])
    assert [line["event"] for line in logs] == ["release-hangs"]
    gate.set()


async def test_a_backend_that_the_config_no_longer_names_is_made_once_for_its_claims(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Releasing] = []

    def load(kind: str) -> Callable[..., Releasing]:
        assert kind == "retired"
        made.append(Releasing())
        return lambda _host, _resources: made[-1]

    monkeypatch.setattr(registry, "load", load)
    releaser = Releaser(Host(), {}, Ledger())
    await releaser.release([claim("x", kind="retired")])
    await releaser.release([claim("y", kind="retired")])
    assert len(made) == 1
    assert [ended[0].id for ended, _ in made[0].told] == ["x", "y"]


async def test_a_backend_that_undoes_nothing_is_not_asked_for_a_thread() -> None:
    releaser = Releaser(Host(), {"fake": Fake()}, Ledger())
    await releaser.release([Held(A, "x", "fake", device("x").hardware)])
    assert not releaser._workers
