"""Keeps our specifications on disk, whole or not at all: one for each resource, and one for each ResourceClaim.

That of a resource is known to be ours before it is there: a record in `state_dir` names the resources that have one: it is written before the first specification of a resource is, and
again after the last is gone. No other file is ever removed, whatever it is called.

That of a claim is written before the kubelet is answered: DRA has no other way in. It stays until the claim is unprepared, also
while no agent runs: a container that starts again is made from it. Its name is the claim's UID, so that no runtime takes an
earlier one for it. It is not synced: a boot empties /run, and the kubelet then has claims prepared again. All of it blocks.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import msgspec

from agent.cdi import RECORD, spec
from backends.base import ContainerEdits, Host, HostPath
from backends.interface.decoding import decoded
from backends.linux import files
from backends.linux.nodes import NoNodeError, device_node

_LOCK: Final = "cdi.lock"
_MOST_RECORDED: Final = 1 << 20  # bytes
_MOST_READ: Final = 16 << 20  # bytes of a specification: 10,000 devices have 5 MB

Devices = Mapping[str, spec.Edits]
"""What a specification says of each device, by its name."""

UID: Final = re.compile("[A-Za-z0-9][A-Za-z0-9-]{0,99}")
"""What a ResourceClaim's UID may be, as it becomes a file's name: RFC 4122's form, and what stands for one in tests."""

_MOST_OF_CLAIM: Final = 4 << 20  # bytes of a specification: a claim has 32 devices


# --- of resources ---


class CutOffError(OSError):
    """A specification is ours by the record, and its end is missing: it has to be written again from what there is."""


