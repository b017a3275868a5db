"""PCI GPUs of NVIDIA, AMD and Intel, handed out as their vendors' own device plugins do.

A module or folder for each vendor (`nvidia`, `amd`, `intel`): what is found, and what a container gets. What they share:
`options` (the keys), `vendor` (what a vendor's module does), `functions` (which PCI functions are GPUs), `nodes` (are
the nodes there, and right), `wedged` (DRM devices that hang), `backend` (one face for all).
"""

from backends.gpu.backend import Gpu as Gpu
from backends.gpu.options import GpuOptions as GpuOptions
from backends.gpu.options import GpuResource as GpuResource
