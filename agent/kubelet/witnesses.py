"""Asks the witnesses of who holds what: the kubelet by podresources, its checkpoint, and the pods' cgroups.

Podresources (v1, kubelet contract: A5) also tells what the kubelet could give. The checkpoint, its own record (A6), is rewritten
with every list that a plugin sends, and may be stale; podresources knows better what is active.

Cgroups tell which pods run: what a kubelet that lost its record does not know any more. It gives a pod's devices to another one
once nothing of the pod runs, its sandbox included (`SyncTerminatingPod` of pkg/kubelet): a pod whose cgroup has processes has
its devices. Which of its containers has which of them is no question then. A container's own devices can be seen, too, but not
where it matters: a program of cgroup v2's device controller is instructions of the container runtime's making (BPF_PROG_QUERY on
the cgroup, CAP_SYS_ADMIN), whose shape differs by runtime and which a privileged container has not; its /dev is to be read by
/proc/PID/root alone (CAP_SYS_PTRACE), and lacks what has no node: network functions, mounts, what a process has open and was
unlinked.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass, field  # noqa: TID251  # it compares by some of its fields
from pathlib import Path
from typing import Final, TypeVar

import msgspec
from grpclib.const import Status
from grpclib.exceptions import GRPCError, ProtocolError, StreamTerminatedError
from msgspec import Struct

from agent.claims.ledger import Trace
from agent.history.notes import uid_in
from agent.kubelet.client import Channel
from agent.kubelet.wire import SENSELESS, Encoded, PodDevices, allocatable_devices, messages, pod_devices, strings
from agent.model import SlotKey
from agent.runtime import pacing
from agent.runtime.workers import BATCH, NoWorkerError, Workers, in_batches, in_slices
from backends.interface.decoding import decoded, decoder
from backends.linux import files

ANSWER_BYTES: Final = 16 << 20
"""Of an answer: what the kubelet's own clients take."""

_Part = TypeVar("_Part")

FILE_NAME: Final = "kubelet_internal_checkpoint"

_CHECKPOINT_BYTES: Final = 64 << 20  # 16 resources of 4 MiB each
_AT_ONCE_BYTES: Final = 64 << 10  # are parsed in 0.2 ms: a node's 110 pods with a device each
_MOST_IDS: Final = 50_000  # that pods have; a list of 4 MiB has no more of them

_SETTLED: Final = 0.1  # seconds; a tick of the clock that dates files takes 1 to 10 ms (CONFIG_HZ)
_DEADLINE: Final = 5.0  # seconds in which this process runs

Version = tuple[int, int, int]
"""Of one writing of the file: inode, modification time in ns, size."""

_DEEPEST: Final = (
    6  # below the root: kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-burstable.slice/…-pod….slice
)
_LEAVES: Final = (".service", ".scope", ".mount", ".socket", ".swap")  # of systemd: no pod is below them
_CGROUP_BYTES: Final = 1 << 20


# --- podresources ---


class PodResourcesError(Exception):
    """The kubelet did not say which devices its pods hold, or could; the message says why."""


async def list_pods(socket: Path, timeout: float) -> list[PodDevices]:  # noqa: ASYNC109  # of the call, told to the kubelet
    """The devices that the containers of active pods hold; absence from one list proves nothing (A5).

    Each call has a connection of its own: it is asked every minute or so, and a kubelet restarts in between.

    Args:
        socket: the kubelet's `pod-resources/kubelet.sock`, as this process sees it.
        timeout: seconds for everything.

    Raises:
        PodResourcesError: no kubelet, no answer in time, or none that makes sense.
    """
    return await _ask(socket, "List", pod_devices, timeout)


async def list_allocatable(socket: Path, timeout: float) -> dict[str, set[str]]:  # noqa: ASYNC109  # as above
    """Resource → the IDs that the kubelet has as healthy, from its memory; a resource without one is missing.

    Raises:
        PodResourcesError: as above, or the kubelet is older than 1.23.
    """
    found: defaultdict[str, set[str]] = defaultdict(set)
    for resource, ids in await _ask(socket, "GetAllocatableResources", allocatable_devices, timeout):
        if ids:
            found[resource].update(ids)
    return found


