"""PCI functions for virtual machines and user-space drivers, by vfio: whole IOMMU groups.

`options` (the keys), `finding` (from groups to devices), `planning` (what would have to be bound, and what is in the
way), `binding` (does it, and undoes it), `health`, `backend` (one face for all).
"""

from backends.vfio.backend import Vfio as Vfio
from backends.vfio.options import VfioOptions as VfioOptions
from backends.vfio.options import VfioResource as VfioResource
