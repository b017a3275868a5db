"""What the kernel says of a PCI function's error recovery."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.base import Clears, Record, Signal, Verdict
from backends.linux import pci, pci_health

CARD = "0000:3b:00.0"
PATH = f"/devices/pci0000:3a/0000:3a:00.0/{CARD}"


def signals(path: str, **properties: str) -> list[Signal]:
    return list(pci_health.recovery_signals(Record("uevent", "boot", 4711, 12.5, path, properties)))


@pytest.mark.parametrize(
    ("step", "reason", "said"),
    [
        ("BEGIN_RECOVERY", "pci-recovery", f"{CARD} has had a PCI Express error and is being recovered"),
        ("FAILED_RECOVERY", "pci-recovery-failed", f"{CARD} could not be recovered from a PCI Express error"),
    ],
)
def test_a_function_that_is_being_recovered_or_could_not_be_is_unhealthy(step: str, reason: str, said: str) -> None:
    (signal,) = signals(PATH, ERROR_EVENT=step, DEVICE_ONLINE="0")
    assert (signal.hardware, signal.reason, signal.verdict) == (f"pci:{CARD}", reason, Verdict.NOW)
    assert signal.message == said
    assert signal.clears_on == set(Clears)


def test_one_that_has_been_recovered_is_well() -> None:
    (signal,) = signals(PATH, ERROR_EVENT="SUCCESSFUL_RECOVERY", DEVICE_ONLINE="1")
    assert (signal.hardware, signal.verdict) == (f"pci:{CARD}", Verdict.FINE)
    assert signal.clears_on == {Clears.RECOVERED}


def test_other_events_say_nothing() -> None:
    assert signals(PATH, ERROR_EVENT="SOMETHING_NEW") == []
    assert signals(PATH, WEDGED="rebind") == []
    assert signals("/devices/platform/thing", ERROR_EVENT="FAILED_RECOVERY") == []


@given(st.text(max_size=40), st.text(max_size=20))
def test_no_event_makes_it_fail(path: str, step: str) -> None:
    for said in (signals(path, ERROR_EVENT=step), signals(f"{path}/{CARD}", ERROR_EVENT="BEGIN_RECOVERY")):
        assert all(pci.ADDRESS.fullmatch(signal.hardware.removeprefix("pci:")) for signal in said)