async def _ask(
    socket: Path,
    method: str,
    read: Callable[[bytes], Iterable[_Part]],
    timeout: float,  # noqa: ASYNC109  # as above
) -> list[_Part]:
    if socket.is_symlink():  # noqa: ASYNC240  # it waits for no disk
        raise PodResourcesError(f"{socket} is a symbolic link, which no kubelet makes: it is not followed; remove it")
    channel = Channel(str(socket), most_bytes=ANSWER_BYTES)
    try:
        request = Encoded()  # neither has fields
        answer = await channel.call(f"/v1.PodResourcesLister/{method}", request, Encoded, timeout)
        return await in_slices(read(answer))
    except GRPCError as error:
        if error.status is Status.DEADLINE_EXCEEDED:  # it knows our deadline, and may see it pass a moment before us
            raise PodResourcesError(_silence(socket, timeout)) from error
        raise PodResourcesError(_refusal(socket, error)) from error
    except TimeoutError as error:
        raise PodResourcesError(_silence(socket, timeout)) from error
    except OSError as error:
        raise PodResourcesError(
            f"no kubelet answers at {socket}: {os.strerror(error.errno) if error.errno else error}"
        ) from error
    except (StreamTerminatedError, ProtocolError, AttributeError) as error:  # the last is grpclib's: lost when made
        if channel.excess:
            raise PodResourcesError(f"what answers at {socket} sends {channel.excess}: that is no kubelet's") from error
        raise PodResourcesError(f"the kubelet at {socket} ended the call: {error}") from error
    except SENSELESS as error:
        raise PodResourcesError(f"the kubelet's answer at {socket} is no pod list: {error}") from error
    finally:
        channel.close()


def _silence(socket: Path, seconds: float) -> str:
    return f"the kubelet did not answer at {socket} within {seconds:g} s"


def _refusal(socket: Path, error: GRPCError) -> str:
    if error.status is Status.UNIMPLEMENTED:
        return f"what answers at {socket} does not serve podresources v1 (Kubernetes 1.20 and later do)"
    return f"the kubelet at {socket} refused to list its pods' devices: {error.message or error.status.name}"


async def holders(pods: Iterable[PodDevices]) -> dict[SlotKey, tuple[PodDevices, ...]]:
    """Slot → the containers that have it, of what podresources says."""
    found: defaultdict[SlotKey, tuple[PodDevices, ...]] = defaultdict(tuple)
    async for batch in in_batches(((it, device_id) for it in pods for device_id in it.ids), 10 * BATCH):
        for entry, device_id in batch:
            found[entry.resource, device_id] += (entry,)
    return dict(found)


# --- the checkpoint ---


class CheckpointError(Exception):
    """The checkpoint cannot be read; the message says why and what to do."""


class DamagedError(CheckpointError):
    """It makes no sense. A kubelet that starts with it forgets what pods have, as if there were none."""


@dataclass(frozen=True, slots=True)
class CheckpointEntry:
    """What one container was given of one resource."""

    pod_uid: str
    container: str
    resource: str
    ids: tuple[str, ...]
    response: bytes = field(default=b"null", compare=False, repr=False)
    """The plugin's answer, a ContainerAllocateResponse, as JSON has bytes."""

    def slots(self) -> frozenset[SlotKey]:
        """The slots that these IDs are."""
        return frozenset((self.resource, device_id) for device_id in self.ids)

    async def trace(self) -> Trace:
        """The nodes and names that the container was given; none where the answer makes no sense."""
        try:
            answer = b"" if self.response == b"null" else decoded(self.response, bytes)
            nodes = await in_slices(path for node in messages(answer, 3) for path in strings(node, 2))
            mounts = await in_slices(path for mount in messages(answer, 2) for path in strings(mount, 2))
            values = [value for pair in messages(answer, 1) for text in strings(pair, 2) for value in text.split(",")]
            cdi = await in_slices(name.rpartition("=")[2] for it in messages(answer, 5) for name in strings(it, 1))
        except (msgspec.MsgspecError, *SENSELESS):
            return Trace()
        return Trace(frozenset(nodes + mounts), frozenset(values + cdi))


class Checkpoint(Struct, frozen=True):
    """One writing of the file."""

    version: Version
    entries: tuple[CheckpointEntry, ...]
    held: Mapping[str, Set[str]]
    """Resource → the IDs that containers have."""

    def served(self) -> dict[tuple[str, str, str], tuple[str, ...]]:
        """UID of a pod, container and resource → the IDs that the container has of it."""
        return {(it.pod_uid, it.container, it.resource): it.ids for it in self.entries}


class _Entry(msgspec.Struct, rename="pascal"):
    pod_uid: str = msgspec.field(name="PodUID")
    container_name: str
    resource_name: str
    device_ids: dict[str, list[str] | None] | list[str] | None = msgspec.field(default=None, name="DeviceIDs")
    """By NUMA node ("-1" for none), under each of its nodes; a kubelet before 1.20 wrote a plain list.

    Go writes an empty list as null.
    """

    alloc_resp: msgspec.Raw = msgspec.field(default=msgspec.Raw(b"null"), name="AllocResp")

    def ids(self) -> tuple[str, ...]:
        if isinstance(self.device_ids, dict):
            return tuple(sorted({id_ for ids in self.device_ids.values() for id_ in ids or ()}))
        return tuple(sorted(self.device_ids or ()))


