"""What KubeVirt's virt-launcher looks for in its environment, as the backends that stand in for its plugins write it."""

from __future__ import annotations

from typing import Final

_MADE_UNDERSCORES: Final = str.maketrans("/.", "__")


def variable(prefix: str, resource: str) -> str:
    """`PCI_RESOURCE_NVIDIA_COM_TU104GL-T4`: the variable that says which devices of a resource the pod has.

    The resource in upper case, `/` and `.` made `_`; a `-` stays (ResourceNameToEnvVar in its pkg/util).
    """
    return f"{prefix}_{resource.upper().translate(_MADE_UNDERSCORES)}"
