"""A QEMU process: what it is made of, how it starts and ends, and its two sockets."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from tests.guest.boot import Layer
from tests.guest.guestd import PORT
from tests.guest.qmp import Qmp, QmpError
from tests.wait import limit

PARTS: Final = Path(__file__).parents[2] / "build/guest"
"""Where `make e2e` has fetch.sh put things."""

Accelerator = Literal["kvm", "tcg"]

_RUNS: Final[Mapping[Accelerator, Sequence[str]]] = {
    "tcg": ("-accel", "tcg", "-cpu", "qemu64,+svm"),  # more features make it slower; svm for the module kvm_amd
    "kvm": ("-accel", "kvm,kernel-irqchip=split", "-cpu", "host"),  # split, for an IOMMU that remaps interrupts
}
_KERNEL: Final = (
    "console=ttyS0 panic=-1 quiet loglevel=4 tsc=unstable random.trust_cpu=1 mitigations=off intel_iommu=on iommu=nopt"
    " no_timer_check"  # it would panic when a busy machine keeps the timer's interrupt waiting for 10 ms
)
_MEMORY: Final = 768  # MiB


class MachineError(RuntimeError):
    """The machine did not start, or is gone."""


def best_accelerator() -> Accelerator:
    """KVM where we may use it and its guests may use it in turn, which the module kvm needs there.

    /dev/kvm alone proves little: a paravirtual one (kvm_pvm) opens, and then runs no kernel of Debian's.
    """
    modules = Path("/sys/module")
    nested = [path.read_text().strip() for path in modules.glob("kvm_[ai]*/parameters/nested")]
    usable = os.access("/dev/kvm", os.R_OK | os.W_OK) and any(answer in ("1", "Y") for answer in nested)
    return "kvm" if usable else "tcg"


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine that runs: QEMU's process, its QMP connection, and the streams to the guest's first process."""

    directory: Path
    """Scratch, where sockets of devices may lie too: their paths are short enough."""
    qmp: Qmp
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    process: asyncio.subprocess.Process

    @property
    def console(self) -> str:
        """What the kernel and init have said so far."""
        return (self.directory / "console").read_text(errors="replace")

    @property
    def complaints(self) -> str:
        """What QEMU has said so far."""
        return (self.directory / "complaints").read_text(errors="replace")


def _qemu(root: Path) -> list[str]:
    """QEMU out of a root of its own, started by its own dynamic loader."""
    libraries = root / "usr/lib/x86_64-linux-gnu"
    data = [root / "usr/share/qemu", root / "usr/share/seabios"]
    return [
        *(str(root / "usr/lib64/ld-linux-x86-64.so.2"), "--library-path", str(libraries)),
        str(root / "usr/bin/qemu-system-x86_64"),
        *(argument for path in data for argument in ("-L", str(path))),
    ]


def _share(name: str, path: Path) -> list[str]:
    """A directory of this machine that the guest may read, over 9p."""
    return [
        *("-fsdev", f"local,id={name},path={path},security_model=none,readonly=on,multidevs=remap"),
        *("-device", f"virtio-9p-pci,fsdev={name},mount_tag={name}"),
    ]


def _arguments(
    directory: Path,
    sockets: tuple[int, int],
    accelerator: Accelerator,
    kernel: Path,
    layer: Path,
    devices: Sequence[str],
) -> list[str]:
    qmp, port = sockets
    return [
        *("-nodefaults", "-no-user-config", "-no-reboot", "-display", "none"),
        *("-machine", "q35", *_RUNS[accelerator], "-m", str(_MEMORY), "-smp", "1"),
        *("-kernel", str(kernel), "-initrd", str(directory / "initramfs"), "-append", _KERNEL),
        *("-serial", f"file:{directory}/console"),
        *("-chardev", f"socket,id=qmp,fd={qmp}", "-mon", "chardev=qmp,mode=control"),
        *("-device", "intel-iommu,intremap=on,caching-mode=on"),  # before whatever it is to govern
        *_share("host", Path("/")),
        *_share("layer", layer),
        *("-device", "virtio-rng-pci", "-device", "virtio-serial-pci,id=serial"),
        *("-chardev", f"socket,id=port,fd={port}"),
        *("-device", f"virtserialport,bus=serial.0,chardev=port,name={PORT}"),
        *(argument for device in devices for argument in device.split(" ")),
    ]


@asynccontextmanager
async def machine(
    accelerator: Accelerator, devices: Sequence[str] = (), *, systemd: bool = False
) -> AsyncIterator[Machine]:
    """A machine that has begun to start; what it has started is turned off at the end.

    Args:
        accelerator: who runs its code.
        devices: what it has beyond the usual, as QEMU's arguments (`-device edu,bus=port0`).
        systemd: systemd runs there, with journald; udevd can be started, which takes 5 s under emulation.
    """
    if not (PARTS / ".ready").exists():
        raise MachineError(f"{PARTS} is not complete; `make e2e` fetches what belongs there")
    layer = Layer(PARTS / "layer")
    settings = {
        "PYTHON": sys.executable,
        "GUESTD": str(Path(__file__).with_name("guestd.py")),
        "SYSTEMD": "1" if systemd else "",
        "CHECKOUT": str(PARTS.parents[1]),
    }
    with tempfile.TemporaryDirectory(prefix="guest-") as scratch:
        directory = Path(scratch)
        (directory / "initramfs").write_bytes(await asyncio.to_thread(layer.initramfs, settings))
        kernel = await asyncio.to_thread(layer.vmlinux)
        with (directory / "complaints").open("wb") as complaints, ExitStack() as theirs:
            # Connected before QEMU starts: a socket in a file can be there before anybody listens.
            (qmp, qemu_qmp), (port, qemu_port) = socket.socketpair(), socket.socketpair()
            sockets = theirs.enter_context(qemu_qmp).fileno(), theirs.enter_context(qemu_port).fileno()
            process = await asyncio.create_subprocess_exec(
                *_qemu(PARTS / "qemu"),
                *_arguments(directory, sockets, accelerator, kernel, layer.root, devices),
                stdin=asyncio.subprocess.DEVNULL,
                stderr=complaints,
                pass_fds=sockets,
            )
        reader, writer = await asyncio.open_unix_connection(sock=port, limit=1 << 24)
        client = Qmp(*await asyncio.open_unix_connection(sock=qmp))
        try:
            try:
                async with limit("QEMU's greeting"):
                    await client.negotiate()
            except (QmpError, TimeoutError):
                said = (directory / "complaints").read_text(errors="replace")
                raise MachineError(f"QEMU does not run; it says:\n{said}") from None
            yield Machine(directory, client, reader, writer, process)
        finally:
            await _turn_off(client, process)
            writer.close()
            if process.returncode is None:
                process.kill()
                await process.wait()


async def _turn_off(qmp: Qmp, process: asyncio.subprocess.Process) -> None:
    with suppress(QmpError, TimeoutError):
        async with limit("QEMU's end"):
            await qmp.execute("quit")
            await process.wait()
    await qmp.close()
