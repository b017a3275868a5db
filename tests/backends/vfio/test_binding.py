"""The backend `vfio` binds and gives back, with a kernel that acts on what is written to it."""

from __future__ import annotations

import errno
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from backends.base import AllocationRefused, Device, Host, HostPath, NotReady, Released
from backends.linux import kernel as module
from backends.linux import pci
from backends.linux.kernel import Kernel
from backends.vfio import Vfio, VfioResource
from backends.vfio.binding import NOTES
from tests.backends.pci_trees import function
from tests.backends.trees import plant, planted_host
from tests.backends.vfio.vfio_node import (
    GPU,
    ROOT,
    SOUND,
    ActingKernel,
    acting,
    gpu,
    grant,
    only,
    resource,
    sound,
)


def drivers(found: Vfio) -> list[tuple[str, str | None, str | None]]:
    """Driver and override of each function."""
    every = [pci.read(found.host, address) for address in pci.addresses(found.host)]
    return [(one.address, one.driver, pci.driver_override(found.host, one.address)) for one in every if one is not None]


def claim(found: Vfio) -> Device:
    """Allocate the one device there is, as the daemon does: claim, then look again."""
    made: VfioResource = found.resources[0]
    found.claim(made, [grant(only(found))])
    return only(found)


def release(found: Vfio, device: Device, *, by: Vfio | None = None) -> None:
    (by or found).release([Released("nvidia.com/T4", device.key, device.hardware)], device.hardware)


def notes(root: Path) -> list[str]:
    directory = root / str(NOTES)[1:]
    return sorted(path.name for path in directory.iterdir()) if directory.is_dir() else []


# --- for a pod ---


def test_a_claim_binds_the_function_and_its_companion_and_gives_the_nodes(tmp_path: Path) -> None:
    found, kernel = acting(tmp_path, gpu("nvidia") + sound("snd_hda_intel"), gpu="nvidia", sound="snd_hda_intel")
    before = only(found)
    device = claim(found)
    assert [node.path.text for node in device.nodes] == ["/dev/vfio/vfio", "/dev/vfio/12"]
    assert [*found.probe(device)] == []
    assert (before.hardware, before.identity) == (device.hardware, device.identity)
    assert all(before.bindings[name] != device.bindings[name] for name in device.hardware)
    assert drivers(found) == [(GPU, "vfio-pci", "vfio-pci"), (SOUND, "vfio-pci", "vfio-pci")]
    bus, probe = "/sys/bus/pci/devices", "/sys/bus/pci/drivers_probe"
    assert kernel.written == [
        (f"{bus}/{SOUND}/driver_override", "vfio-pci"),
        (f"{bus}/{SOUND}/driver/unbind", SOUND),
        (probe, SOUND),
        (f"{bus}/{GPU}/driver_override", "vfio-pci"),
        (f"{bus}/{GPU}/driver/unbind", GPU),
        (probe, GPU),
    ]
    assert notes(tmp_path) == []


def test_a_second_claim_finds_it_done(tmp_path: Path) -> None:
    found, kernel = acting(tmp_path, gpu("nvidia"), gpu="nvidia")
    claim(found)
    kernel.written.clear()
    claim(found)
    assert kernel.written == []


def test_a_companion_without_a_driver_is_bound_before_another_driver_takes_it(tmp_path: Path) -> None:
    found, _ = acting(tmp_path, gpu("nvidia") + sound(None))
    claim(found)
    assert drivers(found)[1] == (SOUND, "vfio-pci", "vfio-pci")


def test_the_module_is_loaded_where_it_is_missing(tmp_path: Path) -> None:
    found, kernel = acting(tmp_path, gpu("nvidia"))
    (tmp_path / "sys/bus/pci/drivers/vfio-pci").rmdir()
    claim(found)
    assert kernel.loaded == ["vfio-pci"]
    claim(found)
    assert kernel.loaded == ["vfio-pci"]


