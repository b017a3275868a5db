"""Understands the events about errors of PCI functions: recovery has begun, and how it ended.

An event names the function, but not the backend that has it. So every PCI backend gives the same signal, and health keeps it
once. Before Linux 6.18, and in stable kernels without its fixes, a failure is reported only for the port above, and the
beginning not at all if the function's driver asks for a reset; only probes notice those.
Sources: pci_uevent_ers in drivers/pci/pci-driver.c, drivers/pci/pcie/err.c.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from backends.base import Clears, Record, Signal, Verdict
from backends.linux.pci import functions as pci

FACT: Final = "ERROR_EVENT"
"""The property that makes an event of the subsystem `pci` a record of this (`Watches.facts`)."""

LATCHED: Final = frozenset({Clears.REBIND, Clears.OUR_RESET, Clears.RECOVERED, Clears.BOOT, Clears.OPERATOR})
"""What ends a latched signal about a PCI function: each resets the function, or an administrator says that it is well."""

_FAILURES: Final = {
    "BEGIN_RECOVERY": ("pci-recovery", "has had a PCI Express error and is being recovered"),
    "FAILED_RECOVERY": ("pci-recovery-failed", "could not be recovered from a PCI Express error"),
}


def signals(record: Record) -> Iterator[Signal]:
    """What an event says of a function's recovery; nothing if it is about something else."""
    step, address = record.properties.get(FACT), pci.address_in(record.text)
    if step is None or address is None:
        return
    hardware = f"pci:{address}"
    if step == "SUCCESSFUL_RECOVERY":
        why = f"{address} has been recovered"
        yield Signal(hardware, "pci-recovered", Verdict.FINE, why, clears_on=frozenset({Clears.RECOVERED}))
    elif step in _FAILURES:
        reason, what = _FAILURES[step]
        yield Signal(hardware, reason, Verdict.NOW, f"{address} {what}", clears_on=LATCHED)
