"""Health: what probes, records, operators and time say of each piece of hardware, merged into one verdict."""

from agent.health.book import HealthBook
from agent.health.drains import Drain
from agent.health.judgement import Statement
from agent.health.saved_state import Handled, KeptHealth

__all__ = ["Drain", "Handled", "HealthBook", "KeptHealth", "Statement"]
