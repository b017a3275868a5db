"""`fairlead conformance`: what it prints, reports and ends with."""

from __future__ import annotations

import json
import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from agent.cli.commands import fairlead
from agent.simulation.conformance import suite
from agent.simulation.conformance.checks import CHECKS
from agent.simulation.conformance.suite import Outcome
from agent.simulation.conformance.suite import Result as Judged
from tests.e2e.forkserver import REPOSITORY

_NULL = '[agent]\nstate_dir = "{0}/state"\nadmin_socket = "{0}/admin"\n[[resource]]\nname = "fl.test/null"\nbackend = "chardev"\npaths = [{{ path = "/dev/null" }}]\ncount = 2\n'
_RUN = f"import sys; sys.path.insert(0, {str(REPOSITORY)!r}); from agent.cli import main; main()"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(fairlead, ["conformance", *arguments], prog_name="fairlead")


def judged() -> list[Judged]:
    why = 'the \x1b[31m"plugin" <said> nothing'
    outcomes = (Outcome.PASS, Outcome.FAIL, Outcome.NOT_APPLICABLE, Outcome.SKIPPED)
    return [
        Judged(check, outcome, "" if outcome is Outcome.PASS else why)
        for check, outcome in zip(CHECKS, outcomes, strict=False)
    ]


def test_each_check_has_a_name_of_its_own_a_sentence_and_a_line_of_the_contract() -> None:
    page = (REPOSITORY / "docs/conformance.md").read_text()
    assert len({it.name for it in CHECKS}) == len(CHECKS)
    for it in CHECKS:
        assert it.sentence.endswith("."), it.name
        assert f"({it.line})" in page or f"{it.line})" in page or f"({it.line}," in page, it.name


def test_the_checks_are_listed_with_what_a_kubelet_does() -> None:
    printed = run("--list", "--only", "ending")
    assert printed.exit_code == 0
    assert "sigterm-ends  (ending, A3)" in printed.output
    assert "list-arrives" not in printed.output


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--only", "sigterm-end", "--", "true"), "did you mean 'sigterm-ends'"),
        ((), "Which plugin?"),
        (("--on", "pull", "true", "--", "true"), "not 'pull'"),
        (("--report", "x", "--format", "table", "--", "true"), "A report is one of"),
        (("--plugin-dir", "/", "--", "true"), "must be called device-plugins"),
    ],
)
def test_a_wrong_command_line_is_told_in_a_sentence(arguments: tuple[str, ...], sentence: str) -> None:
    printed = run(*arguments)
    assert printed.exit_code in (1, 2)
    assert sentence in (printed.output or str(printed.exception)) + str(printed.exception)


def test_a_directory_with_something_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "device-plugins").mkdir()
    kept = tmp_path / "device-plugins" / "kubelet.sock"
    kept.touch()
    printed = run("--plugin-dir", str(kept.parent), "--", "true")
    assert "is not empty" in str(printed.exception)
    assert kept.exists()


def test_tap_has_each_outcome_with_its_reason() -> None:
    lines = suite.FORMATS["tap"](judged(), {"kubelet": "1.36"}).splitlines()
    assert lines[:3] == ["TAP version 14", "1..4", "# kubelet: 1.36"]
    assert [line.partition(" - ")[0] for line in lines if " - " in line] == ["ok 1", "not ok 2", "ok 3", "ok 4"]
    assert [line.partition("# ")[2].partition(":")[0] for line in lines[1:] if "# SKIP" in line] == [
        "SKIP not applicable",
        "SKIP skipped",
    ]


def test_junit_is_xml_whatever_a_plugin_says() -> None:
    tree = ET.fromstring(suite.FORMATS["junit"](judged(), {"kubelet": "1.36"}))
    cases = list(tree.iter("testcase"))
    assert [case.get("name") for case in cases] == [it.name for it in CHECKS[:4]]
    assert [[child.tag for child in case] for case in cases] == [[], ["failure"], ["skipped"], ["skipped"]]
    assert CHECKS[1].sentence in str(cases[1][0].text)


def test_a_plugin_that_never_registers_fails_and_shows_what_it_said(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    place = str(tmp_path / "device-plugins")
    code = "import time; print('there is no device here', flush=True); time.sleep(1000)"
    log = tmp_path / "log"
    printed = run(
        "--plugin-dir", place, "--patience", "0.5", "--only", "registration-arrives", "--report", str(report),
        "--log", str(log), "--", sys.executable, "-c", code,
    )  # fmt: skip
    assert printed.exit_code == 1
    assert "Register was never called" in printed.output
    assert [line for line in printed.output.splitlines() if "the plugin said:" in line] == [
        "the plugin said: there is no device here"
    ]
    title = "The plugin starts beside a kubelet, and is left alone. (registration-arrives)"
    heading, *said = log.read_text().splitlines()
    assert re.sub(r"\d+\.\d s", "N s", heading) == f"=== N s, kubelet 1.36: {title}"
    assert said == ["there is no device here"]
    (check,) = json.loads(report.read_text())["checks"]
    assert check["name"] == "registration-arrives"
    assert check["outcome"] == "fail"
    assert not Path(place).exists()


@pytest.mark.parametrize(
    ("printed", "words"),
    [
        (["starting", "no kubelet is here", ""], "no kubelet is here"),
        (["    throw err;", "", "Error: 2 UNKNOWN: not ready", "    at emit (node:events:518:28)", "  details: 'Last error: none'", "Node.js v20.20.2"], "Error: 2 UNKNOWN: not ready"),
        (["x" * 300], "x" * 200),
        ([], ""),
    ],
)  # fmt: skip
def test_a_plugin_that_ends_by_itself_is_quoted(tmp_path: Path, printed: list[str], words: str) -> None:
    code = f"import sys; print(*{printed!r}, sep=chr(10)); sys.exit(3)"
    tried = run(
        "--plugin-dir", str(tmp_path / "device-plugins"), "--only", "registration-arrives", "--format", "json",
        "--", sys.executable, "-c", code,
    )  # fmt: skip
    (check,) = json.loads(tried.stdout)["checks"]
    quoted = f"; its last words: {words}" if words else ""
    assert check["why"] == f"Register was never called: its process ended by itself with code 3{quoted}"


@pytest.mark.needs("namespaces")
def test_a_plugin_with_fixed_paths_runs_in_a_namespace_of_its_own(tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text(_NULL.format(tmp_path))
    plugin = (sys.executable, "-c", _RUN, "run", "--config", str(config))
    printed = run("--only", "allocate", "--format", "json", "--patience", "300", "--", *plugin)
    assert printed.exit_code == 0, printed.output
    outcomes = {it["name"]: it["outcome"] for it in json.loads(printed.stdout)["checks"]}
    assert [name for name, outcome in outcomes.items() if outcome != "pass"] == ["allocate-cdi-names"]


def test_a_plugin_that_is_not_there_is_told(tmp_path: Path) -> None:
    printed = run("--plugin-dir", str(tmp_path / "device-plugins"), "--", "no-such-plugin")
    assert "no-such-plugin: no such file" in str(printed.exception)