def test_a_module_that_cannot_be_loaded_is_told_and_nothing_is_touched(tmp_path: Path) -> None:
    found, kernel = acting(tmp_path, gpu("nvidia"))
    (tmp_path / "sys/bus/pci/drivers/vfio-pci").rmdir()

    def load(module: str) -> None:
        raise OSError(f"modprobe: FATAL: Module {module} not found in directory /lib/modules/6.1")

    kernel.load = load  # type: ignore[method-assign]
    with pytest.raises(AllocationRefused, match="load it on the host: modprobe: fatal: module vfio-pci not found"):
        claim(found)
    assert kernel.written == []


def test_a_modprobe_that_is_told_to_do_nothing_costs_no_function_its_driver(tmp_path: Path) -> None:
    """As `install vfio-pci /bin/true` in modprobe.d does."""
    found, kernel = acting(tmp_path, gpu("nvidia"))
    (tmp_path / "sys/bus/pci/drivers/vfio-pci").rmdir()
    kernel.load = lambda module: None  # type: ignore[method-assign]
    with pytest.raises(AllocationRefused, match=r"modprobe has loaded no vfio-pci .* /etc/modprobe\.d"):
        claim(found)
    assert kernel.written == []


def test_where_nothing_is_bound_a_claim_sees_that_the_group_can_be_opened(tmp_path: Path) -> None:
    found, kernel = acting(tmp_path, gpu() + sound(), resource())
    device = claim(found)
    assert kernel.written == []
    plant(tmp_path, f"sys/devices/{ROOT}/{SOUND}/driver -> ../../../../bus/pci/drivers/snd_hda_intel")
    (tmp_path / f"sys/devices/{ROOT}/{SOUND}/vfio-dev/vfio1").rmdir()
    with pytest.raises(AllocationRefused, match="IOMMU group 12 cannot be handed out"):
        claim(found)
    (tmp_path / f"sys/devices/{ROOT}/{GPU}/driver").unlink()
    (tmp_path / f"sys/devices/{ROOT}/{GPU}/vfio-dev/vfio0").rmdir()
    (tmp_path / f"sys/devices/{ROOT}/{SOUND}/driver").unlink()
    with pytest.raises(AllocationRefused, match=f"{GPU} is on no vfio driver"):
        found.claim(found.resources[0], [grant(device)])


def test_own_nodes_have_other_numbers_after_a_rebind_and_those_are_handed_out(tmp_path: Path) -> None:
    found, kernel = acting(tmp_path, gpu("nvidia") + "dev/iommu c 10:125\n", gpu="nvidia")
    kernel.cdev = True
    device = claim(found)
    assert "/dev/vfio/devices/vfio7" in [node.path.text for node in device.nodes]
    plant(tmp_path, "sys/devices/elsewhere/vfio-dev/vfio11/")
    kernel.write(HostPath(f"/sys/bus/pci/devices/{GPU}/driver/unbind"), GPU)
    assert "/dev/vfio/devices/vfio12" in [node.path.text for node in claim(found).nodes]


def test_a_function_without_an_iommu_is_bound_into_a_group_that_vfio_makes_up(tmp_path: Path) -> None:
    allowed = "sys/module/vfio/parameters/enable_unsafe_noiommu_mode = Y\n"
    found, _ = acting(tmp_path, gpu("nvidia", group=None) + allowed, gpu="nvidia")
    before = only(found)
    device = claim(found)
    assert (device.key, device.unit, device.hardware) == (before.key, before.unit, before.hardware)
    assert [node.path.text for node in device.nodes] == ["/dev/vfio/vfio", "/dev/vfio/noiommu-0"]
    assert [*found.probe(device)] == []
    assert found.edits(found.resources[0], [grant(device)]).env == {"PCI_RESOURCE_NVIDIA_COM_T4": GPU}


