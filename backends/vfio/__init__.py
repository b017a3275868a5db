"""PCI functions for virtual machines and user-space drivers, by vfio: whole IOMMU groups."""

from backends.vfio.backend import Vfio as Vfio
from backends.vfio.options import VfioOptions as VfioOptions
from backends.vfio.options import VfioResource as VfioResource
