"""The kubelet finds the driver, hears of its devices' health, and neither's restart loses or doubles a claim."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest
from grpclib.client import UnaryStreamMethod

from agent.discovery.paths import POLL
from agent.dra import driver as module
from agent.dra import preparation
from agent.dra.driver import DRA_SERVICES, HEALTH_SERVICES
from agent.dra.names import pool_name
from agent.kubelet.api import dra as messages
from agent.kubelet.client import Channel
from agent.kubelet.wire import Encoded
from agent.kubelet.witnesses import PodResourcesError, list_pods
from agent.model import HEALTHY as WELL
from agent.model import Held
from agent.runtime.limits import SOCKET_PATH_LIMIT
from agent.simulation.dra import ClaimError, ClaimKey
from tests.background import running
from tests.dra.driven import DRIVER, NODE, POOL, SHARED, TOY, Stage, only, staged, toy
from tests.wait import PATIENCE, limit, pass_time, settled, until

HEALTHY, UNHEALTHY = messages.HealthStatus.HEALTHY, messages.HealthStatus.UNHEALTHY


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    async with staged(tmp_path) as stage:
        yield stage


def registry(stage: Stage) -> list[str]:
    return sorted(it.name for it in (stage.kubelet.root / "plugins_registry").iterdir())


# --- registration ---


async def test_the_kubelet_is_told_where_the_driver_listens_and_every_service_that_it_has(stage: Stage) -> None:
    channel = Channel(str(stage.kubelet.root / "plugins_registry" / only(registry(stage))))
    async with limit():
        path = "/pluginregistration.Registration/GetInfo"
        info = await channel.call(path, Encoded(), messages.PluginInfo)
    channel.close()
    assert (info.type, info.name) == ("DRAPlugin", DRIVER)
    assert info.supported_versions == [*DRA_SERVICES, *HEALTH_SERVICES]
    assert Path(info.endpoint).is_socket()
    assert stage.driver.registered


async def test_a_kubelet_that_does_not_take_the_driver_is_reported_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "DRA_SERVICES", ("v9.DRAPlugin",))
    stage = Stage(tmp_path)
    async with stage.kubelet, running(stage.driver.run):
        await until(lambda: stage.driver.complaint)
        assert "none of the DRA gRPC service versions" in stage.driver.complaint
        assert [it.part for it in stage.problems.lasting()] == ["dra"]
    stage.jobs.close()


async def test_a_second_process_serves_beside_the_first_and_goes_on_when_that_is_gone(stage: Stage) -> None:
    claim = stage.api.allocate("train", "a")
    await stage.admit("p", claim)
    async with stage.serving():
        await stage.admit("q", stage.api.allocate("other", "b"))
        await stage.end("p")
        assert stage.held() == {"b": "other"}
        assert stage.files.keys() == {f"dra.{DRIVER}-claim_uid-other.json"}
    await stage.end("q")
    assert stage.held() == {}


async def test_sockets_go_with_the_process_and_those_of_one_that_was_killed_with_the_next(stage: Stage) -> None:
    dead = stage.kubelet.root / "plugins_registry" / f"{DRIVER}-01234567-reg.sock"
    others = stage.kubelet.root / "plugins_registry" / "another.example.com-reg.sock"
    for path in (dead, others):
        with socket.socket(socket.AF_UNIX) as left:
            left.bind(str(path))
    async with stage.serving():
        assert dead.name not in registry(stage)
    assert len(registry(stage)) == 2
    assert others.name in registry(stage)


async def test_sockets_that_are_removed_are_made_again(stage: Stage) -> None:
    before = only(registry(stage))
    (stage.kubelet.root / "plugins_registry" / before).unlink()
    pass_time(POLL)
    await until(lambda: registry(stage) and registry(stage) != [before])
    await until(lambda: stage.instances)
    await stage.admit("p", stage.api.allocate("train", "a"))


async def test_a_node_whose_kubelet_has_never_run_is_served_once_it_does(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    async with running(stage.driver.run):
        await until(stage.problems.lasting)
        async with stage.kubelet:
            pass_time(1.0)
            await until(lambda: stage.instances)
            assert stage.problems.lasting() == []
    stage.jobs.close()


async def test_a_driver_with_a_long_name_has_sockets_all_the_same(tmp_path: Path) -> None:
    registry = tmp_path
    room = SOCKET_PATH_LIMIT - len(os.fsencode(registry)) - len("/-01234567-reg.sock")
    assert module._stem("d" * room, registry) == "d" * room
    assert len(module._stem("d" * (room + 1), registry)) == len("dra-") + 16


# --- restarts ---


async def test_a_kubelet_that_restarts_goes_on_with_what_is_prepared(stage: Stage) -> None:
    claim = stage.api.allocate("train", "a")
    await stage.admit("p", claim)
    await stage.kubelet.restart()
    await until(lambda: stage.instances)
    await stage.admit("p", claim)
    assert len(stage.asked("claim")) == 1
    await stage.end("p")
    assert stage.held() == {}


async def test_a_claim_is_not_made_ready_again_by_the_next_process_but_is_after_a_boot(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    async with stage.kubelet:
        claim = stage.api.allocate("train", "a")
        for boot, made_ready in (("boot-1", 1), ("boot-1", 1), ("boot-2", 2)):
            stage.boot(boot)
            if boot == "boot-2":
                (tmp_path / f"run/cdi/dra.{DRIVER}-claim_uid-train.json").unlink()  # /run is empty
            async with stage.serving():
                stage.lose_record()
                await stage.admit("p", claim)
                assert stage.nodes("p") == ["/dev/a"]
                assert len(stage.asked("claim")) == made_ready
        (held,) = stage.ledger.held()
        assert held.claim is not None
        assert held.claim.boot == "boot-2"
    stage.jobs.close()


async def test_a_file_that_outlives_a_boot_is_no_proof_that_the_hardware_is_ready(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    async with stage.kubelet:
        for boot in ("boot-1", "boot-2"):
            stage.boot(boot)
            async with stage.serving():
                stage.lose_record()
                await stage.admit("p", stage.api.allocate("train", "a"))
    assert len(stage.asked("claim")) == 2
    stage.jobs.close()


async def test_a_claim_is_unprepared_without_the_api_server_by_a_process_that_did_not_prepare_it(
    tmp_path: Path,
) -> None:
    stage = Stage(tmp_path)
    async with stage.kubelet:
        async with stage.serving(stage.driver):
            await stage.admit("p", stage.api.allocate("train", "a"))
        stage.api.away = "https://10.0.0.1: it does not answer"
        async with stage.serving():
            await stage.end("p")
            assert (stage.held(), stage.files) == ({}, {})
    stage.jobs.close()


@pytest.mark.parametrize("is_emptied", [False, True])
async def test_hardware_that_a_pod_runs_with_is_not_reset_for_a_second_pod_of_its_claim_however_late_its_claims_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_emptied: bool
) -> None:
    stage = Stage(tmp_path, "reset")
    async with stage.kubelet:
        claim = stage.api.allocate("train", "a")
        async with stage.serving(stage.driver):
            await stage.admit("p", claim)
            listed = await list_pods(stage.kubelet.pod_resources_socket, PATIENCE)
        monkeypatch.setattr(preparation, "_FIRST_COLLECTION", 0)  # a disk that takes longer
        stage.lose_record()  # by which a kubelet that has restarted knows what it has had prepared
        if is_emptied:  # by another program
            (tmp_path / f"run/cdi/dra.{DRIVER}-claim_uid-train.json").unlink()
        async with stage.serving():
            if is_emptied:
                monkeypatch.setattr(preparation, "list_pods", AsyncMock(side_effect=PodResourcesError("no answer")))
                with pytest.raises(ClaimError, match="is not known: no answer"):
                    await stage.admit("q", claim)
                monkeypatch.setattr(preparation, "list_pods", AsyncMock(return_value=listed))
            await stage.admit("q", claim)
            assert stage.asked("prepare") == [["a"]]
            assert stage.nodes("q") == ["/dev/a"]
    stage.jobs.close()


async def test_a_specification_that_another_program_removes_is_written_again_by_this_process_and_by_the_next(
    tmp_path: Path,
) -> None:
    def remove_all() -> None:
        for path in (tmp_path / "run/cdi").iterdir():
            path.unlink()

    stage = Stage(tmp_path, "reset")
    async with stage.kubelet:
        async with stage.serving(stage.driver):
            await stage.admit("p", stage.api.allocate("train", "a"))
            await stage.admit("monitor", stage.api.allocate("observe", "a", adminAccess=True))
            before = stage.files
            remove_all()
            stage.api.away = "https://10.0.0.1: it does not answer"
            pass_time(10.0)
            await until(lambda: len(stage.problems.lasting()) == 2, seen=stage.problems.lasting)
            assert stage.problems.lasting()[0].sentence.startswith(
                "the CDI specification of ResourceClaim default/observe was removed: ResourceClaim default/observe cannot be read"
            )
            stage.api.away = ""
            pass_time(10.0)
            await until(lambda: not stage.problems.lasting())
            assert stage.files == before
            await stage.end("monitor")
        remove_all()
        async with stage.serving():
            pass_time(10.0)
            await until(lambda: stage.files)
            assert stage.nodes("p") == ["/dev/a"]
            assert stage.asked("prepare") == [["a"]]
            await stage.end("p")
            pass_time(10.0)
            await settled()
            assert stage.files == {}
    stage.jobs.close()


# --- what ended while no process of ours ran ---


async def test_claims_that_ended_while_nobody_served_are_collected_and_those_of_pods_are_kept(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    async with stage.kubelet:
        async with stage.serving(stage.driver):
            await stage.admit("runs", stage.api.allocate("runs", "a"))
            await stage.admit("gone", stage.api.allocate("gone", "b"))
            await stage.admit("idle", stage.api.allocate("idle", "c"))
            await stage.admit("monitor", stage.api.allocate("observe", "a", adminAccess=True))
            await stage.admit("old", stage.api.allocate("watched", "a", adminAccess=True))
            (tmp_path / f"run/cdi/dra.{DRIVER}-claim_uid-watched.json").unlink()  # as a boot does
        for uid in ("uid-gone", "uid-idle", "uid-watched"):  # the kubelet knows of their pods' ends
            stage.lose_record(uid)
        del stage.api.claims["default", "gone"]
        stage.api.claims["default", "idle"]["status"]["reservedFor"] = []
        async with stage.serving():
            await until(lambda: stage.held() == {"a": "runs"}, seen=stage.held)
            await until(lambda: len(stage.files) == 2, seen=lambda: stage.files.keys())
        assert sorted(it.id for it in stage.owners.released) == ["b", "c"]
        assert stage.files.keys() == {f"dra.{DRIVER}-claim_uid-{it}.json" for it in ("runs", "observe")}
        metadata = stage.kubelet.root / "plugins" / DRIVER / "dra-device-metadata"
        assert {it.name for it in metadata.iterdir()} == {"uid-runs", "uid-observe"}
    stage.jobs.close()


async def test_nothing_is_collected_while_the_kubelet_or_the_api_server_cannot_be_asked(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    async with stage.kubelet:
        async with stage.serving(stage.driver):
            await stage.admit("gone", stage.api.allocate("gone", "b"))
        stage.lose_record("uid-gone")
        del stage.api.claims["default", "gone"]
        stage.api.away, before = "https://10.0.0.1: it does not answer", stage.api.asked
        async with stage.serving():
            await until(lambda: stage.api.asked > before)
            assert stage.held() == {"b": "gone"}
            stage.api.away = ""
            pass_time(10.0)
            await until(lambda: stage.held() == {})
    stage.jobs.close()


async def test_a_kubelet_that_lists_no_pod_yet_costs_no_pod_its_devices(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    async with stage.kubelet:
        await lose_a_claim(stage)
        async with stage.serving():
            await stage.admit("monitor", stage.api.allocate("observe", "a", adminAccess=True))  # has no record, ever
        stage.inventory.unclaim(stage.ledger.unprepared("uid-train"))
        there, specs = dict(stage.drivers._claims), stage.files
        stage.drivers._claims.clear()  # what a kubelet lists that has just begun (kubelet contract: A5)
        stage.api.away = "https://10.0.0.1: it does not answer"
        async with stage.serving() as driver:
            assert stage.files == specs
            assert not driver.preparer.adopted.is_set()
            stage.api.away = ""
            pass_time(10.0)
            await driver.preparer.adopted.wait()
            assert stage.files == specs
            assert stage.held() == {"a": "train"}
            stage.drivers._claims.update(there)
            await stage.end("p")
            await stage.end("monitor")
            assert (stage.held(), stage.files) == ({}, {})
    stage.jobs.close()


async def test_a_specification_whose_claim_nobody_can_name_stays(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    async with stage.kubelet:
        await lose_a_claim(stage)
        stage.drivers._claims.clear()
        shutil.rmtree(stage.kubelet.root / "plugins" / DRIVER / "dra-device-metadata")
        async with stage.serving() as driver:
            await driver.preparer.adopted.wait()
            assert len(stage.files) == 1
    stage.jobs.close()


async def test_a_claim_that_is_not_recorded_and_ended_while_nobody_served_leaves_nothing(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    async with stage.kubelet:
        await lose_a_claim(stage)
        stage.drivers._claims.clear()
        stage.api.claims["default", "train"]["status"]["reservedFor"] = []
        async with stage.serving() as driver:
            await driver.preparer.adopted.wait()
            assert (stage.held(), stage.files) == ({}, {})
    stage.jobs.close()


@pytest.mark.parametrize("is_lost", [False, True])
async def test_a_driver_of_another_name_knows_what_pods_have_by_the_one_before(tmp_path: Path, is_lost: bool) -> None:
    stage = Stage(tmp_path)
    async with stage.kubelet:
        async with stage.serving(stage.driver):
            await stage.admit("p", stage.api.allocate("train", "a"))
        if is_lost:
            stage.inventory.unclaim(stage.ledger.unprepared("uid-train"))
        else:
            stage.drivers._claims.clear()  # as long as the kubelet does not list the pod
        other = stage.another_process("other.example.com")
        async with running(other.run):
            async with limit():
                await other.preparer.adopted.wait()
            assert stage.held() == {"a": "train"}
    stage.jobs.close()


async def test_drivers_of_two_names_take_up_each_its_own_claims_and_never_one_token_for_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage, names = Stage(tmp_path), (DRIVER, "other.example.com")
    tokens = {"pool": pool_name(NODE, SHARED), "device": "kvm", "consumedCapacity": {"tokens": "1"}}

    @asynccontextmanager
    async def both() -> AsyncIterator[None]:
        drivers = [stage.another_process(name, other) for name, other in (names, names[::-1])]
        async with running(drivers[0].run), running(drivers[1].run):
            async with limit():
                for it in drivers:
                    await it.preparer.adopted.wait()
            await until(lambda: all(stage.drivers.connected(name) for name in names))
            yield

    async with stage.kubelet:
        async with both():
            for number, name in enumerate(names):
                result = {"request": "r", "driver": name, "shareID": f"s{number}", **tokens}
                key = stage.api.put(f"c{number}", [result])
                await stage.admit(f"p{number}", ClaimKey(name, key.uid, key.name))
        for uid in ("uid-c0", "uid-c1"):
            stage.inventory.unclaim(stage.ledger.unprepared(uid))
        get, asked = stage.api.get, stage.api.asked

        async def at_once(namespace: str, name: str) -> Mapping[str, Any]:
            found = await get(namespace, name)
            await until(lambda: stage.api.asked >= asked + 2, "both drivers have asked")
            return found

        keep, kept = stage.owners.allocated, list[Held]()

        async def keep_at_once(given: Sequence[Held]) -> None:
            kept.extend(given)
            await until(lambda: len(kept) >= len(names), "both drivers have chosen a token")
            await keep(given)

        monkeypatch.setattr(stage.api, "get", at_once)
        monkeypatch.setattr(stage.owners, "allocated", keep_at_once)
        async with both():
            assert sorted(stage.held().values()) == ["c0", "c1"]
            assert {it.claim.driver for it in stage.ledger.held() if it.claim is not None} == set(names)
            assert stage.problems.lasting() == []
            assert stage.api.asked == asked + 2
            await stage.end("p0")
            await stage.end("p1")
            assert (stage.held(), stage.files) == ({}, {})
    stage.jobs.close()


async def lose_a_claim(stage: Stage) -> None:
    """Have a pod get `a` by the claim "train", and our state lost."""
    async with stage.serving(stage.driver):
        await stage.admit("p", stage.api.allocate("train", "a"))
    stage.inventory.unclaim(stage.ledger.unprepared("uid-train"))


async def test_claims_of_running_pods_are_known_again_where_our_state_was_lost(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    async with stage.kubelet:
        await lose_a_claim(stage)
        async with stage.serving():
            assert stage.held() == {"a": "train"}  # before anything can be prepared
            with pytest.raises(ClaimError, match="in use"):
                await stage.admit("q", stage.api.allocate("other", "a"))
            assert len(stage.asked("claim")) == 1
    stage.jobs.close()


async def test_a_claim_whose_device_is_away_while_our_state_is_lost_is_known_again_once_it_is_back(
    tmp_path: Path,
) -> None:
    stage = Stage(tmp_path)
    async with stage.kubelet:
        await lose_a_claim(stage)
        stage.gone("a")
        before = stage.api.asked
        async with stage.serving():
            await until(lambda: stage.api.asked > before)
            await settled()
            assert stage.held() == {}
            stage.found(toy("a", attributes={"is": ("toy",)}))
            pass_time(10.0)
            await until(lambda: stage.held() == {"a": "train"})
    stage.jobs.close()


async def test_a_claim_that_is_not_recorded_is_known_before_its_resource_changes_to_device_plugins(
    tmp_path: Path,
) -> None:
    stage = Stage(tmp_path)
    async with stage.kubelet:
        await lose_a_claim(stage)
        stage.gone("a")
        stage.serves.remove(TOY)
        async with stage.serving() as driver:
            (told,) = stage.problems.lasting()
            assert told.sentence.startswith("ResourceClaim default/train, which a pod has, is not recorded: Device a ")
            assert not driver.preparer.adopted.is_set()
            stage.found(toy("a", attributes={"is": ("toy",)}))
            pass_time(10.0)
            await driver.preparer.adopted.wait()
            assert stage.held() == {"a": "train"}
            assert stage.problems.lasting() == []
    stage.jobs.close()


# --- health ---


async def test_the_kubelet_shows_the_sentence_of_a_device_that_fails_and_when_it_is_well_again(stage: Stage) -> None:
    def health() -> object:
        return stage.drivers.health.get((DRIVER, POOL, "a"))

    await until(lambda: health() == (HEALTHY, ""))
    stage.sick("a", "it fell off the bus")
    stage.driver.changed()
    await until(lambda: health() == (UNHEALTHY, "it fell off the bus"), seen=health)
    stage.inventory.set_health({"toy:a": WELL})
    stage.driver.changed()
    await until(lambda: health() == (HEALTHY, ""))


async def test_a_device_that_is_gone_is_unhealthy_to_the_pod_that_has_it_and_unknown_to_the_kubelet_else(
    stage: Stage,
) -> None:
    await stage.admit("p", stage.api.allocate("train", "a"))
    stage.gone("a")
    stage.gone("b")
    stage.driver.changed()
    await until(lambda: stage.drivers.health.get((DRIVER, POOL, "a"), (0, ""))[0] == UNHEALTHY)
    assert (DRIVER, POOL, "b") not in stage.drivers.health
    assert "gone" in stage.drivers.health[DRIVER, POOL, "a"][1]


async def test_both_versions_of_the_health_stream_are_sent_again_in_time_though_nothing_changes(stage: Stage) -> None:
    endpoint = stage.drivers.instances[DRIVER][0].channel
    for service in HEALTH_SERVICES:
        method = UnaryStreamMethod(endpoint, f"/{service}/NodeWatchResources", messages.Empty, messages.HealthList)
        async with limit(), method.open() as stream:
            await stream.send_message(messages.Empty(), end=True)
            first = await stream.recv_message()
            assert first is not None
            assert {it.device.device_name for it in first.devices} == {"a", "b", "c", "kvm"}
            assert {it.health_check_timeout_seconds for it in first.devices} == {module.HEALTH_TIMEOUT}
            assert {it.last_updated_time for it in first.devices} == {1000}
            pass_time(module.HEALTH_TIMEOUT / 2)
            assert await stream.recv_message() == first
            await stream.cancel()


async def test_a_storm_of_changes_is_a_few_messages(stage: Stage) -> None:
    endpoint = stage.drivers.instances[DRIVER][0].channel
    method = UnaryStreamMethod(
        endpoint, f"/{HEALTH_SERVICES[0]}/NodeWatchResources", messages.Empty, messages.HealthList
    )
    async with limit(), method.open() as stream:
        await stream.send_message(messages.Empty(), end=True)
        count, last = 0, ""
        for n in range(100):
            stage.sick("a", f"fault {n}")
            stage.driver.changed()
        while last != "fault 99":
            message = await stream.recv_message()
            assert message is not None
            count, last = count + 1, next(it.message for it in message.devices if it.device.device_name == "a")
        assert count <= 4
        await stream.cancel()


class SlowClient:
    """A stream of health whose client takes its time for a message while `takes` is not set."""

    def __init__(self) -> None:
        self.got = list[bytes]()
        self.takes = asyncio.Event()
        self.takes.set()

    async def recv_message(self) -> messages.Empty:
        return messages.Empty()

    async def send_message(self, message: Encoded) -> None:
        self.got.append(bytes(message))
        await self.takes.wait()


async def test_a_change_that_comes_while_a_client_takes_a_message_is_told_to_it_next_though_the_kubelet_has_it_by_then(
    stage: Stage,
) -> None:
    slow: Any = SlowClient()
    async with running(partial(stage.driver._watch, slow)):
        await until(lambda: slow.got)
        slow.takes.clear()
        stage.sick("a", "fault 1")
        stage.driver.changed()
        await until(lambda: b"fault 1" in slow.got[-1])
        stage.sick("b", "fault 2")
        stage.driver.changed()
        await until(lambda: stage.drivers.health[DRIVER, POOL, "b"] == (UNHEALTHY, "fault 2"))
        pass_time(1)
        slow.takes.set()
        for _ in range(50):
            await asyncio.sleep(0)
        assert b"fault 2" in slow.got[-1], "not only with the next message that comes by time"