def test_a_node_that_does_not_come_is_told(tmp_path: Path) -> None:
    found, kernel = acting(tmp_path, gpu("nvidia"))
    kernel._make_nodes = lambda found, path: plant(tmp_path, f"{path}/vfio-dev/vfio7/")  # type: ignore[method-assign]
    with pytest.raises(AllocationRefused, match="/dev/vfio/12 did not appear"):
        claim(found)


def test_udev_is_given_time_to_set_the_nodes_mode(tmp_path: Path) -> None:
    found, kernel = acting(tmp_path, gpu("nvidia") + "run/udev/data/c240:12 = I:1\n")
    entry = tmp_path / "run/udev/data/c240:12"
    os.utime(entry, (0, 0))  # what udev wrote of the device that had this number before
    asked: list[bool] = []

    def wait(is_so: Any, seconds: float) -> bool:
        asked.append(is_so())
        if not asked[-1]:
            os.utime(entry)
            asked.append(is_so())
        return asked[-1]

    kernel.wait = wait  # type: ignore[method-assign]
    claim(found)
    assert asked == [True, True, False, True]


# --- what is refused ---


def test_what_the_host_needs_by_now_is_refused_when_it_is_to_be_bound(tmp_path: Path) -> None:
    tree = function(GPU, "144d:a80a", below=ROOT, driver="nvme", group=12, files={"driver_override": "(null)"})
    tree += f"sys/class/block/nvme0n1 -> ../../devices/{ROOT}/{GPU}/nvme/nvme0/nvme0n1\n"
    tree += f"sys/devices/{ROOT}/{GPU}/nvme/nvme0/nvme0n1/dev = 259:0\n"
    found, kernel = acting(tmp_path, tree, resource("a/disk", {"vendor": ("144d",)}, bind="allocate"))
    device = only(found)
    assert device.unusable == ""
    plant(tmp_path, "proc/1/mountinfo = 30 22 259:0 / /data rw - ext4 /dev/nvme0n1 rw")
    with pytest.raises(AllocationRefused, match="it has the disk nvme0n1, which is mounted at /data"):
        found.claim(found.resources[0], [grant(device)])
    assert kernel.written == []
    forced = Vfio(found.host, [resource("a/disk", {"vendor": ("144d",)}, bind="allocate", force=[GPU])], kernel)
    forced.claim(forced.resources[0], [grant(device)])
    assert drivers(found) == [(GPU, "vfio-pci", "vfio-pci")]


def test_a_gpu_that_a_process_has_open_is_left_with_nvidias_driver_which_would_wait_for_ever(tmp_path: Path) -> None:
    forced = resource(bind="allocate", force=[GPU])
    found, kernel = acting(
        tmp_path, gpu("nvidia") + sound("snd_hda_intel"), forced, gpu="nvidia", sound="snd_hda_intel"
    )
    plant(tmp_path, f"proc/driver/nvidia/gpus/{GPU}/information = Model: \t Tesla T4\\nDevice Minor: \t 1")
    ours = f"proc/66/cmdline = python /x/backends/gpu/nvml_process.py\nproc/66/fd/3 -> {tmp_path}/dev/nvidia1"  # a question
    persistenced = f"proc/77/comm = nvidia-persiste\nproc/77/fd/3 -> {tmp_path}/dev/nvidia1"
    plant(tmp_path, f"dev/nvidia1 c 195:1\n{ours}\n{persistenced}\nproc/78/fd/3 -> {tmp_path}/dev/nvidia10")
    with pytest.raises(AllocationRefused, match=r"is open in nvidia-persiste \(process 77\)"):
        claim(found)
    assert kernel.written == []
    (tmp_path / "proc/77/fd/3").unlink()
    claim(found)
    assert drivers(found)[0] == (GPU, "vfio-pci", "vfio-pci")


