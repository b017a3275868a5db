from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from agent.kubelet import witnesses
from agent.kubelet.witnesses import (
    CheckpointEntry,
    CheckpointError,
    CheckpointReader,
    parse_checkpoint,
    read_at_once,
    read_checkpoint,
)

WRITTEN = {
    "Data": {
        "PodDeviceEntries": [
            {
                "PodUID": "0f2c",
                "ContainerName": "main",
                "ResourceName": "nvidia.com/gpu",
                "DeviceIDs": {"0": ["b", "a"], "1": ["c", "a"], "-1": None},
                "AllocResp": "CgsK",
            },
            {"PodUID": "77", "ContainerName": "old", "ResourceName": "x/y", "DeviceIDs": ["2", "1"], "AllocResp": ""},
            {"PodUID": "78", "ContainerName": "none", "ResourceName": "x/y", "DeviceIDs": None, "AllocResp": ""},
        ],
        "RegisteredDevices": {"nvidia.com/gpu": ["a", "b", "c"]},
    },
    "Checksum": 3826480345,
}


def test_both_ways_to_write_device_ids_are_read() -> None:
    assert parse_checkpoint(json.dumps(WRITTEN).encode(), (1, 1, 1)).entries == (
        CheckpointEntry("0f2c", "main", "nvidia.com/gpu", ("a", "b", "c")),
        CheckpointEntry("77", "old", "x/y", ("1", "2")),
        CheckpointEntry("78", "none", "x/y", ()),
    )


def test_a_kubelet_without_pods_has_no_entries() -> None:
    assert (
        parse_checkpoint(b'{"Data":{"PodDeviceEntries":null,"RegisteredDevices":{}},"Checksum":1}', (1, 1, 1)).entries
        == ()
    )


def test_no_file_is_no_checkpoint(tmp_path: Path) -> None:
    assert read_checkpoint(tmp_path) is None


def test_each_writing_has_a_version_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / witnesses.FILE_NAME
    path.write_text(json.dumps(WRITTEN))
    first = read_checkpoint(tmp_path)
    assert first is not None
    assert first == read_checkpoint(tmp_path)
    found = path.stat()
    assert first.version == (found.st_ino, found.st_mtime_ns, found.st_size)
    os.utime(path, ns=(0, first.version[1] + 1))
    again = read_checkpoint(tmp_path)
    assert again is not None
    assert again.version != first.version
    assert again.entries == first.entries


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"", "truncated"),
        (b'{"Data":', "truncated"),
        (b"[]", "Expected `object`, got `array`"),
        (b"{}", "missing required field `Data`"),
        (b'{"Data":{"PodDeviceEntries":[{"PodUID":1}]}}', r"Expected `str`, got `int` - at `\$.Data.PodDeviceEntries"),
        (b'{"Data":{"PodDeviceEntries":[{"PodUID":"\xff"}]}}', "is damaged"),
    ],
)
def test_a_damaged_file_is_told_in_a_sentence(tmp_path: Path, content: bytes, what: str) -> None:
    (tmp_path / witnesses.FILE_NAME).write_bytes(content)
    with pytest.raises(CheckpointError, match=what) as raised:
        read_checkpoint(tmp_path)
    assert str(raised.value).startswith(f"{tmp_path}/kubelet_internal_checkpoint is damaged: ")
    assert str(raised.value).endswith("; the kubelet writes it again with the next list of devices")


def test_an_unreadable_file_is_told_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / witnesses.FILE_NAME).mkdir()
    with pytest.raises(CheckpointError, match="cannot be read: Is a directory"):
        read_checkpoint(tmp_path)


def test_what_the_kernel_has_in_memory_is_read_as_a_thread_would_read_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / witnesses.FILE_NAME
    assert read_at_once(tmp_path) is None
    path.write_text(json.dumps(WRITTEN))
    monkeypatch.setattr(os, "preadv", lambda file, buffers, offset, _: os_preadv(file, buffers, offset))
    assert read_at_once(tmp_path) == read_checkpoint(tmp_path)
    path.write_text(json.dumps(WRITTEN) + " " * witnesses._AT_ONCE_BYTES)
    with pytest.raises(BlockingIOError):  # it takes too long for the event loop
        read_at_once(tmp_path)
    path.write_text("{")
    with pytest.raises(BlockingIOError):  # a thread finds out that it is damaged, and says so
        read_at_once(tmp_path)


os_preadv = os.preadv


@pytest.mark.parametrize("error", [errno.EAGAIN, errno.EOPNOTSUPP, None])
async def test_a_checkpoint_that_must_be_waited_for_is_read_in_a_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int | None
) -> None:
    """Its disk is asked, its file system cannot tell, or only a part of it is in memory."""

    def preadv(*_: object) -> int:
        if error is None:
            return 1
        raise OSError(error, os.strerror(error))

    (tmp_path / witnesses.FILE_NAME).write_bytes(json.dumps(WRITTEN).encode())
    monkeypatch.setattr(os, "preadv", preadv)
    reader = CheckpointReader(tmp_path)
    assert await reader.read() == read_checkpoint(tmp_path)
    reader.close()
