"""Reads the configuration again: when asked, on SIGHUP, and when its file has changed; one after the other.

A configuration with mistakes changes nothing, nor does one that cannot be put into force. It is read in a thread, where the
backends that it needs are made, too. It is put into force by building a second house beside the first: new instances of
backends look at the node, and a new inventory decides who has what, while everything in force goes on. Whatever fails until
then leaves no trace but its report. The move is one step of the event loop, of assignments alone; what hung or was left over in
the old house goes with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Set
from functools import partial
from pathlib import Path
from typing import Any, Final

import anyio
import structlog
from msgspec import Struct

from agent.config import DEFAULT_PATH, Config, ConfigError, ConfigProblem, Difference, compare, load
from agent.console.control import RefusedError
from agent.console.views import Reloaded
from agent.daemon.dra import Dra
from agent.daemon.list_reporter import ListWarnings
from agent.daemon.node import Node
from agent.daemon.serving import Serving
from agent.discovery.backend_answers import make_backends, why_unmade
from agent.discovery.discoverer import Discoverer
from agent.discovery.paths import POLL, FileWatch
from agent.discovery.reading import Changes
from agent.discovery.runner import DiscoveryRunner
from agent.hardware.adoption import Adopter
from agent.hardware.jobs import Jobs
from agent.inventory.inventory import Inventory
from agent.kubernetes.runner import KubernetesParts
from agent.runtime.errors import shown
from agent.runtime.pacing import Doorbell
from agent.runtime.problems import Problems
from agent.runtime.watchdog import Notifier
from agent.runtime.workers import BATCH, NoWorkerError, Workers, in_batches
from backends.base import Backend

READ_DEADLINE: Final = 10.0
"""Seconds that reading the file may take."""

_QUIET: Final = 0.1  # seconds without another change, before a file counts as written
_QUIET_IF_EMPTY: Final = 1.0  # seconds: an empty file, or none, is rarely meant; an editor may be at it
_EMPTY: Final = "the file is empty, as a full disk leaves one; one that has a comment alone offers nothing"
_RESTLESS: Final = 5.0  # seconds after which a file that changes all the time is read all the same
_CLOCK_TICK: Final = 0.01  # seconds by which the time of a file may lag behind the clock (CONFIG_HZ=100)

log = structlog.get_logger()


class Reloader:
    """Does one reload after the other; those who ask while one is under way all get the next."""

    def __init__(
        self,
        swap: ConfigurationSwap,
        notifier: Notifier,
        serving: Serving,
        problems: Problems | None = None,
        default: Path = DEFAULT_PATH,
    ) -> None:
        """`default` is the file where there was none at the start; `problems` is told what cannot be watched."""
        self.mistakes: tuple[str, ...] = ()
        """What was wrong with the configuration when it was read last; empty if it is in force."""
        self.needs_restart: tuple[str, ...] = ()
        """The settings that differ in the file and that only a restart applies."""
        self._swap, self._notifier, self._serving = swap, notifier, serving
        self._problems, self._default = problems, default
        self._next: asyncio.Future[Reloaded] | None = None
        self._wanted = Doorbell()
        self._touched = asyncio.Event()
        self._workers = Workers("reload", limit=1)

    def request(self) -> asyncio.Future[Reloaded]:
        """Have the configuration read; what comes of it, a RefusedError if it has mistakes."""
        if self._next is None:
            self._next = asyncio.get_running_loop().create_future()
            self._next.add_done_callback(_note)
            self._wanted.set()
        return self._next

    async def run(self) -> None:
        """Do what is requested, until cancelled."""
        while True:
            await self._wanted.rung()
            answer, self._next = self._next, None
            assert answer is not None
            try:
                self._notifier.reloading()
                reloaded = await self._reload()
            except BaseException as error:
                _answer(answer, error)
                if not isinstance(error, RefusedError):
                    raise
            else:
                if not answer.done():
                    answer.set_result(reloaded)
            finally:
                self._notifier.ready(self._serving.status)

    async def _reload(self) -> Reloaded:
        """Read, and apply what is new.

        Raises:
            RefusedError: it has mistakes.
        """
        if not self._swap.config.read_at:
            raise RefusedError("this daemon was given its configuration by another program, and has no file to read")
        change = None
        try:
            change = await self._read()
            await self._swap.apply(change)
        except ConfigError as error:
            raise self._refuse(tuple(map(str, error.problems))) from None
        except (TimeoutError, NoWorkerError):
            raise self._refuse((f"{self._file()}: reading it, or starting a backend for it, hangs",)) from None
        except Exception as error:
            if change is not None and self._swap.config is change.difference.config:
                self.mistakes = ()
                raise  # it is in force
            log.exception("part-failed", part="reload")  # where it came from matters
            raise self._refuse((f"{self._file()}: it cannot be put into force: {shown(error)}",)) from error
        difference = change.difference
        self.mistakes = ()
        self._tell(difference)
        return Reloaded(difference.added, difference.removed, difference.changed, difference.needs_restart)

    async def _read(self) -> Change:
        """Read the file, and make what is needed of it.

        Raises:
            ConfigError: it has mistakes.
            TimeoutError: it hangs.
            NoWorkerError: it has hung before.
        """
        try:
            with anyio.fail_after(READ_DEADLINE):
                stuck = self._swap.discovery.stuck()
                return await self._workers.start(partial(_read, self._swap.config, self._default, stuck))
        finally:
            self._workers.close()

    def _refuse(self, mistakes: tuple[str, ...]) -> RefusedError:
        """Say what is wrong once, however often it is read."""
        if mistakes != self.mistakes:
            self.mistakes = mistakes
            for mistake in mistakes:
                log.error("config-invalid", reason=mistake, then="what was configured before stays in force")
        return RefusedError("\n".join(mistakes))

    def _tell(self, difference: Difference) -> None:
        if difference:
            log.info(
                "config-reloaded",
                added=list(difference.added),
                removed=list(difference.removed),
                changed=list(difference.changed),
                settings=list(difference.settings),
            )
        else:
            log.info("config-unchanged")
        if difference.needs_restart != self.needs_restart:
            self.needs_restart = difference.needs_restart
            if difference.needs_restart:
                log.warning("config-needs-restart", settings=list(difference.needs_restart))

    def _file(self) -> Path:
        return (self._swap.config.source or self._default).absolute()

    async def watch(self) -> None:
        """Request a reload whenever the file has changed, until cancelled.

        Raises:
            OSError: it cannot be watched; the message says why.
        """
        if not self._swap.config.read_at:
            await anyio.sleep_forever()
        watch = FileWatch(self._file(), self._touched.set, self._problems)
        async with anyio.create_task_group() as tasks:
            await tasks.start(watch.run)
            self._touched.clear()  # by the directories that are there
            if watch.changed_since(self._swap.config.read_at - _CLOCK_TICK):  # before we watched
                self._touched.set()
            while True:
                seen = watch.identity()
                while not self._touched.is_set() and watch.identity() == seen:
                    with anyio.move_on_after(POLL):
                        await self._touched.wait()
                with anyio.move_on_after(_RESTLESS):
                    await self._quiet()
                watch.follow()
                self.request()

    async def _quiet(self) -> None:
        """Wait until the file has probably been written."""
        while self._touched.is_set():
            self._touched.clear()
            await anyio.sleep(_QUIET)
            if not self._touched.is_set() and _is_empty(self._file()):
                await anyio.sleep(_QUIET_IF_EMPTY)


def _is_empty(file: Path) -> bool:
    """Whether the file is empty or missing."""
    try:
        return file.stat().st_size == 0
    except OSError:
        return True


def _read(before: Config, default: Path, stuck: Set[str]) -> Change:
    """Read the configuration, and make the new backends that it needs (blocking).

    Raises:
        ConfigError: with every mistake; a file that was there and is no more, or is empty now, is one, and a backend that
            cannot be started, unless it was stuck before.
    """
    config = load(before.source, default=default)
    if before.resources and config.source and config.is_empty:  # as it was read: it may be written by now
        raise ConfigError((ConfigProblem(config.source, None, "", _EMPTY),))
    difference = compare(before, config)
    kinds = difference.kinds if not difference.settings else {it.spec.backend for it in difference.config.resources}
    of_kinds = [it for it in difference.config.resources if it.spec.backend in kinds | stuck]
    made = make_backends(before.host, of_kinds)
    unmade = {kind: why for kind, it in made.items() if (why := why_unmade(it))}
    file = before.source or default
    if mistakes := [f"the backend {kind}: {why}" for kind, why in unmade.items() if kind in kinds - stuck]:
        raise ConfigError(tuple(ConfigProblem(file, None, "", mistake) for mistake in mistakes))
    return Change(difference, {kind: it for kind, it in made.items() if kind in kinds or kind not in unmade})


def _answer(answer: asyncio.Future[Reloaded], error: BaseException) -> None:
    if answer.done():
        return  # the caller has gone
    if isinstance(error, Exception):
        answer.set_exception(error)
    else:
        answer.cancel()


def _note(answer: asyncio.Future[Reloaded]) -> None:
    """Read the exception: asyncio complains of one that is never read."""
    if not answer.cancelled():
        answer.exception()


# --- another configuration is put into force ---


DECISION_DEADLINE: Final = 10.0
"""Seconds that it may take to decide who has what; 10,000 devices take less than one."""


class Change(Struct, frozen=True):
    """What a new configuration asks for."""

    difference: Difference
    backends: Mapping[str, Backend[Any]]
    """New instances of the backends whose resources changed, or which are stuck."""


class ConfigurationSwap(Struct):
    """The parts of the daemon that have to know."""

    config: Config
    """What is in force."""
    discovery: DiscoveryRunner
    serving: Serving
    adopter: Adopter
    list_warnings: ListWarnings
    kubernetes: KubernetesParts
    dra: Dra
    jobs: Jobs
    node: Node

    async def apply(self, change: Change) -> None:
        """Put the change from the configuration in force into force.

        Raises:
            ConfigError: it cannot be put into force, and nothing has changed.
            Exception: the same, unless `config` says otherwise: then not every part has been told.
        """
        if change.difference or change.backends:
            await self._move(change)
            self.kubernetes.configure(self.config.kubernetes)
            self.dra.configure(self.config)
            self.node.cdi.changed(self.node.inventory.names())
        else:
            self.config = change.difference.config
        self.adopter.due.set()

    async def _move(self, change: Change) -> None:
        """Build the second house, and move in."""
        difference = change.difference
        async with self.discovery.on_trial(change.backends, difference.config.agent) as fresh:
            kinds = {resource.spec.backend for resource in difference.config.resources}
            every = {kind: it for kind, it in (self.discovery.discoverers | fresh).items() if kind in kinds}
            inventory = await self._decide(difference.config, every)

            # no await from here on: every reader sees one configuration or the other
            found = [it.take_over(self.discovery.discoverers.get(kind)) for kind, it in fresh.items()]
            found += [it.nothing_left() for kind, it in self.discovery.discoverers.items() if kind not in kinds]
            self._known(inventory, every)()  # what happened while it was decided
            self._refuse_broken(difference.config, inventory)
            for discoverer in fresh.values():
                discoverer.watches()

            self.node.inventory.become(inventory, fresh.keys())
            self.discovery.exchange(every)
            self.config = difference.config
            await self._tell(difference, fresh, found)

    async def _decide(self, config: Config, every: Mapping[str, Discoverer]) -> Inventory:
        """An inventory for the configuration that knows what is known now; made in a thread.

        Raises:
            Exception: it cannot be made; a TimeoutError where a backend hangs that is asked for IDs.
        """
        backends = {kind: it.backend for kind, it in every.items()}
        inventory = Inventory(config.resources, backends, self.node.inventory.selection)
        workers = Workers("reload", 1)
        try:
            with anyio.fail_after(DECISION_DEADLINE):
                for _ in range(2):  # the second time: what changed meanwhile, so that little is left for the loop
                    await workers.start(self._known(inventory, every))
        finally:
            workers.close()
        return inventory

    def _refuse_broken(self, config: Config, inventory: Inventory) -> None:
        """Refuse resources whose devices would have no IDs any more.

        Raises:
            ConfigError: there are such.
        """
        broken, before = inventory.selection.broken, self.node.inventory.selection.broken
        if fresh := [f"{name}: {why}" for name, why in broken.items() if name not in before]:
            raise ConfigError(tuple(ConfigProblem(config.source or DEFAULT_PATH, None, "", why) for why in fresh))

    def _known(self, inventory: Inventory, every: Mapping[str, Discoverer]) -> Callable[[], None]:
        """Has an inventory learn all there is to know now, seen by these."""
        units = {kind: dict(it.known.items()) for kind, it in every.items()}
        links = {kind: it.links() for kind, it in every.items()}
        return partial(inventory.learn, units, links, *self.node.inventory.told())

    async def _tell(self, difference: Difference, fresh: Mapping[str, Discoverer], found: Iterable[Changes]) -> None:
        """Tell all parts of the new configuration; no list is sent before its health is known."""
        self.discovery.listen()
        for discoverer in fresh.values():
            discoverer.rescan()  # what happened since it looked
        try:
            for changes in found:
                async for (part,) in in_batches(changes.in_parts(BATCH), 1):
                    self.node.judge(part)
                self.discovery.sight_soon(changes)
        finally:
            self.node.ready(fresh)
        resources = self.node.inventory.selection.in_force()
        self.serving.configure(it.name for it in resources if it.configured in difference.new)
        self.jobs.close()  # threads that only backends of before needed
        self.list_warnings.tell_of_selectors(it for it in difference.config.resources if it.name in difference.new)
        self.adopter.configure(it for it in resources if it.configured not in difference.new)
