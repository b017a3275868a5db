"""Signals of hardware that no scan has found yet are kept until one does, a few of them; and the latches that follow."""

from __future__ import annotations

from agent.discovery.reading import Changes
from agent.discovery.runner import EarlySignals
from agent.health import causes
from agent.health.causes import Latches
from backends.base import Clears, Device, Record, Signal, Verdict

RECORD = Record("kmsg", "b", 1, 1.0, "text")


def signal(hardware: str = "pci:a", reason: str = "xid-79", verdict: Verdict = Verdict.NOW) -> Signal:
    return Signal(hardware, reason, verdict, "It is out.", clears_on=frozenset({Clears.BOOT}))


def news(*hardware: str, unit: str = "u", backend: str = "b") -> Changes:
    devices = (Device("d", unit, frozenset(hardware)),) if hardware else ()
    return Changes(backend, {unit: devices}, {})


def test_what_was_said_last_of_each_reason_is_told_in_that_order_and_once() -> None:
    it = EarlySignals()
    begin, end = signal(reason="begin"), signal(reason="end")
    for said in (begin, end, begin):
        it.keep(said, RECORD)
    assert list(it.take(news("pci:b"))) == []
    assert list(it.take(news("pci:a"))) == [(end, RECORD), (begin, RECORD)]
    assert list(it.take(news("pci:a", backend="other"))) == []


def test_a_scan_that_finds_hardware_beside_its_devices_or_depended_on_has_found_it() -> None:
    it = EarlySignals()
    device = Device("d", "u", frozenset({"pci:a"}), depends=frozenset({"pci:up"}))
    beside = Device("e", "u", frozenset({"pci:b"}))
    for name in ("pci:a", "pci:up", "pci:b", "pci:c"):
        it.keep(signal(name), RECORD)
    taken = it.take(Changes("b", {"u": (device,)}, {}, beside={"u": (beside,)}))
    assert {said.hardware for said, _ in taken} == {"pci:a", "pci:up", "pci:b"}


def test_a_flood_about_hardware_that_does_not_exist_leaves_the_last_of_it() -> None:
    it = EarlySignals()
    for number in range(10_000):
        for said in (signal(f"pci:{number}"), signal("pci:a", f"xid-{number}")):
            it.keep(said, RECORD)
    told = list(it.take(news("pci:a", "pci:0", "pci:9999")))
    assert len([said for said, _ in told if said.hardware == "pci:a"]) == 16
    assert [said.hardware for said, _ in told if said.hardware != "pci:a"] == ["pci:9999"]


def test_latches_have_an_end_and_what_is_mild_gives_way() -> None:
    it = Latches()
    assert all(it.take(signal(reason=f"mild-{n}", verdict=Verdict.INFO), RECORD, 1.0) for n in range(32))
    assert not it.take(signal(reason="one more", verdict=Verdict.DEGRADED), RECORD, 1.0)
    assert it.take(signal(reason="bad"), RECORD, 1.0)
    reasons = {latch.signal.reason for latch in it.of("pci:a")}
    assert len(reasons) == 32
    assert "bad" in reasons
    assert "mild-0" not in reasons
    for number in range(1, 32):
        assert it.take(signal(reason=f"bad-{number}"), RECORD, 1.0)
    assert not it.take(signal(reason="too bad"), RECORD, 1.0)


def test_latches_of_more_hardware_than_any_node_has_are_refused() -> None:
    it = Latches()
    for number in range(causes._HARDWARE + 10):
        it.take(signal(f"pci:{number}"), RECORD, 1.0)
    assert len(it.all()) == causes._HARDWARE
    assert it.clear({Clears.BOOT}, "pci:0")
    assert it.take(signal("pci:new"), RECORD, 1.0)
