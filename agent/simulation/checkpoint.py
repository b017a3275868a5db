"""Which devices pods hold, as the device manager remembers it, and the checkpoint file in which that survives a restart.

Kubelet contract: A4, A6. The file is written with every list and allocation, and read at the start. Its checksum is ours (CRC-32 of
Data); the kubelet's is a hash over Go's memory layout.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from backends.interface.decoding import decoded


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


# --- the file ---

NAME: Final = "kubelet_internal_checkpoint"


class CorruptError(ValueError):
    """The file is no checkpoint, or its checksum does not match."""


class _Entry(Struct):
    PodUID: str
    ContainerName: str
    ResourceName: str
    DeviceIDs: dict[str, list[str]]  # NUMA node, "-1" for none → IDs
    AllocResp: bytes  # msgspec writes it as base64, as Go does


class _Data(Struct):
    PodDeviceEntries: list[_Entry] | None  # Go writes an empty list of entries as null
    RegisteredDevices: dict[str, list[str]]


class _File(Struct):
    Data: msgspec.Raw
    Checksum: int


def encode(entries: Mapping[Key, Allocation], healthy: Mapping[str, Iterable[str]]) -> bytes:
    """The file's bytes; `healthy` are the registered resources with the IDs that are healthy now."""
    data = msgspec.json.encode(
        _Data(
            [
                _Entry(*key, {str(node): list(ids) for node, ids in held.by_node.items()}, held.reply)
                for key, held in entries.items()
            ]
            or None,
            {resource: list(ids) for resource, ids in healthy.items()},
        )
    )
    return msgspec.json.encode(_File(msgspec.Raw(data), zlib.crc32(data)))


def decode(content: bytes) -> tuple[dict[Key, Allocation], tuple[str, ...]]:
    """What pods hold, and the names of the registered resources.

    Raises:
        CorruptError: it cannot be read.
    """
    try:
        file = decoded(content, _File)
        data = decoded(file.Data, _Data)
    except msgspec.MsgspecError as error:
        raise CorruptError(f"the checkpoint is no checkpoint: {error}") from None
    if zlib.crc32(bytes(file.Data)) != file.Checksum:
        raise CorruptError("the checkpoint's checksum does not match its data")
    entries = {
        (e.PodUID, e.ContainerName, e.ResourceName): Allocation(
            {int(node): tuple(ids) for node, ids in e.DeviceIDs.items()}, e.AllocResp
        )
        for e in data.PodDeviceEntries or ()
    }
    return entries, tuple(data.RegisteredDevices)


def write(directory: Path, content: bytes) -> None:
    """Replace the file at once, by a temporary one beside it, as the kubelet does (but without its fsync)."""
    fresh = directory / f".{NAME}.new"
    fresh.write_bytes(content)
    fresh.rename(directory / NAME)
