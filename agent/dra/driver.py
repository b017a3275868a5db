"""Serves the kubelet as a DRA driver: registration, prepare and unprepare of ResourceClaims, and the health of devices.

The kubelet finds the registration socket in `plugins_registry`, asks where the other is, and calls that (kubelet contract of
DRA: D2, D3, D8). Each process has sockets of its own, so that two instances can be registered while one follows the other.
What goes wrong with a claim is a sentence in its answer: the kubelet shows it in an Event, and asks again.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import anyio
import structlog
from grpclib.const import Cardinality, Handler, Status
from grpclib.server import Stream
from msgspec import Struct

from agent.discovery.paths import POLL
from agent.dra.names import digest, pool_name
from agent.dra.preparation import Called, House, Preparer, ReadClaim
from agent.kubelet import wire
from agent.kubelet.client import listens
from agent.kubelet.server import SocketServer, refusal
from agent.kubelet.wire import ClaimsCall, EmptyCall, Encoded, PreparedDevice, RegistrationStatus
from agent.model import Health, Slot
from agent.runtime.errors import brief, shown, words
from agent.runtime.limits import SOCKET_PATH_LIMIT
from agent.runtime.pacing import Credit
from agent.runtime.problems import Problems
from agent.runtime.workers import in_slices
from backends.base import AllocationRefused

PLUGIN_TYPE: Final = "DRAPlugin"
"""What the kubelet's plugin manager calls a DRA driver (pkg/apis/pluginregistration/v1/constants.go)."""

DRA_SERVICES: Final = ("v1.DRAPlugin", "v1beta1.DRAPlugin")
"""As they are listed at registration: the kubelet takes the first that it knows. Both have the same messages."""
HEALTH_SERVICES: Final = ("v1.DRAResourceHealth", "v1alpha1.DRAResourceHealth")
"""The same for health: kubelets from 1.37 on ask only for what is listed, those before ask anyway."""
DRA_PACKAGE: Final = "k8s.io.kubelet.pkg.apis.dra."
"""Before the services' names in the paths of calls."""

HEALTH_TIMEOUT: Final = 90
"""Seconds without a message after which the kubelet calls every device Unknown; a third of it is between two messages."""

_RESEND: Final = HEALTH_TIMEOUT / 3
_AT_ONCE, _PERIOD = 3, 0.5  # health lists: some at once, then one in so many seconds
_MOST_MESSAGE: Final = 1000  # characters that the kubelet shows: 1024 with what `brief` adds
_RETRY: Final = 1.0  # seconds before sockets are tried again
_STOP_PATIENCE: Final = 5.0  # seconds that calls under way get at the end
_SAID: Final = 1000  # claims whose errors are remembered

log = structlog.get_logger()

Call = Callable[[Called], Awaitable[Any]]


class DriverConfig(Struct, frozen=True):
    """Who serves, and where."""

    name: str
    """The driver's, a DNS subdomain."""
    node: str
    """The Node's name."""
    kubelet_root: Path
    """The kubelet's --root-dir; the kubelet must know the sockets below it by the same paths."""


