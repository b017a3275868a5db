"""A claim's specification: a runtime takes it, it is written once for the same content, and nobody else's file is touched."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.cdi.directory import ClaimFiles
from backends.base import ContainerEdits, HostPath, Mount, Node
from tests.backends.trees import planted_host
from tests.cdi.runtime import checked, specs

DRIVER = "fairlead.example.com"
UID = "0b3b2c1e-6f0d-4b1e-9a57-5b8f6c1d2e3f"
EDITS = ContainerEdits(
    (Node(HostPath("/dev/serial"), "/dev/serial", "rw"),), (Mount(HostPath("/etc/x"), "/etc/x"),), env={"A": "b=c"}
)


@pytest.fixture
def files(tmp_path: Path) -> ClaimFiles:
    return ClaimFiles(
        planted_host(tmp_path, "dev/serial -> ttyUSB0\ndev/ttyUSB0 c 188:0\n"), DRIVER, tmp_path / "metadata"
    )


def test_a_runtime_takes_it_and_makes_the_node_that_a_link_leads_to(files: ClaimFiles, tmp_path: Path) -> None:
    files.write(UID, {f"{UID}-serial": EDITS}, {})
    (spec,) = map(checked, specs(tmp_path))
    (device,) = spec["devices"]
    assert f"{spec['kind']}={device['name']}" == files.name(f"{UID}-serial")
    edits = device["containerEdits"]
    assert edits["env"] == ["A=b=c"]
    assert edits["deviceNodes"] == [
        {"path": "/dev/serial", "permissions": "rw", "hostPath": "/dev/ttyUSB0", "type": "c", "major": 188}
    ]


def test_the_same_content_is_not_written_again_and_other_content_is(files: ClaimFiles, tmp_path: Path) -> None:
    files.write(UID, {"x": EDITS}, {})
    path = next((tmp_path / "run/cdi").iterdir())
    before = path.stat().st_ino
    files.write(UID, {"x": EDITS}, {})
    assert path.stat().st_ino == before
    path.write_bytes(path.read_bytes()[:30])  # cut off, as on a disk that was full
    files.write(UID, {"x": EDITS}, {})
    assert len(specs(tmp_path)) == 1
    checked(specs(tmp_path)[0])


def test_a_claim_without_anything_to_say_has_no_file(files: ClaimFiles, tmp_path: Path) -> None:
    files.write(UID, {}, {})
    files.write(UID, {"x": EDITS}, {})
    files.write(UID, {}, {})
    assert specs(tmp_path) == []
    files.remove(UID)


def test_the_files_of_others_are_none_of_ours(files: ClaimFiles, tmp_path: Path) -> None:
    files.write(UID, {"x": EDITS}, {})
    other = ClaimFiles(planted_host(tmp_path, ""), "fairlead.example", tmp_path / "other")
    other.write("u2", {"x": EDITS}, {})
    for name in (
        "nvidia.yaml",
        f"dra.{DRIVER}-claim_.json",
        f"dra.{DRIVER}-claim_a.b.json",
        f".dra.{DRIVER}-claim_u3.json.new",
    ):
        (tmp_path / "run/cdi" / name).write_text("{}")
    assert files.uids() == {UID}
    assert other.uids() == {"u2"}


def test_what_containers_can_read_lies_there_as_long_as_the_claim(files: ClaimFiles, tmp_path: Path) -> None:
    files.write(UID, {"x": EDITS}, {"gpu": b"{}", "nic": b"{}"})
    path = Path(str(files.metadata(UID, "gpu")))
    assert path.read_bytes() == b"{}"
    assert path.stat().st_mode & 0o777 == 0o644
    files.remove(UID)
    assert list((tmp_path / "metadata").iterdir()) == []


def test_the_metadata_tells_which_claim_it_is_and_nothing_where_it_makes_no_sense(files: ClaimFiles) -> None:
    files.write(
        UID,
        {"x": EDITS},
        {"gpu": b"{}", "nic": b'{"metadata": {"name": "train", "namespace": "ml", "uid": "%s"}}' % UID.encode()},
    )
    assert files.named(UID) == ("ml", "train")
    files.write("other", {"x": EDITS}, {"gpu": Path(str(files.metadata(UID, "nic"))).read_bytes()})
    assert files.named("other") is None  # it is another claim's
    assert files.named("none") is None
    for torn in (b'{"metadata": {"name": "\xff', b"[" * 100_000):
        files.write("torn", {"x": EDITS}, {"gpu": torn})
        assert files.named("torn") is None


def test_before_the_first_claim_there_is_no_directory_and_no_claim(files: ClaimFiles) -> None:
    assert files.uids() == frozenset()
