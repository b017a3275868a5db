"""The doctor notices other plugins: by their sockets, and by what the kubelet has of our resources."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from agent.config import AgentConfig, Config
from agent.console.doctor import Level, Patient, kubelet
from agent.console.views import Device, Resource, Status
from agent.kubelet.witnesses import FILE_NAME
from backends.base import Host, ResourceSpec
from backends.base import Resource as Configured
from tests.console.fakes import status

GPU = "nvidia.com/gpu"


def patient(directory: Path, name: str = GPU) -> Patient:
    configured: Configured[Any] = Configured(name, ResourceSpec("stub", None))
    return Patient(Config(AgentConfig(plugin_dir=directory), Host(), (configured,)))


def offered(*devices: Device, **changes: Any) -> Status:
    shown = {"registered": True, "streaming": True} | changes
    return status(Resource(GPU, "gpu", devices=devices, **shown))


WELL, LAME = Device("a", ("a::0", "a::1"), "Degraded"), Device("b", ("b",), "Unhealthy")


def record(directory: Path, devices: Mapping[str, Sequence[str] | None]) -> None:
    document = {"Data": {"PodDeviceEntries": None, "RegisteredDevices": devices}, "Checksum": 1}
    (directory / FILE_NAME).write_text(json.dumps(document))


def test_a_socket_that_is_called_like_a_resource_and_answers_is_told(tmp_path: Path) -> None:
    (silent,) = kubelet.other_plugins(patient(tmp_path))
    with socket.socket(socket.AF_UNIX) as theirs, socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "old-gpu.sock"))
        theirs.bind(str(tmp_path / "nvidia-GPU.sock"))
        theirs.listen()
        (found,) = kubelet.other_plugins(patient(tmp_path))
    assert (silent.level, silent.found) == (Level.FINE, "No other plugin serves in this directory.")
    assert found.level is Level.WARNING
    assert found.found.startswith(f"nvidia-GPU.sock, beside the kubelet's socket, may be another plugin for {GPU}")


@pytest.mark.parametrize(
    ("template", "level"),
    [
        ("nvidia.com/mig-{profile}", Level.WARNING),
        ("nvidia.com/part-{profile}", Level.FINE),
        ("nvidia.com/{model}", Level.FINE),  # it may be called like anything
    ],
)
def test_a_socket_that_is_called_like_what_a_template_gives_is_told(
    tmp_path: Path, template: str, level: Level
) -> None:
    with socket.socket(socket.AF_UNIX) as theirs:
        theirs.bind(str(tmp_path / "nvidia-mig-1g.10gb.sock"))
        theirs.listen()
        (found,) = kubelet.other_plugins(patient(tmp_path, template))
    assert found.level is level


def test_another_resources_plugin_is_no_matter(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as theirs:
        theirs.bind(str(tmp_path / "fpgapu-gpus.sock"))
        theirs.listen()
        (found,) = kubelet.other_plugins(patient(tmp_path))
    assert (found.level, "fpgapu-gpus.sock" in found.found) == (Level.FINE, True)


def test_without_the_directory_the_check_of_it_says_so(tmp_path: Path) -> None:
    (found,) = kubelet.other_plugins(patient(tmp_path / "nowhere"))
    assert found.level is Level.FINE


@pytest.mark.parametrize(
    ("theirs", "how"),
    [
        (["a::0", "a::1"], None),
        (["a::0", "x"], "has x, which Fairlead does not offer"),
        ([f"x{n}" for n in range(6)], "has x0, x1, x2, x3 and 2 more, which Fairlead does not offer"),
        (["a::0", "a::1", "b"], "has b, which Fairlead does not offer"),
        (["a::1"], "lacks a::0"),
        (None, "lacks a::0, a::1"),
    ],
)
def test_what_the_kubelet_has_is_compared_with_what_is_offered(
    tmp_path: Path, theirs: Sequence[str] | None, how: str | None
) -> None:
    record(tmp_path, {GPU: theirs})
    assert kubelet.differences(offered(WELL, LAME), tmp_path) == ({} if how is None else {GPU: how})


def test_what_is_not_registered_or_not_recorded_is_not_compared(tmp_path: Path) -> None:
    record(tmp_path, {GPU: ["x"]})
    assert kubelet.differences(offered(WELL, streaming=False), tmp_path) == {}
    record(tmp_path, {})
    assert kubelet.differences(offered(WELL), tmp_path) == {}
    (tmp_path / FILE_NAME).write_text("garbage")
    assert kubelet.differences(offered(WELL), tmp_path) == {}


def test_a_difference_is_a_failure_with_what_to_do() -> None:
    (found,) = kubelet.taken_over({GPU: "lacks a"})
    assert found.level is Level.FAILURE
    assert found.found.startswith(f"The kubelet lacks a, among its healthy devices of {GPU}: another plugin")
    assert "Remove the other plugin" in found.mend
