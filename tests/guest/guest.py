"""A guest that has come up: commands run in it, hardware comes and goes."""

from __future__ import annotations

import asyncio
import base64
import json
import shlex
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from tests.guest.machine import Accelerator, Machine, MachineError, machine
from tests.guest.vfio_user import PciFunction, served
from tests.wait import limit

PORTS: Final = 4
"""How many functions can be plugged in at a time."""
SPARE_PORTS: Final = 2
"""After those, for what is there from the start."""
SLOWER: Final = 5
"""How many times longer than elsewhere anything may take: emulated code is that slow."""

_FIRST_SLOT: Final = 0x10  # of the root ports; far above those that QEMU gives out by itself


class CommandError(RuntimeError):
    """A command in the guest failed; the text says what it said."""


class Process:
    """A command that runs in the guest. Leaving its context ends it, and all that it has started."""

    def __init__(self, guest: Guest, ident: int, command: str) -> None:
        self._guest, self._ident, self._command = guest, ident, command
        self.messages: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self._exit: int | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._exit is None:
            await self.signal(signal.SIGKILL)
            async with limit(f"the end of {self._command!r}", slower=SLOWER):
                await self.end()

    async def output(self) -> AsyncIterator[bytes]:
        """Pieces of what it says, until its end."""
        while self._exit is None:
            message = await self.messages.get()
            if message is None:
                self._exit = -1
                raise MachineError(
                    f"{self._command!r}: the guest is gone; its console says:\n{self._guest.last_words()}"
                )
            if "exit" in message:
                self._exit = message["exit"]
                self._guest.forget(self._ident)
            else:
                yield base64.b64decode(message["output"])

    async def lines(self) -> AsyncIterator[str]:
        """Lines of what it says, without their ends."""
        rest = b""
        async for piece in self.output():
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                yield line.decode(errors="replace")
        if rest:
            yield rest.decode(errors="replace")

    async def end(self) -> tuple[int, str]:
        """Wait for its end: exit code, and what it has said since somebody listened last."""
        said = b"".join([piece async for piece in self.output()])
        assert self._exit is not None
        return self._exit, said.decode(errors="replace")

    async def write(self, data: bytes | None) -> None:
        """Give it this to read; None is the end of all there is."""
        await self._guest.send(self._ident, input=None if data is None else base64.b64encode(data).decode())

    async def signal(self, number: int) -> None:
        """Send a signal to it and to all that it has started."""
        await self._guest.send(self._ident, signal=number)


