from __future__ import annotations

import pytest

from agent.discovery.backend_answers import NonsenseError, signals
from agent.discovery.records import wants
from backends.base import ANY_SUBSYSTEM, Record, Signal, Verdict, Watches

LINE = Record("kmsg", "b", 1, 1.0, "NVRM: Xid (PCI:0000:3b:00): 79", {"SUBSYSTEM": "pci"})
EVENT = Record("uevent", "b", 1, 1.0, "/devices/pci0", {"SUBSYSTEM": "pci", "ERROR_EVENT": "BEGIN_RECOVERY"})


@pytest.mark.parametrize(
    ("record", "watches", "wanted"),
    [
        (LINE, Watches(kernel_lines=frozenset({"amdgpu", "NVRM: Xid"})), True),
        (LINE, Watches(kernel_lines=frozenset({"amdgpu"})), False),
        (LINE, Watches(frozenset({ANY_SUBSYSTEM}), facts=frozenset({"SUBSYSTEM"})), False),
        (LINE, Watches(), False),
        (EVENT, Watches(frozenset({"pci"}), facts=frozenset({"WEDGED", "ERROR_EVENT"})), True),
        (EVENT, Watches(frozenset({ANY_SUBSYSTEM}), facts=frozenset({"ERROR_EVENT"})), True),
        (EVENT, Watches(frozenset({"drm"}), facts=frozenset({"ERROR_EVENT"})), False),
        (EVENT, Watches(frozenset({"pci"}), facts=frozenset({"WEDGED"})), False),
        (EVENT, Watches(frozenset({"pci"}), kernel_lines=frozenset({"pci0"})), False),
    ],
)
def test_a_backend_gets_the_records_that_it_asked_for(record: Record, watches: Watches, wanted: bool) -> None:
    assert wants(watches, record) is wanted


def test_what_a_record_means_may_be_said_one_by_one_and_is_checked() -> None:
    said = Signal("d", "xid-79", Verdict.NOW, "It fell off the bus.")
    assert signals("signals", iter([said])) == (said,)
    with pytest.raises(NonsenseError, match=r"signals\(\) returned 'more' where a Signal is due"):
        signals("signals", [said, "more"])
