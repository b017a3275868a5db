"""Mediated devices for virtual machines: parts that a driver makes of one device (NVIDIA vGPU, Intel GVT-g, s390 vfio_ap)."""

from backends.mdev.backend import Mdev as Mdev
from backends.mdev.options import MdevOptions as MdevOptions
from backends.mdev.options import MdevResource as MdevResource
