"""Makes the links in /dev/char that udev does not make for NVIDIA's nodes.

`systemctl daemon-reload` makes systemd write the device rules of containers again, for which it looks devices up in
/dev/char/<major>:<minor>. Without the link a container loses its GPU. `nvidia-ctk system create-dev-char-symlinks` makes
the same links.
"""

from __future__ import annotations

from collections.abc import Sequence

from backends.base import Device, Host, HostPath
from backends.gpu import nodes
from backends.linux.kernel import explained
from backends.linux.nodes import NoNodeError, device_node


def make(host: Host, device: Device, roots: Sequence[HostPath]) -> None:
    """Link each node of the device that has no link yet.

    Raises:
        NotReady: a link cannot be made.
    """
    for node in device.nodes:
        found = _number(host, node.path, roots)
        if found is None:
            continue
        number, target = found
        link = host.dev / "char" / number
        with explained(f"/dev/char/{number} cannot be made"):
            link.parent.mkdir(exist_ok=True)
            if not link.is_symlink():
                link.symlink_to(target)


def _number(host: Host, path: HostPath, roots: Sequence[HostPath]) -> tuple[str, str] | None:
    """`195:0`, and what a link with that name leads to."""
    try:
        return device_node(host, path).number.removeprefix("c:"), f"..{path.text.removeprefix('/dev')}"
    except NoNodeError:
        below = next(nodes.below(host, path, roots), None)
        return (below[1].removeprefix("c:"), below[0].text) if below else None
