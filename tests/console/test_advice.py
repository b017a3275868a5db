"""Every reason that a device may have has its meaning, a next step and an end."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.console.advice import REASONS, UNUSABLE, advice, of_xid, told
from agent.console.views import Device
from agent.health.book import DRAINED
from agent.inventory.ownership import TROUBLES
from agent.inventory.shortfall import REASONS as MISSING
from agent.inventory.shortfall import UNUSABLE as NO_USE
from backends.gpu.xid import CATALOG, XIDS

_ROOT = Path(__file__).parents[2]
_MADE = re.compile(r"^(aer|stub)-$")
"""Reasons whose end is put in: `aer-fatal`, `stub-degraded`."""
_NOTES = {"pci-recovered"}  # says that something else has ended


def reasons() -> Iterator[tuple[str, str]]:
    """Where a backend, or health and inventory, give a reason; literals in the place of one, or in a pair with a sentence."""
    for path in sorted([*_ROOT.joinpath("backends").rglob("*.py"), *_ROOT.glob("agent/*/*.py")]):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                name = ast.unparse(node.func)
                at = 1 if name in ("Signal", "Health", "_measured") else 0 if name in ("signal", "_Fault") else None
                if at is not None and len(node.args) > at:
                    yield from ((f"{path.name}:{node.lineno}", it) for it in _texts(node.args[at]))


def _texts(node: ast.expr) -> Iterator[str]:
    if isinstance(node, ast.JoinedStr) and isinstance(node.values[0], ast.Constant):
        yield str(node.values[0].value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value:
        yield node.value


def test_every_reason_that_is_given_has_advice() -> None:
    found = {reason: where for where, reason in reasons()}
    assert len(found) > 40
    for reason, where in found.items():
        known = reason in REASONS or reason.startswith("xid-") or reason in _NOTES
        assert known or _MADE.match(reason), (
            f"{where} gives the reason {reason}, which agent/console/advice.py does not know"
        )


@pytest.mark.parametrize(
    "reason", [*MISSING, *TROUBLES, DRAINED, "aer-fatal", "aer-nonfatal", "stub-unhealthy", "node-replaced"]
)
def test_reasons_that_are_made_otherwise_have_it_too(reason: str) -> None:
    assert advice(reason) is not None


@pytest.mark.parametrize("reason", [*REASONS, "xid-79", "xid-9999"])
def test_advice_has_the_devices_own_names_and_nothing_is_left_open(reason: str) -> None:
    found = advice(
        reason, "0000:3b:00.0 …", device="GPU-1", name="nvidia3", hardware=("pci:0000:3b:00.0", "node:c:1:2")
    )
    assert found is not None
    for _, text in told(found):
        assert "{" not in text.replace("{print", "")
        assert "&& systemctl" not in text or "kubectl drain" in text
        assert not text.startswith("systemctl reboot")  # it kills the pods of the other devices
        assert "GPU-1" not in text  # the shortest name is enough
    assert found.means
    assert found.do
    assert found.ends


def test_what_is_unusable_is_told_apart_by_its_sentence() -> None:
    found = advice(NO_USE, "it has no driver; nvidia is needed", device="0000:3b:00.0", hardware=("pci:0000:3b:00.0",))
    assert found is not None
    assert found.command == "modprobe nvidia && echo 0000:3b:00.0 > /sys/bus/pci/drivers_probe"
    for words in UNUSABLE:
        assert advice(NO_USE, f"card: {words} (what is more)") is not None
    other = advice(NO_USE, "something new")
    assert other is not None
    assert (other.means, other.command) == (REASONS[NO_USE].means, "fairlead explain DEVICE")


def test_a_third_partys_reason_has_none() -> None:
    assert advice("its-own-reason") is None


def test_each_xid_asks_for_what_nvidias_catalog_says() -> None:
    assert "reboot" in of_xid(79).do
    assert "--gpu-reset" in of_xid(95).command
    assert "application" in of_xid(31).do.lower()
    assert "nvidia-bug-report" in of_xid(123).command
    assert all(of_xid(number).command for number in CATALOG)
    assert len({of_xid(number).do for number in XIDS}) > 8


def test_a_drained_device_is_shown_as_that_and_not_as_unhealthy() -> None:
    assert Device("k", ("k",), "Unhealthy", DRAINED).condition == "Drained"
    assert Device("k", ("k",), "Unhealthy", "xid-79").condition == "Unhealthy"
