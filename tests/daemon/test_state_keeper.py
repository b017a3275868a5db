"""What outlives a restart, between the file and its owners."""

from __future__ import annotations

import threading
from pathlib import Path

import anyio
import pytest

from agent.claims.ledger import Ledger
from agent.daemon import state_file
from agent.daemon.state_file import Kept, StateFile, StateKeeper
from agent.hardware.jobs import HardwareQueue
from agent.hardware.reconciler import Reconciler
from agent.hardware.releases import Releaser
from agent.health import HealthBook
from agent.history.recorder import Recorder
from agent.inventory.inventory import Inventory
from agent.inventory.shortfall import Shortfall
from agent.model import Health, Slot, Snapshot, State
from agent.runtime.errors import FairleadError
from agent.runtime.pacing import Clock
from backends.base import Clears, Host
from tests.fakes import KIND, Fake, by_unit, device, held, resource
from tests.health.said import BOOT, INFO, NOW, latch, probe, signal
from tests.wait import PATIENCE, until

WALL = 1_800_000_000.0
CLOCK = Clock(lambda: 100.0, lambda: WALL + 100.0)
CARD = device("card", "a.example/one", hardware=["pci:1"])
XID = signal(NOW, "xid-79", "pci:1", clears_on=[Clears.OPERATOR, Clears.BOOT])


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for the disk, however slow the machine is today."""
    monkeypatch.setattr(state_file, "_WRITE_PATIENCE", 10.0)


class Run:
    """One run of the agent, as far as it keeps anything."""

    def __init__(self, directory: Path, boot: str = BOOT) -> None:
        resources = [resource("a.example/one")]
        self.inventory = Inventory(resources, {KIND: Fake(*resources)})
        self.inventory.update(KIND, by_unit([CARD]))
        self.inventory.ready(KIND)
        self.ledger, self.health, self.file = Ledger(), HealthBook(boot), StateFile(directory)
        self.releaser = Releaser(Host(), {KIND: Fake(*resources)}, self.ledger, Reconciler(HardwareQueue()))
        self.shortfall = Shortfall(self.inventory)
        lists = self.inventory, lambda _name: None, lambda _slot: (), self.shortfall
        self.history = Recorder(*lists, clock=CLOCK)
        self.keeper = StateKeeper(
            self.file,
            self.ledger,
            self.releaser,
            self.inventory,
            self.health,
            self.shortfall,
            self.history,
            clock=CLOCK,
        )

    async def begin(self) -> Run:
        await self.keeper.restore()
        await self.keeper.begin()
        return self

    def shown(self) -> dict[str, str]:
        return {slot.id: slot.health.reason for slot in self.inventory.slots("a.example/one").values()}


async def test_the_next_run_knows_what_the_last_one_was_told_before_it_lists_anything(tmp_path: Path) -> None:
    first = await Run(tmp_path).begin()
    first.ledger.allocate([held("a.example/one", "card", CARD)], 0.0)
    await first.keeper.write_claims()
    first.keeper.drain(["pci:1"], "the fan", None)
    latch(first.health, 100.0, XID)
    await first.keeper.write_health()
    second = Run(tmp_path)
    assert second.shown() == {"card": ""}
    await second.keeper.restore()
    assert second.shown() == {"card": "drained"}
    assert second.ledger.held() == first.ledger.held()
    assert [it.reason for it in second.health.signals_of("pci:1", 100.0)] == ["drained", "xid-79"]


@pytest.mark.parametrize("boots", [[BOOT, BOOT, "boot 2", "boot 2"], [BOOT, "boot 2", "boot 2", "boot 3"]])
async def test_it_is_known_of_a_claim_whether_it_is_from_before_a_boot(tmp_path: Path, boots: list[str]) -> None:
    first = await Run(tmp_path, boots[0]).begin()
    first.ledger.allocate([held("a.example/one", "card", CARD)], 0.0)
    await first.keeper.write_claims()
    for boot in boots[1:]:  # each run of the agent
        run = await Run(tmp_path, boot).begin()
        assert [it.rebooted for it in run.ledger.held()] == [boot != BOOT]


async def test_claims_of_nobody_knows_which_boot_may_be_from_before_this_one(tmp_path: Path) -> None:
    first = await Run(tmp_path, "").begin()
    first.ledger.allocate([held("a.example/one", "card", CARD)], 0.0)
    await first.keeper.write_claims()
    assert [it.rebooted for it in (await Run(tmp_path).begin()).ledger.held()] == [True]


async def test_health_is_written_when_it_changed_and_only_then(tmp_path: Path) -> None:
    run = await Run(tmp_path).begin()
    probe(run.health, 1.0, signal(INFO, hardware="pci:1"))  # the next run will see that itself
    await run.keeper.write_health()
    assert not run.file.path.exists()
    latch(run.health, 1.0, XID)
    for _ in range(3):
        await run.keeper.write_health()
    assert run.file.path.read_bytes().count(b"\n") == 1
    run.keeper.undrain(["pci:1"])
    await run.keeper.write_health()
    kept = StateFile(tmp_path).read().health
    assert kept is not None
    assert kept.latches == ()


async def test_what_happened_in_the_last_moment_before_a_stop_is_kept(tmp_path: Path) -> None:
    first = await Run(tmp_path).begin()
    latch(first.health, 100.0, XID)
    with anyio.CancelScope() as stopping:
        stopping.cancel()
        await first.keeper.end()
    assert (await Run(tmp_path).begin()).shown() == {"card": "xid-79"}


async def test_a_write_that_takes_too_long_is_told_of_until_it_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, go_on, save = await Run(tmp_path).begin(), threading.Event(), StateFile._save
    monkeypatch.setattr(state_file, "_PATIENCE", 0.0)
    monkeypatch.setattr(StateFile, "_save", lambda *of: go_on.wait(PATIENCE) and save(*of))
    latch(run.health, 1.0, XID)
    await run.keeper.write_health()
    assert "could not be written within" in run.keeper.unkept()
    go_on.set()
    await until(lambda: not run.keeper.unkept())


async def test_a_restart_alone_writes_nothing(tmp_path: Path) -> None:
    latch((first := await Run(tmp_path).begin()).health, 1.0, XID)
    await first.keeper.write_health()
    before = first.file.path.stat()
    await (await Run(tmp_path).begin()).keeper.write_health()
    after = first.file.path.stat()  # when it was read may be another
    assert (after.st_ino, after.st_size, after.st_mtime_ns) == (before.st_ino, before.st_size, before.st_mtime_ns)


async def test_nothing_is_written_while_another_agent_may_run_and_then_all_that_came_up(tmp_path: Path) -> None:
    beside = await Run(tmp_path).begin()
    waiting = Run(tmp_path)
    await waiting.keeper.restore()
    waiting.ledger.allocate([held("a.example/one", "late")], 0.0)
    await waiting.keeper.write_claims()
    latch(waiting.health, 2.0, signal(NOW, "xid-48", "pci:2"), sequence=2)
    await waiting.keeper.write_health()
    assert not beside.file.path.exists()
    beside.keeper.drain(["pci:1"], "the fan", None)
    latch(beside.health, 1.0, XID, sequence=1)
    await beside.keeper.write_health()
    await waiting.begin()
    kept = StateFile(tmp_path).read()
    assert kept.claims == (held("a.example/one", "late"),)
    assert kept.health is not None
    assert [drain.hardware for drain in kept.health.drains] == ["pci:1"]
    assert sorted(it.signal.reason for it in kept.health.latches) == ["xid-48", "xid-79"]


async def test_a_file_that_says_nothing_of_health_takes_nothing_away(tmp_path: Path) -> None:
    run = await Run(tmp_path).begin()
    run.keeper.drain(["pci:1"], "", None)
    await run.keeper.restore()
    assert run.health.of("pci:1").reason == "drained"


async def test_after_a_boot_what_waited_for_it_is_forgotten_in_the_file_too(tmp_path: Path) -> None:
    latch((first := await Run(tmp_path).begin()).health, 1.0, XID)
    await first.keeper.write_health()
    second = await Run(tmp_path, "boot 2").begin()
    assert second.shown() == {"card": ""}
    latch(second.health, 1.0, signal(NOW, "odd", "pci:9"), sequence=1)
    await second.keeper.write_health()
    assert b"xid-79" not in second.file.path.read_bytes().splitlines()[-1]


@pytest.mark.parametrize("until", [WALL, WALL + 100.0, float("nan"), float("inf"), 1e11])
def test_a_drain_must_end_later_than_now_and_on_a_day_that_can_be_named(tmp_path: Path, until: float) -> None:
    run = Run(tmp_path)
    with pytest.raises(FairleadError, match="later than now"):
        run.keeper.drain(["pci:1"], "", until)
    assert run.health.kept().drains == ()


async def test_an_operator_is_told_what_ended_with_the_drain(tmp_path: Path) -> None:
    run = await Run(tmp_path).begin()
    run.keeper.drain(["pci:1"], "", WALL + 200.0)
    latch(run.health, 1.0, XID, signal(NOW, "xid-48", "pci:1", clears_on=[Clears.BOOT]))
    changes, ended = run.keeper.undrain(["pci:1"])
    assert (ended, changes["pci:1"].reason) == (("drained", "xid-79"), "xid-48")
    assert run.keeper.undrain(["pci:1"]) == ({}, ())


async def test_what_is_kept_of_an_earlier_format_is_claims(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text(
        '{"version":1,"claims":[{"resource":"a.example/one","id":"x","backend":"fake"}]}'
    )
    run = await Run(tmp_path).begin()
    assert [claim.id for claim in run.ledger.held()] == ["x"]
    await run.keeper.write_claims()
    assert StateFile(tmp_path).read() == Kept(claims=tuple(run.ledger.held()), releasing=(), boot=BOOT)


async def test_how_devices_were_is_kept_though_the_daemon_is_killed_and_each_change_is_written_once(
    tmp_path: Path,
) -> None:
    first = await Run(tmp_path).begin()
    await first.history.begin()
    for generation, state in enumerate((State.UNHEALTHY, State.HEALTHY, State.DEGRADED)):
        slots = {"card": Slot("card", CARD, Health(state, f"reason-{generation}"))}
        await first.history.listed({}, Snapshot("a.example/one", generation, slots))
        await first.keeper.write_history()
    assert first.file.path.read_bytes().count(b"reason-0") == 1
    second = await Run(tmp_path).begin()
    assert second.history.record() == first.history.record()
    changes = second.history.record().changes
    assert [it.condition.state for it in changes] == ["Unhealthy", "Healthy", "Degraded"]
