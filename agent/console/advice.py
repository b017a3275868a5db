"""Says of each reason what it means, what to do now, and what will end it; every face and docs/troubleshooting.md ask here."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from agent.console.sockets import node_name
from agent.console.views import Device, Explanation

UNKNOWN: Final = "DEVICE"
"""What stands for a name that is not known, as in the documentation."""

_ADDRESS: Final = re.compile(r"\b[0-9a-f]{4,8}:[0-9a-f]{2}:[01][0-9a-f]\.[0-7]\b")
_XID: Final = re.compile(r"xid-([0-9]+)")


class Advice(Struct, frozen=True):
    """What a reason asks of a person."""

    means: str
    """One sentence; empty where the device's own says it."""
    do: str
    """What to do now, one or two sentences."""
    command: str = ""
    """A line to copy; empty where no command helps, and of what is not on PCI, where it needs an address."""
    ends: str = ""
    """What will end it."""


SEEN: Final = "by itself, as soon as Fairlead sees it well again"
"""What ends most faults that a probe sees."""
_WITH_THE_POD: Final = "when the pod has ended, or the device is back"
_LATCHED: Final = "with a new binding of its driver, a reset by Fairlead, a reboot, or `fairlead undrain {device}`"
_RESET: Final = "nvidia-smi --gpu-reset --id={address} && fairlead undrain {device}"
_BIND: Final = "echo {address} > /sys/bus/pci/drivers_probe"
_LOOK: Final = "lspci -vvs {address}; dmesg | grep {address}"
_MODULE: Final = "modprobe {driver} && " + _BIND
_CLEAR: Final = "kubectl drain {node} --ignore-daemonsets --delete-emptydir-data"
_REBOOT: Final = _CLEAR + " && systemctl reboot"
_NODE: Final = "ls -l /dev; cat /proc/devices"

_FAULTY_CARD: Final = (
    "If a reboot does not mend it, power the node off, seat the card and its power cables again, and have it exchanged."
)