class Driver:
    """The driver of one node."""

    def __init__(
        self,
        config: DriverConfig,
        house: House,
        claim: ReadClaim,
        serves: Callable[[], Iterable[str]],
        problems: Problems,
        *,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """Prepare.

        Args:
            config: who we are.
            house: the daemon's parts.
            claim: asks the API server for a ResourceClaim.
            serves: names the resources that are served by dynamic resource allocation now.
            problems: is told of what fails.
            wall: seconds since 1970.
        """
        self.config = config
        self.complaint = ""
        """Why the kubelet did not register us; empty if it did, or was not seen yet."""
        self.registered = False
        """Whether a kubelet has registered us."""
        self._house, self._serves, self._wall = house, serves, wall
        self._said: dict[str, str] = {}
        self._news = asyncio.Event()
        """Set by the next change; each change has its own, since several streams wait for it."""
        self._is_stopping = False
        self._troubled = problems.trouble(
            "dra", f"the kubelet cannot reach the DRA driver {config.name}", "dra-not-served", "dra-served",
            then="trying again",
        )  # fmt: skip
        self._refused = problems.trouble("dra", f"the kubelet does not register {config.name}", "dra-not-registered")
        registry = config.kubelet_root / "plugins_registry"
        self._places = (config.kubelet_root / "plugins" / config.name, registry)
        self.preparer = Preparer(config.name, config.node, house, claim, serves, self._places[0], problems)

    def changed(self) -> None:
        """A list, or what is held of one, has changed."""
        news, self._news = self._news, asyncio.Event()
        news.set()

    # --- sockets ---

    async def run(self) -> None:
        """Serve until cancelled, also where the kubelet's directories come late or are made again."""
        self._is_stopping = False
        await self.preparer.begin()
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self.preparer.collect)
                while True:
                    try:
                        await self._serve()
                    except OSError as error:
                        self._troubled.report_once(words(error))
                        await asyncio.sleep(_RETRY)
        finally:
            self.preparer.close()

    async def _serve(self) -> None:
        """Serve on two new sockets, until one of them is not there any more.

        Raises:
            OSError: one cannot be made.
        """
        ours, registry = self._places
        ours.mkdir(mode=0o750, parents=True, exist_ok=True)
        mark = os.urandom(4).hex()
        service = SocketServer([self], ours / f"dra-{mark}.sock")
        stem = _stem(self.config.name, registry)
        registration = SocketServer([_Registration(self, service.path)], registry / f"{stem}-{mark}-reg.sock")
        _remove_dead(ours, re.compile(r"dra-[0-9a-f]{8}\.sock"))
        try:
            await service.open()
            _remove_dead(registry, re.compile(rf"{re.escape(stem)}-[0-9a-f]{{8}}-reg\.sock"))
            await registration.open()
            self._troubled.healed()
            log.info("dra-serving", driver=self.config.name, socket=str(registration.path))
            while service.is_reachable() and registration.is_reachable():  # noqa: ASYNC110  # no event tells of all
                await asyncio.sleep(POLL)
            log.warning("dra-socket-removed", socket=str(registration.path), then="making it again")
        finally:
            with anyio.CancelScope(shield=True):
                await registration.shut_down()  # the kubelet calls no more
                self._is_stopping = True
                self.changed()
                await service.shut_down(_STOP_PATIENCE)
                self._is_stopping = self.registered = False

    def notified(self, status: RegistrationStatus) -> None:
        """Take in whether the kubelet has registered us."""
        self.registered, self.complaint = status.is_registered, brief(status.error)
        if self.registered:
            self._refused.healed()
            log.info("dra-registered", driver=self.config.name)
        else:
            self._refused.report_once(self.complaint or "it does not say why")

    # --- what the kubelet calls ---

    def __mapping__(self) -> dict[str, Handler]:
        """The handlers as grpclib wants them."""
        unary, stream = Cardinality.UNARY_UNARY, Cardinality.UNARY_STREAM
        handlers: dict[str, Handler] = {}
        for service in DRA_SERVICES:
            begin = f"/{DRA_PACKAGE}{service}/"
            handlers[begin + "NodePrepareResources"] = Handler(self._prepare_all, unary, ClaimsCall, Encoded)
            handlers[begin + "NodeUnprepareResources"] = Handler(self._unprepare_all, unary, ClaimsCall, Encoded)
        for service in HEALTH_SERVICES:
            handlers[f"/{service}/NodeWatchResources"] = Handler(self._watch, stream, EmptyCall, Encoded)
        return handlers

    async def _prepare_all(self, stream: Stream[ClaimsCall, Encoded]) -> None:
        called = await _called(stream)
        answers = await asyncio.gather(*map(self._prepare, called))
        await stream.send_message(
            wire.encode_prepared({it.uid: answer for it, answer in zip(called, answers, strict=True)})
        )

    async def _prepare(self, called: Called) -> tuple[list[PreparedDevice], str]:
        ready, error = await self._tried(called, self.preparer.prepare)
        if not error:
            log.info("claim-prepared", claim=str(called), uid=called.uid)
        elif self._took_note(called, error):
            log.warning("claim-not-prepared", claim=str(called), uid=called.uid, reason=error)
        return ready or [], error

    async def _unprepare_all(self, stream: Stream[ClaimsCall, Encoded]) -> None:
        called = await _called(stream)
        errors = await asyncio.gather(*map(self._unprepare, called))
        await stream.send_message(
            wire.encode_unprepared({it.uid: error for it, error in zip(called, errors, strict=True)})
        )

    async def _unprepare(self, called: Called) -> str:
        _, error = await self._tried(called, self.preparer.unprepare)
        if not error:
            log.info("claim-unprepared", claim=str(called), uid=called.uid)
        elif self._took_note(called, error):
            log.warning("claim-not-unprepared", claim=str(called), uid=called.uid, reason=error)
        return error

    async def _tried(self, called: Called, call: Call) -> tuple[Any, str]:
        """What a call for one claim gives, and why it failed: one claim's failure is none of the others'."""
        try:
            made = await call(called)
        except AllocationRefused as refused:
            return None, refused.sentence
        except Exception as error:
            log.exception("dra-failed", claim=str(called))
            return None, (
                f"{called} could not be dealt with: Fairlead failed ({shown(error)}). This node's administrator finds the "
                "details in Fairlead's log."
            )
        self._said.pop(called.uid, None)
        self.changed()
        return made, ""

    def _took_note(self, called: Called, error: str) -> bool:
        """Note the error as the claim's last; False if it was that already. The kubelet asks again and again."""
        if self._said.get(called.uid) == error:
            return False
        if len(self._said) > _SAID:
            self._said.clear()
        self._said[called.uid] = error
        return True

    # --- health ---

    async def _watch(self, stream: Stream[EmptyCall, Encoded]) -> None:
        """Send the health of all devices, whenever it changes, and again in time."""
        await _receive(stream)
        credit, sent, due = Credit(_AT_ONCE, _PERIOD), None, 0.0
        loop = asyncio.get_running_loop()
        while not self._is_stopping:
            if (wait := credit.wait(loop.time())) > 0:
                await asyncio.sleep(wait)
            news = self._news
            now = [it for name in self._serves() for it in self._healths(name)]
            if now != sent or loop.time() >= due:
                at = int(self._wall())
                parts = await in_slices(_encoded(it, at) for it in now)
                await stream.send_message(Encoded(b"".join(parts)))  # messages one after the other are merged
                sent, due = now, loop.time() + _RESEND
                credit.spend(loop.time())
            with anyio.CancelScope(deadline=due):  # not a duration: rounded, it may end before `due`, and again at once
                await news.wait()

    def _healths(self, resource: str) -> Iterator[DeviceHealth]:
        """Of each device of a resource, and of those that are gone and that claims have."""
        pool, inventory = pool_name(self.config.node, resource), self._house.inventory
        slots, claims = inventory.slots(resource), inventory.claims(resource)
        told = set[str]()
        for name, found in self.preparer.devices(resource).items():
            ids = found.placed.ids if found.placed is not None else ()
            if (health := health_of([slots[it] for it in ids if it in slots], claims)) is not None:
                told.add(name)
                yield DeviceHealth(pool, name, health)
        for device_id, held in claims.items():
            if held.claim is not None and held.claim.device not in told and device_id in slots:
                told.add(held.claim.device)
                yield DeviceHealth(held.claim.pool, held.claim.device, slots[device_id].health)


