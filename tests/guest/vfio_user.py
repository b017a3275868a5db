"""PCI functions of any identity for QEMU's `vfio-user-pci`: a server of the vfio-user protocol.

The protocol is docs/interop/vfio-user.rst of QEMU, its numbers those of linux/vfio.h where it says so.
"""

from __future__ import annotations

import asyncio
import errno
import json
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_HEADER: Final = struct.Struct("<HHIII")  # message id, command, size, flags, error
_VERSION, _DMA_MAP, _DMA_UNMAP, _INFO, _REGION_INFO, _, _IRQ_INFO, _SET_IRQS, _READ, _WRITE = range(1, 11)
_RESET, _WRITE_MULTI = 13, 15
_REPLY, _NO_REPLY, _ERROR = 0x1, 0x10, 0x20  # flags of a message; the low four bits are its type
_CAN_RESET, _IS_PCI = 0x1, 0x2  # VFIO_DEVICE_FLAGS_*
_READ_WRITE: Final = 0x3  # VFIO_REGION_INFO_FLAG_READ and _WRITE
_EVENTFD: Final = 0x1  # VFIO_IRQ_INFO_EVENTFD
_CONFIG_REGION: Final = 7  # VFIO_PCI_CONFIG_REGION_INDEX
_REGIONS, _IRQS = 9, 5  # VFIO_PCI_NUM_REGIONS, VFIO_PCI_NUM_IRQS
_POWER: Final = 0x40  # where our one capability lies
_WRITABLE: Final = (0x04, 0x0C, 0x0D, 0x3C, _POWER + 4)  # command, cache line, latency, interrupt line, power state


@dataclass(frozen=True, slots=True)
class PciFunction:
    """What a function says of itself."""

    vendor: int
    device: int
    pci_class: int
    """Class, subclass and programming interface: 0x030200 is a 3D controller."""
    subsystem: tuple[int, int] = (0, 0)

    def config_space(self) -> bytearray:
        """Its first 256 bytes (PCI Local Bus Specification 3.0, 6.1), with power management as the only capability."""
        config = bytearray(256)
        struct.pack_into("<HHHH", config, 0x00, self.vendor, self.device, 0, 0x10)  # status: there are capabilities
        struct.pack_into("<I", config, 0x08, self.pci_class << 8 | 0xA1)
        struct.pack_into("<HH", config, 0x2C, *self.subsystem)
        config[0x34] = _POWER
        struct.pack_into("<BBHH", config, _POWER, 0x01, 0x00, 0x0003, 0x0008)
        return config


H100: Final = PciFunction(0x10DE, 0x2330, 0x030200, (0x10DE, 0x16C1))
T4: Final = PciFunction(0x10DE, 0x1EB8, 0x030200, (0x10DE, 0x12A2))
MI210: Final = PciFunction(0x1002, 0x740F, 0x038000, (0x1002, 0x0C34))
FLEX170: Final = PciFunction(0x8086, 0x56C0, 0x038000, (0x8086, 0x4905))


class _Server:
    """Answers one machine's questions about a function with two BARs, which read as zeros."""

    def __init__(self, function: PciFunction) -> None:
        self._config = function.config_space()
        self._sizes = {0: 1 << 16, 1: 1 << 12, _CONFIG_REGION: len(self._config)}

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection. The memory that comes with its messages is left unread: nothing here does DMA."""
        try:
            while header := await reader.read(_HEADER.size):
                header += await reader.readexactly(_HEADER.size - len(header))
                ident, command, size, flags, _ = _HEADER.unpack(header)
                body, error = await reader.readexactly(size - _HEADER.size), 0
                try:
                    answer = self._answer(command, body)
                except OSError as failure:
                    answer, error = b"", failure.errno or errno.EIO
                if not flags & _NO_REPLY:
                    flags = _REPLY | (_ERROR if error else 0)
                    writer.write(_HEADER.pack(ident, command, _HEADER.size + len(answer), flags, error) + answer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the machine was stopped
        finally:
            writer.close()

    def _answer(self, command: int, body: bytes) -> bytes:
        if command == _VERSION:  # theirs is as good as any
            offer = {"capabilities": {"max_msg_fds": 8, "max_data_xfer_size": 1 << 20, "pgsizes": 4096}}
            return body[:4] + json.dumps(offer).encode() + b"\0"
        if command in (_DMA_MAP, _SET_IRQS, _RESET):
            return b""
        if command == _DMA_UNMAP:
            return body[:24]
        if command == _INFO:
            return struct.pack("<IIII", 16, _CAN_RESET | _IS_PCI, _REGIONS, _IRQS)
        if command == _REGION_INFO:
            return self._region(struct.unpack_from("<I", body, 8)[0])
        if command == _IRQ_INFO:
            return struct.pack("<IIII", 16, _EVENTFD, struct.unpack_from("<I", body, 8)[0], 0)
        if command == _READ:
            return body[:16] + self._read(*struct.unpack_from("<QII", body))
        if command == _WRITE:
            offset, region, _ = struct.unpack_from("<QII", body)
            self._write(offset, region, body[16:])
            return body[:16]
        if command == _WRITE_MULTI:
            for at in range(8, len(body), 24):
                offset, region, count = struct.unpack_from("<QII", body, at)
                self._write(offset, region, body[at + 16 : at + 16 + count])
            return body[:8]
        raise OSError(errno.EOPNOTSUPP, f"command {command}")

    def _region(self, index: int) -> bytes:
        size = self._sizes.get(index, 0)
        return struct.pack("<IIIIQQ", 32, _READ_WRITE if size else 0, index, 0, size, index << 40)

    def _read(self, offset: int, region: int, count: int) -> bytes:
        data = self._config[offset : offset + count] if region == _CONFIG_REGION else b""
        return bytes(data).ljust(count, b"\0")

    def _write(self, offset: int, region: int, data: bytes) -> None:
        if region == _CONFIG_REGION and offset in _WRITABLE:
            self._config[offset : offset + len(data)] = data


@asynccontextmanager
async def served(function: PciFunction, socket: Path) -> AsyncIterator[None]:
    """A function that machines can have from this socket, one at a time and again after each unplugging."""
    server = await asyncio.start_unix_server(_Server(function).serve, socket)
    try:
        yield
    finally:
        server.close()
        socket.unlink(missing_ok=True)