REASONS: Final[Mapping[str, Advice]] = {
    # what Fairlead and its operators decide
    "drained": Advice(
        "an operator has taken it out of service; pods that have it keep it",
        "Nothing, if the work on it goes on; else give it back.",
        "fairlead undrain {device}",
        "with `fairlead undrain {device}`",
    ),
    "flapping": Advice(
        "it failed, or went away and came back, too often, and is left out for a while",
        "Look for a loose card or cable, a power supply, or a driver that resets; its history shows when it came and went.",
        "fairlead status --history {device}",
        "at the time that the sentence says, or with `fairlead undrain {device}`",
    ),
    "hangs": Advice(
        "reading it has not returned for 5 s, so that nobody knows how it is",
        "The driver or the hardware hangs; the kernel's log mostly says what it waits for. Reboot the node if it stays so.",
        "dmesg | grep -e 'blocked for more than' -e {address}",
        "by itself, when the read returns",
    ),
    "unseen": Advice("Fairlead could not look at it just now", "Look why.", "fairlead doctor", SEEN),
    "overtaken": Advice(
        "another plugin has registered the resource after Fairlead, and a kubelet listens to the last one alone",
        "Remove the other plugin: its DaemonSet, or its static pod. Fairlead registers once more within seconds of its end.",
        "kubectl get daemonset --all-namespaces",
        "by itself, when the other plugin has ended",
    ),
    # what pods hold
    "gone": Advice(
        "it was offered and is not there any more",
        "Look what the kernel said when it went; then bring it back: seat it again, load its driver, have the bus looked at.",
        "dmesg | grep {address}; echo 1 > /sys/bus/pci/rescan",
        "by itself, when it is back; what no pod holds is forgotten after a day",
    ),
    "not-seen": Advice(
        "a pod holds it, and since the start nobody could look whether it is there",
        "A read hangs or fails; the problems of `status` name it.",
        "fairlead status",
        "by itself, when it has been looked at",
    ),
    "unusable": Advice(
        "it is there, and no pod can use it as it is",
        "Do what the sentence asks for; where a resource takes it no more, select it again or end the pod.",
        "fairlead explain {device}",
        SEEN,
    ),
    "list-full": Advice(
        "the resource's list is as long as a kubelet takes",
        "Lower `count` or `replicas` of the resource, or divide it into two.",
        "fairlead validate",
        "with another configuration",
    ),
    "conflict": Advice(
        "another device has its hardware or one of its IDs, or a pod has it",
        "Have one of the two resources take it alone, give one another name, or exclude one of the devices.",
        "fairlead explain {device}",
        "with another configuration, or when the other device or the pod goes",
    ),
    "replaced": Advice(
        "a pod holds it, and another device is in its place",
        "End the pod: what it was given is not there any more.",
        "fairlead status --pods",
        "when the pod has ended, or its own device is back",
    ),
    "node-replaced": Advice(
        "a pod holds it, and its device node belongs to another device now, or its stick has another since it was plugged in again",
        "End the pod: what it was given is not there any more.",
        "fairlead status --pods",
        "when the pod has ended, or its own device is back under the old number",
    ),
    "held": Advice(
        "pods hold the same hardware under other IDs, or through another plugin",
        "Nothing: it is free once they have ended.",
        "fairlead explain {device}",
        "when those pods have ended",
    ),
    "forgotten": Advice(
        "a pod holds it, and the kubelet has lost its record of that",
        "End the pod. If none has it any more, say so with `undrain`.",
        "fairlead undrain {device}",
        "when the pod has ended, or with `fairlead undrain {device}`",
    ),
    "two-pods": Advice(
        "two pods have it at the same time, because the kubelet gave it out twice",
        "Delete one of them.",
        "fairlead status --pods",
        "when one of them has ended",
    ),
    "unmapped": Advice(
        "a pod has it from another plugin, and nobody knows which hardware that is",
        "End the pod, or wait for its end.",
        "fairlead status --pods",
        _WITH_THE_POD,
    ),
    "withheld": Advice(
        'it may be what a pod has from another plugin, and its resource has `adopt = "strict"`',
        "End the pods whose IDs are `unmapped`.",
        "fairlead status --pods",
        "when no ID of the resource is `unmapped`",
    ),
    "retired": Advice(
        "a pod holds it, and its resource is no longer configured",
        "Nothing; or put the resource back into the configuration.",
        "fairlead status --pods",
        "when the pod has ended",
    ),
    # device nodes
    "node-missing": Advice(
        "a device node of it is missing or cannot be used",
        "Have the node made: bind its driver again, for NVIDIA's run nvidia-modprobe; in a pod, mount the host's /dev.",
        _NODE,
        SEEN,
    ),
    "not-a-device": Advice(
        "something that is no device node has its place in /dev",
        "Remove it and have the node made again; mostly a container runtime made a file or directory there.",
        _NODE,
        SEEN,
    ),
    "wrong-node": Advice(
        "its node has the numbers of another device",
        "Remove the node and have it made again: it was made by hand, or before the driver was reloaded.",
        _NODE,
        SEEN,
    ),
    "mount-missing": Advice(
        "a file or directory that containers are to get with it is missing",
        "Put it there; the sentence names it. Where Fairlead runs in a pod, `[host] root` must be where it sees it.",
        "ls -l /",
        SEEN,
    ),
    # PCI
    "driver-unbound": Advice(
        "it has lost its driver",
        "Look in the kernel's log why; then load and bind the driver again.",
        _BIND,
        "by itself, when it is bound again",
    ),
    "wrong-driver": Advice(
        "another driver than the one that it needs has it",
        "If that is not wanted, unbind it and have its own driver bound.",
        "echo {address} > /sys/bus/pci/devices/{address}/driver/unbind; " + _BIND,
        "by itself, when its own driver has it",
    ),
    "off-bus": Advice(
        "it does not answer on PCI Express any more: it reads nothing but ones",
        "Move its pods away and reboot the node; a power cycle, where a reboot does not help. " + _FAULTY_CARD,
        _LOOK,
        "by itself, when it answers again",
    ),
    "power-error": Advice("it cannot be powered", "Power the node off and on. " + _FAULTY_CARD, _LOOK, SEEN),
    "broken-parity": Advice(
        "the kernel has marked it as giving parity errors",
        "Plan its exchange.",
        _LOOK,
        "by itself, when the mark is gone",
    ),
    "bar-unassigned": Advice(
        "the firmware or the kernel found no room for its memory",
        'Turn on "Above 4G Decoding" and resizable BARs in the firmware, or start the kernel with `pci=realloc`.',
        "lspci -vvs {address} | grep -i region",
        "by itself, after a boot in which it has an address",
    ),
    "aer-fatal": Advice(
        "fatal PCI Express errors are being counted",
        "Move its pods away, seat the card again, try another slot or riser.",
        "cat /sys/bus/pci/devices/{address}/aer_dev_fatal",
        "by itself, a minute after the last error",
    ),
    "aer-nonfatal": Advice(
        "non-fatal PCI Express errors are being counted",
        "Nothing at once; where it comes again, seat the card again, try another slot or riser.",
        "cat /sys/bus/pci/devices/{address}/aer_dev_nonfatal",
        "by itself, a minute after the last error",
    ),
    "link-width": Advice(
        "it has fewer PCI Express lanes than both ends could have",
        "At the next maintenance seat the card again; try another slot or riser.",
        "lspci -vvs {address} | grep LnkSta",
        "by itself, with all lanes",
    ),
    "link-speed": Advice(
        "its PCI Express link is slower than both ends could be, as of an idle card",
        "Nothing, while it is idle; under load look at slot and riser.",
        "lspci -vvs {address} | grep LnkSta",
        "by itself, at full speed",
    ),
    "pci-recovery": Advice(
        "the kernel recovers it from a PCI Express error",
        "Wait a minute; if it stays so, reboot the node.",
        "dmesg | grep {address}",
        "when the kernel says that it has recovered; else " + _LATCHED,
    ),
    "pci-recovery-failed": Advice(
        "the kernel could not recover it from a PCI Express error",
        "Where dmesg says Non-Fatal and it works, `undrain` it; else move its pods away and reboot. " + _FAULTY_CARD,
        "dmesg | grep -e {address} -e AER",
        _LATCHED,
    ),
    "group-not-viable": Advice(
        "another function of its IOMMU group has a driver of its own",
        "Unbind the function that the sentence names, or let Fairlead do it (`bind`, docs/vfio.md).",
        "ls /sys/bus/pci/devices/{address}/iommu_group/devices",
        "by itself, when the whole group is free",
    ),
    "not-bound": Advice(
        "it is not bound to vfio-pci yet",
        "Wait some seconds; if it stays so, the sentence says what is in the way.",
        "lspci -ks {address}",
        "by itself, when it is bound",
    ),
    "no-iommufd": Advice(
        "the kernel cannot hand it out by iommufd",
        'Load iommufd (Linux 6.6 or newer), or set `iommu = "legacy"`.',
        "modprobe iommufd",
        SEEN,
    ),
    "vgpu-type-changed": Advice(
        "it has another vGPU type than the one that it was offered with",
        "Look who changed it; give it back its type, or restart the pod.",
        "grep . /sys/bus/pci/devices/{address}/nvidia/current_vgpu_type",
        "by itself, with its own type",
    ),
    "no-room-for-vgpu": Advice(
        "its GPU has no room for another vGPU of this type",
        "Nothing: it is free when a virtual machine ends.",
        "cat /sys/bus/pci/devices/{address}/nvidia/creatable_vgpu_types",
        "by itself, when there is room",
    ),
    # GPUs
    "init-failed": Advice(
        "NVIDIA's driver could not start the GPU: no program can open it",
        "Reset it; if that fails, reboot the node. " + _FAULTY_CARD,
        _RESET,
        _LATCHED,
    ),
    "nvidia-drained": Advice(
        "`nvidia-smi drain` has taken it out of use: to NVIDIA's library it is gone",
        "Give it back, if the work on it is done.",
        "nvidia-smi drain --pciid {address} --modify 0",
        "by itself, when it is back in use",
    ),
    "mps-down": Advice(
        "NVIDIA's MPS control daemon, which shares it, is not ready",
        "Look whether its pod or service runs.",
        "pgrep --list-full nvidia-cuda-mps-control",
        "by itself, when the daemon is ready",
    ),
    "exporter-unhealthy": Advice(
        "AMD's metrics exporter finds it unhealthy",
        "See what the exporter counts, mostly uncorrectable ECC errors; reset it or reboot the node.",
        "amd-smi metric --ecc; dmesg | grep amdgpu",
        "by itself, when the exporter finds it healthy",
    ),
    "wedged": Advice(
        "its driver has given it up: it hangs",
        "Bind its driver again, after its pods have ended; if that fails, reboot the node.",
        "echo {address} > /sys/bus/pci/devices/{address}/driver/unbind; " + _BIND,
        _LATCHED,
    ),
    # networks
    "port-down": Advice(
        "a port that must be up has no link",
        "Look at cable, transceiver and the switch's port.",
        "ibstat {name}; rdma link show",
        "by itself, when the link is up",
    ),
    "no-subnet-manager": Advice(
        "the port has a link, and no subnet manager has set it up",
        "Look whether a subnet manager runs in this fabric (opensm, or the switch's own).",
        "sminfo -C {name}; ibstat {name}",
        "by itself, when the port is active",
    ),
    "state-unreadable": Advice(
        "the port's state is there and cannot be read",
        "The adapter's firmware does not answer: look at the kernel's log, and reset the adapter.",
        "dmesg | grep mlx5",
        "by itself, when it can be read",
    ),
    "uverbs-missing": Advice("its adapter has no uverbs device", "Load the module.", "modprobe ib_uverbs", SEEN),
    "hca-missing": Advice(
        "its adapter has left the kernel's list, though its PCI function is there",
        "Its driver failed or is being reset: look at the kernel's log, and bind it again.",
        "dmesg | grep {address}; " + _BIND,
        "by itself, when it is back",
    ),
    "in-another-namespace": Advice(
        "it is in a network namespace that Fairlead does not see, and no pod of ours holds it",
        "Look which namespace has it: mostly that of a container that has not quite ended.",
        "lsns --type net; rdma system",
        "by itself, when it is back in the node's",
    ),
    "rate-reduced": Advice(
        "a port is slower than it has been",
        "Look at cable and transceiver; if it was exchanged for a slower one, say so with `undrain`.",
        "fairlead undrain {device}",
        "by itself, at its old rate, or with `fairlead undrain {device}`",
    ),
    "width-reduced": Advice(
        "a port has fewer lanes than it has had",
        "Look at cable and transceiver; if it was exchanged for a narrower one, say so with `undrain`.",
        "fairlead undrain {device}",
        "by itself, with all lanes, or with `fairlead undrain {device}`",
    ),
    "link-error-recovery": Advice(
        "the port's link is being recovered",
        "Look at cable and transceiver, if it goes on.",
        "perfquery -C {name}",
        SEEN,
    ),
    "errors-rise": Advice(
        "an error counter of a port rises",
        "Clean or exchange cable and transceiver.",
        "perfquery -C {name}",
        "by itself, a minute after the last error",
    ),
    "link-down": Advice(
        "the interface has no link", "Look at cable, transceiver and the switch's port.", "ip -br link", SEEN
    ),
    "link-disabled": Advice(
        "the physical function's interface is not set up",
        "Set it up; the sentence has the command.",
        "ip -br link",
        "by itself, when it is up",
    ),
    "has-address": Advice(
        "the host uses its interface",
        "If a pod should have it, take it out of the host's network.",
        "ip -br address",
        SEEN,
    ),
    "vhost-missing": Advice("a node of vhost is missing", "Load the modules.", "modprobe --all vhost_net tun", SEEN),
    "not-created": Advice(
        "virtual functions that the configuration asks for are not there yet",
        "The sentence says what is in the way.",
        "fairlead doctor",
        "by itself, when they are made",
    ),
    "onload-missing": Advice("Onload is not loaded", "Load it.", "modprobe --all onload sfc_char", SEEN),
    "onload-version": Advice(
        "the loaded Onload is of another version than `onload_version`",
        "Load the version that pods bring, or change the configuration.",
        "modinfo --field version onload",
        "by itself, with that version",
    ),
    "library-missing": Advice(
        "a file that containers are to get is missing", "Install what it belongs to, or change `libraries`.", "", SEEN
    ),
    # IBM's crypto cards
    "deconfigured": Advice(
        "the machine's operator took the card away", "Configure it again.", "chzcrypt --config-on {device}", SEEN
    ),
    "checkstop": Advice("the card's hardware has failed", "Have it exchanged.", "lszcrypt -V", SEEN),
    "offline": Advice("it is offline", "Put it online.", "chzcrypt --enable {device}", SEEN),
    # made-up devices
    "stub-unhealthy": Advice("the stub's file says so", "Edit the file.", "", "when the file says something else"),
    "stub-degraded": Advice("the stub's file says so", "Edit the file.", "", "when the file says something else"),
}
"""Reason → advice. Commands have `{device}`, what `fairlead` knows it by; `{name}`, what its driver calls it; `{address}`, its
PCI address; `{driver}`, the driver that it needs; `{node}`, its node."""

