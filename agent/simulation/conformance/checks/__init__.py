"""All checks, by subject; the order of these imports is that of the table."""

from agent.simulation.conformance.checks import (  # isort: skip  # in the order in which a plugin meets them
    registration,
    lists,
    restarts,
    allocate,
    choosing,
    devices,
    ending,
    resources,
)
from agent.simulation.conformance.suite import CHECKS

__all__ = ["CHECKS", "allocate", "choosing", "devices", "ending", "lists", "registration", "resources", "restarts"]
