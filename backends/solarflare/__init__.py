"""Solarflare network cards with Onload.

`options` (the keys), `onload` (its nodes, its driver and how they are), `backend` (functions as devices, what a pod gets).
"""

from backends.solarflare.backend import Solarflare as Solarflare
from backends.solarflare.options import SolarflareOptions as SolarflareOptions
from backends.solarflare.options import SolarflareResource as SolarflareResource
