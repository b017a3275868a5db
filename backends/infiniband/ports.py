"""Reads the state of the ports of an RDMA adapter, and decides what it means for the adapter's health.

Most of these files ask the firmware, which may hang. Missing or garbage means unknown; a read that fails is reported.
Files: Documentation/ABI/stable/sysfs-class-infiniband.
"""

from __future__ import annotations

import enum
import errno
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, TypeVar

from msgspec import Struct

from backends.base import Host, HostPath, Measure, Signal, Trend, Verdict
from backends.errors import reason_of
from backends.infiniband.options import InfiniBandOptions
from backends.linux import rdma, sysfs
from backends.linux.rdma import Port
from backends.linux.sysfs import text_in

_GONE: Final = (errno.ENOENT, errno.ENOTDIR, errno.ENODEV)  # there is none, or it is being removed
_ENUM: Final = re.compile(rb"([0-9]{1,2})(?::|$)")
_RATE: Final = re.compile(rb"([0-9]{1,6})(\.[0-9])? Gb/sec(?: \(([0-9]{1,2})X)?")
_LID: Final = re.compile(rb"0x([0-9a-f]{1,8})", re.IGNORECASE)
_COUNT: Final = re.compile(rb"[0-9]{1,20}")


_Kind = TypeVar("_Kind", bound=enum.IntEnum)


class State(enum.IntEnum):
    """The logical state (enum ib_port_state in include/rdma/ib_verbs.h)."""

    NOP = 0
    DOWN = 1
    INIT = 2
    ARMED = 3
    ACTIVE = 4
    ACTIVE_DEFER = 5


class Physical(enum.IntEnum):
    """The physical state (enum ib_port_phys_state)."""

    SLEEP = 1
    POLLING = 2
    DISABLED = 3
    TRAINING = 4
    LINK_UP = 5
    LINK_ERROR_RECOVERY = 6
    PHY_TEST = 7


class PortState(Struct, frozen=True):
    """The state of a port, as one look found it; None is what is not known."""

    port: Port
    state: State | None = None
    physical: Physical | None = None
    lid: int | None = None
    """The address that the subnet manager assigns; 0 until then."""
    rate: int | None = None
    """Tenths of Gb/s."""
    lanes: int | None = None
    counters: Mapping[str, int] = {}
    fault: str = ""
    """Why the state of an existing port cannot be read."""

    @property
    def is_active(self) -> bool:
        """Whether it carries data."""
        return self.state in (State.ACTIVE, State.ACTIVE_DEFER)


def read(host: Host, port: Port, counters: Iterable[str] = ()) -> PortState:
    """The state of a port; rate and counters only while it is active, since each file may be a trip to the firmware.

    Counters that are not there, "N/A (no PMA)" or garbage are left out.
    """
    try:
        with sysfs.opened_directory(host.spell(_directory(port))) as directory:
            return _read(directory, port, counters)
    except OSError as error:
        gone = error.errno in _GONE
        return PortState(port, fault="" if gone else reason_of(error))


def glance(host: Host, port: Port) -> bytes | int | None:
    """The text of the port's state, or the error of reading it: one trip to the firmware."""
    try:
        return sysfs.read_bytes(host, _directory(port) / "state")
    except OSError as error:
        return error.errno


def _directory(port: Port) -> HostPath:
    return rdma.INFINIBAND / f"{port.hca}/ports/{port.number}"


def _read(directory: int, port: Port, counters: Iterable[str]) -> PortState:
    """The state of a port in this directory. Raises OSError if it cannot be read."""
    state = _member(State, sysfs.read_in(directory, "state"))
    physical = _member(Physical, text_in(directory, "phys_state"))
    lid = _matched(_LID, text_in(directory, "lid")) if port.link_layer == "InfiniBand" else None
    if state is not State.ACTIVE:
        return PortState(port, state, physical, lid)
    rate, lanes = _rate(text_in(directory, "rate"))
    counts = {name: text_in(directory, f"counters/{name}") or b"" for name in counters}
    return PortState(
        port, state, physical, lid, rate, lanes, {n: int(c) for n, c in counts.items() if _COUNT.fullmatch(c)}
    )


def _member(kind: type[_Kind], said: bytes | None) -> _Kind | None:
    found = _ENUM.match(said or b"")
    try:
        return kind(int(found[1])) if found else None
    except ValueError:
        return None