class _Data(msgspec.Struct, rename="pascal"):
    pod_device_entries: list[_Entry] | None = None


class _File(msgspec.Struct, rename="pascal"):
    data: _Data


class _RegisteredData(msgspec.Struct, rename="pascal"):
    registered_devices: dict[str, list[str] | None] | None = None
    """Resource → the IDs that are healthy; here, too, an empty list may be null."""


class _RegisteredFile(msgspec.Struct, rename="pascal"):
    data: _RegisteredData


_decoder: Final = decoder(_File)


def checkpoint_version(plugin_dir: Path) -> Version | None:
    """Identifies the file that lies there now; None if there is none. The kernel knows it without the disk."""
    try:
        found = (plugin_dir / FILE_NAME).lstat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def parse_checkpoint(data: bytes, version: Version) -> Checkpoint:
    """What a checkpoint file says.

    Raises:
        msgspec.MsgspecError: it is no JSON, of another shape, or says more than can be.
    """
    found = tuple(
        CheckpointEntry(entry.pod_uid, entry.container_name, entry.resource_name, entry.ids(), bytes(entry.alloc_resp))
        for entry in _decoder.decode(data).data.pod_device_entries or ()
    )
    if (count := max(len(found), sum(len(entry.ids) for entry in found))) > _MOST_IDS:
        raise msgspec.ValidationError(f"it says that pods have {count} devices, and {_MOST_IDS} is the most")
    held: defaultdict[str, set[str]] = defaultdict(set)
    for entry in found:
        held[entry.resource].update(entry.ids)
    return Checkpoint(version, found, held)


def read_checkpoint(plugin_dir: Path) -> Checkpoint | None:
    """The checkpoint in the kubelet's plugin directory, or None if there is none; blocks, so call it in a thread.

    Raises:
        CheckpointError: it cannot be read, or is damaged.
    """
    path = plugin_dir / FILE_NAME
    try:
        with files.opened(path, follow=False) as (file, found):
            data = files.contents(file, _CHECKPOINT_BYTES, path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}; Fairlead needs to read it as root") from error
    try:
        return parse_checkpoint(data, (found.st_ino, found.st_mtime_ns, found.st_size))
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise DamagedError(
            f"{path} is damaged: {error}; the kubelet writes it again with the next list of devices"
        ) from error


def read_at_once(plugin_dir: Path) -> Checkpoint | None:
    """The same without a thread, which takes three times as long: of what the kernel has in memory (RWF_NOWAIT, preadv2(2)).

    The kernel has what the kubelet wrote a moment ago.

    Raises:
        BlockingIOError: it must be waited for, is long, or makes no sense: `read` it.
    """
    try:
        with files.opened(plugin_dir / FILE_NAME, follow=False) as (file, found):
            data = bytearray(min(found.st_size, _AT_ONCE_BYTES) + 1)
            if os.preadv(file, [data], 0, os.RWF_NOWAIT) == found.st_size == len(data) - 1:
                return parse_checkpoint(bytes(data[:-1]), (found.st_ino, found.st_mtime_ns, found.st_size))
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        pass  # in a thread it can be waited for, and its fault said
    raise BlockingIOError


def record(plugin_dir: Path) -> tuple[Version | None, Mapping[str, frozenset[str]]]:
    """Which writing of the same file this is, and resource → the IDs that the kubelet has as healthy; blocks.

    Nothing if it cannot be read.
    """
    try:
        with files.opened(plugin_dir / FILE_NAME, follow=False) as (file, found):
            data = decoded(files.contents(file, _CHECKPOINT_BYTES, plugin_dir / FILE_NAME), _RegisteredFile).data
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None, {}
    registered = {name: frozenset(ids or ()) for name, ids in (data.registered_devices or {}).items()}
    return (found.st_ino, found.st_mtime_ns, found.st_size), registered


def lack_of_room(plugin_dir: Path) -> str:
    """Why the kubelet cannot write its checkpoint; empty if it can, or if that is unknown.

    It writes another file beside the one that is there, each time, and then renames that.
    The kernel knows what room there is without the disk (statvfs(2)). A file system without a fixed number of files says that it has 0.
    """
    try:
        found, size = os.statvfs(plugin_dir), _size(plugin_dir)
    except OSError:
        return ""
    file = plugin_dir / FILE_NAME
    if found.f_files and not found.f_ffree:
        return f"{file} cannot be written: its disk has no room for another file"
    if found.f_bfree * found.f_frsize < max(size, found.f_frsize):  # no numbers: it is told once for each reason
        return f"{file} cannot be written: its disk is full"
    return ""


