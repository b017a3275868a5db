"""Network functions for pods: SR-IOV virtual functions and whole cards, as the sriov-network-device-plugin offers them.

`options` (the keys), `functions` and `subfunctions` (what there is), `finding` (whose it is), `nodes` (what a container
opens), `answers` (its variables), `health`, `creation` (virtual functions on request),
`backend` (one face for all).
"""

from backends.sriov.backend import Sriov as Sriov
from backends.sriov.options import SriovOptions as SriovOptions
from backends.sriov.options import SriovResource as SriovResource