UNUSABLE: Final[Mapping[str, Advice]] = {
    "it has no driver": replace(
        REASONS["driver-unbound"],
        means="no driver has it",
        do="Load its driver and have it bound. If none is installed, install it; after a new kernel, rebuild it (DKMS).",
        command=_MODULE,
    ),
    "it is bound to vfio": Advice(
        "vfio has it, for virtual machines",
        'If containers should have it, give it back to its driver; for virtual machines write a resource of backend = "vfio".',
        "echo {address} > /sys/bus/pci/drivers/vfio-pci/unbind; " + _BIND,
        "by itself, when its own driver has it",
    ),
    "it is bound to": REASONS["wrong-driver"],
    "the NVIDIA driver excludes it": Advice(
        "the driver's option NVreg_ExcludedGpus names it",
        "Take it out of that option and reload the driver, if it is well again.",
        "grep -r ExcludedGpus /etc/modprobe.d",
        "by itself, once the driver starts it",
    ),
    "the NVIDIA driver has not started it": Advice(
        "the driver has it and could not start it",
        "The kernel's log says why, mostly `RmInitAdapter failed`; then reboot the node.",
        "dmesg | grep -e NVRM -e {address}",
        SEEN,
    ),
    "the NVIDIA driver does not know its UUID": Advice(
        "the driver tells a GPU's UUID only once a program has opened it",
        "Start NVIDIA's persistence daemon, also at boot.",
        "systemctl enable --now nvidia-persistenced",
        SEEN,
    ),
    "is its driver there?": Advice(
        "no driver has made a node of it that its resource hands out",
        "Load its driver, or have the resource hand out other `nodes` of it.",
        "lsusb --tree; dmesg | tail",
        SEEN,
    ),
    "does not exist": REASONS["node-missing"],
    "it is in no IOMMU group": Advice(
        "the IOMMU is off, and nothing can go to a virtual machine without it",
        "Turn VT-d or AMD-Vi on in the firmware, add `intel_iommu=on` on Intel to the kernel's command line, and reboot.",
        "dmesg | grep -i -e DMAR -e AMD-Vi; cat /proc/cmdline",
        "by itself, after that boot",
    ),
    "has made no RDMA device": Advice(
        "its driver has it, and its RDMA part is missing",
        "Load the module that the sentence names.",
        "modprobe mlx5_ib",
        SEEN,
    ),
    "has no RDMA device": Advice(
        "its driver has it, and its RDMA part is missing", "Load its RDMA module.", "modprobe mlx5_ib", SEEN
    ),
}
"""What the sentence of an `unusable` device has in it → advice; the first that fits."""

