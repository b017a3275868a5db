"""Which GPUs an event is about, what is listened to, and what a probe sees."""

from __future__ import annotations

from pathlib import Path

import pytest

from backends.base import AllocationRefused, Grant, HostPath, Known, LinkChange, PathChange, Uevent, Verdict, Watches
from backends.gpu import Gpu, xid
from backends.linux import pci
from tests.backends.gpu.gpus import backend, devices, look, resource
from tests.backends.kernel_calls import kernel_calls
from tests.backends.machines import H100, MI210, flex_server, hgx_h100, mi210_server, mi300x_cpx, nvidia_gpu
from tests.backends.pci_trees import function
from tests.backends.trees import plant

GPUS = [f"0000:{place}.0" for place in H100]
FIRST = "/devices/pci0000:19/0000:19:01.0/0000:19:00.0"


def known(gpu: Gpu) -> Known:
    return Known({unit: found.devices for unit, found in look(gpu).items()})


def affected(gpu: Gpu, hint: Uevent | PathChange | LinkChange) -> set[str]:
    return set(gpu.affects(hint, known(gpu)))


def path(text: str) -> PathChange:
    return PathChange(HostPath(text))


def pci_event(devpath: str, action: str = "bind", ids: str = "10DE:2330", kind: str = "30200") -> Uevent:
    return Uevent(action, "pci", devpath, properties={"PCI_ID": ids, "PCI_CLASS": kind})


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Gpu:
    return backend(tmp_path_factory.mktemp("machine"), hgx_h100())


@pytest.mark.parametrize(
    ("hint", "units"),
    [
        *((pci_event(FIRST, action), {GPUS[0], "nvlink"}) for action in ("bind", "unbind", "remove", "add")),
        (pci_event("/devices/pci0000:e0/0000:e1:00.0", "add"), {"0000:e1:00.0", "nvlink"}),  # one that nobody knew
        # a bridge takes the GPUs below it along
        (pci_event("/devices/pci0000:19/0000:19:01.0", "remove", "8086:347A", "60400"), {GPUS[0], "nvlink"}),
        (Uevent("add", "drm", f"{FIRST}/drm/card0"), {GPUS[0]}),
        # other functions' events
        (pci_event("/devices/pci0000:e0/0000:e1:00.0", "add", "15B3:1021", "20700"), set()),
        (Uevent("change", "drm", "/devices/platform/vkms/drm/card0"), set()),
        (LinkChange("eth0", 2), set()),
        # nodes that come late may be any GPU's
        (path("/dev/nvidia3"), set(GPUS)),
        (path("/dev/nvidia-uvm"), set(GPUS)),
        (path("/dev/nvidia-caps/nvidia-cap3"), set(GPUS)),
        (path("/dev"), set(GPUS)),
        (path("/proc/driver/nvidia/gpus"), set(GPUS)),
        (path("/dev/ttyUSB0"), set()),
        (path("/dev/dri/card0"), set()),
        (path("/dev/kfd"), set()),
        (path("/proc/driver"), set()),
        # the driver's entry is about that GPU
        (path(f"/proc/driver/nvidia/gpus/{GPUS[3]}"), {GPUS[3]}),
        (path(f"/proc/driver/nvidia/gpus/{GPUS[3]}/information"), {GPUS[3]}),
        (path("/proc/driver/nvidia/gpus/readme"), set()),
    ],
)
def test_an_event_is_about_these_gpus(machine: Gpu, hint: Uevent | PathChange | LinkChange, units: set[str]) -> None:
    assert affected(machine, hint) == units


def test_a_gpu_is_known_by_its_first_event(machine: Gpu) -> None:
    assert machine.affects(pci_event("/devices/pci0000:e0/0000:e1:00.0", "add"), Known()) == {"0000:e1:00.0", "nvlink"}


def test_a_gpu_that_loses_a_virtual_function_is_looked_at_again(tmp_path: Path) -> None:
    gone = function("0000:6f:00.1", "8086:56c0", below="pci0000:6f/0000:6f:01.0", kind="038000", physical="0000:6f:00.0",
                    files={"class": "0x038000", "vendor": "0x8086"})  # fmt: skip
    event = pci_event("/devices/pci0000:6f/0000:6f:01.0/0000:6f:00.1", "remove", "8086:56C0", "38000")
    assert affected(backend(tmp_path, flex_server() + gone), event) == {"0000:6f:00.1", "0000:6f:00.0"}


def test_amds_nodes(tmp_path: Path) -> None:
    gpu = backend(tmp_path, mi210_server())
    assert affected(gpu, path("/dev/kfd")) == {*MI210, "kfd"}
    assert affected(gpu, path("/dev/dri/renderD128")) == {*MI210, "kfd"}


def test_a_partition_that_comes_or_goes(tmp_path: Path) -> None:
    gpu = backend(tmp_path, mi300x_cpx())
    assert affected(gpu, Uevent("add", "drm", "/devices/platform/amdgpu_xcp_1/drm/card1")) == {"kfd"}


def test_intels_links(tmp_path: Path) -> None:
    gpu = backend(tmp_path, flex_server())
    assert affected(gpu, path("/dev/dri/by-path/pci-0000:4d:00.0-card")) == {"0000:4d:00.0"}
    assert affected(gpu, path("/dev/dri/card0")) == {"0000:4d:00.0", "0000:5e:00.0", "0000:6f:00.0"}


