"""Health: what probes, records, operators and time say of each piece of hardware, merged into one verdict."""

from agent.devices.health.book import HealthBook
from agent.devices.health.drains import Drain
from agent.devices.health.judgement import Statement
from agent.devices.health.kept import Handled, KeptHealth

__all__ = ["Drain", "Handled", "HealthBook", "KeptHealth", "Statement"]