_DONE_TO_XID: Final[Mapping[str, tuple[str, str]]] = {
    "RESTART_APP": (
        "The application ends or is to be started again. The GPU is well, unless it comes from many applications.",
        "",
    ),
    "IGNORE": ("Nothing; another XID beside it says more.", "dmesg | grep NVRM"),
    "RESET_GPU": ("End the pods on it and reset it; where that fails, reboot the node.", _RESET),
    "RESTART_BM": (
        "Move the node's pods away and reboot it. " + _FAULTY_CARD,
        _REBOOT,
    ),
    "RESTART_VM": ("Restart the virtual machine that this is; on metal, reset the GPU.", _REBOOT),
    "CHECK_MECHANICALS": (
        "Move the node's pods away and power it off; seat the card and its power cables again.",
        _CLEAR + " && systemctl poweroff",
    ),
    "WORKFLOW_XID_48": (
        "End the pods on it and reset it. If it comes again, or rows cannot be remapped, have the GPU exchanged.",
        "nvidia-smi --query-remapped-rows=gpu_bus_id,remapped_rows.failure --format=csv; " + _RESET,
    ),
    "WORKFLOW_NVLINK_ERR": (
        "Look at the link's other end, too; then reset the GPUs of both. On a system with NVSwitches look at Fabric Manager.",
        "nvidia-smi nvlink --status --id={address}; systemctl status nvidia-fabricmanager",
    ),
    "WORKFLOW_NVLINK5_ERR": (
        "Where its line says Fatal, end the pods on it and reset it; else watch whether it comes again.",
        "nvidia-smi nvlink --status --id={address}; " + _RESET,
    ),
    "XID_154": ("Do what its line says after `changed … to`: drain, reset the GPU, or reboot the node.", _RESET),
    "UPDATE_SWFW": ("Bring the guest's and the host's vGPU software to versions that go together.", "nvidia-smi vgpu"),
    "CONTACT_SUPPORT": ("Write a report, and ask your hardware's or NVIDIA's support.", "nvidia-bug-report.sh"),
}
"""Immediate action of NVIDIA's XID catalog → what it asks for, in our words. `nvidia-smi` resets a GPU that no process uses; Fairlead
does not see that reset, so that `undrain` has to say it."""


