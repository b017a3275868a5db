"""The simulated kubelet does to a DRA driver what a real one does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from grpclib.const import Cardinality, Handler

from agent.kubelet.api import dra as api
from agent.kubelet.server import SocketServer
from agent.kubelet.witnesses import list_pods
from agent.simulation.clock import Clock
from agent.simulation.dra import ClaimError, ClaimKey
from agent.simulation.kubelet import Kubelet
from tests.wait import until

DRIVER = "toy.example.com"
CLAIM = ClaimKey(DRIVER, "u1", "train")
Claims = dict[str, api.Prepared]


class ToyDriver:
    """Answers as a test says."""

    def __init__(self, root: Path, kind: str = "DRAPlugin", versions: tuple[str, ...] = ("v1.DRAPlugin",)) -> None:
        self.statuses: list[api.RegistrationStatus] = []
        self.ends = asyncio.Event()
        """Ends the health stream."""
        self.calls: list[tuple[str, list[str]]] = []
        self.prepared: Callable[[list[str]], Claims] = lambda uids: {
            uid: api.Prepared([api.PreparedDevice(["r"], "pool", "dev", [f"toy/c={uid}"])]) for uid in uids
        }
        self._info = api.PluginInfo(kind, DRIVER, str(root / "dra.sock"), list(versions))
        (root / "plugins_registry").mkdir(exist_ok=True)
        self.servers = [SocketServer([self], it) for it in (root / "dra.sock", root / "plugins_registry/toy-reg.sock")]

    def __mapping__(self) -> dict[str, Handler]:
        unary, stream = Cardinality.UNARY_UNARY, Cardinality.UNARY_STREAM
        begin, registration = "/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/Node", "/pluginregistration.Registration/"
        return {
            f"{begin}PrepareResources": Handler(self._prepare, unary, api.Claims, api.PreparedClaims),
            f"{begin}UnprepareResources": Handler(self._unprepare, unary, api.Claims, api.UnpreparedClaims),
            f"{registration}GetInfo": Handler(self._tell, unary, api.Empty, api.PluginInfo),
            f"{registration}NotifyRegistrationStatus": Handler(self._hear, unary, api.RegistrationStatus, api.Empty),
            "/v1alpha1.DRAResourceHealth/NodeWatchResources": Handler(self._watch, stream, api.Empty, api.HealthList),
        }

    async def _tell(self, stream: Any) -> None:
        await stream.recv_message()
        await stream.send_message(self._info)

    async def _hear(self, stream: Any) -> None:
        self.statuses.append(await stream.recv_message())
        await stream.send_message(api.Empty())

    async def _prepare(self, stream: Any) -> None:
        uids = [it.uid for it in (await stream.recv_message()).claims]
        self.calls.append(("prepare", uids))
        await stream.send_message(api.PreparedClaims(self.prepared(uids)))

    async def _unprepare(self, stream: Any) -> None:
        uids = [it.uid for it in (await stream.recv_message()).claims]
        self.calls.append(("unprepare", uids))
        await stream.send_message(api.UnpreparedClaims({uid: api.Unprepared() for uid in uids}))

    async def _watch(self, stream: Any) -> None:
        await stream.recv_message()
        for health in (api.HealthStatus(2), api.HealthStatus(1)):
            device = api.DeviceHealth(api.DeviceIdentifier("pool", "dev"), health, message="so it is")
            await stream.send_message(api.HealthList([device]))
        await self.ends.wait()


@pytest.fixture
async def kubelet(tmp_path: Path) -> AsyncIterator[Kubelet]:
    async with Kubelet(tmp_path, serves_dra=True, clock=Clock(500.0)) as kubelet:
        yield kubelet


@pytest.fixture
async def driver(tmp_path: Path, kubelet: Kubelet) -> AsyncIterator[ToyDriver]:
    driver = ToyDriver(tmp_path)
    for server in driver.servers:
        await server.open()
    await until(lambda: DRIVER in kubelet.drivers.instances)
    yield driver
    driver.ends.set()
    for server in driver.servers:
        await server.shut_down()


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ({}, "NodePrepareResources skipped 1 ResourceClaims"),
        ({"u1": api.Prepared(), "u9": api.Prepared()}, "returned result for unknown claim UID u9"),
        ({"u1": api.Prepared(error="not now")}, "failed for ResourceClaim train: not now"),
    ],
)
async def test_an_answer_that_is_not_about_the_claim_leaves_the_pod_pending(
    kubelet: Kubelet, driver: ToyDriver, answer: Claims, said: str
) -> None:
    well, driver.prepared = driver.prepared, lambda _: answer
    with pytest.raises(ClaimError, match=said):
        await kubelet.drivers.admit("p", [CLAIM])
    driver.prepared = well
    await kubelet.drivers.admit("p", [CLAIM])
    assert kubelet.drivers.cdi_devices("p") == ["toy/c=u1"]


async def test_a_claim_is_prepared_once_listed_and_unprepared_after_its_last_pod_across_a_restart(
    kubelet: Kubelet, driver: ToyDriver
) -> None:
    for pod in ("p", "q"):
        await kubelet.drivers.admit(pod, [CLAIM])
    await kubelet.restart()
    await until(lambda: DRIVER in kubelet.drivers.instances)
    listed = await list_pods(kubelet.pod_resources_socket, 60.0)
    assert [(it.pod, it.claim, it.cdi_devices) for it in listed] == [(pod, "train", ("toy/c=u1",)) for pod in "pq"]
    for pod in ("p", "q"):
        await kubelet.drivers.end(pod)
    assert driver.calls == [("prepare", ["u1"]), ("unprepare", ["u1"])]


async def test_its_connection_lasts_however_much_is_called(kubelet: Kubelet, driver: ToyDriver) -> None:
    for _ in range(2000):  # some frames each; a channel for a few calls ends at 4,096
        await kubelet.drivers.end("p", [CLAIM])
    assert len(driver.calls) == 2000


async def test_a_claim_that_could_not_be_prepared_is_unprepared_too(kubelet: Kubelet, driver: ToyDriver) -> None:
    await kubelet.drivers.end("p", [CLAIM])
    assert driver.calls == [("unprepare", ["u1"])]


async def test_health_is_taken_in_until_the_stream_ends(kubelet: Kubelet, driver: ToyDriver) -> None:
    key = DRIVER, "pool", "dev"
    await until(lambda: kubelet.drivers.health.get(key) == (1, "so it is"))
    driver.ends.set()
    await until(lambda: key not in kubelet.drivers.health)


@pytest.mark.parametrize(("kind", "versions"), [("CSIPlugin", ("v1.DRAPlugin",)), ("DRAPlugin", ("v9.DRAPlugin",))])
async def test_what_is_no_dra_driver_of_a_known_version_is_told_so(
    tmp_path: Path, kubelet: Kubelet, kind: str, versions: tuple[str, ...]
) -> None:
    driver = ToyDriver(tmp_path, kind, versions)
    for server in driver.servers:
        await server.open()
    await until(lambda: driver.statuses)
    assert not driver.statuses[0].plugin_registered
    assert driver.statuses[0].error
    with pytest.raises(ClaimError, match="not registered"):
        await kubelet.drivers.admit("p", [CLAIM])
    for server in driver.servers:
        await server.shut_down()


async def test_slices_are_wiped_at_the_kubelets_start_and_30_seconds_after_the_driver_has_gone(tmp_path: Path) -> None:
    wiped: list[str | None] = []

    async def wipe(driver: str | None) -> None:
        wiped.append(driver)

    kubelet = Kubelet(tmp_path, serves_dra=True, clock=Clock(500.0))
    kubelet.wipe_slices = wipe
    async with kubelet:
        driver = ToyDriver(tmp_path)
        for server in driver.servers:
            await server.open()
        await until(lambda: wiped == [None])
        for server in driver.servers:
            await server.shut_down()
        await until(lambda: wiped == [None, DRIVER])