def test_where_there_is_no_gpu_no_directory_is_watched(tmp_path: Path) -> None:
    gpu = backend(tmp_path, "")
    assert list(gpu.units()) == []
    assert gpu.watches(Known()) == Watches(
        frozenset({"pci", "drm"}), frozenset(), frozenset({"ERROR_EVENT", "WEDGED"}), xid.LINES
    )


def test_the_directories_where_nvidias_things_come_late_are_watched(machine: Gpu) -> None:
    watched = {directory.text for directory in machine.watches(known(machine)).directories}
    wanted = {"/dev", "/dev/nvidia-caps", "/proc/driver/nvidia/gpus"}
    assert watched == wanted | {f"/proc/driver/nvidia/gpus/{address}" for address in GPUS}


def test_a_gpu_whose_last_look_found_nothing_may_be_anybodys(machine: Gpu) -> None:
    assert set(machine.affects(path("/dev/nvidia0"), Known({GPUS[0]: ()}))) == {GPUS[0]}


# --- probes ---


def said(gpu: Gpu, key: str) -> dict[str, tuple[str, Verdict]]:
    signals = gpu.probe(devices(gpu)[key])
    return {signal.reason: (signal.hardware, signal.verdict) for signal in signals if signal.measure is None}


def test_of_a_gpu_that_is_well_or_cannot_be_used_nothing_is_said(tmp_path: Path) -> None:
    well = nvidia_gpu("0000:3b:00.0", 0)
    bare = nvidia_gpu("0000:5e:00.0", 1, driver=None, registered=False, node=False)
    gpu = backend(tmp_path, well + bare)
    assert [said(gpu, key) for key in devices(gpu)] == [{}, {}]


def test_what_pci_says_is_said_of_the_gpu(tmp_path: Path) -> None:
    gpu = backend(tmp_path, nvidia_gpu("0000:3b:00.0", 0, files={"current_link_width": "4"}))
    gpu.host.local(pci.FUNCTIONS / "0000:3b:00.0" / "config").write_bytes(b"\xff" * 64)
    (key,) = devices(gpu)
    assert said(gpu, key) == {"off-bus": ("pci:0000:3b:00.0", Verdict.NOW)}


def test_a_node_or_driver_that_went_since_it_was_found(tmp_path: Path) -> None:
    gpu = backend(tmp_path, nvidia_gpu("0000:3b:00.0", 0))
    (device,) = devices(gpu).values()
    (tmp_path / "dev/nvidia0").unlink()
    gpu.host.local(pci.FUNCTIONS / "0000:3b:00.0" / "driver").unlink()
    reasons = [signal.reason for signal in gpu.probe(device) if signal.measure is None]
    assert reasons == ["node-missing", "driver-unbound"]
    plant(tmp_path, "dev/nvidia0 c 195:5")
    assert next(s.message for s in gpu.probe(device)) == "/dev/nvidia0 is c:195:5, but the driver says c:195:0"


def test_a_gpu_is_reset_by_itself(tmp_path: Path) -> None:
    gpu = backend(tmp_path, nvidia_gpu("0000:3b:00.0", 0, files={"reset": "0", "reset_method": "flr bus"}))
    (device,) = devices(gpu).values()
    assert list(gpu.prepare(resource(), [Grant(device.key, device)])) == ["pci:0000:3b:00.0"]
    assert gpu.host.local(pci.FUNCTIONS / "0000:3b:00.0" / "reset").read_text() == "1"


def test_a_gpu_that_a_process_has_open_is_not_reset_under_its_driver(tmp_path: Path) -> None:
    gpu = backend(tmp_path, nvidia_gpu("0000:3b:00.0", 0, files={"reset": "0", "reset_method": "flr"}))
    persistenced = (
        f"proc/77/comm = nvidia-persiste\nproc/77/fd/3 -> /dev/nvidiactl\nproc/77/fd/5 -> {tmp_path}/dev/nvidia0"
    )
    plant(tmp_path, f"{persistenced}\nproc/66/fd/3 -> {tmp_path}/home/nvidia0\nhome/nvidia0")
    (device,) = devices(gpu).values()
    with pytest.raises(AllocationRefused, match=r"is open in nvidia-persiste \(process 77\)"):
        gpu.prepare(resource(), [Grant(device.key, device)])
    assert gpu.host.local(pci.FUNCTIONS / "0000:3b:00.0" / "reset").read_text() == "0\n"
    (tmp_path / "proc/77/fd/5").unlink()
    assert gpu.prepare(resource(), [Grant(device.key, device)])


def test_which_gpus_a_pod_gets_matters(machine: Gpu) -> None:
    assert machine.prefers(resource())


def test_a_look_and_a_probe_ask_the_kernel_for_as_little_as_the_idle_limit_needs(tmp_path: Path) -> None:
    """0.3 % of a core, half of it for this: 100 devices each half a minute (bench: `idle_cpu`)."""
    gpu = backend(tmp_path, "".join(nvidia_gpu(f"0000:{n:02x}:00.0", n) for n in range(20)))
    units = list(gpu.units())

    def look() -> None:
        for unit in units:
            for device in gpu.discover(unit).devices:
                list(gpu.probe(device))

    look()
    assert kernel_calls(look) <= 60 * len(units)