def advice(
    reason: str, message: str = "", *, device: str = "", name: str = "", hardware: tuple[str, ...] = (), node: str = ""
) -> Advice | None:
    """What to do about a device that has this reason, with its own names in the commands; None of a reason of a third party.

    Args:
        reason: as a signal or a health has it.
        message: its sentence, which tells apart what `unusable` means.
        device: its ID or key.
        name: what its driver calls it.
        node: what Kubernetes calls the node, where a daemon has told it: a command has no NODE_NAME in its environment.
        hardware: its hardware, whose PCI address is written into commands; else one that the message or the ID has.
    """
    found = _of(reason, message)
    if found is None:
        return None
    addresses = [it.removeprefix("pci:") for it in hardware if it.startswith("pci:")] or _ADDRESS.findall(
        f"{message} {device}"
    )
    driver = re.search(r"; (\S+) is needed", message)
    names = {
        "device": name if name and ", " not in name else device or UNKNOWN,
        "name": name or UNKNOWN,
        "address": min(addresses, default="ADDRESS"),
        "driver": driver[1] if driver else "DRIVER",
        "node": node or node_name(),
    }
    command = found.command if addresses or "{address}" not in found.command else ""
    means = "" if found.means.casefold() in message.casefold() else found.means
    return Advice(*(_filled(text, names) for text in (means, found.do, command, found.ends)))


