"""Names the variables in which KubeVirt's virt-launcher looks for devices."""

from __future__ import annotations

from typing import Final

_MADE_UNDERSCORES: Final = str.maketrans("/.", "__")


def variable(prefix: str, resource: str) -> str:
    """The variable with the devices that a pod has of a resource: `PCI_RESOURCE_NVIDIA_COM_TU104GL-T4`.

    The resource is in upper case, with `_` for `/` and `.`; a `-` stays (ResourceNameToEnvVar in its pkg/util).
    """
    return f"{prefix}_{resource.upper().translate(_MADE_UNDERSCORES)}"
