"""Tells that another plugin has registered a name of ours, and registers what the kubelet lost to it once more.

The kubelet listens to the plugin that registered a name last, and tells no other (kubelet contract: A2, A9.1). While that plugin
serves, the kubelet's record has its devices; when it ends, the kubelet has none, and a list that still goes down our stream makes
it show all of ours as healthy although it refuses every pod. So no list is sent while another plugin has the name, but for the
loss of what the kubelet would give of ours, and it is registered once more when that plugin has ended: two that live would
take turns for ever.

Two witnesses are needed. The kubelet's record alone may be an old one: the kubelet takes what it writes under a lock and writes
after it, so that of two records the older may come last (`writeCheckpoint` of pkg/kubelet/cm/devicemanager/manager.go); a disk
may be full or slow; a backup touches files. What is later than a list of ours is told without the wall clock, which may be set at
any moment. What an `Observation` means is decided by pure functions; `LostResources` makes one after the other, and acts.
"""

from __future__ import annotations

import asyncio
import math
import os
import stat
import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence, Set
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import structlog
from msgspec import Struct, field
from msgspec.structs import replace

from agent.kubelet.client import listens
from agent.kubelet.pod_claims import PodClaims
from agent.kubelet.witnesses import FILE_NAME, PodResourcesError, Version, list_allocatable, record
from agent.runtime import pacing
from agent.runtime.errors import some
from agent.runtime.pacing import Backoff, Doorbell
from agent.runtime.workers import NoWorkerError, Workers

if TYPE_CHECKING:
    from agent.kubelet.registration import Registrar
    from agent.model import Slot

SETTLED: Final = 1.0
"""Seconds after a list in which the kubelet takes it in."""

INTERVAL: Final = 60.0
"""Seconds between two looks where no other plugin is."""

_BESIDE_OTHERS: Final = 2.0  # seconds between two looks where other plugins have sockets
_UNSETTLED: Final = 1.0  # seconds until the next look while another plugin has a name, or the kubelet a list to take in
_GATHER: Final = 0.3  # seconds from a sign to the look that it causes
_STOPS_WITHIN: Final = 2.0  # seconds from the end of a plugin's stream to that of its socket
_LONGEST: Final = 3600.0  # seconds between two registrations of a resource that the kubelet goes on losing
_DEADLINE: Final = 5.0  # seconds for an answer
_GIVEN_UP: Final = 600.0  # seconds after which the kubelet need not answer, however long this process stood still
_LIST_WAITS: Final = 1.0
"""Seconds at most that a list waits for the kubelet's record to be read, and then for what it has in memory.

More than `running_timeout` counts of a time in which this process stood still: it is not out of time by that.
"""
_RECORD_COMES: Final = 0.05  # seconds between two looks at the record while a list waits for what it will say
_LOST: Final = "the kubelet offers none of its devices, as if another plugin had registered this name and were gone"
_DOUBTED: Final = (
    "another plugin ended when a list was sent: if it had registered this name, the kubelet refuses every pod"
)
_STRANGERS: Final = "pods have devices of another plugin that registered this name when a list was sent: ours hid it"
_AGAIN: Final = "registering once more"

log = structlog.get_logger()

SocketId = tuple[int, int]
"""Inode, and time of its last change in ns."""


# --- what was observed, and what it means ---


class Offer(Struct, frozen=True):
    """What a resource's open stream has told the kubelet.

    What the kubelet has is compared with it after every list, which may have 10,000 IDs: so whole sets are compared, no ID by itself.
    """

    slots: Mapping[str, Slot]
    """Of the last list."""
    unhealthy: Set[str]
    """The IDs among them that it had as Unhealthy."""
    delisted: Container[str]
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
        return frozenset(self.slots.keys() - self.unhealthy)

    def has_as_healthy(self, ids: Set[str]) -> bool:
        """Whether these IDs are all that the last list had as healthy."""
        is_as_long = len(ids) == len(self.slots) - len(self.unhealthy)
        return is_as_long and ids.isdisjoint(self.unhealthy) and not ids - self.slots.keys()

    def lacks(self, ids: Set[str]) -> bool:
        """Whether one of these IDs is in no list of the stream."""
        return any(device_id not in self.delisted for device_id in ids - self.slots.keys())


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
    if not theirs or offer.has_as_healthy(theirs):
        return None
    if observed.record != offer.record_before and offer.lacks(theirs):
        return offer.began
    return offer.sent if observed.record != offer.record_since else None


