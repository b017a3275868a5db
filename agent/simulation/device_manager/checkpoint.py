"""The kubelet's checkpoint file: written with every list and allocation, read at the start.

Kubelet contract: A6. The checksum is ours (CRC-32 of Data); the kubelet's is a hash over Go's memory layout.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

import msgspec

from agent.simulation.device_manager.allocation import Allocation, Key

NAME: Final = "kubelet_internal_checkpoint"


class CorruptError(ValueError):
    """The file is no checkpoint, or its checksum does not match."""


class _Entry(msgspec.Struct):
    PodUID: str
    ContainerName: str
    ResourceName: str
    DeviceIDs: dict[str, list[str]]  # NUMA node, "-1" for none → IDs
    AllocResp: bytes  # msgspec writes it as base64, as Go does


class _Data(msgspec.Struct):
    PodDeviceEntries: list[_Entry] | None  # Go writes an empty list of entries as null
    RegisteredDevices: dict[str, list[str]]


class _File(msgspec.Struct):
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
        file = msgspec.json.decode(content, type=_File)
        data = msgspec.json.decode(file.Data, type=_Data)
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
