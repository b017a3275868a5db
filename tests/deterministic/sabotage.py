"""Faults put into the agent on purpose: each must be found by some of the first seeds, or the simulation proves nothing."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any, Final

from msgspec.structs import replace

from agent.cdi.directory import ClaimFiles
from agent.dra.publisher import Publisher as SlicePublisher
from agent.inventory.inventory import Inventory
from agent.inventory.lists import Listing
from agent.kubelet import lock, plugin
from agent.kubelet.client import GatheringTransport
from agent.kubelet.registration import Registrar
from agent.kubelet.server import SocketServer
from agent.model import Snapshot


def lists_lack_what_pods_hold() -> None:
    whole = Listing.snapshot

    def snapshot(self: Any, *arguments: Any) -> Any:
        found = whole(self, *arguments)
        slots = {name: slot for name, slot in found.slots.items() if name not in self.claims}
        return replace(found, slots=slots, changed=None)

    Listing.snapshot = snapshot  # type: ignore[assignment,method-assign]


def each_tenth_change_is_not_published() -> None:
    take, number = Inventory.take, count(1)

    def sometimes(self: Inventory, now: float = 0.0) -> list[Snapshot]:
        return take(self, now) if next(number) % 10 else take(self, now)[:0]

    Inventory.take = sometimes  # type: ignore[method-assign]


def what_left_a_list_is_given_at_once() -> None:
    plugin.REMEMBERED = 0.0  # type: ignore[misc]


def time_counts_while_the_kubelet_stands_still() -> None:
    GatheringTransport.is_unread = lambda self: False  # type: ignore[method-assign]


def two_agents_hold_the_lock() -> None:
    lock._try_lock = lambda fd: True


def specifications_of_claims_are_left() -> None:
    ClaimFiles.remove = lambda self, uid: None  # type: ignore[method-assign]


def slices_that_others_delete_are_not_missed() -> None:
    take = SlicePublisher._take
    SlicePublisher._take = lambda self, line: None if b'"DELETED"' in line else take(self, line)  # type: ignore[method-assign]


def the_kubelets_restart_goes_unnoticed() -> None:
    async def for_ever(self: Any) -> float:
        import anyio

        self._set_registered(True)
        await anyio.sleep_forever()
        return 0.0

    Registrar._stay = for_ever  # type: ignore[method-assign]


def sockets_are_left_behind() -> None:
    SocketServer._remove_socket = lambda self: None  # type: ignore[method-assign]


SABOTAGES: Final[dict[str, Callable[[], None]]] = {
    it.__name__: it
    for it in (
        lists_lack_what_pods_hold,
        each_tenth_change_is_not_published,
        what_left_a_list_is_given_at_once,
        time_counts_while_the_kubelet_stands_still,
        two_agents_hold_the_lock,
        the_kubelets_restart_goes_unnoticed,
        sockets_are_left_behind,
        specifications_of_claims_are_left,
        slices_that_others_delete_are_not_missed,
    )
}
