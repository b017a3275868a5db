from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from msgspec.structs import replace

from agent.discovery.backend_answers import NonsenseError
from agent.discovery.backend_answers import units as checked_units
from agent.discovery.unit_walk import Seen, Walk, probe, walk
from agent.runtime import garbage
from backends.base import Device, Discovery, HostPath, Link, Measure, Node, Signal, Trend, Verdict
from backends.interface.known_devices import Known
from tests.fakes import Fake, device

D = device("d", unit="u")


def walked(backend: Fake, seen: Seen | None = None, skip: frozenset[str] = frozenset()) -> Walk:
    progress = Walk()
    walk(backend, None, skip, seen or Seen(), progress, time.monotonic)
    return progress


def probed(backend: Fake, seen: Seen, progress: Walk | None = None, *, at_a_glance: bool = False) -> Walk:
    progress = progress or Walk()
    probe(backend, frozenset(seen.devices), seen, progress, time.monotonic, lambda: False, at_a_glance=at_a_glance)
    return progress


def test_every_unit_is_looked_at_in_order_with_its_devices_and_signals() -> None:
    backend = Fake()
    backend.hardware = {"v": (), "u": (D,)}
    said = Signal("d", "sick", Verdict.NOW, "")
    backend.seen = lambda found: [said]
    progress = walked(backend)
    assert backend.looked == ["u", "v"]
    assert progress.listed == frozenset("uv")
    assert progress.looks["u"].discovery.devices == (D,)
    assert progress.looks["u"].signals == (said,)
    assert progress.failures == {}


def test_a_look_knows_whether_the_devices_are_others_than_before() -> None:
    backend = Fake()
    backend.hardware = {"u": (replace(D),)}
    assert walked(backend).looks["u"].changed
    assert not walked(backend, Seen(Known({"u": (D,)}))).looks["u"].changed
    assert not walked(Fake()).looks


def test_a_look_knows_whether_the_links_are_others_than_before() -> None:
    link = Link("d", "e", 1)
    backend = Fake()
    backend.hardware = {"u": lambda: Discovery((D,), (link,))}
    before = Known({"u": (D,)})
    assert walked(backend, Seen(before)).looks["u"].links_changed
    assert not walked(backend, Seen(before, {"u": (replace(link),)})).looks["u"].links_changed
    assert not walked(backend, Seen(before, {"u": (link,)})).looks["u"].changed


# --- probes alone ---

SICK = Signal("d", "sick", Verdict.NOW, "It is sick.")
RISING = Signal("d", "errors", Verdict.DEGRADED, "It errs.", measure=Measure("errors", 7, Trend.RISES))
TWO = Known({"u": (D,), "v": (replace(D, key="e", unit="v"),)})


def test_a_probe_asks_for_the_health_of_known_devices_and_for_nothing_else() -> None:
    backend, asked = Fake(), []
    backend.listed = lambda: pytest.fail("it was asked to list")

    def seen(found: Device) -> list[Signal]:
        asked.append(found.key)
        return [SICK] if found.key == "d" else []

    backend.seen = seen
    progress = probed(backend, Seen(TWO))
    assert asked == ["d", "e"]
    assert backend.looked == []
    assert progress.probes == {"u": (SICK,), "v": None}
    assert progress.listed is None
    assert progress.looks == {}


@pytest.mark.parametrize(
    ("before", "now", "told"),
    [
        ((), (), None),
        ((SICK,), (replace(SICK),), None),
        ((), (SICK,), (SICK,)),
        ((SICK,), (), ()),
        ((SICK,), (replace(SICK, message="It is dead."),), (replace(SICK, message="It is dead."),)),
        ((RISING,), (replace(RISING),), (RISING,)),  # that it did not rise matters
        ((RISING,), (), ()),
    ],
)
def test_a_probe_tells_what_is_new_and_every_measure(
    before: tuple[Signal, ...], now: tuple[Signal, ...], told: tuple[Signal, ...] | None
) -> None:
    backend = Fake()
    backend.seen = lambda found: now
    assert probed(backend, Seen(Known({"u": (D,)}), signals={"u": before})).probes == {"u": told}


@pytest.mark.parametrize("error", [OSError("unreadable"), SystemExit(1)])
def test_a_probe_that_raises_is_the_failure_of_its_unit(error: BaseException) -> None:
    def fail(found: Device) -> list[Signal]:
        if found.key == "d":
            raise error
        return ["it is fine"] if found.key == "f" else []  # type: ignore[list-item]

    backend = Fake()
    backend.seen = fail
    progress = probed(backend, Seen(Known({**TWO, "w": (replace(D, key="f", unit="w"),)})))
    assert progress.failures["u"] is error
    assert isinstance(progress.failures["w"], NonsenseError)
    assert progress.probes == {"v": None}


class Glanced(Fake):
    """A backend of which a glance shows this."""

    def __init__(self) -> None:
        super().__init__()
        self.shows: object = "well"

    def glance(self, device: Device) -> object:
        if isinstance(self.shows, Exception):
            raise self.shows
        return f"{device.key} is {self.shows}"