@pytest.mark.needs("device nodes", "/dev/loop0")
def test_a_disk_that_something_has_to_itself_is_refused_when_it_is_to_be_bound(tmp_path: Path) -> None:
    tree = function(GPU, "144d:a80a", below=ROOT, driver="nvme", group=12, files={"driver_override": "(null)"})
    path = f"sys/devices/{ROOT}/{GPU}/nvme/nvme0/loop0"
    tree += f"sys/class/block/loop0 -> ../../devices/{ROOT}/{GPU}/nvme/nvme0/loop0\n"
    tree += f"{path}/dev = 7:0\n{path}/uevent = DEVNAME=loop0\n{path}/subsystem -> ../../../../../../../class/block\n"
    found, kernel = acting(
        tmp_path, tree + "dev/loop0 b 7:0\n", resource("a/disk", {"vendor": ("144d",)}, bind="allocate")
    )
    taken = os.open(tmp_path / "dev/loop0", os.O_RDONLY | os.O_EXCL)
    try:
        with pytest.raises(AllocationRefused, match="has the disk loop0, which something uses"):
            claim(found)
    finally:
        os.close(taken)
    assert kernel.written == []
    claim(found)


def test_what_the_kernel_refuses_is_told_and_undone(tmp_path: Path) -> None:
    found, kernel = acting(tmp_path, gpu("nvidia"), resource(bind="allocate", release="restore"), gpu="nvidia")
    kernel.refuses = lambda path, _: OSError(errno.EROFS, os.strerror(errno.EROFS)) if path.name == "unbind" else None
    with pytest.raises(AllocationRefused, match=f"{GPU} cannot be bound to vfio-pci: read-only file system"):
        claim(found)
    assert drivers(found) == [(GPU, "nvidia", None)]
    assert notes(tmp_path) == []


def test_a_function_that_vfio_will_not_take_gets_its_own_driver_back(tmp_path: Path) -> None:
    found, kernel = acting(tmp_path, gpu("nvidia"), resource(bind="allocate", release="restore"), gpu="nvidia")
    kernel.deaf.add(GPU)
    with pytest.raises(AllocationRefused, match=f"the kernel did not bind {GPU} to vfio-pci"):
        claim(found)
    assert drivers(found) == [(GPU, "nvidia", None)]
    assert notes(tmp_path) == []


def test_what_cannot_be_undone_at_once_is_undone_by_the_release(tmp_path: Path) -> None:
    found, kernel = restoring(tmp_path, gpu("nvidia"), gpu="nvidia")
    device = only(found)
    kernel.deaf.add(GPU)
    kernel.refuses = lambda _, text: OSError(errno.EBUSY, os.strerror(errno.EBUSY)) if text == "\n" else None
    with pytest.raises(AllocationRefused, match=f"the kernel did not bind {GPU} to vfio-pci"):
        found.claim(found.resources[0], [grant(device)])
    assert drivers(found) == [(GPU, None, "vfio-pci")]
    assert notes(tmp_path) == [GPU]
    kernel.refuses = lambda *_: None
    release(found, device)
    assert drivers(found) == [(GPU, "nvidia", None)]
    assert notes(tmp_path) == []


def test_a_device_that_is_gone_is_refused(tmp_path: Path) -> None:
    found, _ = acting(tmp_path, gpu("nvidia"))
    device = only(found)
    (tmp_path / f"sys/bus/pci/devices/{GPU}").unlink()
    with pytest.raises(AllocationRefused, match=f"{GPU} is gone, or in another group now"):
        found.claim(found.resources[0], [grant(device)])


# --- given back ---


def restoring(tmp_path: Path, tree: str = "", **native: str) -> tuple[Vfio, ActingKernel]:
    native = native or {"gpu": "nvidia", "sound": "snd_hda_intel"}
    tree = tree or gpu("nvidia") + sound("snd_hda_intel")
    return acting(tmp_path, tree, resource(bind="allocate", release="restore"), **native)


