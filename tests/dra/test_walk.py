"""Claims come and go in any order, across restarts, boots and devices that vanish: nothing is ever of two claims, nothing is left."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from agent.dra.driver import Driver
from agent.dra.names import pool_name
from agent.dra.preparation import Called
from backends.base import AllocationRefused
from tests.dra.driven import NODE, SHARED, Stage, toy

CLAIMS = ("one", "two", "three", "four")
Step = st.one_of(
    st.tuples(st.just("prepare"), st.sampled_from(CLAIMS), st.sampled_from("abc")),
    st.tuples(st.just("share"), st.sampled_from(CLAIMS), st.integers(1, 3)),
    st.tuples(st.just("unprepare"), st.sampled_from(CLAIMS), st.none()),
    st.tuples(st.just("restart"), st.none(), st.none()),
    st.tuples(st.just("boot"), st.none(), st.none()),
    st.tuples(st.just("gone"), st.none(), st.sampled_from("abc")),
    st.tuples(st.just("back"), st.none(), st.sampled_from("abc")),
)


async def walk(stage: Stage, steps: list[tuple[str, str, str | int]]) -> None:
    driver, boots, ready = stage.driver, 0, set[str]()
    for what, name, more in steps:
        called = Called(f"uid-{name}", "default", name)
        if what in ("prepare", "share"):
            if ("default", name) not in stage.api.claims:  # a claim's allocation lasts as long as the claim
                if what == "prepare":
                    stage.api.allocate(name, str(more))
                else:
                    pool, tokens = pool_name(NODE, SHARED), {"tokens": str(more)}
                    stage.api.allocate(name, "kvm", pool=pool, shareID=f"s-{name}", consumedCapacity=tokens)
            try:
                assert await driver.preparer.prepare(called)
                ready.add(called.uid)
            except AllocationRefused:
                pass
        elif what == "unprepare":
            await driver.preparer.unprepare(called)
            stage.api.claims.pop(("default", name), None)
            ready.discard(called.uid)
        elif what in ("restart", "boot"):
            if what == "boot":
                boots += 1
                stage.boot(f"boot-{boots + 1}")
                for path in (stage.root / "run/cdi").glob("*"):
                    path.unlink()
                ready.clear()
            driver.preparer.close()
            driver = stage.another_process()
            await driver.preparer.begin()
        elif what == "gone":
            stage.gone(str(more))
        else:
            stage.found(toy(str(more), attributes={"is": ("toy",)}))
        check(stage, ready)
    await leave(stage, driver)


def check(stage: Stage, ready: set[str]) -> None:
    held = stage.ledger.held()
    assert len({it.slot for it in held}) == len(held)
    for it in held:
        assert it.claim is not None
        others = {other.claim.uid for other in held if other.claim and not other.hardware.isdisjoint(it.hardware)}
        assert len(others) == 1 or it.hardware == {"toy:kvm"}, "a device for one is of two claims"
        asked = stage.api.claims["default", it.claim.name]["status"]["allocation"]["devices"]["results"]
        assert [(one["pool"], one["device"]) for one in asked] == [(it.claim.pool, it.claim.device)]
    written = {name.rpartition("_")[2].removesuffix(".json") for name in stage.files}
    assert ready <= written <= {it.claim.uid for it in held if it.claim}


async def leave(stage: Stage, driver: Driver) -> None:
    """All claims end: nothing of them is left."""
    for name in CLAIMS:
        await driver.preparer.unprepare(Called(f"uid-{name}", "default", name))
    driver.preparer.close()
    assert stage.ledger.held() == []
    assert stage.files == {}
    assert not any(stage.inventory.claims(name) for name in stage.inventory.names())
    assert list((stage.kubelet.root / "plugins").glob("*/dra-device-metadata/*")) == []
    stage.jobs.close()
    await asyncio.sleep(0)


@settings(max_examples=40, deadline=None)
@given(st.lists(Step, max_size=25))
def test_whatever_happens_each_device_is_of_one_claim_and_at_the_end_nothing_is_left(
    steps: list[tuple[str, str, str | int]],
) -> None:
    async def run() -> None:
        with tempfile.TemporaryDirectory() as home:
            await walk(Stage(Path(home)), steps)

    asyncio.run(run())