def confirmed(
    offer: Offer, observed: Observation, resource: str, allocatable: Mapping[str, Set[str]] | None
) -> frozenset[str]:
    """The devices of another plugin that the kubelet has, by a second witness beside its record; empty: none says so.

    That is what it keeps in memory (`allocatable`, by podresources). Where it does not tell (None), it is a socket that came
    after our stream and answers; and the record must have IDs that were never ours.
    """
    if allocatable is not None:
        theirs = allocatable.get(resource, frozenset())
        return frozenset() if offer.has_as_healthy(theirs) else frozenset(theirs)
    theirs = observed.registered.get(resource, frozenset())
    came = not observed.answering.isdisjoint(observed.later(offer))
    return theirs if came and offer.lacks(theirs) else frozenset()


def is_late(offer: Offer, observed: Observation, theirs: Set[str]) -> bool:
    """Whether the kubelet has these from a list of ours sent before the last one: all were ours, and no plugin was seen to come.

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


# --- looking, and what is done about it ---


class LostResources:
    """Compares the devices that the kubelet has, and would give to pods, with those of our lists."""

    def __init__(
        self,
        pod_resources: Path,
        plugin_dir: Path,
        registrars: dict[str, Registrar] | None = None,
        clock: Callable[[], float] = time.monotonic,
        pod_claims: PodClaims | None = None,
    ) -> None:
        """Prepare.

        Args:
            pod_resources: the podresources socket.
            plugin_dir: where the kubelet's record and the sockets of others lie.
            registrars: of the resources that are served, as they are at any time; none yet, if left out.
            clock: monotonic seconds.
            pod_claims: finds out what pods hold.
        """
        self._pod_claims = pod_claims
        self._socket, self._plugin_dir, self._clock = pod_resources, plugin_dir, clock
        self.registrars = {} if registrars is None else registrars
        self._workers = Workers("other plugins", limit=2)
        self._tried: dict[str, tuple[float, Backoff]] = {}
        """Resource that was registered once more, and of which the kubelet still has no device → until when (monotonic)."""
        self._overtaken: dict[str, int] = {}  # resource → how many Allocates had come when it was
        self._observed = Observation()
        self._allocatable: Mapping[str, Set[str]] | None = None  # as the kubelet said last; None: it did not
        self._doubtful: set[str] = set()
        """The resources of which the last look came too early to tell whose devices the kubelet has."""
        self._looked = 0.0
        self._moved: dict[str, float] = {}  # socket → when it came or went last, since the last look
        self._doubts: dict[str, tuple[float, str]] = {}
        """Resource → since when a list of ours may hide that the kubelet has lost it, and why."""
        self._sign = Doorbell()
        self._is_looking = False
        self._is_told = False  # of what happens in the plugin directory

    def changed(self, path: Path) -> None:
        """Note an event of this entry of the plugin directory, or that the directory itself is watched now."""
        if path.suffix == ".sock" and path.name != "kubelet.sock":
            self._moved[path.name] = self._clock()
            self._sign.set()
        elif path == self._plugin_dir or path.name == FILE_NAME:
            self._is_told = True
            self._sign.set()

    async def run(self) -> None:
        """Look for ever."""
        try:
            while True:
                await self._sign.rung(self._pause(), gather=_GATHER)
                await self.look()
        finally:
            self._workers.close()

    def _pause(self) -> float:
        if self._overtaken or self._doubts:
            return _UNSETTLED
        settled = max((it.plugin.sent_at for it in self._registered()), default=-math.inf) + SETTLED
        if (left := settled - self._clock()) > 0:
            return left
        return _BESIDE_OTHERS if self._observed.sockets else INTERVAL

    def _registered(self) -> list[Registrar]:
        return [registrar for registrar in self.registrars.values() if registrar.registered]

    async def look(self) -> None:
        """Register once more what the kubelet should offer and does not."""
        registered = self._registered()
        self._overtaken = {n: it for n, it in self._overtaken.items() if n in {r.plugin.resource for r in registered}}
        if not any(registrar.plugin.offers or registrar.rival for registrar in registered):
            return
        self._is_looking = True  # before it has been compared, the cause of this look is unknown
        try:
            over = await self._look_at_directory([registrar.plugin.sent_at for registrar in registered])
            if (asked := self._offering()) or any(map(self._unlike_since, registered)):
                await self._ask(_DEADLINE)
            self._look_at_all(registered, over)
        finally:
            self._is_looking = False
        if asked:
            self._look_for_lost(asked)

    def _look_at_all(self, registered: Sequence[Registrar], over: float) -> None:
        self._doubtful.clear()
        for registrar in registered:
            is_over, doubt = registrar.plugin.began < over, self._doubts.get(registrar.plugin.resource)
            if not (registrar.rival and is_over):  # else the record may have nothing of that name, as if it were ours
                self._compare(registrar)
            # its devices may be found out only after its end: a kubelet of 1.37 keeps them until our next list
            if registrar.rival and (is_over or (doubt and doubt[1] is _DOUBTED)):
                self._renew(registrar, _LOST)
            elif doubt and registrar.plugin.sent_at >= doubt[0]:
                self._renew(registrar, doubt[1])

    async def _ask(self, within: float) -> None:
        """Have the kubelet say which devices it has, in so many seconds in which this process runs."""
        try:
            async with pacing.running_timeout(within):
                self._allocatable = await list_allocatable(self._socket, _GIVEN_UP)
        except (TimeoutError, PodResourcesError):
            self._allocatable = (
                None  # `PodClaims` asks there too, and reports it; kubelets before 1.23 do not know the call
            )

    async def _look_at_directory(self, sent: Sequence[float]) -> float:
        """Look at the directory; returns when another plugin ended since the last look, or 0.0.

        `sent` is when our last lists were sent.
        """
        before, since, self._looked = self._observed, self._looked, self._clock()
        moved, self._moved = self._moved, {}
        try:
            async with pacing.running_timeout(_DEADLINE):
                # one that was killed may leave its socket, and a kubelet of 1.37 its devices (kubelet contract: A12)
                doubt = bool(self._overtaken) or max(sent) >= since
                job = partial(observe, self._plugin_dir, before, doubt=doubt)
                found = await self._workers.start(job)
        except (TimeoutError, NoWorkerError):
            return 0.0  # `PodClaims` reads there too, and reports it
        stayed = {name for name, identity in found.sockets.items() if before.sockets.get(name) == identity}
        came = {it: before.came[it] if it in stayed else moved.get(it, since and self._looked) for it in found.sockets}
        self._observed = replace(found, came=came, at=self._looked)
        names = ended(before, self._observed) | (moved.keys() - self._observed.sockets.keys())
        over = max((moved.get(name, since) for name in names), default=0.0)
        for registrar in self._registered():
            if registrar.plugin.began < over:  # else it was registered over that plugin
                self._doubts.setdefault(registrar.plugin.resource, (max(since, over - _STOPS_WITHIN), _DOUBTED))
        return over

    # --- another plugin that serves ---

    async def confirm(self, resource: str, listed: Callable[[], Set[str]]) -> None:
        """Find out before a list is sent whether the name is still ours, and what pods hold that it lacks (kubelet contract: A7.2).

        `listed` are the IDs of the list, as it is when called.
        """
        await self.before_list(resource)
        if self._pod_claims is not None and (strangers := await self._pod_claims.confirm(resource, listed)):
            self.suspect(resource, strangers)

    def suspect(self, resource: str, held: Set[str]) -> None:
        """Note that pods hold IDs that were never ours: another plugin has registered the name since our first list.

        Within milliseconds of its registration nothing else betrays it, and a list of ours that goes out now may hide it.
        """
        registrar = self.registrars.get(resource)
        if registrar and registrar.registered and (offer := registrar.plugin.offer) and offer.lacks(held):
            self._doubts.setdefault(resource, (self._clock(), _STRANGERS))
            self._sign.set()

    async def before_list(self, resource: str) -> None:
        """Find out whether another plugin has the name by now: a list that was sent then would hide it.

        The kubelet's record is read only where the plugin directory may have changed since the last look, or where that came
        too early to tell. Where the record and the kubelet's memory differ from our lists, this list waits until the kubelet has
        taken them in, `SETTLED` seconds at most: what differs afterwards is another plugin's.
        """
        if not (self._sign.is_set() or self._is_looking or not self._is_told or resource in self._doubtful):
            return
        registrar = self.registrars.get(resource)
        if registrar is None or not registrar.registered or resource in self._overtaken:
            return
        while await self._has_record():
            if self._unlike_since(registrar) is not None:
                await self._ask(_LIST_WAITS)
            self._compare(registrar)
            if resource not in self._doubtful:
                return
            await asyncio.sleep(_RECORD_COMES)

    async def _has_record(self) -> bool:
        """Read the kubelet's record; False if that takes too long."""
        try:
            async with pacing.running_timeout(_LIST_WAITS):
                which, registered = await self._workers.start(partial(record, self._plugin_dir))
        except (TimeoutError, NoWorkerError):
            return False  # `PodClaims` reads there too, and reports it
        self._observed = replace(self._observed, record=which, registered=registered)
        return True

    def _unlike_since(self, registrar: Registrar) -> float | None:
        """When we sent the list from which the kubelet's record differs; None if it differs from none."""
        offer = registrar.plugin.offer if registrar.registered else None
        return None if offer is None else unlike_since(offer, self._observed, registrar.plugin.resource)

    def _compare(self, registrar: Registrar) -> None:
        """Report that another plugin has the name, or has it no more; note where it is too early to tell."""
        plugin, name = registrar.plugin, registrar.plugin.resource
        self._doubtful.discard(name)
        if not registrar.registered or (offer := plugin.offer) is None:
            return
        since, theirs = unlike_since(offer, self._observed, name), frozenset[str]()
        if since is not None:
            theirs = confirmed(offer, self._observed, name, self._allocatable)
            if theirs and self._clock() - since < SETTLED:
                self._doubtful.add(name)
            elif theirs and is_late(offer, self._observed, theirs):
                theirs = frozenset()
                plugin.repeat()
        lasts = since is not None and self._allocatable is None and name in self._overtaken
        is_theirs = (theirs and name not in self._doubtful) or lasts
        if is_theirs and name not in self._overtaken:
            self._overtaken[name] = plugin.asked
            registrar.rival = sentence(self._observed, offer, theirs)
            log.warning("overtaken", resource=name, reason=registrar.rival, then="sending no lists meanwhile")
        elif name in self._overtaken and (not is_theirs or plugin.asked > self._overtaken[name]):
            del self._overtaken[name]
            registrar.rival = ""
            plugin.silence(False)
            log.info("not-overtaken", resource=name)
        if name in self._overtaken:
            plugin.silence(True, self._offered(registrar))

    def _offered(self, registrar: Registrar) -> Set[str]:
        """What the kubelet would give to a pod of our last list: its loss is never kept from it."""
        if (offer := registrar.plugin.offer) is None:
            return frozenset()
        if self._allocatable is None:
            return offer.healthy
        return offer.healthy & self._allocatable.get(registrar.plugin.resource, frozenset())

    # --- what no plugin serves ---

    def _look_for_lost(self, asked: Mapping[str, float]) -> None:
        if self._allocatable is None:
            self._doubts.clear()
            return
        now = {it.plugin.resource: it.plugin.sent_at for it in self._registered() if it.plugin.offers}
        known = {name for name, sent_at in asked.items() if now.get(name) == sent_at}
        dispelled = known - self._doubtful
        self._doubts = {name: doubt for name, doubt in self._doubts.items() if name in now.keys() - dispelled}
        self._tried = {name: tried for name, tried in self._tried.items() if name not in self._allocatable}
        for name in sorted(known - self._allocatable.keys()):
            self._renew(self.registrars[name], _LOST)

    def _offering(self) -> Mapping[str, float]:
        """The resources that the kubelet should offer, with when their lists were sent."""
        now = self._clock()
        plugins = (registrar.plugin for registrar in self._registered())
        return {it.resource: it.sent_at for it in plugins if now - it.sent_at >= SETTLED and it.offers}

    def _renew(self, registrar: Registrar, why: str) -> None:
        name, now = registrar.plugin.resource, self._clock()
        again, backoff = self._tried.get(name, (now, Backoff(INTERVAL, _LONGEST)))
        if now < again:
            return
        self._tried[name] = now + backoff.next(), backoff
        self._overtaken.pop(name, None)
        self._doubts.pop(name, None)
        registrar.plugin.silence(True, self._offered(registrar))  # until the new stream
        log.warning("registration-lost", resource=name, reason=why, then=_AGAIN)
        registrar.renew()
