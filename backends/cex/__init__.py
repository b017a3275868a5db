"""IBM Crypto Express: adjunct processor queues (APQNs) of s390, each behind a zcrypt node of its own.

`options` (the keys), `ap` (what sysfs says of cards and queues), `finding` (from these to devices), `health`, `zcrypt`
(nodes), `shadow` (the sysfs that a container sees), `backend` (one face for all).
"""

from backends.cex.backend import Cex as Cex
from backends.cex.options import Apqn as Apqn
from backends.cex.options import CexOptions as CexOptions
from backends.cex.options import CexResource as CexResource
