"""What is offered where there is no configuration file: the devices that KubeVirt's virtual machines ask for."""

from __future__ import annotations

from typing import Any, Final

_TOKENS: Final = 1000  # as many as KubeVirt's own plugin offers of each

_NODES: Final = {
    "kvm": "/dev/kvm",
    "tun": "/dev/net/tun",
    "vhost-net": "/dev/vhost-net",
    "vhost-vsock": "/dev/vhost-vsock",
    "sev": "/dev/sev",
}

TABLES: Final[dict[str, Any]] = {
    "resource": [
        {
            "name": f"devices.kubevirt.io/{name}",
            "backend": "chardev",
            "paths": [{"path": path}],
            "count": _TOKENS,
        }
        for name, path in _NODES.items()
    ]
}
"""The set as TOML would give it."""
