"""One seed is one run, and what an agent must not do is found."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deterministic.sabotage import SABOTAGES

_ROOT = Path(__file__).parents[2]
_FRESH = 50
"""Seeds: a minute of one core."""


def first_fresh_seed() -> int:
    """Another for each content of the checkout that was committed, and for one content always the same: no run fails by chance."""
    tree = subprocess.run(["git", "rev-parse", "HEAD^{tree}"], cwd=_ROOT, check=False, capture_output=True, text=True)
    return int(tree.stdout[:8], 16) if tree.returncode == 0 else 1


def simulate(*arguments: str, hashes: str = "random") -> subprocess.CompletedProcess[str]:
    """Run it in a process of its own: its clock is taken while the agent is imported."""
    command = [sys.executable, "-m", "tests.deterministic", *arguments]
    environ = os.environ | {"PYTHONHASHSEED": hashes}
    return subprocess.run(command, cwd=_ROOT, env=environ, check=False, capture_output=True, text=True)


def test_the_same_seed_is_the_same_run_to_the_last_turn_of_each_process() -> None:
    """Also where sets have another order."""
    first, second, another = (
        simulate("--seed", seed, "--steps", "60", "--trace", hashes=hashes)
        for seed, hashes in (("900", "3"), ("900", "77"), ("901", "3"))
    )
    assert first.returncode == second.returncode == 0, first.stdout + first.stderr
    assert first.stdout == second.stdout
    assert len(first.stdout.splitlines()) > 60
    assert first.stdout != another.stdout


def test_all_that_ever_failed_and_fresh_seeds_are_well() -> None:
    """What fails is shown with its seed and the shortest sequence that still fails."""
    done = simulate("--from", str(first_fresh_seed()), "--runs", str(_FRESH))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("sabotage", sorted(SABOTAGES))
def test_what_an_agent_must_not_do_is_found(sabotage: str) -> None:
    done = simulate("--sabotage", sabotage, "--seconds", "0", "--whole")
    assert done.returncode == 1, f"its case in cases.jsonl is well: {done.stdout}{done.stderr}"
    assert "FAILS" in done.stdout


def test_a_seed_that_fails_is_shown_by_the_fewest_steps_that_still_fail() -> None:
    done = simulate("--sabotage", "two_agents_hold_the_lock", "--seed", "72", "--steps", "8")
    shown = done.stdout.partition("the shortest sequence that still fails:\n")[2].splitlines()
    steps = [line for line in shown if line.startswith("  after ")]
    assert 1 <= len(steps) <= 3, done.stdout + done.stderr
    assert "make simulate ARGS='--seed 72'" in done.stdout