class Guest:
    """A guest's side of things as its tests want them."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self._processes: dict[int, Process] = {}
        self._number = 0
        self._up: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        try:
            async for line in self.machine.reader:
                message = json.loads(line)
                if "up" in message:
                    self._up.set_result(message["up"])
                elif process := self._processes.get(message["id"]):
                    process.messages.put_nowait(message)
        except ConnectionError:
            pass  # the machine is off
        for process in self._processes.values():
            process.messages.put_nowait(None)

    def last_words(self) -> str:
        """The end of what the kernel and init have said."""
        return self.machine.console[-3000:]

    async def up(self) -> float:
        """Wait until commands can be run; the guest's own seconds that this took.

        Raises:
            MachineError: it did not come to that.
        """
        waited: list[asyncio.Future[Any]] = [self._up, self._task]
        async with limit("a guest that is up", self.last_words, slower=SLOWER):
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        if not self._up.done():
            raise MachineError(f"the guest did not come up; its console says:\n{self.last_words()}")
        return self._up.result()

    async def close(self) -> None:
        """Hear no more of it."""
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task

    # --- commands ---

    async def send(self, ident: int, **message: object) -> None:
        """Tell the guest's first process something about one command."""
        self.machine.writer.write(json.dumps({"id": ident, **message}).encode() + b"\n")
        await self.machine.writer.drain()

    def forget(self, ident: int) -> None:
        """A command has ended."""
        del self._processes[ident]

    async def start(self, command: str) -> Process:
        """Have sh start a command."""
        self._number += 1
        process = self._processes[self._number] = Process(self, self._number, command)
        await self.send(self._number, run=command)
        return process

    async def run(self, command: str) -> str:
        """Have sh run a command to its end; what it said.

        Raises:
            CommandError: its exit code is not 0.
        """
        async with limit(f"the end of {command!r}", slower=SLOWER), await self.start(command) as process:
            code, said = await process.end()
        if code:
            raise CommandError(f"{command!r} ended with {code}:\n{said}")
        return said.strip()

    async def write(self, path: Path | str, content: str | bytes) -> None:
        """Make a file in the guest, and the directories above it."""
        quoted = shlex.quote(str(path))
        async with await self.start(f'mkdir -p "$(dirname {quoted})" && cat > {quoted}') as process:
            await process.write(content.encode() if isinstance(content, str) else content)
            await process.write(None)
            code, said = await process.end()
        if code:
            raise CommandError(f"{path} could not be written: {said}")

    async def until(self, condition: str) -> None:
        """Wait until a shell condition holds: for what no event tells of."""
        await self.run(f"until {condition}; do sleep 0.01; done")

    async def modprobe(self, *modules: str) -> None:
        for module in modules:
            await self.run(f"modprobe {module}")

    # --- hardware ---

    @asynccontextmanager
    async def plugged(self, function: PciFunction, port: int = 0) -> AsyncIterator[Card]:
        """A function in the slot of a root port; unplugged at the end if it still is there."""
        socket = self.machine.directory / f"function{port}"
        async with served(function, socket):
            card = Card(self, socket, port)
            await card.plug()
            try:
                yield card
            finally:
                if card.there:
                    await card.unplug()

    async def behind(self, port: int) -> str:
        """The address of the function behind a root port, waited for."""
        bridge = f"/sys/bus/pci/devices/0000:00:{_FIRST_SLOT + port:02x}.0"
        await self.until(f"[ -e {bridge}/0000:*:??.? ]")  # beside 0000:00:10.0:pcie001, the port's services
        return await self.run(f"cd {bridge} && echo 0000:*:??.?")


class Card:
    """A made-up function that can be plugged in and unplugged again and again."""

    def __init__(self, guest: Guest, socket: Path, port: int) -> None:
        self._guest, self._socket, self._port = guest, socket, port
        self._ident = f"card{port}"
        self.there = False
        self.address = ""
        """Where it is, or was last: `0000:01:00.0`."""

    @property
    def directory(self) -> str:
        """Its directory in /sys."""
        return f"/sys/bus/pci/devices/{self.address}"

    async def plug(self) -> None:
        """Into its slot; when this returns the kernel has it."""
        await self._guest.machine.qmp.execute(
            "device_add",
            driver="vfio-user-pci",
            id=self._ident,
            bus=f"port{self._port}",
            socket={"type": "unix", "path": str(self._socket)},
        )
        self.there = True
        self.address = await self._guest.behind(self._port)

    async def unplug(self) -> None:
        """Out of its slot; when this returns the kernel has let go of it."""
        await self._guest.machine.qmp.execute("device_del", id=self._ident)
        async with limit("the end of a device", slower=SLOWER):
            await self._guest.machine.qmp.event("DEVICE_DELETED", device=self._ident)
        self.there = False


def _ports() -> list[str]:
    """Root ports `port0`, `port1`, … as QEMU's arguments; acpiphp empties one in 30 ms, pciehp would take 5 s."""
    return [
        f"-device pcie-root-port,id=port{n},addr={_FIRST_SLOT + n:#x},chassis={n + 1},slot={n + 1}"
        for n in range(PORTS + SPARE_PORTS)
    ]


@asynccontextmanager
async def guest(
    accelerator: Accelerator, devices: Sequence[str] = (), *, systemd: bool = False
) -> AsyncIterator[Guest]:
    """A guest that is up; `devices` are QEMU's arguments and can name root ports."""
    async with machine(accelerator, [*_ports(), *devices], systemd=systemd) as running:
        up = Guest(running)
        try:
            print(f"guest up with {accelerator} after {await up.up():.1f} s of its own")
            yield up
        finally:
            await up.close()
