"""`make install` and `make uninstall`, and the script that replaces the running service by what was installed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

from agent import __version__
from tests.deploy.manifests import REPOSITORY
from tests.deploy.test_systemd import UNITS
from tests.needs import skip_without

PYTHON: Final = "/usr/bin/python3"


def script(what: str, root: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run what `make install` and `make uninstall` run."""
    variables = {"DESTDIR": str(root), "PYTHON": PYTHON, "TOOLS": sys.executable} | environment
    return subprocess.run(
        ["sh", REPOSITORY / "deploy/install.sh", what],
        env={**os.environ, **variables}, capture_output=True, text=True, check=False,
    )  # fmt: skip


def files(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_symlink() or not path.is_dir()}


def test_what_make_install_puts_below_a_prefix_runs_and_make_uninstall_removes_all_of_it(tmp_path: Path) -> None:
    skip_without("Debian's Python 3.11 or newer")
    root = tmp_path / "root"
    others = root / "usr/local/share/man/man8/other.8"
    others.parent.mkdir(parents=True)
    others.touch()
    assert script("install", root).stderr == ""
    prefix = root / "usr/local"
    done = subprocess.run(
        [prefix / "lib/fairlead/bin/python3", prefix / "sbin/fairlead", "--version"], capture_output=True, text=True
    )
    assert (done.stdout.split()[-1], done.stderr) == (__version__, "")
    assert (prefix / "sbin/fairlead").read_text().startswith("#!/usr/local/lib/fairlead/bin/python3\n")
    assert (
        "ExecStart=/usr/local/lib/fairlead/bin/fairlead run\n"
        in (prefix / "lib/systemd/system/fairlead.service").read_text()
    )
    assert (prefix / "share/man/man8/fairlead.8").read_text().startswith(".TH FAIRLEAD 8")
    assert "_fairlead" in (prefix / "share/bash-completion/completions/fairlead").read_text()
    installed = files(root)
    texts = {name: (root / name).read_bytes() for name in installed if (root / name).is_file()}
    assert not [name for name, text in texts.items() if str(tmp_path).encode() in text]

    assert script("install", root, TOOLS="/bin/false").returncode != 0
    assert files(root) == installed

    assert script("uninstall", root).stderr == ""
    assert files(root) == {"usr/local/share/man/man8/other.8"}


def test_a_python_that_the_service_could_not_see_is_refused(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho /root/.pyenv/bin/python3\n")
    python.chmod(0o755)
    done = script("install", tmp_path / "root", PYTHON=str(python))
    assert (done.returncode, files(tmp_path / "root")) == (1, set())
    assert "cannot see /root/.pyenv/bin/python3" in done.stderr


# --- the running service ---

_SYSTEMCTL: Final = """#!/bin/sh
echo "$*" >> "$CALLS"
case "$*" in
*"cat fairlead" | show*) echo "[Service]" ;;
*"is-active fairlead-next") exit $NEXT ;;
"$FAILS") exit 1 ;;
esac
"""
"""Notes what it was asked; the second service runs as $NEXT says (0), and one call fails."""

REPLACED: Final = ["start fairlead-next", "restart fairlead", "stop fairlead-next"]


@dataclass(frozen=True, slots=True)
class Systemd:
    """A systemd that only listens."""

    place: Path

    def asked(self, *, fails: str = "no call", next_runs: bool = False) -> list[str]:
        """Run the script; the starts and stops that it asked for."""
        calls = self.place / "calls"
        calls.write_text("")
        environment = {
            "PATH": f"{self.place / 'bin'}:{os.environ['PATH']}", "CALLS": str(calls), "UNITS": str(self.place),
            "FAILS": fails, "NEXT": str(int(not next_runs)),
        }  # fmt: skip
        done = subprocess.run(
            ["sh", UNITS / "replace.sh"], env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == (fails != "no call"), done.stderr
        assert bool(done.stderr) == (fails != "no call")
        return [line for line in calls.read_text().splitlines() if re.match("(re)?start|stop", line)]

    @property
    def has_next(self) -> bool:
        return (self.place / "fairlead-next.service").exists()


@pytest.fixture
def systemd(tmp_path: Path) -> Systemd:
    systemctl = tmp_path / "bin/systemctl"
    systemctl.parent.mkdir()
    systemctl.write_text(_SYSTEMCTL)
    systemctl.chmod(0o755)
    (systemctl.parent / "journalctl").symlink_to("/bin/true")
    return Systemd(tmp_path)


def test_a_second_service_takes_over_and_hands_back_to_the_first(systemd: Systemd) -> None:
    assert systemd.asked() == REPLACED
    assert not systemd.has_next


def test_where_the_new_one_does_not_start_the_old_one_is_not_stopped(systemd: Systemd) -> None:
    assert systemd.asked(fails="start fairlead-next") == ["start fairlead-next", "stop fairlead-next"]
    assert not systemd.has_next


def test_where_the_first_does_not_come_back_the_second_serves_until_the_script_runs_again(systemd: Systemd) -> None:
    assert systemd.asked(fails="restart fairlead") == ["start fairlead-next", "restart fairlead"]
    assert systemd.has_next
    assert systemd.asked(next_runs=True) == ["start fairlead", "stop fairlead-next", *REPLACED]
    assert not systemd.has_next


def test_a_service_that_does_not_run_is_not_started(systemd: Systemd) -> None:
    assert systemd.asked(fails="--quiet is-active fairlead") == []


def test_make_says_what_it_installs_and_how_large_that_gets(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\nif [ "$2" = venv ]; then mkdir -p "$3/bin" && cp "$0" "$3/bin/python"; fi\n')
    python.chmod(0o755)
    for target, locks, said in (("demo", ("run", "build"), "(run build)"), ("test", ("dev",), "(dev)")):
        into = tmp_path / target
        ran = subprocess.run(
            ["sh", REPOSITORY / "tools/environment.sh", into, *locks], cwd=REPOSITORY,
            env={**os.environ, "PYTHON": str(python)}, capture_output=True, text=True, check=True,
        )  # fmt: skip
        found = re.match(
            rf"-- installing [0-9]+ packages \({' '.join(locks)}\) into {into}, once: ([0-9]+) MB", ran.stdout
        )
        assert found is not None, ran.stdout
        assert said in ran.stdout
        assert re.search(rf"`make {target}`[^.]* {found[1]} MB into", (REPOSITORY / "README.md").read_text())
        assert not (into / "fetched").exists()


def test_make_says_what_to_pass_where_a_proxy_opens_tls_and_which_python_is_not_here(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(
        '#!/bin/sh\nif [ "$2" = venv ]; then mkdir -p "$3/bin" && cp "$0" "$3/bin/python"; fi\n'
        'if [ "$2" = pip ]; then echo "SSL: CERTIFICATE_VERIFY_FAILED" >&2; exit 1; fi\n'
    )
    python.chmod(0o755)

    def said(python: str) -> list[str]:
        ran = subprocess.run(
            ["sh", REPOSITORY / "tools/environment.sh", tmp_path / "into", "run", "build"], cwd=REPOSITORY,
            env={**os.environ, "PYTHON": python}, capture_output=True, text=True,
        )  # fmt: skip
        assert ran.returncode == 1
        return ran.stderr.splitlines()

    assert said(str(python)) == [
        "SSL: CERTIFICATE_VERIFY_FAILED",
        "A proxy opens TLS: give pip its authority, PIP_CERT=/path/ca.pem make demo (docs/installing.md)",
    ]
    assert said("python3.99") == ["There is no python3.99 here; docs/installing.md names the package."]