class DeviceHealth(Struct, frozen=True):
    """How a device is, as the kubelet shows it in the status of its pods."""

    pool: str
    device: str
    health: Health


def health_of(slots: Sequence[Slot], held: Collection[str]) -> Health | None:
    """The health of a device by its IDs: of those that are held, if any are, the worst; else the best."""
    theirs = [it.health for it in slots if it.id in held]
    if theirs:
        return min(theirs, key=lambda it: it.offered)
    return max((it.health for it in slots), key=lambda it: it.offered, default=None)


def _encoded(it: DeviceHealth, at: int) -> bytes:
    message = brief(it.health.message or it.health.reason, _MOST_MESSAGE)
    is_well = it.health.offered
    return wire.encode_health(it.pool, it.device, is_well=is_well, at=at, lasts=HEALTH_TIMEOUT, message=message)


class _Registration:
    """What the kubelet's plugin watcher asks."""

    def __init__(self, driver: Driver, socket: Path) -> None:
        self._driver, self._socket = driver, socket

    def __mapping__(self) -> dict[str, Handler]:
        unary, begin = Cardinality.UNARY_UNARY, "/pluginregistration.Registration/"
        return {
            begin + "GetInfo": Handler(self._info, unary, EmptyCall, Encoded),
            begin + "NotifyRegistrationStatus": Handler(self._notify, unary, RegistrationStatus, Encoded),
        }

    async def _info(self, stream: Stream[EmptyCall, Encoded]) -> None:
        await _receive(stream)
        versions = [*DRA_SERVICES, *HEALTH_SERVICES]
        await stream.send_message(
            wire.encode_plugin_info(PLUGIN_TYPE, self._driver.config.name, str(self._socket), versions)
        )

    async def _notify(self, stream: Stream[RegistrationStatus, Encoded]) -> None:
        self._driver.notified(await _receive(stream))
        await stream.send_message(Encoded())


async def _receive(stream: Stream[Any, Any]) -> Any:
    """The message of a call.

    Raises:
        GRPCError: it makes no sense.
    """
    try:
        message = await stream.recv_message()
    except wire.SENSELESS as error:
        raise refusal(Status.INVALID_ARGUMENT, f"malformed request: {shown(error)}") from None
    if message is None:
        raise refusal(Status.INVALID_ARGUMENT, "the request has no message")
    return message


async def _called(stream: Stream[ClaimsCall, Encoded]) -> list[Called]:
    """The claims that a call is about."""
    return [Called(uid, namespace, name) for namespace, uid, name in (await _receive(stream)).claims]


def _stem(driver: str, registry: Path) -> str:
    """How the names of our registration sockets begin: as the driver is called, or a digest where that is too long."""
    room = SOCKET_PATH_LIMIT - len(os.fsencode(registry)) - len("/-01234567-reg.sock")
    if len(driver) <= room:
        return driver
    return f"dra-{digest(driver)}"


def _remove_dead(directory: Path, name: re.Pattern[str]) -> None:
    """Remove the sockets of processes of ours that were killed: the kubelet would try them for ever.

    Raises:
        OSError: the directory cannot be read.
    """
    for path in directory.iterdir():
        if name.fullmatch(path.name) and path.is_socket() and not listens(path):
            path.unlink(missing_ok=True)
