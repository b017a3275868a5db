"""Sets up every test: its event loop, its directory, skips, the order of the files, and one summary line per reason of skips."""

from __future__ import annotations

import itertools
import os
import random
import resource
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import HealthCheck, settings

from agent.runtime import logs  # noqa: F401  # first: it keeps structlog from importing rich
from tests.e2e import forkserver
from tests.needs import RECORDINGS, skip_without
from tests.nodes import pretend

import structlog  # isort: skip

_NO_SKIPS: Final = "--no-skips"
_SHUFFLE: Final = "--shuffle"
_HERE: Final = Path(__file__).parent
_SLOW: Final = (
    "e2e",
    "guest",
    "deterministic",
    "soak",
    "backends/test_recordings.py",
    "console/http/test_page_in_browser.py",
    "docs/test_commands.py",
    "docs/test_security.py",
    "docs/test_writing_a_backend.py",
    "kubelet/test_cancellation.py",
    "simulation/conformance/test_fairlead.py",
    "test_at_once.py",
)
"""Files and folders that start processes, unpack machines or try whatever may happen at once; they start first, so that none
is left alone at the end of a run. All others are `fast`: what a developer runs before each commit."""

# A busy machine is no failure. With CI set, hypothesis takes its own profile, which is patient and repeatable.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
if "CI" not in os.environ:
    settings.load_profile("patient")


_numbers: Final = itertools.count()


@pytest.fixture
def tmp_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a short name, kept as pytest keeps its own: a socket's path has at most 107 bytes.

    Pytest's own has the test's name in it, beside the user's and, with pytest-xdist, the process's.
    """
    path = tmp_path_factory.getbasetemp() / f"t{next(_numbers)}"
    path.mkdir(mode=0o700)
    return path


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session", autouse=True)
def _fork_server_ends() -> Iterator[None]:
    """A test of any folder may start the program as a process of its own."""
    yield
    forkserver.stop()


@pytest.fixture(autouse=True)
def fresh_logging() -> Iterator[None]:
    """A command that a test runs in this process sets logging up: for itself, not for the tests that follow."""
    yield
    structlog.reset_defaults()


def pytest_configure() -> None:
    pretend()
    configure = (
        structlog.configure
    )  # here, since fixtures of a module run commands too: no logger keeps what it had first
    structlog.configure = lambda **settings: configure(**settings | {"cache_logger_on_first_use": False})
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a login's 1,024 are too few


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(_NO_SKIPS, action="store_true", help="fail if a test was skipped; for machines that can run all")
    parser.addoption(_SHUFFLE, type=int, metavar="SEED", help="run files, and tests within each, in an order by chance")


def pytest_report_header(config: pytest.Config) -> str | None:
    seed = config.getoption(_SHUFFLE)
    return None if seed is None else f"in an order by chance: {_SHUFFLE} {seed} runs them in the same"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if (seed := config.getoption(_SHUFFLE)) is not None:
        random.Random(seed).shuffle(items)
        files = {path: n for n, path in enumerate(dict.fromkeys(item.path for item in items))}
        items.sort(key=lambda item: files[item.path])
    slow = {item for item in items if _path(item).startswith(_SLOW)}
    for item in items:
        if item not in slow:
            item.add_marker(pytest.mark.fast)
    items.sort(key=lambda item: item not in slow)


def _path(item: pytest.Item) -> str:
    return item.path.relative_to(_HERE).as_posix() if item.path.is_relative_to(_HERE) else item.path.name


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker in item.iter_markers("needs"):
        skip_without(*marker.args)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.exitstatus == pytest.ExitCode.OK and _unwanted(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    reasons = Counter(_reason(report) for report in terminalreporter.stats.get("skipped", []))
    for reason, number in sorted(reasons.items()):
        terminalreporter.line(f"SKIPPED {number}: {reason}")
    if unwanted := _unwanted(config):
        terminalreporter.section(f"skipped, though {_NO_SKIPS} says that this machine can run everything")
        for report in unwanted:
            terminalreporter.line(f"{report.nodeid}: {_reason(report)}", red=True)


def _reason(report: Any) -> str:
    return str(report.longrepr[2]).removeprefix("Skipped: ")


def _unwanted(config: pytest.Config) -> list[Any]:
    """The reports of skips that the options do not allow. Recordings are no part of the repository: any may lack them."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or not config.getoption(_NO_SKIPS):
        return []
    skipped: list[Any] = reporter.stats.get("skipped", [])
    return [
        report for report in skipped if not hasattr(report, "wasxfail") and _reason(report) != f"needs {RECORDINGS}"
    ]
