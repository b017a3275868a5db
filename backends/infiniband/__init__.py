"""InfiniBand, RoCE and iWARP adapters (HCAs), each one pod's, shared by several, or all of a pool for each token.

`backend` (one face for all), `options` (the keys), `adapters` (one place's adapter as a device), `pools` (several as
one), `ports` (what the state of ports means), `events` (what an event is about). They read with `backends.linux.network.rdma`.
"""

from backends.infiniband.backend import InfiniBand as InfiniBand
from backends.infiniband.options import InfiniBandOptions as InfiniBandOptions
from backends.infiniband.options import InfiniBandResource as InfiniBandResource
