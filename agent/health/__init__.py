"""Health: what probes, records, operators and time say of each piece of hardware, merged into one verdict."""

from agent.health.book import Handled, HealthBook, KeptHealth, Statement
from agent.health.drains import Drain

__all__ = ["Drain", "Handled", "HealthBook", "KeptHealth", "Statement"]
