"""What the design promises ("What it must reach"), figure by figure; each is about the p50, or its ratio to the baseline's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Limit:
    """One of the three bounds is set."""

    unit: str
    p50: float | None = None
    ratio: float | None = None
    """To the plugin on grpcio."""
    bare: float | None = None
    """To the plugin on bare grpclib."""
    missed_because: str = "not known: profile it"
    """What is known to hold it up; shown where it is missed."""

    @property
    def bound(self) -> float:
        return next(it for it in (self.p50, self.ratio, self.bare) if it is not None)

    def __str__(self) -> str:
        if self.p50 is not None:
            return f"<= {self.p50:g} {self.unit}"
        return f"<= {self.ratio:g} x grpcio" if self.ratio is not None else f"<= {self.bare:g} x bare"


_WAKING: Final = (
    "an event wakes the loop, a worker thread and the loop again, 0.1 ms each where cores sleep in between, and runs "
    "code that went cold meanwhile; the baseline is handed its change"
)
_TOKENS: Final = "its slots are placed, compared and encoded one by one, 1.3 us of CPU each when they come back"
_REPLY: Final = (
    "the client and grpclib above HTTP/2 are half of it; the claim is in the state file before the reply, by way of a "
    "thread: two wake-ups"
)
_EACH_DEVICE: Final = "a device, its slot, its places in indexes and its health are values of their own"
_REGISTRATION: Final = "1.4 ms of our CPU and 1.5 ms of the measuring kubelet's go into each registration"
_IMPORTS: Final = "four fifths of it is importing, some 500 modules; `python -m bench.stages` has the rest"
_FIRST_LOOK: Final = (
    "each of 256 VFs costs 0.46 ms of CPU to read, some 35 files; half of the time is imports and registrations"
)
_LIBRARIES: Final = "before the first device the interpreter is 11 MB, the libraries are 23 and our own code is 4"

_API_SERVER: Final = "it is CPU, which other work takes: a third of the loop's is the GET, and the API server answers from the measuring process"

_MASSES: Final = (
    "first look", "allocation", "start with claims", "start without state", "all go", "all come back", "reload",
    "questions", "reload, renamed", "claims end",
)  # fmt: skip

LIMITS: Final[Mapping[tuple[str, str], Limit]] = {
    ("event_to_list", "8"): Limit("ms", bare=1.35, missed_because=_WAKING),
    ("event_to_list", "8 (uevent)"): Limit("ms", bare=1.35, missed_because=_WAKING),
    ("event_to_list", "1,000"): Limit("ms", bare=1.35, missed_because=_WAKING),
    **{
        ("second_event", pause): Limit("ms", bare=1.5, missed_because=_WAKING)
        for pause in ("5 ms later", "30 ms later")
    },
    ("steady_cpu", "1,000 uevents/s"): Limit("%", p50=10.0),
    ("storm_cpu", "100,000 uevents"): Limit("s", p50=3.0),
    ("event_to_list", "10,000"): Limit("ms", p50=6.0),
    ("tokens_to_list", "1,000"): Limit("ms", p50=1.5, missed_because=_TOKENS),
    ("unhealthy_to_list", "1,000"): Limit("ms", p50=2.0, missed_because=_WAKING),
    ("xid_to_list", "1,000"): Limit("ms", p50=5.0),
    ("flip", "1 of 10,000"): Limit("ms", p50=1.0),
    ("prepare", "1"): Limit("ms", p50=5.0, missed_because=_API_SERVER),
    ("prepare", "64"): Limit("ms", p50=100.0, missed_because=_API_SERVER),
    ("flip", "1,000 tokens"): Limit("ms", p50=1.0),
    ("allocate", "1"): Limit("ms", bare=0.75, missed_because=_REPLY),
    ("allocate_growth", "1,000 held more"): Limit("ms", p50=0.1, missed_because="something looks at every claim"),
    ("event_to_list_growth", "1,000 devices more"): Limit(
        "ms", p50=0.05, missed_because="something looks at all devices"
    ),
    ("steady_cpu_growth", "1,000 devices more"): Limit(
        "%", p50=10.0, missed_because="events of many devices are of many units, each of which is read"
    ),
    ("exec_to_registered_growth", "a resource more"): Limit("ms", bare=1.4, missed_because=_REGISTRATION),
    ("kubelet_to_registered_growth", "a resource more"): Limit("ms", bare=1.0, missed_because=_REGISTRATION),
    ("rss_after_restarts_growth", "a resource more"): Limit(
        "MB", p50=0.2, missed_because="a resource has a server and a list"
    ),
    ("allocate_concurrent", "32"): Limit("ms", bare=0.5, missed_because=_REPLY),
    ("prefer", "16"): Limit("ms", p50=2.0),
    ("prefer", "1,000"): Limit("ms", p50=50.0, missed_because="the tables of its groups are joined size by size"),
    ("exec_to_registered", "1"): Limit("ms", p50=160.0, missed_because=_IMPORTS),
    ("exec_to_registered", "1, cold"): Limit("ms", p50=260.0, missed_because=_IMPORTS),
    ("exec_to_registered", "16"): Limit("ms", p50=190.0, missed_because=_IMPORTS),
    ("exec_to_registered", "24, 1,302 devices"): Limit("ms", p50=500.0, missed_because=_FIRST_LOOK),
    ("exec_to_whole", "16"): Limit("ms", p50=500.0, missed_because=_IMPORTS),
    ("kubelet_to_registered", "1"): Limit("ms", p50=10.0),
    ("kubelet_to_registered", "16"): Limit("ms", p50=50.0, missed_because=_REGISTRATION),
    ("kubelet_to_registered", "100"): Limit("ms", p50=250.0, missed_because=_REGISTRATION),
    ("metrics", "1,000"): Limit("ms", p50=20.0),
    ("metrics_hold", "1,000"): Limit("ms", p50=5.0),
    **{("loop_step_max", what): Limit("ms", p50=50.0) for what in _MASSES},
    ("rss", "100 resources, 40 restarts"): Limit("MB", p50=57.0, missed_because=_LIBRARIES),
    ("rss", "100"): Limit("MB", p50=36.0, missed_because=_LIBRARIES),
    ("rss", "1,000 devices more"): Limit("MB", p50=2.0, missed_because=_EACH_DEVICE),
    ("rss", "100, all on"): Limit("MB", p50=48.0),
    ("rss", "24, 1,302 devices"): Limit("MB", p50=52.0),
    ("idle_cpu", "100"): Limit("%", p50=0.3),
    ("idle_cpu", "100 HCAs"): Limit("%", p50=0.3),
}
"""(Figure, size) → its limit."""
