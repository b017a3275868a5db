"""Decides what the state of an adapter's ports means for its health; pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from msgspec import Struct

from backends.base import Measure, Signal, Trend, Verdict
from backends.infiniband.options import InfiniBandOptions
from backends.infiniband.port_state import Physical, PortState, State

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
