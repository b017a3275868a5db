from __future__ import annotations

import os
import resource
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests import nodes

SKIPS: dict[str, str] = {
    "in a test": "import pytest\ndef test_it(): pytest.skip('no such card')",
    "of a module": "import pytest\npytest.skip('no such card', allow_module_level=True)",
    "in a fixture": "import pytest\n@pytest.fixture\ndef it(): pytest.skip('no such card')\ndef test_it(it): pass",
}


def run(directory: Path, test: str, *options: str) -> subprocess.CompletedProcess[str]:
    shutil.copy(Path(__file__).with_name("conftest.py"), directory)
    (directory / "pytest.ini").write_text("[pytest]\nmarkers =\n  needs(*things)\n  fast\n")
    (directory / "test_it.py").write_text(test)
    (directory / "test_that.py").write_text("def test_that_passes(): pass")
    arguments = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options]
    environment = {"CI": "true", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # it needs none, and they take a second
    environment["PYTHONPATH"] = str(Path(__file__).parents[1])
    return subprocess.run(arguments, cwd=directory, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("test", SKIPS.values(), ids=SKIPS.keys())
def test_a_skip_fails_the_session_where_none_is_allowed_and_says_why(tmp_path: Path, test: str) -> None:
    found = run(tmp_path, test, "--no-skips")
    assert found.returncode == pytest.ExitCode.TESTS_FAILED
    assert "test_it.py" in found.stdout
    assert "no such card" in found.stdout
    assert "1 passed, 1 skipped" in found.stdout.splitlines()[-1]


def test_a_skip_is_fine_elsewhere(tmp_path: Path) -> None:
    assert run(tmp_path, SKIPS["in a test"]).returncode == pytest.ExitCode.OK


def test_skips_are_summed_up_by_their_reason(tmp_path: Path) -> None:
    test = "import pytest\n@pytest.mark.parametrize('n', range(3))\ndef test_it(n): pytest.skip('no such card')"
    assert "SKIPPED 3: no such card" in run(tmp_path, test).stdout.splitlines()


def test_what_is_fast_can_be_run_alone(tmp_path: Path) -> None:
    (tmp_path / "e2e").mkdir()
    (tmp_path / "e2e/test_slow.py").write_text("def test_that_starts_processes(): pass")
    assert "3 passed" in run(tmp_path, "def test_it(): pass").stdout
    found = run(tmp_path, "def test_it(): pass", "-mfast")
    assert "2 passed, 1 deselected" in found.stdout, found.stdout


def test_tests_run_in_an_order_by_chance_that_its_seed_brings_again(tmp_path: Path) -> None:
    test = "import pytest\n@pytest.mark.parametrize('n', range(20))\ndef test_it(n): pass"
    usual, one, again, other = (
        [line for line in run(tmp_path, test, "-v", *options).stdout.splitlines() if "PASSED" in line]
        for options in ((), ("--shuffle", "7"), ("--shuffle", "7"), ("--shuffle", "8"))
    )
    names = [[line.split()[0] for line in lines] for lines in (usual, one, again, other)]
    assert names[1] == names[2]
    assert names[0] != names[1] != names[3]
    assert sorted(names[0]) == sorted(names[1]) == sorted(names[3])
    assert "--shuffle 7 runs them in the same" in run(tmp_path, test, "--shuffle", "7").stdout


def test_an_expected_failure_is_no_skip(tmp_path: Path) -> None:
    test = "import pytest\n@pytest.mark.xfail\ndef test_it(): raise ValueError"
    assert run(tmp_path, test, "--no-skips").returncode == pytest.ExitCode.OK


def test_no_test_at_all_stays_an_error(tmp_path: Path) -> None:
    found = run(tmp_path, "", "--no-skips", "-k", "nothing")
    assert found.returncode == pytest.ExitCode.NO_TESTS_COLLECTED


def test_what_the_machine_lacks_is_skipped_with_one_line_for_each_reason(tmp_path: Path) -> None:
    lacking = "import os, pytest\nfrom tests import needs\nneeds.has = lambda thing: thing != 'a card'\n"
    test = "@pytest.mark.needs('root', 'a card')\ndef test_{}(): raise ValueError\n"
    found = run(tmp_path, lacking + test.format(1) + test.format(2))
    assert found.returncode == pytest.ExitCode.OK
    assert "needs root" not in found.stdout
    assert "SKIPPED 2: needs a card" in found.stdout.splitlines()


def test_a_file_that_pretends_to_be_a_node_is_one_after_its_mode_has_changed(tmp_path: Path) -> None:
    node, plain = tmp_path / "node", tmp_path / "plain"
    for file, mode in ((node, 0o1600), (plain, 0o600)):
        file.touch()
        file.chmod(mode)
        nodes._keeping_the_mark(os.chmod)(file, 0o666)
    its_own = getattr(os.stat, "__wrapped__", os.stat)
    assert [stat.S_IMODE(its_own(file).st_mode) for file in (node, plain)] == [0o1666, 0o666]


def test_tests_have_as_many_descriptors_as_their_user_may_have(tmp_path: Path) -> None:
    """A login has 1,024 and may have half a million; tests side by side need more than it has."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
    try:
        inner = "import resource\ndef test_it(): assert len(set(resource.getrlimit(resource.RLIMIT_NOFILE))) == 1"
        done = run(tmp_path, inner)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert done.returncode == 0, done.stdout