class Directory:
    """The specifications, and the record of them."""

    def __init__(self, host: Host, state_dir: Path) -> None:
        self._host = host
        self._record, self._lock = state_dir / RECORD, state_dir / _LOCK

    def recorded(self) -> frozenset[str]:
        """The resources that have a specification of ours, or had one begun.

        Raises:
            OSError: the record cannot be read.
        """
        try:
            return frozenset(decoded(files.read(self._record, _MOST_RECORDED, follow=False), list[str]))
        except (FileNotFoundError, msgspec.MsgspecError):  # we write it whole: what cannot be read is not ours
            return frozenset()

    def update(self, resource: str, change: Callable[[Devices], Devices], *, every: bool = False) -> bool:
        """Change a resource's specification, and write it if that changed anything; True if there is one now.

        Args:
            resource: its name.
            change: from what it says to what it is to say; nothing: no specification.
            every: `change` has all that there is: look up every node again, not only those of devices that it adds or
                replaces; and what was cut off says nothing.

        Raises:
            CutOffError: it says nothing, and what `change` has is not all.
            OSError: it cannot be written and stays as it was, or the file is not ours.
        """
        path, kind = self._host.local(spec.file(resource)), spec.kind(resource)
        with self._alone():
            try:
                before = self._read(resource)
            except CutOffError:
                if not every:
                    raise
                before = {}
            wanted = change(before)
            known = {} if every else before
            after = {name: it if it is known.get(name) else resolved(self._host, it) for name, it in wanted.items()}
            if not after:
                self._remove(resource)
                return False
            self._note(self.recorded() | {resource})  # also where the state directory was wiped since
            if after != before:
                path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
                files.replace(path, spec.encode(kind, after), 0o644, synced=True)
        return True

    def remove(self, resource: str) -> bool:
        """Remove a resource's specification, and what a write that was cut off left; True if it was there.

        Raises:
            OSError: it cannot be removed, or the file is not ours.
        """
        with self._alone():
            return self._remove(resource)

    def _remove(self, resource: str) -> bool:
        path = self._host.local(spec.file(resource))
        files.unfinished(path).unlink(missing_ok=True)
        try:
            is_there = bool(self._read(resource))
        except CutOffError:
            is_there = True
        if is_there:
            path.unlink()
        self._note(self.recorded() - {resource})
        return is_there

    def _read(self, resource: str) -> dict[str, spec.Edits]:
        """What our specification says; nothing if there is none.

        Raises:
            CutOffError: it is ours, and no JSON.
            OSError: it cannot be read, or is not ours.
        """
        path = self._host.local(spec.file(resource))
        try:
            found = spec.decode(files.read(path, _MOST_READ, follow=False), spec.kind(resource))
        except FileNotFoundError:
            return {}
        except (msgspec.DecodeError, ValueError) as error:
            found = None
            if resource in self.recorded():
                raise CutOffError(errno.EBADMSG, "Its end is missing", str(path)) from error
        if found is None:
            raise FileExistsError(errno.EEXIST, "It is not Fairlead's; move it away", str(path))
        return found

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Hold the lock for writing: an agent that has handed the node over may still hang in a write."""
        self._lock.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = files.open_ours(self._lock)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)

    def _note(self, resources: frozenset[str]) -> None:
        if resources != self.recorded():
            files.replace(self._record, msgspec.json.encode(sorted(resources)))


def resolved(host: Host, edits: spec.Edits) -> spec.Edits:
    """With the numbers of nodes, and those that links lead to: a runtime takes a link for no node, a kubelet follows it."""
    return msgspec.structs.replace(edits, device_nodes=[_real(host, node) for node in edits.device_nodes])


def _real(host: Host, node: spec.DeviceNode) -> spec.DeviceNode:
    try:
        found = device_node(host, HostPath(node.host_path or node.path))
    except NoNodeError:  # not there now, or outside /dev: as its backend says; it has no numbers until it is back
        return msgspec.structs.replace(node, kind="", major=0, minor=0)
    return msgspec.structs.replace(
        node,
        host_path="" if found.path.text == node.path else found.path.text,
        kind="b" if found.block else "c",
        major=found.major,
        minor=found.minor,
    )


# --- of ResourceClaims ---


class _Claim(msgspec.Struct):
    name: str
    namespace: str
    uid: str


class _Metadata(msgspec.Struct):
    metadata: _Claim


class ClaimFiles:
    """The specifications of one driver's claims."""

    def __init__(self, host: Host, driver: str, metadata: Path) -> None:
        """Prepare; `metadata` is a directory for what containers can read of their devices, at the host's path of it."""
        self._host, self._driver, self._metadata = host, driver, metadata
        self._kind = spec.claim_kind(driver)
        begin, end = spec.claim_file(driver, "*").name.split("*")
        self._name = re.compile(f"{re.escape(begin)}({UID.pattern}){re.escape(end)}")

    def metadata(self, uid: str, request: str) -> HostPath:
        """Where the metadata of a request lies, for a mount."""
        return HostPath(str(self._metadata / uid / f"{request}.json"))

    def write(self, uid: str, devices: Mapping[str, ContainerEdits], metadata: Mapping[str, bytes]) -> None:
        """Have the specification of a claim say this of its devices, by their names; of none, there is no specification.

        `metadata` is what containers can read, by request.

        Raises:
            OSError: it cannot be written.
        """
        for request, said in metadata.items():
            _have(self._metadata / uid / f"{request}.json", said)
        found = {name: resolved(self._host, spec.whole_edits(it)) for name, it in devices.items()}
        path = self._host.local(spec.claim_file(self._driver, uid))
        if not found:
            self.remove(uid)
            return
        _have(path, spec.encode(self._kind, found))

    def remove(self, uid: str) -> None:
        """Remove the specification and the metadata of a claim, as far as there are any.

        Raises:
            OSError: they cannot be removed.
        """
        path = self._host.local(spec.claim_file(self._driver, uid))
        for it in (files.unfinished(path), path):
            it.unlink(missing_ok=True)
        with suppress(FileNotFoundError):  # last: without its name, what an end of ours leaves could not be judged
            shutil.rmtree(self._metadata / uid)

    def uids(self) -> frozenset[str]:
        """The claims that have a specification.

        Raises:
            OSError: the directory cannot be read.
        """
        with suppress(FileNotFoundError):
            found = self._host.local(spec.DIRECTORY).iterdir()
            return frozenset(it[1] for path in found if (it := self._name.fullmatch(path.name)))
        return frozenset()

    def left(self) -> frozenset[str]:
        """The claims that have a specification, or had one before a boot, which takes only that.

        Raises:
            OSError: a directory cannot be read.
        """
        with suppress(FileNotFoundError):
            return self.uids() | {it.name for it in self._metadata.iterdir() if UID.fullmatch(it.name)}
        return self.uids()

    def named(self, uid: str) -> tuple[str, str] | None:
        """A claim's namespace and name, by its metadata; None if there is none that says so.

        Raises:
            OSError: the metadata cannot be read.
        """
        with suppress(FileNotFoundError):
            for path in sorted((self._metadata / uid).glob("*.json")):
                with suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):  # torn, or not ours
                    said = decoded(files.read(path, _MOST_OF_CLAIM, follow=False), _Metadata).metadata
                    if said.uid == uid:
                        return said.namespace, said.name
        return None

    def name(self, device: str) -> str:
        """What the runtime is told for a device of a specification."""
        return f"{self._kind}={device}"


def _have(path: Path, data: bytes) -> None:
    """Write a file if it has anything else; an equal one stays: each change of a directory has runtimes read it again.

    Raises:
        OSError: it cannot be written.
    """
    with suppress(OSError):
        if files.read(path, _MOST_OF_CLAIM, follow=False) == data:
            return
    try:
        files.replace(path, data, 0o644)
    except FileNotFoundError:
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        files.replace(path, data, 0o644)
