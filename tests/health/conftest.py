"""What many tests of devices begin with."""

from __future__ import annotations

import pytest

from agent.health import HealthBook
from tests.health.said import BOOT


@pytest.fixture
def book() -> HealthBook:
    """Health of which nothing has been told yet."""
    return HealthBook(BOOT)
