"""Runs dynamic resource allocation once a resource is served by it, and keeps resources from being served by both APIs.

Nothing of it is imported before. A resource that changes from one API to the other is served by device plugin only once the API
server has no slice of it any more. Which it may have is kept on disk, for a start with another configuration.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import anyio
import msgspec
from msgspec import Struct

from agent.config import Config
from agent.config.model import DraConfig
from agent.inventory.inventory import Inventory
from agent.kubernetes.api import ApiError, pause
from agent.kubernetes.runner import LACKING, connected, load_client
from agent.runtime.supervision.problems import Problems
from agent.runtime.supervision.restarts import supervise
from agent.runtime.workers import Workers
from backends.base import Backend
from backends.errors import reason_of
from backends.linux import files

if TYPE_CHECKING:
    from agent.dra.publisher import Publisher

RECORD: Final = "dra.json"
"""In `state_dir`: of which resources the API server may have devices, and who we are to it."""

_MOST_BYTES: Final = 1 << 20  # of that file
_THREADS: Final = 4  # two connections that read their credentials, the file, and one that hangs


class _Record(Struct, frozen=True):
    """What `RECORD` has."""

    driver: str
    node: str
    kubeconfig: str
    resources: tuple[str, ...] = ()


class Dra:
    """The door to dynamic resource allocation for the rest of the daemon."""

    follow: Callable[[], None]
    """Has the resources followed that are to be served by device plugin; they may be others."""

    def __init__(
        self,
        config: Config,
        node: str,
        inventory: Inventory,
        backends: Mapping[str, Backend[Any]],
        problems: Problems,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """`node` is what this node is called where the configuration does not say; `backends` are those in force."""
        self._config, self._node, self._file = config, node, config.agent.state_dir / RECORD
        self._inventory, self._backends, self._problems = inventory, backends, problems
        self._clock, self._wall = clock, wall
        self._record = _read(self._file)
        self._publisher: Publisher | None = None
        self._scope: anyio.CancelScope | None = None
        self._workers = Workers("dra", limit=_THREADS)
        self._away = problems.trouble(
            "DRA", "Kubernetes' API server cannot be reached", "dra-api-away", "dra-api-answers",
            then="trying again; pods keep what they have, and no pod gets a device by DRA meanwhile",
        )  # fmt: skip
        self._lacking = problems.trouble("DRA", 'no resource with serve = "dra" is offered', "dra-client-missing")
        self._unkept = problems.trouble("DRA", f"{self._file} cannot be written", "dra-record-unwritten")

    # --- what the others ask ---

    def by_plugin(self, names: Iterable[str]) -> list[str]:
        """Those of these resources that are served by device plugin."""
        offered = self._record.resources if self._record else ()
        return [name for name in names if name not in offered and not self.serves(name)]

    def serves(self, name: str) -> bool:
        """Is a resource served by DRA? One that retires is what it was: it has only what pods hold."""
        if (resource := self._inventory.resource(name)) is not None:
            return resource.spec.serve == "dra"
        return all(it.claim is not None for it in self._inventory.claims(name).values())

    def is_offered(self, name: str) -> bool:
        """Has the API server the devices of a resource?"""
        return self._publisher is not None and self._publisher.is_offered(name)

    def changed(self, resources: Iterable[str]) -> None:
        """Lists of these resources have changed, or claims on them."""
        if self._publisher is not None:
            self._publisher.changed(resources)

    def configure(self, config: Config) -> None:
        """Take up a changed configuration."""
        before, self._config = self._config, config
        if (before.dra, before.uses_dra) != (config.dra, config.uses_dra):
            for trouble in (self._away, self._lacking, self._unkept):
                trouble.healed()
            if self._scope is not None:
                self._scope.cancel()
        elif self._publisher is not None:
            self._publisher.changed()

    # --- running ---

    async def run(self) -> None:
        """Run it while it is needed, until cancelled."""
        self._record = _read(self._file)  # the agent before us may have changed it; a few bytes
        try:
            while True:
                with anyio.CancelScope() as self._scope:
                    await self._serve()
        finally:
            self._workers.close()

    async def _serve(self) -> None:
        """Withdraw what another configuration offered; offer what this one does, until cancelled."""
        record = self._record
        mine = self._who(self._config.dra) if self._config.uses_dra else None
        if record is None and mine is None:
            await anyio.sleep_forever()
        try:
            self._loaded = await self._workers.start(_load)
        except ImportError:
            self._lacking.report_once(LACKING)
            await anyio.sleep_forever()
        if record is not None and (mine is None or msgspec.structs.replace(record, resources=()) != mine):
            await self._withdraw(record)
        if mine is None:
            await anyio.sleep_forever()
        assert mine is not None
        self._record = record = self._record or mine
        publisher = self._publisher = self._made(record, self._config.dra)
        try:
            async with anyio.create_task_group() as tasks:
                for part, run in (("DRA's slices", publisher.run), ("watch of DRA's slices", publisher.watch)):
                    connect = partial(connected, partial(self._connect, record), run)
                    tasks.start_soon(partial(supervise, part, connect, problems=self._problems))
        finally:
            self._publisher = None
            for trouble in publisher.troubles:
                trouble.healed()

    def _who(self, config: DraConfig) -> _Record:
        return _Record(
            str(config.driver), config.node or self._node, str(config.kubeconfig)
        )  # else msgspec encodes neither

    def _made(self, record: _Record, config: DraConfig) -> Publisher:
        publisher = self._loaded.publisher
        eviction = self._loaded.slices.Eviction(config.no_execute_after, config.no_execute_most)
        settings = publisher.Settings(record.driver, record.node, frozenset(config.no_execute), eviction)
        known = self._inventory, self._backends, self._problems, record.resources
        made: Publisher = publisher.Publisher(settings, *known, self._keep, clock=self._clock, wall=self._wall)
        return made

    def _connect(self, record: _Record) -> Any:
        """A connection to the API server."""
        who = partial(self._loaded.identity.read, Path(record.kubeconfig) if record.kubeconfig else None)
        return self._loaded.client.ApiClient(who, self._workers, self._away, self._clock)

    async def _withdraw(self, record: _Record) -> None:
        """Delete all that an earlier configuration offered; as long as that cannot be done, nobody else offers it."""
        publisher, failures = self._made(record, self._config.dra), 0
        trouble = self._problems.trouble(
            "DRA", f"ResourceSlices of {record.driver} are not deleted", "dra-slices-left",
            then=f"trying again; until then these are not served by device plugin: {', '.join(record.resources)}",
        )  # fmt: skip
        while True:
            try:
                await connected(partial(self._connect, record), publisher.withdraw)
                break
            except ApiError as error:
                trouble.report_once(error.sentence)
                failures += 1
                await anyio.sleep(pause(failures))
        trouble.healed()
        await self._keep(frozenset())
        self._record = None

    async def _keep(self, offered: frozenset[str]) -> None:
        """Keep of which resources the API server may have devices."""
        assert self._record is not None
        is_less = not offered.issuperset(self._record.resources)
        self._record = msgspec.structs.replace(self._record, resources=tuple(sorted(offered)))
        try:
            await self._workers.start(partial(_write, self._file, self._record if offered else None))
        except OSError as error:
            self._unkept.report_once(reason_of(error))
        else:
            self._unkept.healed()
        if is_less:
            self.follow()


class _Loaded(Struct, frozen=True):
    """The modules, which most nodes can do without, and the event loop for 0.1 s."""

    client: Any
    identity: Any
    publisher: Any
    slices: Any


def _load() -> _Loaded:
    from agent.dra import publisher, slices  # noqa: PLC0415

    return _Loaded(*load_client(), publisher, slices)


def _read(file: Path) -> _Record | None:
    """What an earlier run kept, if anything."""
    try:
        return msgspec.json.decode(files.read(file, _MOST_BYTES), type=_Record)
    except (OSError, msgspec.MsgspecError):  # of what a person wrote there nothing follows
        return None


def _write(file: Path, record: _Record | None) -> None:
    if record is None:
        file.unlink(missing_ok=True)
    else:
        files.replace(file, msgspec.json.encode(record))
