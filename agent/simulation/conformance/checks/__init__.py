"""All checks, by subject; the order of these imports is that of the table."""

from agent.simulation.conformance.checks import (  # isort: skip  # in the order in which a plugin meets them
    registration,
    restarts,
    allocate,
    devices,
    process,
)
from agent.simulation.conformance.suite import CHECKS

__all__ = ["CHECKS", "allocate", "devices", "process", "registration", "restarts"]
