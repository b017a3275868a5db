"""Checks the health of a PCI function by sysfs (bus, power, BARs, error counters, link, driver) and by events about its recovery.

`probe` of every PCI backend asks for `signals`, for every function each half minute; a function takes a tenth of a
millisecond. Missing, unreadable or garbage means unknown, and is no signal. Files that would wake a sleeping function are not
read. Files: Documentation/ABI/testing/sysfs-bus-pci, sysfs-bus-pci-devices-aer_stats, sysfs-devices-power.

An event of a recovery names the function, but not the backend that has it. So every PCI backend gives the same signal
(`recovery_signals`), and health keeps it once. Before Linux 6.18, and in stable kernels without its fixes, a failure is
reported only for the port above, and the beginning not at all if the function's driver asks for a reset; only probes notice
those. With those fixes, every recovery fails below a port where one driver has no `error_detected` (NVIDIA's from 570 on,
snd_hda_intel), also from a non-fatal error that did no harm: the event does not say which it was, and counts until somebody
looks. Sources: pci_uevent_ers in drivers/pci/pci-driver.c, report_error_detected in drivers/pci/pcie/err.c.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Collection, Iterator
from contextlib import suppress
from typing import Final

from backends.base import Clears, Host, Measure, Record, Signal, Trend, Verdict
from backends.linux import pci, sysfs
from backends.linux.sysfs import text_in

HEADER_BYTES: Final = 64
"""The part of the configuration space that every user may read."""

ERROR_LASTS: Final = 60.0
"""Seconds for which a counted error still counts: two of the default probes."""

_CLASS_AT: Final = 8  # class and revision (PCI Local Bus Specification, 6.1)
_AWAKE: Final = (None, b"active", b"unsupported")
_MOST_LANES: Final = 32  # PCI Express Base Specification, 7.5.3.6; a kernel that does not know says 0 or 255
_BARS: Final = 6  # then come the ROM, which mostly has no address, and the BARs of virtual functions
_MEMORY: Final = 0x200  # IORESOURCE_MEM in include/linux/ioport.h; ports are often left out, and hardly ever needed
_UNSET: Final = 0x20000000  # IORESOURCE_UNSET
_RANGE: Final = re.compile(rb"0x([0-9a-f]{1,16}) 0x([0-9a-f]{1,16}) 0x([0-9a-f]{1,16})")
_TOTAL: Final = re.compile(rb"TOTAL_ERR_\w+ ([0-9]{1,18})")
_SPEED: Final = re.compile(rb"([0-9]{1,3}(?:\.[0-9])?) GT/s")


def signals(host: Host, address: str, *, has_link: bool = True) -> Iterator[Signal]:
    """What is wrong with the function; nothing if it is gone. The link of a virtual one is its physical one's."""
    with suppress(OSError), sysfs.opened_directory(f"{host.sys}/bus/pci/devices/{address}") as directory:
        yield from _signals(directory, f"pci:{address}", address, has_link=has_link)


def _signals(directory: int, hardware: str, address: str, *, has_link: bool) -> Iterator[Signal]:
    yield from _errors(directory, hardware, address)
    if text_in(directory, "power_state") == b"error":
        yield Signal(hardware, "power-error", Verdict.NOW, f"{address} cannot be powered: its power_state is error")
    if text_in(directory, "broken_parity_status") == b"1":
        yield Signal(hardware, "broken-parity", Verdict.DEGRADED, f"{address} is marked as giving parity errors")
    if (bar := _bar_without_address(text_in(directory, "resource"))) is not None:
        why = f"BAR {bar} of {address} has no address: the firmware or the kernel found no room for it"
        yield Signal(hardware, "bar-unassigned", Verdict.NOW, why)
    if text_in(directory, "power/runtime_status") not in _AWAKE:
        return
    if _is_off_bus(directory):
        why = f"{address} has fallen off the bus: its configuration space reads 0xff throughout"
        yield Signal(hardware, "off-bus", Verdict.NOW, why)
        return  # its link reads the same
    if has_link:
        yield from _link(directory, hardware, address)


def driver_signals(host: Host, address: str, expected: Collection[str]) -> Iterator[Signal]:
    """A signal if the function is not bound to one of these drivers; nothing if it is gone or cannot be read."""
    directory = f"{host.sys}/bus/pci/devices/{address}"
    try:
        driver = posixpath.basename(os.readlink(f"{directory}/driver"))  # noqa: PTH115  # a name is all we want
    except FileNotFoundError:
        if os.path.isdir(directory):  # noqa: PTH112  # Path costs ten times as much
            yield Signal(f"pci:{address}", "driver-unbound", Verdict.NOW, f"{address} has lost its driver")
        return
    except OSError:
        return
    if driver not in expected:
        why = f"{address} is bound to {driver}, not to {' or '.join(sorted(expected))}"
        yield Signal(f"pci:{address}", "wrong-driver", Verdict.NOW, why)


