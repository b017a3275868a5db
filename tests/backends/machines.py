"""Published machines as lines of a fixture tree (see trees.py): what their kernels and drivers show of the GPUs.

DGX-1, HGX H100, MI210 and MI300X servers, Intel's Flex cards; written from documented layouts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tests.backends.pci_trees import function

CONTROLS = """
dev/nvidiactl c 195:255
dev/nvidia-uvm c 235:0
dev/nvidia-uvm-tools c 235:1
dev/nvidia-modeset c 195:254
"""

HEALTHY_LINK = {
    "current_link_width": "16",
    "max_link_width": "16",
    "aer_dev_fatal": "TOTAL_ERR_FATAL 0",
    "aer_dev_nonfatal": "TOTAL_ERR_NONFATAL 0",
}


def uuid(minor: int) -> str:
    """The UUID of the NVIDIA GPU with that minor number."""
    return f"GPU-{minor:08x}-0000-4000-8000-{minor:012x}"


def information(minor: int, model: str, *, gpu_uuid: str | None = None, excluded: str = "No") -> str:
    """What NVIDIA's driver says of a GPU, as one value of a fixture tree."""
    said = {
        "Model": model,
        "IRQ": "10",
        "GPU UUID": gpu_uuid or uuid(minor),
        "Video BIOS": "96.00.99.00.01",
        "Bus Type": "PCIe",
        "DMA Mask": "0xfffffffffffff",
        "Device Minor": str(minor),
        "GPU Firmware": "535.129.03",
        "GPU Excluded": excluded,
    }
    return "\\n".join(f"{name}: \t {value}" for name, value in said.items())


def nvidia_gpu(
    address: str,
    minor: int,
    *,
    ids: str = "10de:2330",
    model: str = "NVIDIA H100 80GB HBM3",
    below: str = "pci0000:00",
    numa_node: int = 0,
    driver: str | None = "nvidia",
    registered: bool = True,
    node: bool = True,
    files: Mapping[str, str] | None = None,
) -> str:
    """One GPU; `registered` with its driver's /proc, and with its device node."""
    names = {"class": "0x030200", "vendor": f"0x{ids[:4]}", **HEALTHY_LINK, **(files or {})}
    lines = function(address, ids, below=below, driver=driver, numa_node=numa_node, group=minor, files=names)
    if registered:
        lines += f"proc/driver/nvidia/gpus/{address}/information = {information(minor, model)}\n"
    return lines + (f"dev/nvidia{minor} c 195:{minor}\n" if node else "")


def dgx1() -> str:
    """Eight V100: four switches with two each, two sockets."""
    places = ["06:00", "07:00", "0a:00", "0b:00", "85:00", "86:00", "89:00", "8a:00"]
    lines = [CONTROLS]
    for minor, place in enumerate(places):
        socket, switch = minor // 4, minor // 2
        root = f"pci0000:{'80' if socket else '00'}"
        below = f"{root}/0000:{'80' if socket else '00'}:0{1 + switch % 2}.0/0000:{place[:2]}:08.0"
        lines.append(
            nvidia_gpu(
                f"0000:{place}.0",
                minor,
                ids="10de:1db1",
                model="Tesla V100-SXM2-16GB",
                below=below,
                numa_node=socket,
            )
        )
    return "".join(lines)


H100 = ["19:00", "3b:00", "4c:00", "5d:00", "9b:00", "bb:00", "cb:00", "db:00"]


