"""Made-up nodes: what a daemon on them would show."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from agent.console.views import (
    Configuration,
    Device,
    Event,
    Held,
    Holder,
    Kubelet,
    Period,
    Problem,
    Resource,
    Status,
    Unclaimed,
)

STARTED = 1_790_000_000.0
NOW = STARTED + 7200


def held(device_id: str, pod: str, namespace: str = "training") -> Held:
    return Held(device_id, (Holder(namespace, pod, "main"),))


def gpu(number: int, **changes: Any) -> Device:
    """One of eight: four below each of two NUMA nodes, two and two below a switch."""
    address = f"0000:{0x1B + 0x10 * number:02x}:00.0"
    switch = f"0000:{0x19 + 0x20 * (number // 2):02x}:00.0"
    root = f"pci0000:{0x18 + 0x20 * (number // 2):02x}"
    device = Device(
        f"GPU-5f3c2a{number}b-8d1e-4c77-9a60-2f1b7cd0e4a{number}",
        (f"GPU-5f3c2a{number}b-8d1e-4c77-9a60-2f1b7cd0e4a{number}",),
        "Healthy",
        since=STARTED,
        numa_node=number // 4,
        ancestry=(root, root.removeprefix("pci") + ":00.0", switch),
        hardware=(f"pci:{address}",),
        name=f"nvidia{number}",
        model="H100",
    )
    return replace(device, **changes)


FALLEN = {
    "state": "Unhealthy",
    "reason": "xid-79",
    "message": "XID 79: the GPU has fallen off the bus; it needs a reset or the node a reboot.",
    "since": NOW - 260,
}


def _period(began: float, ended: float, state: str, pod: str = "", reason: str = "", message: str = "") -> Period:
    """From how many hours ago until how many."""
    pods = (f"training/{pod}",) if pod else ()
    return Period(NOW - began * 3600, NOW - ended * 3600, state, reason, message, pods)


PAST: tuple[Period, ...] = (
    _period(24, 20, "Unknown", message="Fairlead did not run"),
    _period(20, 17, "Healthy"),
    _period(17, 13, "Healthy", "llama-1"),
    _period(13, 9, "Degraded", "llama-1", "pcie-width", "It has 8 of 16 lanes."),
    _period(9, 7, "Drained", "", "drained", "an operator drained it: new riser"),
    _period(7, 6, "Gone", "", "gone", "it is on no list"),
    _period(6, 260 / 3600, "Healthy", "notebook-7d9f"),
    _period(260 / 3600, 0, "Unhealthy", "notebook-7d9f", "xid-79", str(FALLEN["message"])),
)
"""Of a GPU that has had a long day."""

UNCHANGED: tuple[Period, ...] = (Period(NOW - 86400, NOW - 40000, "Unknown"), Period(NOW - 40000, NOW, "Healthy"))


def gpus(**of_third: Any) -> Resource:
    """Eight GPUs, of which pods hold three."""
    devices = [gpu(number) for number in range(8)]
    for number, pod in ((0, "llama-0"), (1, "llama-1"), (3, "notebook-7d9f")):
        devices[number] = replace(devices[number], held=(held(devices[number].ids[0], pod),))
    devices[3] = replace(devices[3], **of_third)
    return Resource("nvidia.com/gpu", "gpu", True, True, devices=tuple(devices))


def unusable(number: int, why: str = "it has no driver; nvidia is needed") -> Unclaimed:
    """One of the GPUs, which no pod can get."""
    it = gpu(number)
    return Unclaimed(
        it.key, "gpu", why, "nvidia.com/gpu", "unusable", NOW - 60, it.numa_node, it.ancestry, it.hardware,
        it.name, it.model,
    )  # fmt: skip


def hca(number: int) -> Device:
    """An adapter beside the GPU of that number: below the same switch, on a port of its own."""
    it = gpu(number)
    address = it.hardware[0].removeprefix("pci:").replace(":00.0", ":10.0")
    return Device(
        address, (address,), "Healthy", since=STARTED, numa_node=it.numa_node,
        ancestry=(*it.ancestry, address.replace(":10.0", ":02.0")), hardware=(f"pci:{address}",),
        name=f"mlx5_{number}", model="ConnectX-7",
    )  # fmt: skip


def hcas() -> Resource:
    """Eight adapters, one beside each GPU, of which a pod holds two."""
    every = [hca(number) for number in range(8)]
    every[:2] = [replace(it, held=(held(it.ids[0], "llama-0"),)) for it in every[:2]]
    return Resource("rdma/hca", "infiniband", True, True, devices=tuple(every))


def kvm(tokens: int = 1000, used: int = 37) -> Resource:
    ids = tuple(f"kvm::{number}" for number in range(tokens))
    taken = tuple(held(ids[number], f"virt-launcher-{number:03}", "vms") for number in range(used))
    device = Device("kvm", ids, "Healthy", since=STARTED, hardware=("node:/dev/kvm",), held=taken)
    return Resource("devices.kubevirt.io/kvm", "chardev", True, True, devices=(device,))


def vfs(number: int = 128, bad: int = 3) -> Resource:
    """Virtual functions of one adapter."""

    def vf(n: int) -> Device:
        address = f"0000:d8:{2 + n // 8:02x}.{n % 8}"
        device = Device(
            address, (address,), "Healthy", since=STARTED, numa_node=1,
            ancestry=("pci0000:d7", "0000:d7:00.0"), hardware=(f"pci:{address}",),
        )  # fmt: skip
        if n >= bad:
            return replace(device, held=(held(address, f"cnf-{n}", "telco"),)) if n % 3 == 0 else device
        message = f"Port 1 of {address} is down (its link partner says nothing)."
        return replace(device, state="Degraded", reason="port-down", message=message, since=NOW - 4000)

    return Resource("example.com/vf", "infiniband", True, True, devices=tuple(vf(n) for n in range(number)))


def node(*resources: Resource, **changes: Any) -> Status:
    """A node with these resources."""
    status = Status(
        "0.1.0",
        STARTED,
        NOW,
        Kubelet("/var/lib/kubelet/device-plugins/kubelet.sock", True),
        Configuration("/etc/fairlead/config.toml", STARTED),
        resources,
        (
            Unclaimed("0000:00:02.0", "gpu", "nvidia.com/gpu does not take it: vendor is 8086, not 10de"),
            Unclaimed("/dev/ttyS0", "chardev", "no resource selects it"),
        ),
    )
    return replace(status, **changes)


def busy() -> Status:
    """One on which a little of everything is the matter."""
    waiting = Resource("example.com/camera", "chardev", False, False, "the kubelet refused: Unimplemented")
    problem = Problem("infiniband", "0000:d8:00.0", "0000:d8:00.0 cannot be read: it has hung for more than 5 s.")
    return node(gpus(**FALLEN), vfs(), kvm(), waiting, problems=(problem,))


def broken() -> Status:
    """Eight GPUs and eight adapters, on which there are ten troubles."""
    drained = {"state": "Unhealthy", "reason": "drained", "message": "an operator drained it: new riser"}
    narrow = {"state": "Degraded", "reason": "pcie-width", "message": "it runs at 8 of 16 lanes"}
    down = {"state": "Unhealthy", "reason": "port-down", "message": "its port is down (polling: no cable)"}
    cards = list(gpus(**FALLEN).devices)
    cards[4], cards[7] = replace(cards[4], **narrow), replace(cards[7], **drained)
    adapters = [replace(hca(number), **(down if number in (2, 6) else {})) for number in range(8)]
    gone = replace(unusable(7, "it is not there any more"), resource="rdma/hca", reason="gone")
    gone = replace(gone, device=adapters[7].key, name="mlx5_7", model="ConnectX-7", hardware=adapters[7].hardware)
    hung = (
        Problem("infiniband", it, f"{it} cannot be read: it has hung for more than 5 s.")
        for it in ("0000:d8:00.0", "0000:d9:00.0")
    )
    failing = Problem("", "restarts", "HTTP fails and is started again: Address already in use")
    return node(
        replace(gpus(), devices=(*cards[:5], cards[7])),
        replace(hcas(), devices=tuple(adapters[:7]), complaint="another plugin has registered it"),
        Resource("example.com/camera", "chardev", False, False, "the kubelet refused: Unimplemented"),
        unclaimed=(unusable(5), unusable(6, "the NVIDIA driver excludes it (NVreg_ExcludedGpus)"), gone),
        problems=(*hung, failing),
    )


EVENTS = [
    Event(1, STARTED + 1, "resource-registered", "nvidia.com/gpu"),
    Event(2, STARTED + 1, "resource-registered", "example.com/vf"),
    Event(
        3, NOW - 260, "device-changed", "nvidia.com/gpu", gpu(3).key, "Unhealthy", "xid-79",
        "XID 79: the GPU has fallen off the bus; it needs a reset or the node a reboot.",
    ),
]  # fmt: skip


def many(devices: int) -> Status:
    """A node with so many devices in ten resources."""
    return node(
        *(
            Resource(
                f"example.com/r{n}", "chardev", True, True,
                devices=tuple(
                    Device(
                        f"dev-{n}-{i}", (f"dev-{n}-{i}",), "Healthy", since=STARTED, numa_node=i % 2,
                        ancestry=(f"pci0000:{n:02x}", f"0000:{n:02x}:00.0"), hardware=(f"node:/dev/dev-{n}-{i}",),
                        held=(held(f"dev-{n}-{i}", f"pod-{n}-{i}"),) if i % 2 else (),
                    )
                    for i in range(devices // 10)
                ),
            )
            for n in range(10)
        )
    )  # fmt: skip
