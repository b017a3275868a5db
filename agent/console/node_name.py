"""What this node is called."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping


def node_name(environment: Mapping[str, str] = os.environ) -> str:
    """Kubernetes' name for it, which the manifests hand in as NODE_NAME, else the machine's own."""
    return environment.get("NODE_NAME") or socket.gethostname()
