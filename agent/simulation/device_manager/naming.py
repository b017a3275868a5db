"""Which resource names a kubelet takes.

Written down apart from the agent's own check, so that each is evidence for the other.
"""

from __future__ import annotations

import re
from typing import Final

_QUOTA_PREFIX: Final = "requests."  # a name must also be valid with this before it
_DOMAIN_LIMIT: Final = 253
_NAME_LIMIT: Final = 63
_DOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_NAME = re.compile(r"([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]")


def is_extended_resource(name: str) -> bool:
    """Does the kubelet accept a device plugin for this name? (kubelet contract: A1)."""
    if "kubernetes.io/" in name or name.startswith(_QUOTA_PREFIX) or name.count("/") != 1:
        return False
    domain, local = (_QUOTA_PREFIX + name).split("/")
    return (
        len(domain) <= _DOMAIN_LIMIT
        and _DOMAIN.fullmatch(domain) is not None
        and len(local) <= _NAME_LIMIT
        and _NAME.fullmatch(local) is not None
    )
