"""Runs the parts that talk to Kubernetes' API server, those that the configuration turns on; a reload changes which.

Each part is supervised by itself. Nothing here is needed for anything else: the daemon says what happens and never waits.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from http import HTTPStatus
from types import ModuleType
from typing import Any, Final

import anyio

from agent.config.file import KubernetesConfig
from agent.inventory.shortfall import Missing, Shortfall
from agent.kubernetes import events
from agent.kubernetes.api import STRATEGIC, Api, ApiError
from agent.kubernetes.events import EventSender, Notice, Subject
from agent.kubernetes.own_node import ConditionKeeper, Devices, DrainAnnotation
from agent.model import Transition
from agent.runtime.pacing import SYSTEM, Clock
from agent.runtime.problems import Problems
from agent.runtime.watchdog import supervise
from agent.runtime.workers import Workers

_FADES: Final = 300.0  # seconds without a try that failed, after which none is shown: longer than any pause between two
_LASTS: Final = 3600.0  # seconds for which an Event that is refused is shown: as long as one is kept
_CLOSING: Final = 1.0  # seconds that the end of a connection may take
_THREADS: Final = 8  # the parts here need four at once; each that hangs takes one more


class KubernetesParts:
    """Events, condition and annotation, as far as they are turned on."""

    def __init__(
        self,
        config: KubernetesConfig,
        node: str,
        devices: Devices,
        shortfall: Shortfall,
        problems: Problems,
        clock: Clock = SYSTEM,
    ) -> None:
        """`node` is the Node's name."""
        self._config, self._problems, self._clock = config, problems, clock.now
        self._node = events.about_node(node)
        self._scope: anyio.CancelScope | None = None
        self._workers = Workers("kubernetes", limit=_THREADS)
        self._away = problems.trouble(
            "kubernetes",
            "Kubernetes' API server cannot be reached",
            "kubernetes-away",
            "kubernetes-answers",
            fades=_FADES,
            then="trying again, ever more rarely; all else goes on",
        )
        refused = problems.trouble("kubernetes", "an Event is not taken", "kubernetes-event-refused", fades=_LASTS)
        unwritten = problems.trouble(
            "kubernetes", "the Node's condition is not written", "kubernetes-condition-unwritten"
        )
        self._events = EventSender(node, refused, clock=clock.now, wall=clock.wall)
        told = devices.inventory.all_slots, lambda: shortfall.missing
        self._condition = ConditionKeeper(node, *told, unwritten, clock=clock.now, wall=clock.wall)
        self._annotation = DrainAnnotation(node, devices, self._tell, problems)
        self._troubles = (refused, unwritten, *self._annotation.troubles)

    # --- what happens ---

    def lists_changed(self) -> None:
        """A list or a drain has changed."""
        if self._config.is_on:  # else each begins with a look at all, once it is turned on
            self._condition.changed()
            self._annotation.changed()

    @property
    def tells_events(self) -> bool:
        """Whether anything becomes an Event."""
        return self._config.events

    def changed(
        self, resource: str, changes: Sequence[Transition], more: int, held: Iterable[tuple[Subject, Transition]]
    ) -> None:
        """Devices of a resource changed: these, and `more` others; `held` are those that pods hold, with the pod."""
        told = [events.changed(self._node, it) for it in changes]
        if more > 0:
            told.append(events.many(self._node, resource, more))
        self._tell([*told, *(events.changed(pod, it) for pod, it in held)])

    def missing(self, begun: Iterable[Missing], more: Mapping[str, int], ended: Iterable[Missing]) -> None:
        """Devices are not offered any more, `more` by resource beside these; or are again."""
        self._condition.changed()
        told = [events.not_offered(self._node, it) for it in begun]
        told += [events.many(self._node, resource, count) for resource, count in more.items()]
        self._tell([*told, *(events.offered_again(self._node, it) for it in ended)])

    def _tell(self, those: Sequence[Notice]) -> None:
        if self.tells_events and those:
            self._events.tell(those)

    # --- running ---

    def configure(self, config: KubernetesConfig) -> None:
        """Take up a changed configuration."""
        if config == self._config:
            return
        self._config = config
        for trouble in self._troubles:
            trouble.healed()
        if self._scope is not None:
            self._scope.cancel()

    async def run(self) -> None:
        """Run what is turned on, until cancelled."""
        try:
            while True:
                with anyio.CancelScope() as self._scope:
                    await self._serve(self._config)
        finally:
            self._workers.close()

    async def _serve(self, config: KubernetesConfig) -> None:
        """Run the parts that the configuration turns on, until cancelled."""
        if not config.is_on:
            await anyio.sleep_forever()
        client, identity = await self._workers.start(load_client)
        parts: list[tuple[bool, str, Callable[[Api], Awaitable[None]]]] = [
            (config.events, "Kubernetes' events", self._events.run),
            (config.condition, "Kubernetes' condition", partial(self._condition.run, workers=self._workers)),
            (config.drain_annotation, "Kubernetes' annotation", self._annotation.watch),
        ]
        async with anyio.create_task_group() as tasks:
            for is_on, name, run in parts:
                if is_on:
                    who = partial(identity.read, config.kubeconfig.path)
                    connect = partial(client.ApiClient, who, self._workers, self._away, self._clock)
                    part = partial(connected, connect, run)
                    tasks.start_soon(partial(supervise, name, part, problems=self._problems))
            if config.drain_annotation:
                tasks.start_soon(partial(supervise, "annotated drains", self._annotation.run, problems=self._problems))


async def excess_rights(config: KubernetesConfig, node: str) -> tuple[str, ...]:
    """What the API server lets a thief of this pod's token write, beyond what Fairlead writes.

    It is asked to do what the policies of deploy/kubernetes/api-access refuse, in dry runs, which pass them, too.

    Raises:
        FairleadError: this is no pod, or the API server does not answer.
    """
    about = Subject("Namespace", "default", "", "default")
    event = events.event(events.omitted(about, 1), "fairlead-doctor", 0.0, 0.0, 1, node)
    label = {"metadata": {"labels": {"fairlead.dev/doctor": ""}}}
    asked = (
        (config.events, "Events about any object", "POST", "namespaces/default/events", event),
        (config.condition, "all of this Node's status and its labels", "PATCH", f"nodes/{node}/status", label),
    )
    found = []

    async def ask(api: Api) -> None:
        for is_on, what, method, path, body in asked:
            if is_on:
                content = STRATEGIC if method == "PATCH" else "application/json"
                try:
                    await api.call(method, f"/api/v1/{path}?dryRun=All", body, content)
                except ApiError as error:
                    if error.status not in (HTTPStatus.FORBIDDEN, HTTPStatus.UNPROCESSABLE_ENTITY):
                        raise
                else:
                    found.append(what)

    workers = Workers("kubernetes", limit=1)
    away = Problems().trouble("kubernetes", "the API server cannot be reached", "kubernetes-away")
    try:
        client, identity = load_client()
        await connected(lambda: client.ApiClient(partial(identity.read, None), workers, away), ask)
    finally:
        workers.close()
    return tuple(found)


async def connected(connect: Callable[[], Any], run: Callable[[Api], Awaitable[None]]) -> None:
    """Run a part with a connection of its own."""
    api = connect()
    try:
        await run(api)
    finally:
        with anyio.move_on_after(_CLOSING, shield=True):
            await api.close()


def load_client() -> tuple[ModuleType, ModuleType]:
    """The client, with h11 and TLS, which most nodes can do without; importing it blocks."""
    from agent.kubernetes import client, identity  # noqa: PLC0415

    return client, identity
