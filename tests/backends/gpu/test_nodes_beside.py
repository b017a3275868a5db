"""What NVIDIA's plugin hands out beside GPUs, or in their place: IMEX channels, links, the GPU of Tegra and of WSL."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from backends.base import ContainerEdits, HostPath, Known, Mount, NotReady, PathChange
from tests.backends.gpu.gpus import backend, devices, given, look, nodes, offered, resource
from tests.backends.machines import CONTROLS, hgx_h100, nvidia_gpu, uuid
from tests.backends.trees import plant, planted_host

GPU = "0000:3b:00.0"
CHANNEL = "dev/nvidia-caps-imex-channels/channel0"


# --- IMEX ---


def test_a_container_gets_the_imex_channel_with_its_gpu(tmp_path: Path) -> None:
    every = ["envvar", "volume-mounts", "cdi-annotations", "cdi-cri"]
    wanted = resource(imex="optional", pass_device_specs=True, gds_enabled=True, device_list_strategy=every)
    edits = given(backend(tmp_path, nvidia_gpu(GPU, 0) + f"{CHANNEL} c 238:0", wanted), wanted, uuid(0))
    assert nodes(edits) == [f"/{CHANNEL} rw", "/dev/nvidia0 rw"]
    assert edits.env["NVIDIA_IMEX_CHANNELS"] == "0"
    assert Mount(HostPath("/dev/null"), "/var/run/nvidia-container-devices/imex/0") in edits.mounts
    names = [f"k8s.device-plugin.nvidia.com/{name}" for name in (f"gpu={uuid(0)}", "imex-channel=0", "gds=all")]
    assert edits.cdi_devices == tuple(names)


@pytest.mark.parametrize(("imex", "there"), [("none", True), ("optional", False)])
def test_without_a_channel_or_the_wish_for_one_there_is_none(tmp_path: Path, imex: str, there: bool) -> None:
    wanted = resource(imex=imex, pass_device_specs=True, device_list_strategy=["envvar", "cdi-cri"])
    other = resource("a.com/gpu", imex="optional")
    gpu = backend(tmp_path, nvidia_gpu(GPU, 0) + (f"{CHANNEL} c 238:0" if there else ""), wanted, other)
    edits = given(gpu, wanted, uuid(0))
    assert (nodes(edits), edits.env) == (["/dev/nvidia0 rw"], {"NVIDIA_VISIBLE_DEVICES": uuid(0)})
    assert edits.cdi_devices == (f"k8s.device-plugin.nvidia.com/gpu={uuid(0)}",)


def test_a_gpu_waits_for_the_channel_that_is_required(tmp_path: Path) -> None:
    wanted = resource(imex="required")
    gpu = backend(tmp_path, nvidia_gpu(GPU, 0), wanted)
    assert devices(gpu)[uuid(0)].unusable == f"/{CHANNEL} does not exist"
    known = Known({unit: found.devices for unit, found in look(gpu).items()})
    assert HostPath(f"/{CHANNEL}").parent in gpu.watches(known).directories
    assert [*gpu.affects(PathChange(HostPath(f"/{CHANNEL}")), known)] == [GPU]
    plant(tmp_path, f"{CHANNEL} c 238:0")
    assert offered(gpu) == [uuid(0)]


# --- links in /dev/char ---


def test_links_are_made_in_dev_char_where_asked(tmp_path: Path) -> None:
    linked = resource(dev_char_links=True)
    gpu = backend(tmp_path, CONTROLS + nvidia_gpu(GPU, 3), linked)
    assert (gpu.adopts(linked), gpu.adopts(resource())) == (True, False)
    for _ in range(2):
        assert not gpu.adopt(linked, devices(gpu)[uuid(3)])
    made = {path.name: str(path.readlink()) for path in (tmp_path / "dev/char").iterdir()}
    assert made == {
        "195:3": "../nvidia3",
        "195:255": "../nvidiactl",
        "195:254": "../nvidia-modeset",
        "235:0": "../nvidia-uvm",
        "235:1": "../nvidia-uvm-tools",
    }
    assert all(path.is_char_device() for path in (tmp_path / "dev/char").iterdir())


def test_a_link_that_another_gpu_needs_too_and_makes_at_the_same_moment_is_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    linked = resource(dev_char_links=True)
    gpu = backend(tmp_path, CONTROLS + nvidia_gpu(GPU, 3), linked)
    (device,) = devices(gpu).values()
    make = os.symlink

    def twice(*paths: Any, **options: Any) -> None:
        make(*paths, **options)
        make(*paths, **options)

    monkeypatch.setattr(os, "symlink", twice)
    assert not gpu.adopt(linked, device)
    assert len(list((tmp_path / "dev/char").iterdir())) == 5


def test_links_lead_below_the_drivers_root(tmp_path: Path) -> None:
    linked = resource(dev_char_links=True, device_driver_root="/run/nvidia/driver")
    gpu = backend(tmp_path, nvidia_gpu(GPU, 0, node=False) + "run/nvidia/driver/dev/nvidia0 c 195:0", linked)
    gpu.adopt(linked, devices(gpu)[uuid(0)])
    assert str((tmp_path / "dev/char/195:0").readlink()) == "/run/nvidia/driver/dev/nvidia0"


def test_a_link_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    linked = resource(dev_char_links=True)
    gpu = backend(tmp_path, nvidia_gpu(GPU, 0) + "dev/char = a plain file", linked)
    with pytest.raises(NotReady, match="/dev/char/195:0 cannot be made"):
        gpu.adopt(linked, devices(gpu)[uuid(0)])


# --- Tegra and WSL ---

TEGRA = "sys/devices/soc0/family = Tegra"


@pytest.mark.parametrize(("options", "name"), [({}, "tegra"), ({"device_id_strategy": "index"}, "0")])
def test_tegra_has_one_device_without_nodes(tmp_path: Path, options: dict[str, Any], name: str) -> None:
    select = {"vendor": ("10de",), "platform": ("tegra",)}
    wanted = resource(pass_device_specs=True, replicas=2, select=select, **options)
    gpu = backend(tmp_path, TEGRA, wanted)
    (found,) = devices(gpu).values()
    assert wanted.refuses(found) is None
    assert (list(gpu.ids(wanted, found)), found.numa_node) == (["tegra::0", "tegra::1"], None)
    assert given(gpu, wanted, "tegra::1") == ContainerEdits(env={"NVIDIA_VISIBLE_DEVICES": name})
    assert list(gpu.probe(found)) == []


def test_wsl_has_one_device_however_many_gpus_windows_has(tmp_path: Path) -> None:
    wanted = resource(pass_device_specs=True)
    gpu = backend(tmp_path, "dev/dxg c 10:63\n" + CONTROLS, wanted)
    edits = given(gpu, wanted, "all")
    assert (nodes(edits), edits.env) == (["/dev/dxg rw"], {"NVIDIA_VISIBLE_DEVICES": "all"})


def test_a_machine_that_is_neither_has_no_such_device(tmp_path: Path) -> None:
    assert list(backend(tmp_path, CONTROLS).units()) == []
    assert len(offered(backend(tmp_path / "tegra", TEGRA + "\n" + hgx_h100()))) == 8


def test_tegra_is_known_by_its_release_too(tmp_path: Path) -> None:
    planted_host(tmp_path, "etc/nv_tegra_release = # R36 (release), REVISION: 4.3")
    assert offered(backend(tmp_path, "")) == ["tegra"]
