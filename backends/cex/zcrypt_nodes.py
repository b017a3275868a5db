"""Makes zcrypt nodes that lead to one queue each, and destroys them.

To write a name to `create` of the class makes a node. Its three masks say which cards, domains and ioctls it may use; at first
they permit nothing (drivers/s390/crypto/zcrypt_api.c). Masks are written whole, not bit by bit, which also corrects a node
that was made and never got its masks.
"""

from __future__ import annotations

import errno
from contextlib import suppress
from typing import Final

from backends.base import Host, HostPath, NotReady
from backends.cex import ap_bus
from backends.errors import reason_of
from backends.linux import sysfs
from backends.linux.kernel import Kernel, explained
from backends.linux.nodes import is_device_node

NODES: Final = HostPath("/sys/devices/virtual/zcrypt")
EVERYTHING: Final = f"0x{'f' * 64}"
"""A mask with all its 256 bits."""

_APPEARS: Final = 6.4  # seconds, as long as IBM's plugin waits for udev; a claim has 10
_MODE: Final = 0o666  # a container's user need not be root


def mask(bit: int) -> str:
    """A mask with one of its 256 bits set, as sysfs writes it: the leftmost digit has the bits 0 to 3."""
    return f"0x{1 << (255 - bit):064x}"


def node(device_id: str) -> HostPath:
    """The node of an ID."""
    return HostPath(f"/dev/zcrypt-{device_id}")


class Nodes:
    """Makes and destroys the nodes of one host."""

    def __init__(self, host: Host, kernel: Kernel) -> None:
        self._host = host
        self._kernel = kernel

    def make(self, device_id: str, adapter: int, domain: int) -> None:
        """Make the node of an ID, or check that it leads to its queue.

        Raises:
            NotReady: it cannot be made. What was made is destroyed again.
        """
        name = node(device_id).name
        is_new = not self._host.local(NODES / name).is_dir()
        try:
            if is_new:
                self._write(ap_bus.ZCRYPT / "create", name)
            if not self._kernel.wait(lambda: is_device_node(self._host, node(device_id)), _APPEARS):
                raise NotReady(f"{node(device_id)} did not appear in {_APPEARS:g} s")
            with explained(f"{node(device_id)} cannot be opened to every user"):
                self._host.local(node(device_id)).chmod(_MODE)
            for file, wanted in (("apmask", mask(adapter)), ("aqmask", mask(domain)), ("ioctlmask", EVERYTHING)):
                if sysfs.attribute(self._host, NODES / name / file) != wanted:
                    self._write(NODES / name / file, wanted)
        except NotReady:
            if is_new:
                with suppress(NotReady):  # the release destroys it
                    self.destroy(device_id)
            raise

    def destroy(self, device_id: str) -> None:
        """Destroy the node of an ID; nothing if there is none.

        Raises:
            NotReady: it is open, or the kernel refuses.
        """
        name = node(device_id).name
        if not self._host.local(NODES / name).is_dir():
            return
        try:
            self._kernel.write(ap_bus.ZCRYPT / "destroy", name)
        except OSError as error:
            if error.errno == errno.ENODEV:  # it is gone already
                return
            why = "it is still open" if error.errno == errno.EBUSY else reason_of(error)
            raise NotReady(f"{node(device_id)} cannot be destroyed: {why}") from error

    def _write(self, path: HostPath, text: str) -> None:
        with explained(f"{path} refuses {text!r}"):
            self._kernel.write(path, f"{text}\n")
