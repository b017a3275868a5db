"""What tests of discovery begin with."""

from __future__ import annotations

import pytest

from agent.discovery import reading


@pytest.fixture(autouse=True)
def no_read_is_slow(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A walk tells all it finds at once, however long this process stood still, but where reads are made to hang."""
    if "hanging" not in request.fixturenames:
        monkeypatch.setattr(reading, "SLOW_AFTER", 1e6)
