"""Network functions for pods: SR-IOV virtual functions and whole cards, as the sriov-network-device-plugin offers them."""

from backends.sriov.backend import Sriov as Sriov
from backends.sriov.options import SriovOptions as SriovOptions
from backends.sriov.options import SriovResource as SriovResource
