"""PCI GPUs of NVIDIA, AMD and Intel, handed out as their vendors' own device plugins do; each vendor has a module."""

from backends.gpu.backend import Gpu as Gpu
from backends.gpu.options import GpuOptions as GpuOptions
from backends.gpu.options import GpuResource as GpuResource
