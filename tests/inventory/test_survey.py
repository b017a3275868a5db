from __future__ import annotations

import asyncio
import threading
from functools import partial

import pytest

from agent.discovery.discoverer import Discoverer
from agent.inventory import survey as module
from agent.inventory.survey import survey
from backends.base import Discovery, Problem, Signal, Verdict
from tests.fakes import KIND, Fake, device, resource
from tests.wait import PATIENCE, limit, pass_time, settled

A = "a.example/one"


async def test_it_shows_what_each_resource_would_offer_with_its_health() -> None:
    backend = Fake(resource(A))
    backend.hardware = {"u": (device("u", A),), "v": (device("v", A),), "w": (device("w", "somebody.else/x"),)}
    backend.seen = lambda found: [Signal("v", "sick", Verdict.NOW, "")] if found.key == "v" else []
    found = await survey([resource(A)], {KIND: backend}, 5.0)
    slots = found.inventory.slots(A)
    assert {slot.id: slot.health.reason for slot in slots.values()} == {"u": "", "v": "sick"}
    assert [lost.device.key for lost in found.inventory.unclaimed()] == ["w"]
    assert found.problems == ()


async def test_what_is_down_now_is_shown_as_what_it_will_be_if_it_stays_so() -> None:
    backend = Fake(resource(A))
    backend.hardware = {"u": (device("u", A),)}
    backend.seen = lambda _found: [Signal("u", "port-down", Verdict.DELAYED, "", after=10.0)]
    found = await survey([resource(A)], {KIND: backend}, 5.0)
    assert found.inventory.slots(A)["u"].health.reason == "port-down"


async def test_problems_come_with_their_backend() -> None:
    odd = Problem("u", "U is odd.")
    backend = Fake()
    backend.hardware = {"u": lambda: Discovery(problems=(odd,))}
    assert (await survey([], {KIND: backend}, 5.0)).problems == ((KIND, odd),)


async def test_a_backend_that_hangs_is_said_to_be_slow_and_the_others_are_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "Discoverer", partial(Discoverer, unit_deadline=1e6))
    gate, hanging, well = threading.Event(), Fake(), Fake(resource(A, "well"))
    hanging.listed = lambda: gate.wait(PATIENCE) and []
    well.hardware = {"u": (device("u", A),)}
    looking = asyncio.ensure_future(survey([resource(A, "well")], {"hangs": hanging, "well": well}, 1000.0))
    await settled()
    assert not looking.done()
    pass_time(1000.0)
    async with limit("its patience ends"):
        found = await looking
    gate.set()
    assert list(found.inventory.slots(A)) == ["u"]
    sentence = "its scan did not end within 1000 s; what is shown may be incomplete"
    assert found.problems == (("hangs", Problem("hangs", sentence)),)
