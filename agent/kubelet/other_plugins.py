"""Tells from what the kubelet has, and from sockets that come and go, that another plugin has registered a name of ours.

The kubelet listens to the plugin that registered a name last, and tells no other (kubelet contract: A2, A9.1). Two witnesses
are needed. Its record alone may be an old one: the kubelet takes what it writes under a lock and writes after it, so that
of two records the older may come last (`writeCheckpoint` of pkg/kubelet/cm/devicemanager/manager.go); a disk may be full or
slow; a backup touches files. What is later than a list of ours is told without the wall clock, which may be set at any moment.
Pure but for `observe`, which reads the plugin directory.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Container, Iterable, Mapping, Set
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct, field

from agent.kubelet.pods.checkpoint import Version, record
from agent.kubelet.transport.client import listens
from agent.runtime.errors import some

if TYPE_CHECKING:
    from agent.model import Slot

SocketId = tuple[int, int]
"""Inode, and time of its last change in ns."""


class Offer(Struct, frozen=True):
    """What a resource's open stream has told the kubelet."""

    slots: Mapping[str, Slot]
    """Of the last list."""
    former: Container[str]
    """IDs that earlier lists had."""
    began: float
    """When its first list was sent, in monotonic seconds."""
    sent: float
    """When its last list was sent."""
    record_before: object = None
    """Which writing of the kubelet's record lay there when the first list was sent."""
    record_since: object = None
    """The same when the last list was sent."""

    @property
    def healthy(self) -> frozenset[str]:
        """What the last list had as healthy."""
        return frozenset(device_id for device_id, slot in self.slots.items() if slot.health.offered)

    def lacks(self, ids: Set[str]) -> bool:
        """Is one of these IDs in no list of the stream?"""
        return any(device_id not in self.former for device_id in ids - self.slots.keys())


class Observation(Struct, frozen=True):
    """What lies in the plugin directory."""

    record: Version | None = None
    """Which writing of the kubelet's record lies there."""
    registered: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Resource → the IDs that the kubelet has as healthy."""
    sockets: Mapping[str, SocketId] = field(default_factory=dict)
    """Of other plugins."""
    answering: frozenset[str] = frozenset()
    """Those of them that were tried and answer."""
    came: Mapping[str, float] = field(default_factory=dict)
    """When each of the sockets came, in monotonic seconds; 0.0: before we looked."""
    at: float = 0.0
    """When the sockets were looked at, in monotonic seconds; 0.0: not yet."""

    def later(self, offer: Offer) -> list[str]:
        """The sockets that came after a stream's first list."""
        return [name for name in self.sockets if self.came.get(name, 0.0) > offer.began]


def unlike_since(offer: Offer, observed: Observation, resource: str) -> float | None:
    """When we sent the list from which the kubelet's later record differs; None if it differs from none.

    The kubelet may not have taken in that list yet, or it has another plugin's devices, whose IDs may be those of our lists.
    A record that was written before our list tells nothing: with a full disk it stays an old one.
    """
    theirs = observed.registered.get(resource)
    if theirs is None:
        return None
    if observed.record != offer.record_before and offer.lacks(theirs):
        return offer.began
    if observed.record != offer.record_since and theirs and theirs != offer.healthy:  # last, since it walks all IDs
        return offer.sent
    return None


def confirmed(
    offer: Offer, observed: Observation, resource: str, allocatable: Mapping[str, Set[str]] | None
) -> frozenset[str]:
    """The devices of another plugin that the kubelet has, by a second witness beside its record; empty: none says so.

    That is what it keeps in memory (`allocatable`, by podresources). Where it does not tell (None), it is a socket that came
    after our stream and answers; and the record must have IDs that were never ours.
    """
    if allocatable is not None:
        theirs = allocatable.get(resource, frozenset())
        return frozenset() if theirs == offer.healthy else frozenset(theirs)
    theirs = observed.registered.get(resource, frozenset())
    came = not observed.answering.isdisjoint(observed.later(offer))
    return theirs if came and offer.lacks(theirs) else frozenset()


def is_late(offer: Offer, observed: Observation, theirs: Set[str]) -> bool:
    """Does the kubelet have these from a list of ours that was sent before the last one? All were ours, and no plugin was seen to come.

    One of 1.37 reads our earlier streams, also those of an agent that was killed, beside the latest, and believes what it reads
    last (kubelet contract: A12.1).
    """
    return observed.at > offer.began and not offer.lacks(theirs) and not observed.later(offer)


def ended(before: Observation, now: Observation) -> frozenset[str]:
    """The plugins that ended between two observations: their sockets are gone, are others, or do not answer now."""
    return frozenset(
        name
        for name, identity in before.sockets.items()
        if now.sockets.get(name) != identity or (name in before.answering and name not in now.answering)
    )


def sentence(observed: Observation, offer: Offer, theirs: Iterable[str]) -> str:
    """The sentence that says which plugin has a name of ours."""
    names = sorted(observed.later(offer) or observed.sockets)
    whose = "whose socket is not in the plugin directory"
    if names:
        whose = f"with the socket {some(names)}" if len(names) == 1 else f"with one of the sockets {some(names)}"
    return (
        f"another plugin, {whose}, has registered this name, and the kubelet has its devices: {some(sorted(theirs))}; "
        "Fairlead registers once more when that has ended"
    )


def observe(plugin_dir: Path, before: Observation, *, doubt: bool) -> Observation:
    """The plugin directory as it is; blocks.

    Args:
        plugin_dir: the kubelet's.
        before: what was observed last.
        doubt: try every socket, not only those that are new.
    """
    which, registered = record(plugin_dir)
    sockets = other_sockets(plugin_dir)
    tried = {it for it, identity in sockets.items() if doubt or before.sockets.get(it) != identity}
    answering = {it for it in tried if listens(plugin_dir / it)}
    return Observation(which, registered, sockets, frozenset(answering | (before.answering & sockets.keys() - tried)))


def other_sockets(plugin_dir: Path) -> dict[str, SocketId]:
    """The sockets of other plugins; ours lie in a directory below. Blocks."""
    sockets = {}
    try:
        with os.scandir(plugin_dir) as entries:
            for entry in entries:
                if entry.name != "kubelet.sock" and not entry.name.startswith("."):
                    found = entry.stat(follow_symlinks=False)
                    if stat.S_ISSOCK(found.st_mode):
                        sockets[entry.name] = found.st_ino, found.st_ctime_ns
    except OSError:
        pass  # the directory is gone, or an entry is since this moment: the next look sees more
    return sockets