def _size(plugin_dir: Path) -> int:
    found = checkpoint_version(plugin_dir)
    return found[2] if found else 0


class CheckpointReader:
    """Reads the checkpoint, in a thread if it must wait for the disk; those who ask at the same time share a reading."""

    def __init__(self, plugin_dir: Path, wall: Callable[[], float] = time.time) -> None:
        """Prepare; `wall` has seconds since the epoch."""
        self._plugin_dir = plugin_dir
        self._wall = wall
        self._read_at = 0.0
        self._workers = Workers("checkpoint", limit=2)
        self._reading = asyncio.Lock()
        self._begun = 0
        self._read_last = 0  # the number of the reading
        self.last: Checkpoint | None = None
        """What it read."""
        self.under_way = 0
        """Readings that have not ended; of a disk that hangs, also those that no caller waits for any more."""

    async def read(self, within: float | None = None) -> Checkpoint | None:
        """The checkpoint as it lies there after this call began; None if there is none. It waits so many seconds at most.

        Raises:
            CheckpointError: it cannot be read, is damaged, or the reading hangs.
        """
        if not self._reading.locked():
            began = self._wall()
            with suppress(BlockingIOError):
                self.last, self._read_at = read_at_once(self._plugin_dir), began
                self._begun = self._read_last = self._begun + 1
                return self.last
        wanted = self._begun + 1  # the next to begin; the one under way may have seen the file before
        try:
            async with pacing.running_timeout(_DEADLINE if within is None else within), self._reading:
                if self._read_last < wanted:
                    self._begun = number = self._begun + 1
                    began = self._wall()
                    self.last, self._read_at = await self._workers.start(self._read), began
                    self._read_last = number
                return self.last
        except (TimeoutError, NoWorkerError):
            raise CheckpointError("reading it hangs") from None

    def is_unchanged(self) -> bool:
        """Whether the file there is the one that was read last. The kubelet makes another one for each writing.

        A file that was young when it was read may have been replaced within the same tick of the kernel's clock, under the same
        inode: it counts as changed.
        """
        if self.last is None or self.last.version != checkpoint_version(self._plugin_dir):
            return False
        return self._read_at - self.last.version[1] / 1e9 > _SETTLED

    def _read(self) -> Checkpoint | None:
        self.under_way += 1
        try:
            return read_checkpoint(self._plugin_dir)
        finally:
            self.under_way -= 1

    def close(self) -> None:
        """Let the threads end."""
        self._workers.close()


# --- cgroups ---


def running_pods(sys: Path) -> frozenset[str] | None:
    """UIDs of the pods that have a process; None if pods' cgroups are not to be seen here. Blocks.

    A container without the host's /sys sees its own cgroup alone, or none.

    Args:
        sys: where the host's /sys is seen.
    """
    root = sys / "fs/cgroup"
    if not (root / "cgroup.controllers").exists() and (root / "pids").is_dir():  # of cgroup v1 one hierarchy is enough
        root /= "pids"
    found = dict[str, bool]()
    for uid, group in _pods(root, _DEEPEST):
        found[uid] = found.get(uid, False) or _is_populated(group)
    if not found and not _has_kubepods(root):
        return None
    return frozenset(uid for uid, is_populated in found.items() if is_populated)


def _has_kubepods(root: Path) -> bool:
    """Whether the kubelet's group for pods is there (defaultNodeAllocatableCgroupName, pkg/kubelet/cm); it may have none.

    It lies below `--cgroup-root`: in kind that is /kubelet, and with systemd the group's name has it (`kubelet-kubepods.slice`).
    """
    groups = (inner.name for group in (root, *_below(root)) for inner in _below(group))
    return any(name.removesuffix(".slice").endswith("kubepods") for name in groups)


def _pods(group: Path, depth: int) -> Iterator[tuple[str, Path]]:
    """The cgroups of pods below this one, with their UIDs."""
    for inner in _below(group):
        if uid := uid_in(os.fsencode(inner.name)):
            yield uid, inner
        elif depth > 1 and not inner.name.endswith(_LEAVES):
            yield from _pods(inner, depth - 1)


def _below(group: Path) -> list[Path]:
    with suppress(OSError), os.scandir(group) as entries:  # it may have gone meanwhile
        return [Path(it.path) for it in entries if it.is_dir(follow_symlinks=False)]
    return []


def _is_populated(group: Path) -> bool:
    """Whether it, or one below it, has a process. Of cgroup v2 the kernel says so (cgroup.events, cgroup-v2.rst)."""
    with suppress(OSError):
        return b"populated 1" in files.read(group / "cgroup.events", _CGROUP_BYTES)
    with suppress(OSError):
        if files.read(group / "cgroup.procs", _CGROUP_BYTES).strip():
            return True
    return any(map(_is_populated, _below(group)))