def _matched(pattern: re.Pattern[bytes], said: bytes | None) -> int | None:
    found = pattern.fullmatch(said or b"")
    return int(found[1], 16) if found else None


def _rate(said: bytes | None) -> tuple[int | None, int | None]:
    """Tenths of Gb/s, and lanes: of `2.5 Gb/sec (1X)` and `100 Gb/sec (4X EDR)`."""
    found = _RATE.match(said or b"")
    if found is None:
        return None, None
    return int(found[1]) * 10 + int((found[2] or b".0")[1:]), int(found[3]) if found[3] else None


# --- what it means ---


ERROR_LASTS: Final = 60.0
"""Seconds for which a counted error still counts."""

_DARK: Final[Mapping[Physical | None, str]] = {
    Physical.SLEEP: "asleep",
    Physical.POLLING: "polling: no cable, or nothing at its other end",
    Physical.DISABLED: "disabled",
}


class _Fault(Struct, frozen=True):
    """Why a port carries no data."""

    reason: str
    message: str
    after: float
    """Seconds before it makes the adapter unhealthy."""


def signals(hardware: str, states: Sequence[PortState], options: InfiniBandOptions) -> Iterator[Signal]:
    """What is wrong with an adapter that has these ports."""
    wanted = options.ports
    named = states if isinstance(wanted, str) else [state for state in states if state.port.number in wanted]
    faults = [fault for state in named if (fault := _fault(state, options)) is not None]
    if faults and (wanted != "any" or len(faults) == len(named)):
        # any of several failed ports may come back first: the longest delay counts
        patience = max(fault.after for fault in faults) if wanted == "any" else 0.0
        for fault in faults:
            after = max(fault.after, patience)
            yield Signal(
                hardware, fault.reason, Verdict.DELAYED, fault.message, after=after, recover_after=options.up_after
            )
    else:
        for fault in faults:
            yield Signal(hardware, fault.reason, Verdict.DEGRADED, f"{fault.message}; another port is up")
    for state in named:
        yield from _weaknesses(hardware, state, options)


def _fault(state: PortState, options: InfiniBandOptions) -> _Fault | None:
    """Why the port carries no data; None if it does, or if that is not known."""
    port = state.port
    if state.fault:
        return _Fault("state-unreadable", f"the state of {port} cannot be read: {state.fault}", options.down_after)
    dark = _DARK.get(state.physical)
    if state.state is State.DOWN or (dark and not state.is_active):
        return _Fault("port-down", f"{port} is down" + (f" ({dark})" if dark else ""), options.down_after)
    if port.link_layer != "InfiniBand":
        return None
    if state.state in (State.INIT, State.ARMED):
        why = f"{port} has a link, but no subnet manager has made it active"
        return _Fault("no-subnet-manager", why, options.subnet_manager_grace)
    if state.is_active and state.lid == 0:
        why = f"{port} is active without a LID: no subnet manager has given it one"
        return _Fault("no-subnet-manager", why, options.subnet_manager_grace)
    return None


def _weaknesses(hardware: str, state: PortState, options: InfiniBandOptions) -> Iterator[Signal]:
    """What makes a working port worse than it could be. A message holds no number, since each change of it is told."""
    port = state.port
    if state.physical is Physical.LINK_ERROR_RECOVERY:
        why = f"{port} is recovering from errors of its link"
        yield Signal(hardware, "link-error-recovery", Verdict.DEGRADED, why, recover_after=options.up_after)
    best = (
        ("rate-reduced", f"{port} is slower than it has been", "rate", state.rate),
        ("width-reduced", f"{port} has fewer lanes than it has had", "width", state.lanes),
    )
    for reason, why, name, value in best:
        if value is not None:
            yield _measured(hardware, reason, why, Measure(f"{port} {name}", value, Trend.BELOW_BEST), options.up_after)
    for name, count in state.counters.items():
        why = f"{port} counts errors ({name} rises)"
        yield _measured(hardware, "errors-rise", why, Measure(f"{port} {name}", count, Trend.RISES), ERROR_LASTS)


def _measured(hardware: str, reason: str, why: str, measure: Measure, recover_after: float) -> Signal:
    return Signal(hardware, reason, Verdict.DEGRADED, why, recover_after=recover_after, measure=measure)


def missing(ports: Iterable[int], options: InfiniBandOptions) -> list[int]:
    """The ports that the options ask for and the adapter does not have."""
    return [] if isinstance(options.ports, str) else sorted(set(options.ports) - set(ports))
