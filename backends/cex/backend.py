"""The backend `cex`: its units are cards, its devices are queues; a container gets a node and a /sys of its own."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import ClassVar, Final

from backends.base import (
    AllocationRefused,
    Backend,
    ContainerEdits,
    Device,
    Discovery,
    Grant,
    Hint,
    Host,
    Known,
    Node,
    NotReady,
    Released,
    Signal,
    Uevent,
    Watches,
)
from backends.cex import container_files, queues
from backends.cex.container_files import Nodes
from backends.cex.options import CexOptions, CexResource, complaints
from backends.errors import each
from backends.linux.kernel import Kernel

_ID: Final = re.compile("apqn-[0-9]{1,3}-[0-9]{1,3}-[0-9]{1,3}")
_PLACE: Final = f"{queues.DEVICES}/".removeprefix("/sys")
_Z90CRYPT: Final = "/dev/z90crypt"


class Cex(Backend[CexOptions]):
    """Hands out queues of crypto cards. Units are cards: `card01`."""

    options_type: ClassVar = CexOptions
    attributes: ClassVar = queues.ATTRIBUTES
    complaints: ClassVar = staticmethod(complaints)

    def __init__(self, host: Host, resources: Sequence[CexResource], kernel: Kernel | None = None) -> None:
        super().__init__(host, resources)
        self._nodes = Nodes(host, kernel or Kernel(host))

    @classmethod
    def tokens(cls, resource: CexResource) -> Iterable[tuple[tuple[str | int, ...], int]]:
        """As many IDs for each queue as containers may share it."""
        yield ("overcommit",), resource.spec.options.overcommit

    # --- what is there ---

    def units(self) -> Iterable[str]:
        """The cards."""
        return queues.cards(self.host)

    def discover(self, unit: str) -> Discovery:
        """A card's queues."""
        return queues.find(self.host, self.resources, unit)

    def probe(self, device: Device) -> Iterable[Signal]:
        """The state of the queue and of its card."""
        return () if device.unusable else queues.signals(self.host, device.unit, _queue(device))

    def watches(self, known: Known) -> Watches:  # noqa: ARG002  # an interface's
        """Events of cards and queues, which come also when one goes offline or is deconfigured."""
        return Watches(frozenset({"ap"}))

    def affects(self, hint: Hint, known: Known) -> Iterable[str]:  # noqa: ARG002
        """The card that an event is about, or whose queue it is about."""
        if not isinstance(hint, Uevent) or not hint.devpath.startswith(_PLACE):
            return ()
        name = hint.devpath.removeprefix(_PLACE).partition("/")[0]
        return (name,) if queues.CARD.fullmatch(name) else ()

    # --- what a container gets ---

    def ids(self, resource: CexResource, device: Device) -> Sequence[str]:
        """As IBM's plugin names them: `apqn-<card>-<domain>-<n>`, one for each container that may share the queue."""
        return tuple(f"{device.key}-{n}" for n in range(resource.spec.options.overcommit))

    def prefers(self, resource: CexResource) -> bool:
        """Where queues are shared, so that containers are spread over them."""
        return resource.spec.options.overcommit > 1

    def edits(self, resource: CexResource, grants: Sequence[Grant]) -> ContainerEdits:
        """The ID's node as /dev/z90crypt, and the shadow of /sys.

        Raises:
            AllocationRefused: a container asks for several.
        """
        grant = _one(resource, grants)
        live = resource.spec.options.live_sysfs
        return ContainerEdits(
            nodes=(Node(container_files.node(grant.id), _Z90CRYPT, "rw"),),
            mounts=container_files.mounts(grant.id, grant.device.unit, _queue(grant.device), live=live),
        )

    def claim(self, resource: CexResource, grants: Sequence[Grant]) -> None:
        """Make the node and the shadow of /sys."""
        grant = _one(resource, grants)
        card, queue = grant.device.unit, _queue(grant.device)
        try:
            planned = container_files.plan_shadow(self.host, card, queue, live=resource.spec.options.live_sysfs)
            container_files.build_shadow(self.host, grant.id, planned)
            self._nodes.make(grant.id, int(card[4:], 16), queues.domain_of(queue))
        except NotReady as error:
            raise AllocationRefused(
                f"{grant.id} of {resource.name} cannot be made ready: {error}. Create the pod again; if it happens again, "
                "this node's administrator must look at the card."
            ) from error

    def release(self, ended: Sequence[Released], idle: frozenset[str]) -> None:  # noqa: ARG002
        """Destroy the nodes and the shadows of these IDs; those of other containers on the same queue stay."""
        ids = sorted({one.id for one in ended if _ID.fullmatch(one.id)})
        each(self._undo, ids, NotReady, "not undone")

    def _undo(self, device_id: str) -> None:
        self._nodes.destroy(device_id)
        container_files.remove_shadow(self.host, device_id)


def _queue(device: Device) -> str:
    (queue,) = device.attributes["apqn"]
    return queue


def _one(resource: CexResource, grants: Sequence[Grant]) -> Grant:
    if len(grants) == 1:
        return grants[0]
    raise AllocationRefused(
        f"A container may ask for one {resource.name} at most, because it has one {_Z90CRYPT}; this one asks for "
        f"{len(grants)}."
    )