def hgx_h100() -> str:
    """Eight H100, each below a switch of its own; 0–3 on one socket."""
    return CONTROLS + "".join(
        nvidia_gpu(f"0000:{place}.0", minor, below=f"pci0000:{place[:2]}/0000:{place[:2]}:01.0", numa_node=minor // 4)
        for minor, place in enumerate(H100)
    )


def mig(minor: int, instances: Iterable[tuple[int, int]]) -> str:
    """What the driver shows of a GPU that is divided: (GPU instance, compute instance)."""
    lines, number = [], 3 + 100 * minor
    seen: set[int] = set()
    for gi, ci in instances:
        names = [f"gi{gi}/ci{ci}"] if gi in seen else [f"gi{gi}", f"gi{gi}/ci{ci}"]
        seen.add(gi)
        for name in names:
            lines.append(f"proc/driver/nvidia/capabilities/gpu{minor}/mig/{name}/access = DeviceFileMinor: {number}")
            lines.append(f"dev/nvidia-caps/nvidia-cap{number} c 236:{number}")
            number += 1
    return "\n".join([*lines, ""])


def drm_nodes(path: str, card: int, render: int) -> str:
    """A card's DRM children and their nodes."""
    return (
        f"{path}/drm/card{card}/dev = 226:{card}\n"
        f"{path}/drm/card{card}/uevent = MAJOR=226\\nMINOR={card}\\nDEVNAME=dri/card{card}\\nDEVTYPE=drm_minor\n"
        f"{path}/drm/renderD{render}/dev = 226:{render}\n"
        f"{path}/drm/renderD{render}/uevent = MAJOR=226\\nMINOR={render}\\nDEVNAME=dri/renderD{render}\n"
        f"sys/class/drm/renderD{render} -> ../../{path.removeprefix('sys/')}/drm/renderD{render}\n"
        f"dev/dri/card{card} c 226:{card}\n"
        f"dev/dri/renderD{render} c 226:{render}\n"
    )


def amd_gpu(
    address: str,
    number: int,
    *,
    ids: str = "1002:740f",
    kind: str = "038000",
    numa_node: int = 0,
    partition: tuple[str, str] | None = None,
    driver: str | None = "amdgpu",
) -> str:
    """One GPU with its DRM nodes: card<number>, renderD<128 + number>."""
    below = f"pci0000:{address[5:7]}/0000:{address[5:7]}:01.1"
    files = {
        "class": f"0x{kind}",
        "vendor": "0x1002",
        "unique_id": f"{0x1901F0 + number:016x}",
        "serial_number": f"69231500{number:04}",
        "product_name": "AMD Instinct MI210",
        **HEALTHY_LINK,
    }
    if partition is not None:
        files |= dict(zip(("current_compute_partition", "current_memory_partition"), partition, strict=True))
    lines = function(
        address, ids, below=below, subsystem="1002:0c34", kind=kind, driver=driver, numa_node=numa_node, files=files
    )
    return lines + (drm_nodes(f"sys/devices/{below}/{address}", number, 128 + number) if driver == "amdgpu" else "")


def kfd_node(number: int, address: str, render: int, xgmi: Mapping[int, int], partition: int = 0) -> str:
    """A GPU in KFD's topology; `xgmi` has the number of links to each other node, `partition` is or-ed to its place."""
    place = int(address[5:7], 16) << 8 | int(address[8:10], 16) << 3 | int(address[11]) | partition
    path = f"sys/class/kfd/kfd/topology/nodes/{number}"
    said = f"cpu_cores_count 0\\nsimd_count 416\\nlocation_id {place}\\ndomain {int(address[:4], 16)}"
    lines = [f"{path}/properties = {said}\\ndrm_render_minor {render}\\nunique_id 1801979520617338022"]
    for link, (other, count) in enumerate(xgmi.items()):
        said = f"type 11\\nnode_from {number}\\nnode_to {other}\\nweight 15"
        lines.append(
            f"{path}/io_links/{link}/properties = {said}\\nmin_bandwidth 50000\\nmax_bandwidth {50000 * count}"
        )
    lines.append(f"{path}/io_links/{len(xgmi)}/properties = type 2\\nnode_from {number}\\nnode_to 0\\nweight 20")
    return "\n".join(lines) + "\n"


MI210 = [f"0000:{bus}:00.0" for bus in ("23", "26", "43", "46", "a3", "a6", "c3", "c6")]


def mi210_server() -> str:
    """Eight MI210 in two XGMI hives of four."""
    lines = ["dev/kfd c 234:0\n", "sys/class/kfd/kfd/topology/nodes/0/properties = cpu_cores_count 64\\nsimd_count 0\n"]
    for n, address in enumerate(MI210):
        hive = range(n // 4 * 4, n // 4 * 4 + 4)
        lines.append(amd_gpu(address, n, numa_node=n // 4))
        lines.append(kfd_node(n + 1, address, 128 + n, {other + 1: 1 for other in hive if other != n}))
    return "".join(lines)


MI300X = "0000:0c:00.0"


def mi300x_cpx(partitions: int = 4, *, name: str = "amdgpu_xcp_{}", shift: int = 0) -> str:
    """One MI300X divided in CPX mode (into eight, really): itself, the others as platform devices.

    Kernels have called those `amdgpu_xcp.0` and `amdgpu_xcp_0` (amdgpu_xcp_drv.c), and put the partition into the lowest
    bits of KFD's location_id or, for a time, 28 bits higher (kfd_topology.c); low as in AMD's recordings of MI300X and MI308X.
    """
    gpu = amd_gpu(MI300X, 0, ids="1002:74a1", kind="120000", partition=("CPX", "NPS4"))
    lines = ["dev/kfd c 234:0\n", gpu, kfd_node(1, MI300X, 128, {})]
    for n in range(1, partitions):
        path = f"sys/devices/platform/{name.format(n)}"
        lines += [drm_nodes(path, n, 128 + n), kfd_node(n + 1, MI300X, 128 + n, {}, n << shift)]
    lines.append(drm_nodes("sys/devices/platform/amdgpu_xcp_9", 9, 137))  # made by the driver, not in use
    return "".join(lines)


def intel_gpu(address: str, number: int, driver: str | None, *, ids: str = "8086:56c0", virtual: int = 0) -> str:
    """One Flex card with its DRM nodes and udev's links."""
    bus = address[5:7]
    below = f"pci0000:{bus}/0000:{bus}:01.0"
    files = {"class": "0x038000", "vendor": "0x8086", **HEALTHY_LINK}
    others = [f"{address[:-1]}{n}" for n in range(1, virtual + 1)]
    lines = function(
        address, ids, below=below, subsystem="8086:4905", kind="038000", driver=driver, virtual=others, files=files
    )
    if driver not in ("i915", "xe"):
        return lines
    lines += drm_nodes(f"sys/devices/{below}/{address}", number, 128 + number)
    lines += f"dev/dri/by-path/pci-{address}-card -> ../card{number}\n"
    return lines + f"dev/dri/by-path/pci-{address}-render -> ../renderD{128 + number}\n"


def flex_server(first: int = 0) -> str:
    """A Flex card on i915, one on xe, and one on xe with two virtual functions; the first is card<first>."""
    return (
        intel_gpu("0000:4d:00.0", first, "i915")
        + intel_gpu("0000:5e:00.0", first + 1, "xe")
        + intel_gpu("0000:6f:00.0", first + 2, "xe", virtual=2)
    )