def test_what_was_bound_for_a_pod_gets_its_own_drivers_back(tmp_path: Path) -> None:
    found, _ = restoring(tmp_path)
    before = drivers(found)
    device = claim(found)
    assert notes(tmp_path) == [GPU, SOUND]
    release(found, device)
    assert drivers(found) == before == [(GPU, "nvidia", None), (SOUND, "snd_hda_intel", None)]
    assert notes(tmp_path) == []
    assert not (tmp_path / "dev/vfio/12").exists()


def test_it_is_given_back_although_the_configuration_knows_nothing_of_it_any_more(tmp_path: Path) -> None:
    found, kernel = restoring(tmp_path)
    device = claim(found)
    release(found, device, by=Vfio(found.host, (), kernel))
    assert drivers(found) == [(GPU, "nvidia", None), (SOUND, "snd_hda_intel", None)]


def test_what_others_bound_is_not_given_back(tmp_path: Path) -> None:
    tree = gpu(files={"driver_override": "vfio-pci"})  # as driverctl does
    found, kernel = restoring(tmp_path, tree)
    device = claim(found)
    release(found, device)
    assert (kernel.written, drivers(found)) == ([], [(GPU, "vfio-pci", "vfio-pci")])


def test_what_a_pod_still_holds_is_not_given_back(tmp_path: Path) -> None:
    found, _ = restoring(tmp_path)
    device = claim(found)
    found.release([Released("nvidia.com/T4", GPU, device.hardware)], frozenset())
    assert drivers(found)[0] == (GPU, "vfio-pci", "vfio-pci")


def test_what_is_to_be_kept_is_kept(tmp_path: Path) -> None:
    found, _ = acting(tmp_path, gpu("nvidia"), gpu="nvidia")
    release(found, claim(found))
    assert drivers(found) == [(GPU, "vfio-pci", "vfio-pci")]


def test_what_somebody_else_bound_meanwhile_is_left_alone(tmp_path: Path) -> None:
    found, kernel = restoring(tmp_path, gpu("nvidia"), gpu="nvidia")
    device = claim(found)
    kernel.write(HostPath(f"/sys/bus/pci/devices/{GPU}/driver_override"), "pci-stub")
    kernel.written.clear()
    release(found, device)
    assert kernel.written == []
    assert notes(tmp_path) == []


def test_an_override_of_before_is_written_back(tmp_path: Path) -> None:
    found, _ = restoring(tmp_path, gpu("nvidia", files={"driver_override": "nvidia"}))
    release(found, claim(found))
    assert drivers(found) == [(GPU, "nvidia", "nvidia")]


def test_what_cannot_be_given_back_is_told_and_can_be_tried_again(tmp_path: Path) -> None:
    found, kernel = restoring(tmp_path)
    device = claim(found)
    kernel.refuses = lambda path, _: OSError(errno.EBUSY, os.strerror(errno.EBUSY)) if GPU in path.text else None
    with pytest.raises(ExceptionGroup) as raised:
        release(found, device)
    assert [str(error) for error in raised.value.exceptions] == [
        f"{GPU} cannot be given back to its own driver: device or resource busy"
    ]
    assert notes(tmp_path) == [GPU]
    kernel.refuses = lambda *_: None
    release(found, device)
    release(found, device)
    assert drivers(found) == [(GPU, "nvidia", None), (SOUND, "snd_hda_intel", None)]


def test_a_note_that_cannot_be_written_refuses_the_pod_before_anything_is_bound(tmp_path: Path) -> None:
    found, kernel = restoring(tmp_path)
    (tmp_path / "run/fairlead").write_text("in the way")
    with pytest.raises(AllocationRefused, match=r"cannot be noted in /run/fairlead/vfio .* or set release = \"keep\""):
        claim(found)
    assert kernel.written == []


