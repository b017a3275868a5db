"""PCI GPUs of NVIDIA, AMD and Intel, handed out as their vendors' own device plugins do.

One module for each vendor (`nvidia`, `amd`, `intel`: what is found and what a container gets). What they share:
`options` (the keys), `vendor` (what a vendor's module does), `functions` (which PCI functions are GPUs), `nodes` (are
the nodes there, and right), `xid` (NVIDIA's error codes), `wedged` (DRM devices that hang), `backend` (one face for
all). NVIDIA's has `procfs`, `mig`, `nvml` and `platforms` to read, and hands out with `gke`, `mps` and `char_links`; AMD's
has `kfd`.
"""

from backends.gpu.backend import Gpu as Gpu
from backends.gpu.options import GpuOptions as GpuOptions
from backends.gpu.options import GpuResource as GpuResource
