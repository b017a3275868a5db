"""Mediated devices for virtual machines: what a driver made of one device (NVIDIA vGPU, Intel GVT-g, s390 vfio_ap).

`options` (the keys), `parents` (their types, and what was made of them), `finding` (from these to devices), `making`
(makes and removes them), `backend` (one face for all).
"""

from backends.mdev.backend import Mdev as Mdev
from backends.mdev.options import MdevOptions as MdevOptions
from backends.mdev.options import MdevResource as MdevResource