def test_a_function_whose_own_driver_is_gone_is_left_to_whichever_comes(tmp_path: Path) -> None:
    found, kernel = restoring(tmp_path)
    device = claim(found)
    kernel.native.clear()  # its module was unloaded meanwhile
    release(found, device)
    assert drivers(found) == [(GPU, None, None), (SOUND, None, None)]
    assert notes(tmp_path) == []
    kernel.native[GPU] = "nouveau"
    kernel.write(HostPath("/sys/bus/pci/drivers_probe"), GPU)  # as the kernel does when a driver is loaded
    assert drivers(found)[0] == (GPU, "nouveau", None)


def test_a_function_that_was_unplugged_is_forgotten(tmp_path: Path) -> None:
    found, _ = restoring(tmp_path)
    device = claim(found)
    for address in (GPU, SOUND):
        (tmp_path / f"sys/bus/pci/devices/{address}").unlink()
    release(found, device)
    assert notes(tmp_path) == []


# --- at the start ---


def test_a_device_that_joins_is_bound_with_its_companion(tmp_path: Path) -> None:
    found, _ = acting(tmp_path, gpu("nvidia") + sound("snd_hda_intel"), resource(bind="start"))
    (start,) = found.resources
    assert found.adopts(start)
    assert found.adopt(start, only(found))
    device = only(found)
    assert [*found.probe(device)] == []
    assert len(device.nodes) == 2
    assert not found.adopt(start, device)


def test_nothing_else_is_adopted(tmp_path: Path) -> None:
    for bind in ("never", "allocate"):
        found, _ = acting(tmp_path / bind, gpu("nvidia"), resource(bind=bind))
        assert not found.adopts(found.resources[0])


def test_what_cannot_be_bound_at_the_start_is_told(tmp_path: Path) -> None:
    found, kernel = acting(tmp_path, gpu("nvidia"), resource(bind="start"))
    kernel.deaf.add(GPU)
    with pytest.raises(NotReady, match=f"the kernel did not bind {GPU} to vfio-pci; its log"):
        found.adopt(found.resources[0], only(found))


# --- the real one ---


def test_an_attribute_is_written_in_one_go_and_never_made(tmp_path: Path) -> None:
    kernel = Kernel(planted_host(tmp_path, "sys/a = 1\n"))
    kernel.write(HostPath("/sys/a"), "2")
    assert (tmp_path / "sys/a").read_text() == "2\n"
    with pytest.raises(FileNotFoundError):
        kernel.write(HostPath("/sys/b"), "2")
    assert not (tmp_path / "sys/b").exists()


def test_a_module_is_loaded_from_the_hosts_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modprobe = tmp_path / "bin/modprobe"
    modprobe.parent.mkdir()
    modprobe.write_text(
        '#!/bin/sh\necho "$@" > "$2/said"\n[ "$3" = vfio-pci ] || { echo "not found: $3" >&2; exit 1; }\n'
    )
    modprobe.chmod(0o755)
    monkeypatch.setenv("PATH", f"{modprobe.parent}:{os.environ['PATH']}")
    kernel = Kernel(Host.below(tmp_path))
    kernel.load("vfio-pci")
    assert (tmp_path / "said").read_text() == f"--dirname {tmp_path} vfio-pci\n"
    with pytest.raises(OSError, match="not found: other"):
        kernel.load("other")


def test_a_module_that_is_not_loaded_in_time_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], timeout: float, **_: object) -> None:
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(OSError, match="modprobe vfio-pci was not done within 5 s"):
        Kernel(Host()).load("vfio-pci")


def test_a_host_without_modprobe_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(OSError, match="there is no modprobe here"):
        Kernel(Host()).load("vfio-pci")


def test_waiting_ends_when_it_is_so_or_the_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    kernel, looks = Kernel(Host()), iter([False, False, True])
    assert kernel.wait(lambda: next(looks), 10.0)
    assert 0 < now - 1000.0 < 1.0
    assert not kernel.wait(lambda: False, 10.0)
    assert 1010.0 <= now < 1012.0