@pytest.mark.parametrize(("shows", "asked"), [("well", []), ("ill", ["d"])])
def test_a_device_is_probed_only_where_a_glance_shows_something_new(shows: str, asked: list[str]) -> None:
    backend, seen = Glanced(), Seen(Known({"u": (D,)}), glances={"u": ("d is well",)})
    backend.shows, backend.seen = shows, lambda found: [RISING]
    progress = probed(backend, seen, at_a_glance=True)
    assert backend.probed == asked
    assert progress.probes == {"u": (RISING,) if asked else None}
    assert progress.glances == ({"u": ("d is ill",)} if asked else {})


@pytest.mark.parametrize(
    ("verdict", "asked"),
    [(Verdict.NOW, ["d"]), (Verdict.DELAYED, ["d"]), (Verdict.DEGRADED, []), (Verdict.INFO, []), (None, [])],
)
def test_a_device_that_is_ill_is_probed_whatever_a_glance_shows(verdict: Verdict | None, asked: list[str]) -> None:
    said = replace(SICK, verdict=verdict) if verdict else replace(RISING, verdict=Verdict.NOW)
    backend, seen = Glanced(), Seen(Known({"u": (D,)}), signals={"u": (said,)}, glances={"u": ("d is well",)})
    probed(backend, seen, at_a_glance=True)
    assert backend.probed == asked


def test_a_probe_that_is_due_is_made_whatever_a_glance_shows() -> None:
    backend, seen = Glanced(), Seen(Known({"u": (D,)}), glances={"u": ("d is well",)})
    assert probed(backend, seen).glances == {"u": ("d is well",)}
    assert backend.probed == ["d"]


def test_a_backend_without_glances_is_probed_each_time() -> None:
    backend, seen = Fake(), Seen(Known({"u": (D,)}))
    for _ in range(2):
        seen.glances.update(probed(backend, seen, at_a_glance=True).glances)
    assert backend.probed == ["d", "d"]


def test_a_unit_that_was_read_is_probed_at_the_next_glance() -> None:
    """Its health may have changed back since."""
    backend, seen = Glanced(), Seen(Known({"u": (D,)}), glances={"u": ("d is well",), "v": ()})
    backend.hardware, backend.shows = {"u": (D,)}, "ill"
    seen.replace(walked(backend, seen).looks, {"v"})
    backend.probed.clear()
    backend.shows = "well"
    assert probed(backend, seen, at_a_glance=True).glances == {"u": ("d is well",)}
    assert backend.probed == ["d"]


def test_health_that_changes_while_it_is_probed_shows_at_the_next_glance() -> None:
    backend, seen = Glanced(), Seen(Known({"u": (D,)}))

    def change(_: Device) -> list[Signal]:
        backend.shows = "ill"
        return []

    backend.seen = change
    assert probed(backend, seen).glances == {"u": ("d is well",)}


@pytest.mark.parametrize("fails", ["glance", "probe"])
def test_a_glance_that_led_to_no_probe_is_not_remembered(fails: str) -> None:
    backend, error = Glanced(), OSError("unreadable")

    def raise_it(_: Device) -> list[Signal]:
        raise error

    if fails == "glance":
        backend.shows = error
    else:
        backend.seen = raise_it
    progress = probed(backend, Seen(Known({"u": (D,)})), at_a_glance=True)
    assert progress.failures == {"u": error}
    assert (progress.glances, progress.probes) == ({}, {})


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_probe_that_is_interrupted_or_given_up_ends_with_the_unit_it_is_at(interrupted: bool) -> None:
    progress = Walk(abandoned=not interrupted)
    call = Fake(), frozenset(TWO), Seen(TWO), progress, time.monotonic, lambda: interrupted
    probe(*call, at_a_glance=False)
    assert progress.probes == {"u": None}


def test_what_is_beside_is_of_its_unit_and_goes_with_it() -> None:
    seen, backend = Seen(), Fake()
    backend.hardware = {"u": (D,)}
    progress = walked(backend, seen)
    (look,) = progress.looks.values()
    other = replace(D, key="beside")
    seen.replace({"u": replace(look, discovery=replace(look.discovery, beside=(other,)))}, set())
    assert seen.selectable() == [D, other]
    seen.replace({}, {"u"})
    assert seen.selectable() == []


def test_hardware_that_is_beside_what_can_be_had_or_depended_on_is_seen() -> None:
    found, beside = (
        replace(D, depends=frozenset({"up"})),
        replace(D, hardware=frozenset({"b"}), depends=frozenset({"c"})),
    )
    seen = Seen(Known({"u": (found,)}), beside={"u": (beside,)})
    assert [name for name in ("d", "up", "b", "c", "e") if seen.has(name)] == ["d", "up", "b", "c"]
    seen.replace({}, {"u"})
    assert not any(map(seen.has, ("d", "up", "b", "c")))


def test_units_to_be_skipped_are_listed_and_not_read() -> None:
    backend = Fake()
    backend.hardware = {"u": (D,), "v": ()}
    progress = walked(backend, skip=frozenset("u"))
    assert progress.listed == frozenset("uv")
    assert backend.looked == ["v"]


