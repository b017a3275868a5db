"""The kubelet's DRA side: finds drivers, has ResourceClaims prepared for pods, takes in what drivers say of health.

Contract of DRA: D2, D3, D5, D8. Which driver allocated which claim is handed in, as the kubelet reads it in the API server.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, TypeVar

import msgspec
from grpclib.client import UnaryStreamMethod
from grpclib.exceptions import GRPCError, ProtocolError, StreamTerminatedError
from msgspec import Struct

from agent.kubelet.api import dra as api
from agent.kubelet.api.v1 import CdiDevice, ClaimResource, ContainerResources, DynamicResource, PodResources
from agent.kubelet.client import Channel, listens
from agent.kubelet.wire import Encoded
from agent.simulation.clock import Background, Clock
from backends.interface.decoding import decoded

REGISTRY: Final = "plugins_registry"
STATE: Final = "dra_manager_state"

SCAN: Final = 1.0  # seconds between two looks at the registry (D2)
WIPED_AFTER: Final = 30.0  # seconds without a driver, after which its slices are deleted (D5)
_WIPES_AT_START: Final = 0.002  # seconds after the first registration (D5)
_INFO_DEADLINE, _CALL_DEADLINE = 1.0, 45.0  # seconds (D2, D3)
_HEALTH_RETRY: Final = 5.0  # seconds (D8)
_VERSIONS: Final = ("v1.DRAPlugin", "v1beta1.DRAPlugin")
_HEALTH: Final = "v1alpha1.DRAResourceHealth"  # what 1.36 asks for, whether it is listed or not (D8)
_LOST: Final = (
    OSError,
    StreamTerminatedError,
    ProtocolError,
    AttributeError,
    TimeoutError,
)  # the last but one is grpclib's


_Answer = TypeVar("_Answer")


class ClaimError(Exception):
    """A claim is not prepared, or not unprepared; the text is the Event's, and the kubelet tries again."""


class ClaimKey(Struct, frozen=True):
    """A ResourceClaim, and the driver that allocated its devices."""

    driver: str
    uid: str
    name: str
    namespace: str = "default"


class Instance(Struct, eq=False):
    """One process of a driver, as it is registered."""

    driver: str
    service: str
    endpoint: Path
    channel: Channel
    health: asyncio.Task[None] | None = None

    @property
    def is_connected(self) -> bool:
        """Whether the process still listens. One that was killed leaves its sockets, and stays registered."""
        return listens(self.endpoint)


class _Device(Struct):
    pool: str
    device: str
    cdi: list[str]
    share: str | None = None


class _Prepared(Struct):
    claim: ClaimKey
    devices: list[_Device]
    pods: list[str]


async def keep_slices(_driver: str | None) -> None:
    """There is no API server."""


