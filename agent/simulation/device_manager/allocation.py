"""Which devices pods hold, and which ones a container is given; pure.

Kubelet contract: A4.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping

from msgspec import Struct


class AdmissionError(Exception):
    """A container cannot have its devices; the sentence ends up in the pod's status."""


class Allocation(Struct, frozen=True):
    """What a container holds of one resource: IDs by NUMA node, and the plugin's reply as it came."""

    by_node: Mapping[int, tuple[str, ...]]
    reply: bytes

    @property
    def ids(self) -> frozenset[str]:
        """Every ID once."""
        return frozenset(device for devices in self.by_node.values() for device in devices)


Key = tuple[str, str, str]
"""Pod UID, container, resource."""


class PodDevices:
    """The device manager's memory of who holds what; survives a restart in the checkpoint."""

    def __init__(self, entries: Mapping[Key, Allocation] | None = None) -> None:
        self.entries: dict[Key, Allocation] = dict(entries or {})
        self.overlooked: set[str] = set()
        """UIDs of pods whose devices count as free though they have them (kubelet contract: A11.8)."""

    def in_use(self, resource: str) -> frozenset[str]:
        """The IDs of this resource that some container holds."""
        entries = self.entries.items()
        return frozenset().union(
            *(a.ids for (uid, _, held), a in entries if held == resource and uid not in self.overlooked)
        )

    def of(self, uid: str, container: str) -> dict[str, Allocation]:
        """What one container holds: resource → allocation."""
        return {key[2]: a for key, a in self.entries.items() if key[:2] == (uid, container)}

    def keep_only(self, uids: Collection[str]) -> None:
        """Forget what other pods held; if they held anything, all is counted again."""
        kept = {key: a for key, a in self.entries.items() if key[0] in uids}
        if len(kept) < len(self.entries):
            self.entries = kept
            self.overlooked.clear()


class Choice(Struct, frozen=True):
    """An allocation half made: what is reused, and what the rest may be taken from."""

    count: int
    chosen: frozenset[str]
    free: frozenset[str]

    @property
    def complete(self) -> bool:
        """Is nothing left to choose?"""
        return len(self.chosen) == self.count

    def finish(self, preferred: Collection[str], rng: random.Random) -> frozenset[str]:
        """Fill up with preferred devices that are free, then with any; in random order, as Go's maps do."""
        wanted = _shuffled(self.free & frozenset(preferred), rng)
        others = _shuffled(self.free - frozenset(preferred), rng)
        return self.chosen | frozenset((wanted + others)[: self.count - len(self.chosen)])


def begin(
    resource: str,
    count: int,
    *,
    healthy: frozenset[str],
    in_use: frozenset[str],
    reusable: Collection[str],
    rng: random.Random,
) -> Choice:
    """Reuse what init containers left, and see what is free for the rest.

    Raises:
        AdmissionError: too few healthy devices are free.
    """
    if not healthy:
        raise AdmissionError(f"no healthy devices present; cannot allocate unhealthy devices {resource}")
    chosen = frozenset(_shuffled(reusable, rng)[:count])
    free = healthy - in_use - chosen
    needed = count - len(chosen)
    if len(free) < needed:
        raise AdmissionError(
            f"requested number of devices unavailable for {resource}. Requested: {needed}, Available: {len(free)}"
        )
    return Choice(count, chosen, free)


def _shuffled(ids: Collection[str], rng: random.Random) -> list[str]:
    return rng.sample(sorted(ids), len(ids))
