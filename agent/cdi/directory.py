"""Keeps our specifications on disk: whole or not at all, and each known to be ours before it is there.

A record in `state_dir` names the resources that have one: it is written before the first specification of a resource is, and
again after the last is gone. No other file is ever removed, whatever it is called. All of it blocks.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec

from agent.cdi import RECORD, names, spec
from backends.base import Host, HostPath
from backends.linux import files
from backends.linux.nodes import NoNodeError, device_node

_LOCK: Final = "cdi.lock"
_MOST_RECORDED: Final = 1 << 20  # bytes
_MOST_READ: Final = 16 << 20  # bytes of a specification: 10,000 devices have 5 MB

Devices = Mapping[str, spec.Edits]
"""What a specification says of each device, by its name."""


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
            return frozenset(
                msgspec.json.decode(files.read(self._record, _MOST_RECORDED, follow=False), type=list[str])
            )
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
        path, kind = self._host.local(names.file(resource)), names.kind(resource)
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
        path = self._host.local(names.file(resource))
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
        path = self._host.local(names.file(resource))
        try:
            found = spec.decode(files.read(path, _MOST_READ, follow=False), names.kind(resource))
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
