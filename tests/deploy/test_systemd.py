"""The units of deploy/systemd: systemd finds no fault in them, and little that the observer could do."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Final

import pytest

from agent.config import AgentConfig
from backends.vfio.binding import NOTES
from tests.needs import skip_without

UNITS: Final = Path(__file__).parents[2] / "deploy/systemd"
TEXT: Final = (UNITS.parents[1] / "docs/installing.md").read_text()
OBSERVER, HARDWARE = (
    int(10 * float(it)) for it in re.findall(r"`systemd-analyze security fairlead` says (\d\.\d)", TEXT)
)
"""Tenths of what `systemd-analyze security` calls exposure, of the unit and with the drop-in."""
MOST: Final = 25
"""Of the unit."""


def analyze(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["systemd-analyze", "--no-pager", *map(str, arguments)],
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin:/usr/sbin:/sbin", "SYSTEMD_COLORS": "0", "LC_ALL": "C.UTF-8"},
        check=False,
    )


@pytest.fixture(params=["observer", "hardware"])
def unit(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The unit alone, or with the drop-in; its program is one that is there."""
    skip_without("systemd")
    text = (UNITS / "fairlead.service").read_text()
    path = tmp_path / "fairlead.service"
    path.write_text(text.replace("/opt/fairlead/bin/fairlead", "/bin/true"))
    if request.param == "hardware":
        shutil.copytree(UNITS / "fairlead.service.d", tmp_path / "fairlead.service.d")
    return path


def test_systemd_finds_no_fault(unit: Path) -> None:
    done = analyze("verify", "--man=no", unit)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_systemd_would_find_one(unit: Path) -> None:
    unit.write_text(unit.read_text().replace("Type=notify", "Type=notified\nWatchdogSecs=3"))
    done = analyze("verify", "--man=no", unit)
    assert "WatchdogSecs" in done.stderr


def test_it_may_do_no_more_than_the_docs_and_the_drop_in_say(unit: Path) -> None:
    drop_in = unit.with_suffix(".service.d") / "hardware.conf"
    said = HARDWARE if drop_in.exists() else OBSERVER
    done = analyze("security", "--offline=true", f"--threshold={said}", unit)
    assert done.returncode == 0, done.stdout
    assert OBSERVER <= MOST
    assert not drop_in.exists() or f"says {HARDWARE / 10}, and {OBSERVER / 10} without it" in drop_in.read_text()


def settings() -> list[tuple[str, str]]:
    """Every setting of the unit, in order."""
    lines = (UNITS / "fairlead.service").read_text().splitlines()
    return [
        (name, value) for name, is_one, value in (line.partition("=") for line in lines) if is_one and name[0] != "#"
    ]


def test_the_observer_writes_nothing_to_sys() -> None:
    found = settings()
    assert {("ProtectKernelTunables", "yes"), ("ProtectSystem", "strict")} <= {*found}
    assert not [value for name, value in found if name == "ReadWritePaths" and value.lstrip("-").startswith("/sys")]


def test_its_directories_are_those_that_the_configuration_has_by_itself() -> None:
    found, ours = dict(settings()), AgentConfig()
    assert Path("/var/lib", found["StateDirectory"]) == ours.state_dir
    assert Path("/run", found["RuntimeDirectory"]) == ours.admin_socket.parent
    assert ("ReadWritePaths", f"-{ours.kubelet_root}") in settings()
    assert ours.plugin_dir.is_relative_to(ours.kubelet_root)


def test_however_often_it_ends_it_is_started_again() -> None:
    assert {("Restart", "always"), ("StartLimitIntervalSec", "0")} <= set(settings())


def test_what_was_bound_is_known_after_a_stop() -> None:
    assert NOTES.text.startswith("/run/fairlead/")
    assert dict(settings())["RuntimeDirectoryPreserve"] == "yes"
