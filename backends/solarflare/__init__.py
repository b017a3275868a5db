"""Solarflare network cards with Onload."""

from backends.solarflare.backend import Solarflare as Solarflare
from backends.solarflare.options import SolarflareOptions as SolarflareOptions
from backends.solarflare.options import SolarflareResource as SolarflareResource
