from __future__ import annotations

import asyncio
from typing import Any

import pytest
from structlog.testing import capture_logs

from agent.claims.ledger import Ledger
from agent.discovery.backend_answers import make_backends
from agent.discovery.discoverer import Discoverer
from agent.hardware.jobs import HardwareQueue
from agent.hardware.reconciler import Reconciler
from agent.hardware.releases import Releaser
from agent.model import Held
from agent.runtime.workers import Workers
from backends import registry
from backends.base import Host
from tests.fakes import Fake, resource
from tests.wait import until


class Broken(Fake):
    def __init__(self, host: Host, resources: Any) -> None:
        raise OSError("no driver")


class Made(Fake):
    def __init__(self, host: Host, resources: Any) -> None:
        super().__init__(*resources)


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    classes = {"made": Made, "broken": Broken}

    def load(name: str) -> type[Fake]:
        if name not in classes:
            raise registry.BrokenBackendError(f"backend {name!r} cannot be imported")
        return classes[name]

    monkeypatch.setattr(registry, "load", load)


def test_a_kind_has_one_instance_for_all_of_its_resources() -> None:
    one, two = resource("a.example/one", "made"), resource("b.example/two", "made")
    made = make_backends(Host(), [one, two])
    assert made.keys() == {"made"}
    assert made["made"].resources == (one, two)


@pytest.mark.parametrize(("kind", "why"), [("broken", "no driver"), ("unknown", "cannot be imported")])
async def test_a_backend_that_cannot_be_made_leaves_the_others_alone_and_says_why(kind: str, why: str) -> None:
    made = make_backends(Host(), [resource("a.example/one", kind), resource("b.example/two", "made")])
    assert isinstance(made["made"], Made)
    discoverer = Discoverer(kind, made[kind], lambda _news: None)
    with pytest.raises(RuntimeError, match=why):
        await Workers("x").start(discoverer.backend.units)


async def test_claims_of_a_backend_that_cannot_be_made_do_not_end_unsaid() -> None:
    made = make_backends(Host(), [resource("a.example/one", "broken")])
    claim = Held("a.example/one", "x", "broken")
    reconciler = Reconciler(HardwareQueue())
    releaser = Releaser(Host(), made, Ledger(), reconciler)
    with capture_logs() as logs:
        releaser.add([claim])
        running = asyncio.ensure_future(reconciler.run())
        await until(lambda: bool(logs))
        running.cancel()
        await asyncio.wait([running])
    assert [(line["event"], line["slots"]) for line in logs] == [("release-failed", ["a.example/one/x"])]
    assert releaser.pending() == (claim,)
