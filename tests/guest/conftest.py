"""Every test here runs in a guest, or beside one: `make e2e` fetches what that takes and runs them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import pytest

from tests.guest.guest import Guest, guest
from tests.guest.hardware import DEVICES
from tests.guest.machine import Accelerator, best_accelerator
from tests.guest.node import Node, node

_TIMEOUT: Final = 1800  # seconds for a test and the guest that it may start; what it awaits has a limit of its own
_HERE: Final = Path(__file__).parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--accel", choices=["kvm", "tcg"], help="who runs the guest's code; the best that there is")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(_HERE):
            item.add_marker(pytest.mark.guest)
            item.add_marker(pytest.mark.timeout(_TIMEOUT))


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def accelerator(request: pytest.FixtureRequest) -> Accelerator:
    chosen: Accelerator = request.config.getoption("--accel", None) or best_accelerator()
    return chosen


@pytest.fixture(scope="session", name="guest")
async def _guest(accelerator: Accelerator) -> AsyncIterator[Guest]:
    """One for all tests; each leaves it as it was."""
    async with guest(accelerator, DEVICES) as up:
        yield up


@pytest.fixture(scope="session", name="node")
async def _node(guest: Guest) -> AsyncIterator[Node]:
    async with node(guest) as up:
        yield up
