"""CDI devices of others that a backend names: only those that a specification of the node defines reach a container."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from agent.cdi.foreign_names import Definitions, ForeignNames
from agent.runtime.problems import Problems
from backends.base import AllocationRefused, ContainerEdits, Host
from backends.linux import files
from tests.backends.gpu.gpus import resource
from tests.backends.trees import planted_host
from tests.wait import limit

GPU, GDS = "nvidia.com/gpu=GPU-1", "nvidia.com/gds=all"
GPUS = "cdiVersion: 0.5.0\nkind: nvidia.com/gpu\ndevices:\n- {name: GPU-1, containerEdits: {env: [A=b]}}\n"
KEY = "cdi.k8s.io/nvidia-device-plugin_1"
NAMED = ContainerEdits(
    env={"NVIDIA_GDS": "enabled"}, annotations={KEY: f"{GPU},{GDS}", "other": GDS}, cdi_devices=(GPU, GDS)
)


class Node:
    """A host, and who looks at it."""

    def __init__(self, root: Path) -> None:
        self.root, self.problems = root, Problems()
        planted_host(root, "run/cdi/\netc/cdi/")
        self.names = ForeignNames(Host.below(root), self.problems)

    async def given(self, edits: ContainerEdits = NAMED) -> ContainerEdits:
        async with limit():
            return await self.names.checked(resource(), edits)


async def test_what_belongs_to_all_is_left_out_and_told_until_a_specification_defines_it(tmp_path: Path) -> None:
    node = Node(tmp_path)
    (tmp_path / "etc/cdi/nvidia.yaml").write_text(GPUS)
    assert await node.given() == ContainerEdits(
        env={"NVIDIA_GDS": "enabled"}, annotations={KEY: GPU, "other": GDS}, cdi_devices=(GPU,)
    )
    assert [it.sentence for it in node.problems.lasting()] == [
        f"containers with nvidia.com/gpu are not given {GDS}: no CDI specification in /etc/cdi or /run/cdi defines it"
    ]
    (tmp_path / "run/cdi/gds.json").write_text('{"kind": "nvidia.com/gds", "devices": [{"name": "all"}]}')
    assert await node.given() == NAMED
    assert not node.problems.lasting()


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("etc/cdi/none.yaml", "[: no YAML"),
        ("etc/cdi/other.yaml", GPUS.replace("GPU-1", "GPU-2")),
        ("etc/cdi/nvidia.yaml.tmp", GPUS),
        ("run/cdi/list.json", "[]"),
        ("run/cdi/deep.json", "[" * 100_000),
        ("run/cdi/odd.json", '{"kind": 1, "devices": "GPU-1"}'),
        ("run/cdi/number.yaml", "kind: !!int ''"),  # PyYAML raises an IndexError
    ],
)
async def test_a_pod_whose_own_device_no_specification_defines_is_refused(
    tmp_path: Path, file: str, content: str
) -> None:
    node = Node(tmp_path)
    (tmp_path / file).write_text(content)
    with pytest.raises(AllocationRefused) as refused:
        await node.given()
    assert refused.value.sentence == (
        f"No CDI specification in /etc/cdi or /run/cdi defines {GPU}, which a container with nvidia.com/gpu is to have. "
        "Ask this node's administrator to have it written, or another name given."
    )
    (tmp_path / "run/cdi/nvidia.yaml").write_text(GPUS)
    assert (await node.given()).cdi_devices == (GPU,)
    (tmp_path / "run/cdi/nvidia.yaml").write_text(GPUS.replace("GPU-1", "GPU-2, more: x"))  # written anew
    with pytest.raises(AllocationRefused):
        await node.given()


async def test_a_node_without_either_directory_defines_nothing_and_no_thread_is_asked_where_nothing_is_named(
    tmp_path: Path,
) -> None:
    names = ForeignNames(planted_host(tmp_path), Problems())
    with pytest.raises(AllocationRefused):
        await names.checked(resource(), NAMED)
    plain = ContainerEdits(env={"A": "b"}, annotations={"other": GDS})
    assert await names.checked(resource(), plain) is plain


async def test_what_cannot_be_read_is_not_taken_for_a_node_that_defines_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node, failing = Node(tmp_path), set[str]()
    for name, content in (("gds", GPUS.replace("/gpu", "/gds").replace("GPU-1", "all")), ("gpu", GPUS)):
        (tmp_path / f"run/cdi/{name}.yaml").write_text(content)
    (tmp_path / "run/cdi/directory.json").mkdir()  # is none, and hides none
    really = files.read

    def read(path: Path, most: int) -> bytes:
        if path.name in failing:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return really(path, most)

    monkeypatch.setattr(files, "read", read)
    failing.add("gds.yaml")
    with pytest.raises(
        AllocationRefused, match=r"cannot be read: Input/output error: .*/gds\.yaml\. Create the pod again"
    ):
        await node.given()
    assert not node.problems.lasting()
    failing.clear()
    assert await node.given() == NAMED


def test_two_pods_that_ask_at_once_are_both_told_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    definitions = Definitions(planted_host(tmp_path, "run/cdi/"))
    wanted = [GPU, GPU.replace("1", "2")]
    for name in "12":
        (tmp_path / f"run/cdi/{name}.yaml").write_text(GPUS.replace("1", name))
    really, read, asking, first_is_done = files.read, list[Path](), threading.Event(), threading.Event()
    told = list[frozenset[str]]()
    second = threading.Thread(target=lambda: told.append(definitions.undefined(wanted)), daemon=True)

    def reads(path: Path, most: int) -> bytes:
        if threading.current_thread() is second:
            asking.set()
            first_is_done.wait()
        else:
            read.append(path)
            if (
                len(read) == 2
            ):  # the second pod asks while the first is half way; what that has read is another file now
                content = read[0].read_bytes()
                read[0].unlink()
                read[0].write_bytes(content + b"# another\n")
                second.start()
                asking.wait()
        return really(path, most)

    monkeypatch.setattr(files, "read", reads)
    told.append(definitions.undefined(wanted))
    first_is_done.set()
    second.join()
    assert told == [frozenset(), frozenset()]
