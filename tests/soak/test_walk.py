"""The soak itself: a short walk ends well, and a daemon that does what it must not is found out."""

from __future__ import annotations

import random
from pathlib import Path

from tests.e2e.node import pod
from tests.soak.report import report
from tests.soak.walk import Walk
from tests.soak.world import WIDGET, World
from tests.wait import PATIENCE as LONG
from tests.wait import until

FORGETFUL = """
from msgspec.structs import replace
from agent.inventory.lists import Listing
whole = Listing.snapshot
def snapshot(self, now, size):
    found = whole(self, now, size)
    return replace(found, slots={name: slot for name, slot in found.slots.items() if name not in self.claims}, changed=None)
Listing.snapshot = snapshot
"""
"""The lists lack what pods hold."""


async def test_a_short_walk_ends_well(tmp_path: Path) -> None:
    async with World(tmp_path, random.Random(7), hurried=False) as world:
        await Walk(world, pace=0.0).go(LONG, steps=15)
    world.found.steps.clear()  # longer on a busy machine
    text, ok = report(world.found, {}, "", world.step)
    assert ok, text


async def test_a_daemon_that_loses_what_a_pod_holds_is_found_out(tmp_path: Path) -> None:
    async with World(tmp_path, random.Random(7), FORGETFUL, hurried=False) as world:
        await world.node.admit(pod("holder", WIDGET, 5))
        world.node.unlink("w0")
        await until(lambda: world.found.violations, "a violation")
    text, ok = report(world.found, {}, "", world.step)
    assert not ok
    assert f"a list of {WIDGET} lacks" in text
