from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from agent.discovery.backend_answers import NonsenseError
from agent.discovery.backend_answers import units as checked_units
from agent.discovery.reading import NOTHING, Job, Reads, UnitState, probe, read
from agent.runtime import process
from agent.runtime.workers import Workers
from backends.base import Device, Discovery, HostPath, Link, Measure, Node, Signal, Trend, Verdict
from tests.discovery.test_discoverer import NEVER, Eyes, looking
from tests.fakes import KIND, Fake, device

D = device("d", unit="u")
KNOWN = UnitState((D,))


def found(backend: Fake, before: UnitState = NOTHING) -> UnitState:
    return read(backend, "u", before)


def probed(backend: Fake, before: UnitState = KNOWN, *, at_a_glance: bool = False) -> UnitState:
    return probe(backend, before, at_a_glance=at_a_glance)


async def run(
    units: str, do: Callable[[str], UnitState], stop: Callable[[], bool] = lambda: False
) -> tuple[dict[str, Job[UnitState]], Sequence[str]]:
    """What a thread has done of these units, and those that it left out."""
    workers = Workers(KIND)
    reads = Reads(workers, NEVER, time.monotonic, lambda job: pytest.fail(f"{job.unit} hangs"))
    done, left = await reads.run([Job(unit) for unit in units], do, stop)
    workers.close()
    return {job.unit: job for job in done}, [job.unit for job in left]


def test_a_unit_that_is_read_shows_its_devices_and_what_their_probes_say() -> None:
    backend = Fake()
    backend.hardware = {"u": (D,)}
    backend.seen = lambda found: [SICK]
    assert found(backend) == UnitState((D,), signals=(SICK,))


def test_what_is_equal_to_what_was_known_is_the_same_object() -> None:
    """By that what differs is told, and memory has it once."""
    link = Link("d", "e", 1)
    backend = Fake()
    backend.hardware = {"u": lambda: Discovery((replace(D),), (replace(link),), beside=(replace(D),))}
    first = found(backend)
    assert (first.devices, first.links, first.beside) == ((D,), (link,), (D,))
    again = found(backend, first)
    assert again.devices is first.devices
    assert again.beside is first.beside
    assert again.links is first.links
    backend.hardware = {"u": lambda: Discovery((replace(D, identity="another"),), (replace(link, weight=2),))}
    other = found(backend, first)
    assert (other.devices, other.links) == ((replace(D, identity="another"),), (Link("d", "e", 2),))


# --- probes alone ---

SICK = Signal("d", "sick", Verdict.NOW, "It is sick.")
RISING = Signal("d", "errors", Verdict.DEGRADED, "It errs.", measure=Measure("errors", 7, Trend.RISES))


def test_a_probe_asks_for_the_health_of_known_devices_and_for_nothing_else() -> None:
    backend = Fake()
    backend.listed = lambda: pytest.fail("it was asked to list")
    backend.seen = lambda found: [SICK] if found.key == "d" else []
    two = UnitState((D, replace(D, key="e")))
    assert probed(backend, two).signals == (SICK,)
    assert (backend.probed, backend.looked) == (["d", "e"], [])


@pytest.mark.parametrize(
    ("before", "now", "is_new"),
    [
        ((), (), False),
        ((SICK,), (replace(SICK),), False),
        ((), (SICK,), True),
        ((SICK,), (), True),
        ((SICK,), (replace(SICK, message="It is dead."),), True),
        ((RISING,), (replace(RISING),), True),  # that it did not rise matters
        ((RISING,), (), True),
    ],
)
def test_a_probe_tells_what_is_new_and_every_measure(
    before: tuple[Signal, ...], now: tuple[Signal, ...], is_new: bool
) -> None:
    backend, known = Fake(), replace(KNOWN, signals=before)
    backend.seen = lambda found: now
    after = probed(backend, known)
    assert after.signals == now
    assert (after.signals is not known.signals) is is_new


class Glanced(Fake):
    """A backend of which a glance shows this."""

    def __init__(self) -> None:
        super().__init__()
        self.shows: object = "well"

    def glance(self, device: Device) -> object:
        if isinstance(self.shows, Exception):
            raise self.shows
        return f"{device.key} is {self.shows}"


WELL = replace(KNOWN, glance=("d is well",))


@pytest.mark.parametrize(("shows", "asked"), [("well", []), ("ill", ["d"])])
def test_a_device_is_probed_only_where_a_glance_shows_something_new(shows: str, asked: list[str]) -> None:
    backend = Glanced()
    backend.shows, backend.seen = shows, lambda found: [RISING]
    after = probed(backend, WELL, at_a_glance=True)
    assert backend.probed == asked
    assert after == (replace(WELL, signals=(RISING,), glance=("d is ill",)) if asked else WELL)


@pytest.mark.parametrize(
    ("verdict", "asked"),
    [(Verdict.NOW, ["d"]), (Verdict.DELAYED, ["d"]), (Verdict.DEGRADED, []), (Verdict.INFO, []), (None, [])],
)
def test_a_device_that_is_ill_is_probed_whatever_a_glance_shows(verdict: Verdict | None, asked: list[str]) -> None:
    said = replace(SICK, verdict=verdict) if verdict else replace(RISING, verdict=Verdict.NOW)
    backend = Glanced()
    probed(backend, replace(WELL, signals=(said,)), at_a_glance=True)
    assert backend.probed == asked


