"""The node of a stick belongs to QEMU's user while a pod has it, and after that to whom it did before."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from backends.base import AllocationRefused, Grant, Released
from backends.chardev import CharDev
from backends.linux import files
from tests.backends.chardev.chardevs import FTDI, NAME, chardev, configured, only
from tests.backends.crashes import Crash, Fuse
from tests.backends.linux.sticks import stick
from tests.needs import skip_without
from tests.nodes import make_node

BEFORE = (0, 20)
QEMU = (107, 107)


class Node:
    """A stick whose node belongs to root and dialout."""

    def __init__(self, root: Path, owner: int | None = 107) -> None:
        skip_without("root")
        self.resource = configured(usb=FTDI, owner=owner)
        self.backend: CharDev = chardev(root, stick("1-2", 5, serial="A"), self.resource)
        self.path = root / "dev/bus/usb/001/005"
        os.chown(self.path, *BEFORE)
        self.device = only(self.backend, "usb:1-2")
        self.notes = root / "run/fairlead/owners"

    def claim(self) -> None:
        self.backend.claim(self.resource, [Grant("A", self.device)])

    def release(self, *, idle: bool = True) -> None:
        hardware = self.device.hardware
        self.backend.release([Released(NAME, "A", hardware)], hardware if idle else frozenset())

    @property
    def owner(self) -> tuple[int, int]:
        return self.path.stat().st_uid, self.path.stat().st_gid


def test_a_node_is_the_owners_while_a_pod_has_it(tmp_path: Path) -> None:
    node = Node(tmp_path)
    for _ in range(2):
        node.claim()
        node.claim()  # a pod that is created again
        assert node.owner == QEMU
        node.release(idle=False)
        assert node.owner == QEMU
        node.release()
        node.release()
        assert node.owner == BEFORE
        assert [*node.notes.iterdir()] == []


def test_a_node_is_left_alone_without_an_owner_and_where_it_is_the_owners_already(tmp_path: Path) -> None:
    for number, owner in enumerate((None, 0)):
        node = Node(tmp_path / str(number), owner)
        os.chown(node.path, 0, 0)
        node.claim()
        assert node.owner == (0, 0)
        assert not node.notes.exists()


def test_a_node_that_was_plugged_in_again_or_that_is_anothers_by_now_is_not_given_back(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.claim()
    os.chown(node.path, 42, 42)
    node.release()
    assert node.owner == (42, 42)
    node.claim()
    node.path.rename(node.path.with_name("gone"))  # so that its inode is not given to the next one
    make_node(node.path, "c", 189, 4)
    os.chown(node.path, *QEMU)  # as a udev rule may
    node.release()
    assert node.owner == QEMU
    node.claim()
    node.path.unlink()
    node.release()
    assert [*node.notes.iterdir()] == []


def of_user_108(node: Node) -> None:
    node.resource = configured(usb=FTDI, owner=108)
    node.backend = CharDev(node.backend.host, [node.resource])
    node.claim()


def test_another_owner_after_a_reload_forgets_not_whose_the_node_was(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.claim()
    of_user_108(node)
    assert node.owner == (108, 108)
    node.release()
    assert node.owner == BEFORE


@pytest.mark.parametrize("at", range(10))
def test_a_crash_at_any_step_is_undone_by_the_release(tmp_path: Path, monkeypatch: Any, at: int) -> None:
    node, fuse = Node(tmp_path), Fuse()
    fuse.steps = at

    def crashing(act: Any) -> Any:
        def acting(*arguments: Any, **options: Any) -> None:
            fuse.step()
            act(*arguments, **options)
            fuse.step()

        return acting

    with monkeypatch.context() as patched:
        patched.setattr("backends.linux.kernel.files.replace", crashing(files.replace))
        patched.setattr("backends.chardev.backend.os.chown", crashing(os.chown))
        with suppress(Crash):
            node.claim()
            of_user_108(node)
            node.release()
            pytest.fail("it did not crash")
    node.release()
    assert node.owner == BEFORE
    assert not node.notes.exists() or [*node.notes.iterdir()] == []


def test_a_node_that_cannot_be_given_refuses_the_pod_and_says_what_to_do(tmp_path: Path, monkeypatch: Any) -> None:
    node = Node(tmp_path)

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    with monkeypatch.context() as patched:
        patched.setattr("backends.chardev.backend.os.chown", refuse)
        with pytest.raises(AllocationRefused, match=r"cannot be given to user 107: operation not permitted.*CHOWN"):
            node.claim()
    node.release()
    assert node.owner == BEFORE


def test_a_node_that_cannot_be_given_back_keeps_no_other_from_it(tmp_path: Path) -> None:
    node, notes = Node(tmp_path), tmp_path / "run/fairlead/owners"
    node.claim()
    (notes / "1:1").mkdir()  # in the way
    with pytest.raises(ExceptionGroup, match="not given back"):
        node.backend.release([], frozenset({"node:1:1", *node.device.hardware}))
    assert node.owner == BEFORE