def test_a_walk_that_was_abandoned_looks_no_further() -> None:
    backend, progress = Fake(), Walk()

    def abandon() -> Discovery:
        progress.abandoned = True
        return Discovery()

    backend.hardware = {"u": abandon, "v": ()}
    walk(backend, None, frozenset(), Seen(), progress, time.monotonic)
    assert backend.looked == ["u"]


@pytest.mark.parametrize("error", [OSError("unreadable"), SystemExit(1), KeyboardInterrupt(), StopIteration()])
def test_whatever_a_unit_raises_is_its_own_failure(error: BaseException) -> None:
    def fail() -> Discovery:
        raise error

    backend = Fake()
    backend.hardware = {"u": fail, "v": ()}
    progress = walked(backend)
    assert progress.failures == {"u": error}
    assert progress.looks.keys() == {"v"}


NONSENSE: list[Any] = [
    None,
    [D],
    Discovery(None),  # type: ignore[arg-type]
    Discovery([D]),  # type: ignore[arg-type]
    Discovery(("device",)),  # type: ignore[arg-type]
    Discovery(problems=("problem",)),  # type: ignore[arg-type]
    Discovery(links=[Link("d", "e", 1)]),  # type: ignore[arg-type]
    Discovery(links=("link",)),  # type: ignore[arg-type]
    Discovery(links=(Link("", "e", 1),)),
    Discovery(links=(Link("d", None, 1),)),  # type: ignore[arg-type]
    Discovery(links=(Link("d", "e", "NV4"),)),  # type: ignore[arg-type]
    Discovery((replace(D, unit="another"),)),
    Discovery((replace(D, key=""),)),
    Discovery((replace(D, key=7),)),
    Discovery((replace(D, hardware={"d"}),)),
    Discovery((replace(D, hardware=frozenset({7})),)),
    Discovery((replace(D, depends=["p"]),)),
    Discovery((replace(D, identity=None),)),
    Discovery((replace(D, bindings="driver"),)),
    Discovery((replace(D, bindings={"d": 7}),)),
    Discovery((replace(D, bindings={"d": ""}),)),
    Discovery((replace(D, resource=7),)),
    Discovery((replace(D, numa_node=-1),)),
    Discovery((replace(D, ancestry=["pci0000:00"]),)),
    Discovery((replace(D, numa_node="0"),)),
    Discovery((replace(D, attributes=None),)),
    Discovery((replace(D, attributes={"vendor": "10de"}),)),
    Discovery((replace(D, hardware=frozenset()),)),
    Discovery((replace(D, exclusive={"d"}),)),
    Discovery((replace(D, nodes=["/dev/d"]),)),
    Discovery((replace(D, nodes=("/dev/d",)),)),
    Discovery((replace(D, nodes=(Node(HostPath("dev/d"), "/dev/d", "rw"),)),)),
    Discovery((replace(D, nodes=(Node(HostPath("/dev/d"), "/dev/d", None),)),)),  # type: ignore[arg-type]
    Discovery((replace(D, mounts=("/etc/d",)),)),
]


@pytest.mark.parametrize("answer", NONSENSE, ids=range(len(NONSENSE)))
def test_nonsense_is_blamed_on_the_unit_it_came_from(answer: Any) -> None:
    backend = Fake()
    backend.hardware = {"u": lambda: answer, "v": ()}
    progress = walked(backend)
    assert isinstance(progress.failures["u"], NonsenseError)
    assert progress.looks.keys() == {"v"}


def test_a_probe_that_says_no_signal_is_blamed_on_the_unit() -> None:
    backend = Fake()
    backend.hardware = {"u": (D,)}
    backend.seen = lambda found: ["it is fine"]
    assert isinstance(walked(backend).failures["u"], NonsenseError)


def broken() -> Iterator[str]:
    yield "u"
    raise OSError("unreadable")


@pytest.mark.parametrize("units", [None, "u", ["u", ""], ["u", 7], 7])
def test_nonsense_instead_of_units_ends_the_walk(units: Any) -> None:
    backend = Fake()
    backend.listed = lambda: units
    with pytest.raises((NonsenseError, TypeError)):
        walked(backend)
    backend.listed = broken
    with pytest.raises(OSError, match="unreadable"):
        walked(backend)


def test_units_may_be_any_iterable_and_say_a_name_twice() -> None:
    assert checked_units(iter(["u", "v", "u"])) == {"u", "v"}


def test_of_thousands_of_new_devices_the_garbage_collector_sees_the_newest(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden: list[int] = []
    backend, seen = Fake(), Seen()
    monkeypatch.setattr(garbage, "hide", lambda: hidden.append(len(backend.looked)))
    backend.hardware = {f"u{n}": [device(f"u{n}-{k}", unit=f"u{n}") for k in range(400)] for n in range(8)}
    seen.replace(walked(backend, seen).looks, set())
    assert hidden == [3, 6]
    walked(backend, seen)
    assert hidden == [3, 6], "these are not new"