# --- one reading each ---


def _errors(directory: int, hardware: str, address: str) -> Iterator[Signal]:
    """The uncorrectable errors that were counted since boot (Advanced Error Reporting)."""
    for kind, verdict, what in (("fatal", Verdict.NOW, "fatal"), ("nonfatal", Verdict.DEGRADED, "non-fatal")):
        if (count := _total(text_in(directory, f"aer_dev_{kind}"))) is not None:
            yield Signal(
                hardware,
                f"aer-{kind}",
                verdict,
                f"{address} reports {what} PCI Express errors (aer_dev_{kind} rises)",
                recover_after=ERROR_LASTS,
                measure=Measure(f"{address} aer_dev_{kind}", count, Trend.RISES),
            )


def _link(directory: int, hardware: str, address: str) -> Iterator[Signal]:
    """Signals if the link is narrower or slower than both ends allow. The upstream end is the directory above."""
    width = _lanes(text_in(directory, "current_link_width"))
    ends = (_lanes(text_in(directory, f"{where}max_link_width")) for where in ("", "../"))
    most = min((lanes for lanes in ends if lanes is not None), default=None)
    if width is not None and most is not None and width < most:
        why = f"the link of {address} has {width} lanes, and could have {most}"
        yield Signal(hardware, "link-width", Verdict.DEGRADED, why)
    speed = _transfers(text_in(directory, "current_link_speed"))
    rates = (_transfers(text_in(directory, f"{where}max_link_speed")) for where in ("", "../"))
    fastest = min((rate for rate in rates if rate is not None), default=None)
    if speed is not None and fastest is not None and speed < fastest:
        why = f"the link of {address} is slower than it could be, as it is when little is to be done"
        yield Signal(hardware, "link-speed", Verdict.INFO, why)


def _bar_without_address(said: bytes | None) -> int | None:
    """The first memory BAR that has a size but no address; each line has start, end and flags."""
    for number, line in enumerate((said or b"").splitlines()[:_BARS]):
        if (found := _RANGE.fullmatch(line)) is None:
            return None
        start, end, flags = (int(part, 16) for part in found.groups())
        if flags & _MEMORY and (flags & _UNSET or start == 0 < end):
            return number
    return None


def _total(said: bytes | None) -> int | None:
    """The total in the last line of one of AER's counter files."""
    *_, last = (said or b"").splitlines() or (b"",)
    found = _TOTAL.fullmatch(last)
    return int(found[1]) if found else None


def _lanes(said: bytes | None) -> int | None:
    if said is None or not said.isdigit() or len(said) > 2:
        return None
    return lanes if 0 < (lanes := int(said)) <= _MOST_LANES else None


def _transfers(said: bytes | None) -> float | None:
    """GT/s; of `16.0 GT/s PCIe`, and of `8 GT/s` as kernels before 5.7 wrote it."""
    found = _SPEED.match(said or b"")
    return float(found[1]) if found else None


def _is_off_bus(directory: int) -> bool:
    """Whether a function's header reads 0xff throughout. In a virtual function only vendor and device do so by specification.

    The class is read first: every four bytes are a trip to the hardware, 1 µs long, and 17 µs in a virtual machine.
    """
    try:
        config = sysfs.open_in(directory, "config")
    except OSError:
        return False
    try:
        hollow = os.pread(config, 4, _CLASS_AT) == b"\xff" * 4
        return hollow and os.pread(config, HEADER_BYTES, 0) == b"\xff" * HEADER_BYTES
    except OSError:
        return False
    finally:
        os.close(config)


# --- events about a recovery ---


FACT: Final = "ERROR_EVENT"
"""The property that makes an event of the subsystem `pci` a record of this (`Watches.facts`)."""

LATCHED: Final = frozenset({Clears.REBIND, Clears.OUR_RESET, Clears.RECOVERED, Clears.BOOT, Clears.OPERATOR})
"""What ends a latched signal about a PCI function: it was reset, its driver says that it is well, or an administrator does."""

_FAILURES: Final = {
    "BEGIN_RECOVERY": ("pci-recovery", "has had a PCI Express error and is being recovered"),
    "FAILED_RECOVERY": ("pci-recovery-failed", "could not be recovered from a PCI Express error"),
}


def recovery_signals(record: Record) -> Iterator[Signal]:
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
