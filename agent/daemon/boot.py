"""Waits at a start for devices that were there before: a kubelet rejects for good a pod whose devices it is not offered.

After a boot it admits what it finds in its checkpoint a second after its start (docs/operations.md, "A reboot"), and a driver may take
longer to make its devices. systemd starts the kubelet once this service is ready.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

import anyio
import structlog

from agent.claims.ledger import names_of
from agent.daemon.node import Node
from agent.health.book import DRAINED
from agent.kubelet.kubelet_socket import Kubelet
from agent.kubelet.transport.client import listens
from agent.model import SlotKey
from agent.runtime.supervision.problems import Trouble

HELD_BACK: Final = 30.0
"""Seconds at most that first lists wait for a backend which is slow to look: 10,000 nodes take a busy machine some 10."""

_GLANCE: Final = (
    0.25  # seconds between two looks at what it has found; a kubelet that starts admits pods after a second
)
_STEP: Final = 0.1  # seconds between two looks; nobody else waits

log = structlog.get_logger()


async def wait_for_held(node: Node, kubelet: Path, at_most: float, tell: Callable[[str], None]) -> None:
    """Wait until every device that a pod had is there and Healthy, or one listens at the socket `kubelet`; `tell` is told for what."""
    awaited = _absent(node)
    if not awaited or listens(kubelet):
        return
    log.info("boot-waits", slots=names_of(awaited), then=f"the kubelet waits for this service, {at_most:g} s at most")
    with anyio.move_on_after(at_most):
        while awaited and not listens(kubelet):
            tell(f"devices that pods had before the boot: {', '.join(names_of(awaited))}")
            await anyio.sleep(_STEP)
            awaited = _absent(node)
    tell("")
    if awaited:
        log.warning("boot-goes-on", slots=names_of(awaited), reason="these are not there, or not Healthy")
    else:
        log.info("boot-goes-on")


async def list_when_found(kind: str, node: Node, kubelet: Kubelet, told: Trouble) -> None:
    """Hold the first lists of a backend that is slow back, until it has found what an earlier run offered, or has looked at all.

    A kubelet that runs has admitted its pods, which lose nothing; of a short list it refuses new ones that the scheduler has
    counted on. One that starts meanwhile admits its pods again, and loses for good those whose device it has not heard of: it
    gets what there is. So does each after `HELD_BACK` seconds.
    """
    generation = kubelet.generation
    if listens(kubelet.socket):
        with anyio.move_on_after(HELD_BACK):
            while kubelet.generation == generation and kind in node.looking() and node.shortfall.awaits(kind):
                told.report_once("its first lists wait for devices that were offered before")
                await anyio.sleep(_GLANCE)
    node.ready([kind])
    while kind in node.looking():
        told.report_once("its lists have what it has found so far")
        await anyio.sleep(_GLANCE)
    told.healed()


def _absent(node: Node) -> list[SlotKey]:
    """What pods had of resources in force, and could not have now; what an operator has drained comes back by his word alone."""
    names = set(node.inventory.selection.names())  # of one that retires nothing is Healthy ever again
    return [
        held.slot
        for held in node.ledger.held()
        if held.resource in names
        and ((slot := node.inventory.slot(*held.slot)) is None or not slot.health.offered)
        and (slot is None or slot.health.reason != DRAINED)
    ]
