"""What an earlier plugin's answer in the kubelet's checkpoint leads to."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

from agent.claims.ledger import Trace, leads_to
from agent.kubelet.api.v1beta1 import CdiDevice, ContainerAllocateResponse, DeviceSpec, Mount
from agent.kubelet.witnesses import FILE_NAME, read_checkpoint
from backends.base import Device, HostPath, Node
from backends.base import Mount as HeldMount


async def trace(directory: Path, response: object) -> Trace:
    entry = {
        "PodUID": "u",
        "ContainerName": "c",
        "ResourceName": "r",
        "DeviceIDs": {"-1": ["a"]},
        "AllocResp": response,
    }
    (directory / FILE_NAME).write_text(json.dumps({"Data": {"PodDeviceEntries": [entry]}, "Checksum": 1}))
    found = read_checkpoint(directory)
    assert found is not None
    return await found.entries[0].trace()


async def test_an_answer_is_read(tmp_path: Path) -> None:
    answer = ContainerAllocateResponse(
        envs={"NVIDIA_VISIBLE_DEVICES": "GPU-1,GPU-2", "PCI_RESOURCE_X": "0000:3b:00.0"},
        mounts=[Mount("/in", "/var/lib/card0")],
        devices=[DeviceSpec("/dev/x", "/dev/card0", "rw")],
        cdi_devices=[CdiDevice("nvidia.com/gpu=GPU-3")],
    )
    found = await trace(tmp_path, base64.b64encode(bytes(answer)).decode())
    assert found.nodes == {"/dev/card0", "/var/lib/card0"}
    assert found.names == {"GPU-1", "GPU-2", "GPU-3", "0000:3b:00.0"}


@pytest.mark.parametrize("response", [None, "", 3, "no base64", base64.b64encode(b"\x0a\xff").decode(), {"a": 1}])
async def test_an_answer_that_makes_no_sense_says_nothing_and_spoils_no_checkpoint(
    tmp_path: Path, response: object
) -> None:
    assert await trace(tmp_path, response) == Trace()


def device(key: str, *nodes: str, identity: str = "") -> Device:
    return Device(
        key,
        "unit",
        frozenset({f"pci:{key}"}),
        identity=identity,
        nodes=tuple(Node(HostPath(node), node, "rw") for node in nodes),
        mounts=(HeldMount(HostPath(f"/run/{key}"), "/in"),),
    )


def test_what_one_device_alone_has_leads_to_it() -> None:
    leads = leads_to([device("0", "/dev/a", "/dev/both", "/dev/vfio/vfio", identity="GPU-0"), device("1", "/dev/both")])
    assert {clue for clue, hardware in leads.items() if hardware == {"pci:0"}} == {"/dev/a", "/run/0", "GPU-0", "0"}
    assert "/dev/both" not in leads
    assert "/dev/vfio/vfio" not in leads
