"""Runs dynamic resource allocation once a resource is served by it, and keeps resources from being served by both APIs.

Nothing of it is imported before. A resource that changes from one API to the other is served by device plugin only once the API
server has no slice of it any more. Which it may have is kept on disk, for a start with another configuration.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

import anyio
import msgspec
from anyio.abc import TaskGroup
from msgspec import Struct

from agent.config import Config
from agent.config.file import DraConfig
from agent.daemon.node import Node
from agent.kubelet.allocation import Allocator, Starter
from agent.kubernetes.api import Api, ApiError, backoff, read
from agent.kubernetes.runner import connected, load_client
from agent.runtime.counts import Counts
from agent.runtime.pacing import SYSTEM, Clock
from agent.runtime.problems import Problems
from agent.runtime.watchdog import supervise
from agent.runtime.workers import NoWorkerError, Workers
from backends.base import Backend
from backends.errors import reason_of
from backends.interface.decoding import decoded
from backends.linux import files

if TYPE_CHECKING:
    from agent.dra.driver import Driver
    from agent.dra.publisher import Publisher

RECORD: Final = "dra.json"
"""In `state_dir`: of which resources the API server may have devices, and who we are to it."""

_MOST_BYTES: Final = 1 << 20  # of that file
_THREADS: Final = 8  # connections that read their credentials, two and one for each name; the file; and some that hang


class _Record(Struct, frozen=True):
    """What `RECORD` has."""

    driver: str
    node: str
    kubeconfig: str
    resources: tuple[str, ...] = ()


class Dra:
    """The door to dynamic resource allocation for the rest of the daemon."""

    def __init__(
        self,
        config: Config,
        called: str,
        node: Node,
        backends: Mapping[str, Backend[Any]],
        allocator: Allocator,
        starter: Starter,
        problems: Problems,
        counts: Counts,
        clock: Clock = SYSTEM,
    ) -> None:
        """Prepare.

        Args:
            config: what is configured.
            called: this node's name where the configuration does not say one.
            node: what is there, and who holds it.
            backends: those in force at any time, by their kinds.
            allocator: gives devices to containers.
            starter: makes hardware ready for them.
            problems: is told what fails.
            counts: has what is prepared and written.
            clock: the time.
        """
        self._config, self._called, self._file = config, called, config.agent.state_dir / RECORD
        self._house, self._inventory, self._backends = node, node.inventory, backends
        self._giving = allocator, starter
        self._problems, self._counts, self._clock = problems, counts, clock
        self._recall()
        self._publisher: Publisher | None = None
        self._drivers: dict[str, Driver] = {}
        self._name = ""
        """The driver whose state `status` shows. The others serve only what pods have since an earlier configuration."""
        self._unadopted = set[str]()
        """The names by which pods may have claims that are not in the ledger."""
        self._slots = set[tuple[str, str]]()
        """Those that any of them is giving."""
        self._scope: anyio.CancelScope | None = None
        self._workers = Workers("dra", limit=_THREADS)
        self._adopted = asyncio.Event()
        """Set once all claims that pods have are in the ledger: our state may have been lost, and what they have looks free."""
        self._keeping = asyncio.Lock()
        self._away = problems.trouble(
            "dra", "Kubernetes' API server cannot be reached", "dra-api-away", "dra-api-answers",
            then="trying again; pods keep what they have, and no pod gets a device by DRA meanwhile",
        )  # fmt: skip
        self._unkept = problems.trouble("dra", f"{self._file} cannot be written", "dra-record-unwritten")

    # --- what the others ask ---

    def by_plugin(self, names: Iterable[str]) -> list[str]:
        """Those of these resources that are served by device plugin."""
        offered = self._record.resources if self._record else ()
        return [name for name in names if name not in offered and not self.serves(name)]

    def serves(self, name: str) -> bool:
        """Whether a resource is served by DRA. One that retires is what it was: it has only what pods hold."""
        if (resource := self._inventory.resource(name)) is not None:
            return resource.spec.serve == "dra"
        return all(it.claim is not None for it in self._inventory.claims(name).values())

    def is_offered(self, name: str) -> bool:
        """Whether the API server has the devices of a resource."""
        return self._publisher is not None and self._publisher.is_offered(name)

    @property
    def is_registered(self) -> bool:
        """Whether the kubelet asks us to prepare claims."""
        return self._driver is not None and self._driver.registered

    def complaint(self, name: str) -> str:
        """Why no pod gets devices of a resource that is served so; empty if they do."""
        if not self.serves(name) or self._inventory.resource(name) is None:
            return ""
        if self._away.lasts and not self.is_offered(name):
            return self._away.sentence
        return self._driver.complaint if self._driver is not None else ""

    def changed(self, resources: Iterable[str]) -> None:
        """Lists of these resources have changed, or claims on them."""
        if self._publisher is not None:
            self._publisher.changed(resources)
        for driver in self._drivers.values():
            driver.changed()

    def configure(self, config: Config) -> None:
        """Take up a changed configuration."""
        before, self._config = self._config, config
        if (before.dra, before.uses_dra) != (config.dra, config.uses_dra):
            for trouble in (self._away, self._unkept):
                trouble.healed()
            if self._scope is not None:
                self._scope.cancel()
        elif self._publisher is not None:
            self._publisher.changed()

    # --- running ---

    async def run(self) -> None:
        """Run it while it is needed, until cancelled."""
        self._recall()  # the agent before us may have changed it
        try:
            while True:
                with anyio.CancelScope() as self._scope:
                    await self._serve()
        finally:
            self._workers.close()

    def _recall(self) -> None:
        """Read what an earlier run kept; a few bytes."""
        self._record = _read(self._file)
        self._offered = frozenset(self._record.resources if self._record else ())

    @property
    def _driver(self) -> Driver | None:
        return self._drivers.get(self._name)

    async def _serve(self) -> None:
        """Offer what is configured, withdraw what another configuration offered, and serve what pods have, until cancelled."""
        record = self._record
        mine = self._who(self._config.dra) if self._config.uses_dra else None
        has_claims = any(it.claim is not None for it in self._house.ledger.held())
        if record is None and mine is None and not has_claims:
            await anyio.sleep_forever()
        self._loaded = await self._workers.start(_load)
        async with anyio.create_task_group() as tasks:
            # of claims the kubelet tells the end, whatever is configured now; and of what was offered, some may not be known
            if mine is not None or has_claims or record is not None:
                self._drive_all(tasks, mine, record)
            if (
                mine is not None and record is not None
            ):  # the credentials of then may be gone: another way of installing
                record = msgspec.structs.replace(record, kubeconfig=mine.kubeconfig)
            if record is not None and (mine is None or msgspec.structs.replace(record, resources=()) != mine):
                await self._withdraw(record)
                # pods may have unknown claims of these
                left = self._record.resources if self._record is not None else ()
                record = msgspec.structs.replace(mine, resources=left) if mine is not None else None
                self._record = None
            if mine is not None:
                before, self._record = self._record, record or mine
                if before != self._record and (before is not None or self._record.resources):
                    await self._keep(frozenset(self._record.resources))
                await self._publish(self._record)
            await anyio.sleep_forever()

    def _drive_all(self, tasks: TaskGroup, mine: _Record | None, record: _Record | None) -> None:
        """Serve the kubelet by all names that pods have claims of: it tells the end of each to the driver that prepared it."""
        who = mine or record or self._who(self._config.dra)
        held = {it.claim.driver for it in self._house.ledger.held() if it.claim is not None}
        configured = {it.driver for it in (mine, record) if it is not None}
        names = (held | configured) - {""}
        self._name = who.driver if who.driver in names or not names else min(names)
        self._unadopted = {self._name, *names}
        for name in sorted(self._unadopted):
            node = record.node if record is not None and record.driver == name else who.node
            one = msgspec.structs.replace(who, driver=name, node=node)
            part = "DRA" if name == self._name else f"DRA as {name}"
            self._start(tasks, one, part, partial(self._drive, one, frozenset(self._unadopted - {name})))

    async def _drive(self, who: _Record, others: frozenset[str], api: Api) -> None:
        """Serve the kubelet by one name, until cancelled."""
        from agent.dra.driver import Driver, DriverConfig  # noqa: PLC0415  # `_load` has loaded it
        from agent.dra.preparation import House  # noqa: PLC0415
        from agent.dra.publisher import API  # noqa: PLC0415

        async def claim(namespace: str, name: str) -> Mapping[str, Any]:
            path = f"{API}/namespaces/{namespace}/resourceclaims/{name}"
            return read(await api.call("GET", path), dict[str, Any])

        node, agent = self._house, self._config.agent
        parts = node, node.ledger, self._inventory, self._backends, *self._giving, node.cdi
        driver = self._drivers[who.driver] = Driver(
            DriverConfig(who.driver, who.node, agent.kubelet_root),
            House(self._config.host, *parts, agent.pod_resources, self._counts, self._slots, others),
            claim,
            lambda: [name for name in self._inventory.names() if self.serves(name)],
            self._problems,
            wall=self._clock.wall,
        )
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._note_adopted, driver)
                await driver.run()
        finally:
            del self._drivers[who.driver]

    async def _note_adopted(self, driver: Driver) -> None:
        await driver.preparer.adopted.wait()
        self._unadopted.discard(driver.config.name)
        if self._unadopted:
            return
        self._adopted.set()
        if self._record is not None:
            await self._keep(self._offered)

    async def _publish(self, record: _Record) -> None:
        """Keep the API server's slices as the devices are, until cancelled."""
        publisher = self._publisher = self._made(record, self._config.dra)
        try:
            async with anyio.create_task_group() as tasks:
                self._start(tasks, record, "DRA's slices", publisher.run)
                self._start(tasks, record, "watch of DRA's slices", publisher.watch)
        finally:
            self._publisher = None
            for trouble in publisher.troubles:
                trouble.healed()

    def _start(self, tasks: TaskGroup, who: _Record, part: str, run: Callable[[Api], Awaitable[None]]) -> None:
        """Start a part with a connection of its own."""
        connect = partial(connected, partial(self._connect, who), run)
        tasks.start_soon(partial(supervise, part, connect, problems=self._problems))

    def _who(self, config: DraConfig) -> _Record:
        # plain texts: msgspec writes no others
        return _Record(str(config.driver), config.node or self._called.lower(), str(config.kubeconfig))

    def _made(self, record: _Record, config: DraConfig) -> Publisher:
        """A publisher of what this record names."""
        from agent.dra.publisher import Publisher, Settings  # noqa: PLC0415
        from agent.dra.slices import Eviction  # noqa: PLC0415

        eviction = Eviction(config.no_execute_after, config.no_execute_most)
        settings = Settings(record.driver, record.node, frozenset(config.no_execute), eviction)
        known = self._inventory, self._backends, self._problems, self._counts, record.resources
        return Publisher(settings, *known, self._keep, clock=self._clock.now, wall=self._clock.wall)

    def _connect(self, record: _Record) -> Any:
        """A connection to the API server."""
        client, identity = self._loaded
        who = partial(identity.read, Path(record.kubeconfig) if record.kubeconfig else None)
        return client.ApiClient(who, self._workers, self._away, self._clock.now)

    async def _withdraw(self, record: _Record) -> None:
        """Delete all that an earlier configuration offered; as long as that fails, no other driver offers it."""
        publisher, tries = self._made(record, self._config.dra), backoff()
        trouble = self._problems.trouble(
            "dra", f"ResourceSlices of {record.driver} are not deleted", "dra-slices-left",
            then=f"trying again; until then these are not served by device plugin: {', '.join(record.resources)}",
        )  # fmt: skip
        while True:
            try:
                await connected(partial(self._connect, record), publisher.withdraw)
                break
            except ApiError as error:
                trouble.report_once(error.sentence)
                await anyio.sleep(tries.next())
        trouble.healed()
        if not self._config.uses_dra:
            await self._adopted.wait()
        await self._keep(frozenset())

    async def _keep(self, offered: frozenset[str]) -> bool:
        """Keep of which resources the API server may have devices, or claims that are not known; returns whether it is kept."""
        async with self._keeping:
            assert self._record is not None
            before = frozenset(self._record.resources)
            self._offered = offered
            kept = offered if self._adopted.is_set() else offered | before
            self._record = msgspec.structs.replace(self._record, resources=tuple(sorted(kept)))
            try:
                await self._workers.start(partial(_write, self._file, self._record if kept else None))
            except (OSError, NoWorkerError) as error:
                self._unkept.report_once(reason_of(error) if isinstance(error, OSError) else str(error))
            else:
                self._unkept.healed()
        if before - kept:
            self._house.serve_others()
        return not self._unkept.lasts


def _load() -> tuple[ModuleType, ModuleType]:
    """Load what most nodes can do without, and the event loop for 0.3 s; the API server's client, and who we are to it."""
    from agent.dra import driver, publisher  # noqa: F401, PLC0415

    return load_client()


def _read(file: Path) -> _Record | None:
    """What an earlier run kept, if anything."""
    try:
        return decoded(files.read(file, _MOST_BYTES), _Record)
    # of what a person wrote there nothing follows
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def _write(file: Path, record: _Record | None) -> None:
    if record is None:
        file.unlink(missing_ok=True)
    else:
        files.replace(file, msgspec.json.encode(record))