class Drivers:
    """The drivers of one kubelet process, and the claims of its pods."""

    def __init__(
        self,
        root: Path,
        background: Background,
        clock: Clock,
        wipe: Callable[[str | None], Awaitable[None]] = keep_slices,
    ) -> None:
        """Prepare; `wipe` deletes the node's ResourceSlices, of one driver or of all."""
        self._registry, self._state = root / REGISTRY, root / STATE
        self._background, self._clock, self._wipe = background, clock, wipe
        self._seen: dict[Path, tuple[tuple[int, ...], Instance | None]] = {}
        self._claims: dict[str, _Prepared] = {}
        self._here: set[str] = set()  # drivers that answered at the last look
        self.instances: dict[str, list[Instance]] = {}
        """Driver → its registered processes; the newest is called."""
        self.health: dict[tuple[str, str, str], tuple[api.HealthStatus, str]] = {}
        """Driver, pool and device → what it said last."""
        self.refusals: list[str] = []
        """What drivers were told that were not registered."""

    def start(self) -> None:
        """Read the record, as a kubelet that starts, and look for drivers from now on."""
        self._registry.mkdir(mode=0o750, parents=True, exist_ok=True)
        with suppress(FileNotFoundError):
            self._claims = {it.claim.uid: it for it in decoded(self._state.read_bytes(), list[_Prepared])}
        self._background.spawn(self._watch())

    def close(self) -> None:
        """End every connection."""
        for of in self.instances.values():
            for one in of:
                one.channel.close()
        self.instances.clear()

    # --- registration ---

    async def _watch(self) -> None:
        has_wiped = False
        while True:
            there = {
                path: _identity(path) for path in self._registry.iterdir() if path.name[0] != "." and path.is_socket()
            }
            for path, (identity, instance) in list(self._seen.items()):
                if there.get(path) != identity:
                    del self._seen[path]
                    self._forget(instance)
            for path, identity in there.items():
                if path not in self._seen:
                    with suppress(*_LOST, GRPCError):
                        self._seen[path] = identity, await self._register(path)
                        if not has_wiped:
                            has_wiped = True
                            await self._clock.sleep(_WIPES_AT_START)
                            await self._wipe(None)
            self._note_gone()
            await self._clock.sleep(SCAN)

    async def _register(self, path: Path) -> Instance | None:
        channel = Channel(str(path))
        try:
            begin = "/pluginregistration.Registration/"
            info = await channel.call(begin + "GetInfo", Encoded(), api.PluginInfo, _INFO_DEADLINE)
            service = next((it for it in info.supported_versions if it in _VERSIONS), "")
            if info.type != "DRAPlugin":
                error = f"no handler registered for plugin type: {info.type} at socket {path}"
            elif not service:
                error = f"none of the DRA gRPC service versions in {info.supported_versions} is supported"
            else:
                error = ""
            status = api.RegistrationStatus(not error, error)
            await channel.call(begin + "NotifyRegistrationStatus", Encoded(bytes(status)), api.Empty, _INFO_DEADLINE)
        finally:
            channel.close()
        if error:
            self.refusals.append(error)
            return None
        instance = Instance(info.name, service, Path(info.endpoint), Channel(info.endpoint, math.inf, math.inf))
        self.instances.setdefault(info.name, []).append(instance)
        instance.health = self._background.spawn(self._watch_health(instance))
        return instance

    def _forget(self, instance: Instance | None) -> None:
        if instance is None or instance not in self.instances.get(instance.driver, ()):
            return
        self.instances[instance.driver].remove(instance)
        instance.channel.close()
        if instance.health is not None:
            instance.health.cancel()
        if not self.instances[instance.driver]:
            del self.instances[instance.driver]

    def connected(self, driver: str) -> list[Instance]:
        """The processes of a driver that answer; the newest is called."""
        return [it for it in self.instances.get(driver, ()) if it.is_connected]

    def _note_gone(self) -> None:
        """Have the slices of drivers wiped that do not answer for long enough."""
        here = {driver for driver in self.instances if self.connected(driver)}
        for driver in self._here - here:
            self._background.spawn(self._wipe_later(driver))
        self._here = here

    async def _wipe_later(self, driver: str) -> None:
        await self._clock.sleep(WIPED_AFTER)
        if not self.connected(driver):
            await self._wipe(driver)

    async def _watch_health(self, instance: Instance) -> None:
        while True:
            with suppress(*_LOST, GRPCError):
                method = UnaryStreamMethod(
                    instance.channel, f"/{_HEALTH}/NodeWatchResources", api.Empty, api.HealthList
                )
                async with method.open() as stream:
                    await stream.send_message(api.Empty(), end=True)
                    async for message in stream:
                        told = {
                            (instance.driver, it.device.pool_name, it.device.device_name): (it.health, it.message)
                            for it in message.devices
                        }
                        self.health = self._health_of_others(instance.driver) | told
            self.health = self._health_of_others(instance.driver)
            await self._clock.sleep(_HEALTH_RETRY)

    def _health_of_others(self, driver: str) -> dict[tuple[str, str, str], tuple[api.HealthStatus, str]]:
        return {key: it for key, it in self.health.items() if key[0] != driver}

    # --- claims ---

    def cdi_devices(self, pod: str) -> list[str]:
        """What the container runtime is told of a pod's claims."""
        return [cdi for it in self._claims.values() if pod in it.pods for one in it.devices for cdi in one.cdi]

    @property
    def prepared(self) -> frozenset[str]:
        """The UIDs of the claims that are prepared."""
        return frozenset(self._claims)

    async def admit(self, pod: str, claims: Sequence[ClaimKey]) -> None:
        """Have a pod's claims prepared, each once, however many pods have it.

        Raises:
            ClaimError: one could not be; the others are, and the pod is tried again.
        """
        for driver, those in _by_driver(it for it in claims if it.uid not in self._claims).items():
            answer = await self._call(driver, "NodePrepareResources", those, api.PreparedClaims)
            _check("NodePrepareResources", those, answer.claims)
            for claim in those:
                if error := answer.claims[claim.uid].error:
                    raise ClaimError(f"NodePrepareResources failed for ResourceClaim {claim.name}: {error}")
                devices = [
                    _Device(it.pool_name, it.device_name, it.cdi_device_ids, it.share_id)
                    for it in answer.claims[claim.uid].devices
                ]
                self._claims[claim.uid] = _Prepared(claim, devices, [])
        for claim in claims:
            if pod not in self._claims[claim.uid].pods:
                self._claims[claim.uid].pods.append(pod)
        self._write()

    async def end(self, pod: str, claims: Sequence[ClaimKey] = ()) -> None:
        """A pod has ended: have the claims unprepared that no other has, and those whose preparation failed.

        Raises:
            ClaimError: one could not be; the pod stays Terminating, and it is tried again.
        """
        theirs = {it.claim.uid: it.claim for it in self._claims.values() if pod in it.pods}
        theirs |= {it.uid: it for it in claims if it.uid not in self._claims}
        last = [it for uid, it in theirs.items() if uid not in self._claims or self._claims[uid].pods == [pod]]
        for driver, those in _by_driver(last).items():
            answer = await self._call(driver, "NodeUnprepareResources", those, api.UnpreparedClaims)
            _check("NodeUnprepareResources", those, answer.claims)
            for claim in those:
                if error := answer.claims[claim.uid].error:
                    raise ClaimError(f"NodeUnprepareResources failed for ResourceClaim {claim.name}: {error}")
                self._claims.pop(claim.uid, None)
        for it in self._claims.values():
            if pod in it.pods:
                it.pods.remove(pod)
        self._write()

    async def _call(self, driver: str, method: str, claims: Iterable[ClaimKey], answer: type[_Answer]) -> _Answer:
        if not self.instances.get(driver):
            raise ClaimError(f"DRA driver {driver} is not registered")
        instance = next(reversed(self.connected(driver)), self.instances[driver][-1])
        request = api.Claims([api.Claim(it.namespace, it.uid, it.name) for it in claims])
        path = f"/k8s.io.kubelet.pkg.apis.dra.{instance.service}/{method}"
        try:
            return await instance.channel.call(path, Encoded(bytes(request)), answer, _CALL_DEADLINE)
        except GRPCError as error:
            raise ClaimError(f"rpc error: code = {error.status.name} desc = {error.message}") from error
        except _LOST as error:
            raise ClaimError(f"rpc error: code = Unavailable desc = {error}") from error

    def _write(self) -> None:
        self._state.write_bytes(msgspec.json.encode(list(self._claims.values())))

    def resources(self) -> Iterator[PodResources]:
        """What podresources' List says of the pods with claims; each has one container."""
        pods = dict.fromkeys(pod for it in self._claims.values() for pod in it.pods)
        for pod in pods:
            has = [
                DynamicResource(
                    it.claim.name,
                    it.claim.namespace,
                    [
                        ClaimResource(
                            [CdiDevice(cdi) for cdi in one.cdi], it.claim.driver, one.pool, one.device, one.share
                        )
                        for one in it.devices
                    ],
                )
                for it in self._claims.values()
                if pod in it.pods
            ]
            yield PodResources(pod, has[0].claim_namespace, [ContainerResources("main", dynamic_resources=has)])


def _by_driver(claims: Iterable[ClaimKey]) -> dict[str, list[ClaimKey]]:
    found: dict[str, list[ClaimKey]] = {}
    for it in claims:
        found.setdefault(it.driver, []).append(it)
    return found


def _check(call: str, asked: Sequence[ClaimKey], answered: Mapping[str, object]) -> None:
    """A driver answers for each claim, and for no other."""
    uids = {it.uid for it in asked}
    if strange := answered.keys() - uids:
        raise ClaimError(f"{call} returned result for unknown claim UID {min(strange)}")
    if skipped := uids - answered.keys():
        raise ClaimError(f"{call} skipped {len(skipped)} ResourceClaims")


def _identity(path: Path) -> tuple[int, ...]:
    found = path.lstat()
    return found.st_dev, found.st_ino, found.st_ctime_ns