def test_a_probe_that_is_due_is_made_whatever_a_glance_shows() -> None:
    backend = Glanced()
    assert probed(backend, WELL).glance == ("d is well",)
    assert backend.probed == ["d"]


def test_a_backend_without_glances_is_probed_each_time() -> None:
    backend = Fake()
    probed(backend, probed(backend, at_a_glance=True), at_a_glance=True)
    assert backend.probed == ["d", "d"]


def test_a_unit_that_was_read_is_probed_at_the_next_glance() -> None:
    """Its health may have changed back since."""
    backend = Glanced()
    backend.hardware, backend.shows = {"u": (D,)}, "ill"
    known = found(backend, WELL)
    backend.probed.clear()
    backend.shows = "well"
    assert probed(backend, known, at_a_glance=True).glance == ("d is well",)
    assert backend.probed == ["d"]


def test_health_that_changes_while_it_is_probed_shows_at_the_next_glance() -> None:
    backend = Glanced()

    def change(_: Device) -> list[Signal]:
        backend.shows = "ill"
        return []

    backend.seen = change
    assert probed(backend).glance == ("d is well",)


# --- many units ---


async def test_a_thread_does_one_unit_after_the_other_and_whatever_one_raises_is_its_own_failure() -> None:
    errors = {"u": OSError("unreadable"), "v": SystemExit(1), "w": KeyboardInterrupt(), "x": StopIteration()}

    def do(unit: str) -> UnitState:
        if unit in errors:
            raise errors[unit]
        return NOTHING

    done, left = await run("tuvwxy", do)
    assert list(done) == list("tuvwxy")
    assert {unit: job.error for unit, job in done.items() if job.error} == errors
    assert [unit for unit, job in done.items() if job.result is NOTHING] == ["t", "y"]
    assert left == []


async def test_a_thread_that_is_interrupted_ends_with_the_unit_that_it_is_at() -> None:
    done, left = await run("uvw", lambda _: NOTHING, lambda: True)
    assert (list(done), left) == (["u"], ["v", "w"])


@pytest.mark.parametrize("fails", ["glance", "probe"])
async def test_a_glance_that_led_to_no_probe_is_not_remembered(fails: str) -> None:
    backend, error = Glanced(), OSError("unreadable")

    def raise_it(_: Device) -> list[Signal]:
        raise error

    if fails == "glance":
        backend.shows = error
    else:
        backend.seen = raise_it
    done, _ = await run("u", lambda unit: probed(backend, at_a_glance=True))
    assert (done["u"].error, done["u"].result) == (error, None)


async def test_what_is_beside_what_can_be_had_is_selectable_and_seen_and_goes_with_its_unit() -> None:
    main = replace(D, depends=frozenset({"up"}))
    beside = replace(D, key="beside", hardware=frozenset({"b"}), depends=frozenset({"c"}))
    backend = Fake()
    backend.hardware = {"u": lambda: Discovery((main,), beside=(beside,))}
    async with looking(Eyes(backend)) as eyes:
        assert eyes.it.selectable() == [main, beside]
        assert [name for name in ("d", "up", "b", "c", "e") if eyes.it.sees(name)] == ["d", "up", "b", "c"]
        backend.hardware = {"u": (main,)}
        await eyes.look_at("u")
        assert eyes.it.selectable() == [main]
        backend.hardware = {"v": ()}
        eyes.it.rescan()
        await eyes.look_at("v")
        assert eyes.it.selectable() == []
        assert not any(map(eyes.it.sees, ("d", "up", "b", "c")))


# --- nonsense ---

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
    backend.hardware = {"u": lambda: answer}
    with pytest.raises(NonsenseError):
        found(backend)


def test_a_probe_that_says_no_signal_is_blamed_on_the_unit() -> None:
    backend = Fake()
    backend.hardware = {"u": (D,)}
    backend.seen = lambda found: ["it is fine"]
    with pytest.raises(NonsenseError):
        found(backend)
    with pytest.raises(NonsenseError):
        probed(backend)


def broken() -> Iterator[str]:
    yield "u"
    raise OSError("unreadable")


@pytest.mark.parametrize("units", [lambda: None, lambda: "u", lambda: ["u", ""], lambda: ["u", 7], lambda: 7, broken])
async def test_nonsense_instead_of_units_ends_the_scan(units: Any) -> None:
    backend = Fake()
    backend.hardware = {"u": (D,)}
    backend.listed = units
    async with looking(Eyes(backend)) as eyes:
        assert eyes.sentences()[0].startswith("backend fake cannot list its units: ")
        assert (eyes.known(), backend.looked) == ({}, [])


def test_units_may_be_any_iterable_and_say_a_name_twice() -> None:
    assert checked_units(iter(["u", "v", "u"])) == {"u", "v"}


async def test_of_thousands_of_new_devices_the_garbage_collector_sees_the_newest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hidden: list[int] = []
    backend = Fake()
    monkeypatch.setattr(process, "hide", lambda: hidden.append(len(backend.looked)))
    backend.hardware = {f"u{n}": [device(f"u{n}-{k}", unit=f"u{n}") for k in range(400)] for n in range(8)}
    async with looking(Eyes(backend)) as eyes:
        assert hidden == [3, 6]
        await eyes.look_at(*backend.hardware)
        assert hidden == [3, 6], "these are not new"
