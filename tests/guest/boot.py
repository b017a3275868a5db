"""What a machine starts from: a kernel that needs no unpacking, and an initramfs with the few modules that find the root."""

from __future__ import annotations

import lzma
import shlex
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

_SIGNED: Final = b"~Module signature appended~\n"
"""The end of a signed module (include/linux/module_signature.h)."""
_MODULES: Final = ("virtio_pci", "virtio_console", "virtio_rng", "9pnet_virtio", "9p", "overlay")


class Layer:
    """The directory that fetch.sh fills: a kernel, its modules, and what the guest has over this machine's root."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (self.kernel,) = (root / "boot").glob("vmlinuz-*")
        self._modules = root / "lib/modules" / self.kernel.name.removeprefix("vmlinuz-")

    def vmlinux(self) -> Path:
        """The kernel as ELF, kept beside the original: QEMU starts it at its PVH entry, 2 s sooner under emulation.

        The offsets are those of Documentation/arch/x86/boot.rst. A kernel that is not packed with xz is left as it is.
        """
        target = self.kernel.with_name("vmlinux")
        if not target.exists():
            image = self.kernel.read_bytes()
            sectors = image[0x1F1] or 4  # setup_sects
            at = (sectors + 1) * 512 + int.from_bytes(image[0x248:0x24C], "little")  # payload_offset
            if not image[at:].startswith(b"\xfd7zXZ\0"):
                return self.kernel
            target.write_bytes(lzma.LZMADecompressor().decompress(image[at:]))
        return target

    def modules(self, names: Iterable[str] = _MODULES) -> Iterator[tuple[str, bytes]]:
        """The file names and contents of these modules and all they need, in the order in which to load them.

        Those that are built into the kernel are left out.
        """
        needs = {}
        for line in (self._modules / "modules.dep").read_text().splitlines():
            path, _, others = line.partition(":")
            needs[_module_name(path)] = [*reversed(others.split()), path]
        loaded = dict.fromkeys(path for name in names for path in needs.get(_module_name(name), []))
        for path in loaded:
            data = (self._modules / path).read_bytes()
            yield f"{_module_name(path)}.ko", lzma.decompress(data) if path.endswith(".xz") else data

    def initramfs(self, settings: Mapping[str, str]) -> bytes:
        """init.sh, what it needs, and the settings it reads."""
        modules = dict(self.modules())
        lines = {**settings, "MODULES": " ".join(modules)}
        return cpio(
            {
                "init": Path(__file__).with_name("init.sh").read_bytes(),
                "settings": "".join(f"{name}={shlex.quote(value)}\n" for name, value in lines.items()).encode(),
                "bin/busybox": (self.root / "usr/bin/busybox").read_bytes(),
                **{f"modules/{name}": data for name, data in modules.items()},
            }
        )


def _module_name(path: str) -> str:
    return path.rpartition("/")[2].partition(".")[0].replace("-", "_")


def unsigned(module: bytes) -> bytes:
    """A module that was changed: without a signature it only taints the kernel."""
    return module.removesuffix(_SIGNED)


def cpio(files: Mapping[str, bytes]) -> bytes:
    """These files, all of them executable, as the kernel wants an initramfs (initramfs-buffer-format.rst, "newc")."""
    directories = dict.fromkeys(str(parent) for name in files for parent in reversed(Path(name).parents[:-1]))
    archive = bytearray()
    for inode, (name, mode, data) in enumerate(
        [
            *((name, stat.S_IFDIR | 0o755, b"") for name in directories),
            *((name, stat.S_IFREG | 0o755, data) for name, data in files.items()),
            ("TRAILER!!!", 0, b""),
        ]
    ):
        path = name.encode() + b"\0"
        numbers = (inode, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(path), 0)
        archive += b"070701" + b"".join(b"%08X" % number for number in numbers) + path
        archive += bytes(-len(archive) % 4) + data
        archive += bytes(-len(archive) % 4)
    return bytes(archive)