def of_device(it: Device | Explanation, name: str, node: str = "") -> Advice | None:
    """What to do about a device with this name of its driver's; of a drained one, also about what the drain covers."""
    asked = partial(
        advice,
        message=it.message,
        device=it.ids[0] if len(it.ids) == 1 else it.key,
        name=name,
        hardware=it.hardware,
        node=node,
    )
    found = asked(it.reason)
    if found is None or it.condition != "Drained":
        return found
    ends = f"at {it.until}, or {found.ends}" if it.until else found.ends
    if (fault := asked(it.besides)) is None:
        return replace(found, ends=ends)
    if ends_too := undrain_ends(it.besides):
        ends += f", which also declares {it.besides} mended: mend that first"
    return Advice(
        f"{found.means}; besides, it has {it.besides}: {fault.means}",
        f"{fault.do} Then give it back." if ends_too else f"{fault.do} When the work on it is done, give it back.",
        fault.command,
        ends,
    )


def undrain_ends(reason: str) -> bool:
    """Whether `fairlead undrain` ends this reason, whatever the hardware is like."""
    found = _of(reason, "")
    return reason != "drained" and found is not None and "fairlead undrain" in found.ends


def _of(reason: str, message: str) -> Advice | None:
    if (xid := _XID.fullmatch(reason)) is not None:
        return of_xid(int(xid[1]))
    if reason == "unusable":
        return next((it for words, it in UNUSABLE.items() if words in message), REASONS[reason])
    return REASONS.get(reason)


def of_xid(number: int) -> Advice:
    """What to do about an XID, after NVIDIA's catalog."""
    from backends.gpu.xid import XIDS  # noqa: PLC0415  # a node without GPUs need not have it in memory

    means, action = XIDS.get(number, ("an error that NVIDIA's catalog does not explain", "CONTACT_SUPPORT"))
    return Advice(means, *_DONE_TO_XID[action], _LATCHED)


def _filled(text: str, names: Mapping[str, str]) -> str:
    for key, value in names.items():
        text = text.replace(f"{{{key}}}", value)
    return text


def told(it: Advice) -> Iterator[tuple[str, str]]:
    """Its parts as a person reads them, each with its label."""
    if it.means:
        yield "means", f"{it.means[:1].upper()}{it.means[1:]}."
    yield "do", it.do
    if it.command:
        yield "run", it.command
    if it.ends:
        yield "ends", f"{it.ends[:1].upper()}{it.ends[1:]}."
