import pytest

from agent.runtime import pacing
from tests.left_behind import nothing_left_behind

__all__ = ["nothing_left_behind", "seldom_looks"]


@pytest.fixture
def seldom_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A deadline has one look at the clock, not four a second: `at_once` comes to rest before each, and all those take seconds."""
    monkeypatch.setattr(pacing, "STEP", 3600.0)
