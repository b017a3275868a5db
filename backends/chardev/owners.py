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
from backends.errors import reason_of
from backends.linux import files

NOTES: Final = HostPath("/run/fairlead/owners")

_NOTE_BYTES: Final = 8192  # a path has 4,096 at most (PATH_MAX)


class _Note(msgspec.Struct):
    path: str
    inode: int
    uid: int
    gid: int
    """As they were."""
    owner: int
    """As it is by us: user and group."""


def give(host: Host, owner: int, nodes: Iterable[tuple[str, HostPath]]) -> None:
    """Make the nodes, each with its number as `DeviceNode.number` writes it, belong to this user and its group.

    Raises:
        AllocationRefused: one cannot be given; what was given before is noted, for the release.
    """
    for number, path in nodes:
        node = host.local(path)
        try:
            status = node.lstat()
            if (status.st_uid, status.st_gid) == (owner, owner):
                continue
            note = _read(host, number)
            if note is None or note.inode != status.st_ino:
                note = _Note(path.text, status.st_ino, status.st_uid, status.st_gid, owner)
            note.owner = owner
            host.local(NOTES).mkdir(mode=0o755, parents=True, exist_ok=True)
            files.replace(host.local(NOTES / number), msgspec.json.encode(note))
            os.chown(node, owner, owner, follow_symlinks=False)
        except OSError as error:
            raise AllocationRefused(
                f"{path} cannot be given to user {owner}: {reason_of(error)}. Ask this node's administrator to let "
                "Fairlead do so (it needs the capability CHOWN), or to leave out owner."
            ) from error


def give_back(host: Host, numbers: Iterable[str]) -> None:
    """Make the nodes of these numbers belong to whom they did, where we gave them away and nobody has since.

    Raises:
        OSError: one cannot be given back; its note stays.
    """
    for number in numbers:
        if (note := _read(host, number)) is None:
            continue
        node = host.local(HostPath(note.path))
        with suppress(FileNotFoundError):  # it was unplugged
            status = node.lstat()
            if (status.st_ino, status.st_uid, status.st_gid) == (note.inode, note.owner, note.owner):
                os.chown(node, note.uid, note.gid, follow_symlinks=False)
        host.local(NOTES / number).unlink(missing_ok=True)


def _read(host: Host, number: str) -> _Note | None:
    """What is noted of a node, if anything; a note that is none is as good as none."""
    try:
        return msgspec.json.decode(files.read(host.local(NOTES / number), _NOTE_BYTES, follow=False), type=_Note)
    except (FileNotFoundError, msgspec.MsgspecError):
        return None
