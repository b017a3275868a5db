"""Gives nodes to a user while pods hold them, and gives them back: QEMU runs as one, and the kernel's owner is root.

What a node was is noted before it is changed, one file for each node in /run, which ends with the boot as the nodes do. A
node that was plugged in again since is another one, and nobody's to give back.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from typing import Final

import msgspec

from backends.base import AllocationRefused, Host, HostPath
from backends.errors import each, reason_of
from backends.linux.kernel import Notes

NOTES: Final = HostPath("/run/fairlead/owners")


class _Note(msgspec.Struct):
    path: str
    inode: int
    uid: int
    gid: int
    """As they were."""
    owner: int
    """Whom `give` gave it to: user and group."""
    earlier: list[int] = []
    """Whom `give` gave it to before: after a crash it may belong to one of these."""


def give(host: Host, owner: int, nodes: Iterable[tuple[str, HostPath]]) -> None:
    """Make the nodes, each with its number as `DeviceNode.number` writes it, belong to this user and its group.

    Raises:
        AllocationRefused: one cannot be given; what was given before is noted, for the release.
    """
    notes = Notes(host, NOTES)
    for number, path in nodes:
        node = host.local(path)
        try:
            status = node.lstat()
            if (status.st_uid, status.st_gid) == (owner, owner):
                continue
            note = _read(notes, number)
            if note is None or note.inode != status.st_ino:
                note = _Note(path.text, status.st_ino, status.st_uid, status.st_gid, owner)
            elif note.owner != owner:
                note.earlier, note.owner = [*note.earlier, note.owner], owner
            notes.write(number, msgspec.json.encode(note))
            os.chown(node, owner, owner, follow_symlinks=False)
        except OSError as error:
            raise AllocationRefused(
                f"{path} cannot be given to user {owner}: {reason_of(error)}. Ask this node's administrator to let "
                "Fairlead do so (it needs the capability CHOWN), or to leave out owner."
            ) from error


def give_back(host: Host, numbers: Iterable[str]) -> None:
    """Give these nodes back to their owners, where `give` gave them away and nobody else has since.

    Raises:
        ExceptionGroup: of those that cannot be given back; their notes stay.
    """
    notes = Notes(host, NOTES)
    each(lambda number: _give_back(host, notes, number), numbers, OSError, "not given back")


def _give_back(host: Host, notes: Notes, number: str) -> None:
    if (note := _read(notes, number)) is None:
        return
    node = host.local(HostPath(note.path))
    with suppress(FileNotFoundError):  # it was unplugged
        status = node.lstat()
        ours = {(owner, owner) for owner in (note.owner, *note.earlier)}
        if status.st_ino == note.inode and (status.st_uid, status.st_gid) in ours:
            os.chown(node, note.uid, note.gid, follow_symlinks=False)
    notes.drop(number)


def _read(notes: Notes, number: str) -> _Note | None:
    """A node's note; None if there is none that can be read."""
    try:
        return None if (data := notes.read(number)) is None else msgspec.json.decode(data, type=_Note)
    except msgspec.MsgspecError:
        return None
