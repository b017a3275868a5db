"""InfiniBand, RoCE and iWARP adapters (HCAs): each for one pod, for several, or all of a pool for each token."""

from backends.infiniband.backend import InfiniBand as InfiniBand
from backends.infiniband.options import InfiniBandOptions as InfiniBandOptions
from backends.infiniband.options import InfiniBandResource as InfiniBandResource
