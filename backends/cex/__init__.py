"""IBM Crypto Express: hands out queues (APQNs) of the cards of s390, each behind a zcrypt node of its own."""

from backends.cex.backend import Cex as Cex
from backends.cex.options import Apqn as Apqn
from backends.cex.options import CexOptions as CexOptions
from backends.cex.options import CexResource as CexResource
