"""Hardware that goes and comes back: what is flapping, and what somebody meant to happen."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import eq

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.health import HealthBook
from agent.health.causes import WINDOW, Presence
from agent.health.drains import FAILURES, FIRST
from agent.model import HEALTHY, Health, State
from backends.base import Clears, Device
from tests.fakes import device
from tests.health.said import BOOT, NOW, latch, probe, signal, states

WALL = 1_800_000_000.0  # 2027-01-15 08:00:00 UTC
CARD, STICK = "pci:0000:3b:00.0", "usb:1-2"


def card(identity: str = "GPU-1", *, hardware: Iterable[str] = (CARD,), unusable: str = "") -> Device:
    return device("card", hardware=hardware, identity=identity, unusable=unusable)


def see(book: HealthBook, now: float, *devices: Device, backend: str = "fake", unit: str = "card") -> dict[str, Health]:
    return book.found(backend, {unit: devices}, now)


def comes_back(book: HealthBook, times: int, began: float = 0.0, found: Sequence[Device] = (card(),)) -> float:
    """It is there, and goes and comes back so often, every 2 s; when it came the last time."""
    see(book, began, *found)
    for n in range(times):
        see(book, began + 2 * n + 1)
        see(book, began + 2 * n + 2, *found)
    return began + 2 * times


def test_hardware_that_comes_back_too_often_comes_back_unhealthy_and_stays_so_for_a_while(book: HealthBook) -> None:
    book.ripen(0.0, WALL)
    comes_back(book, FAILURES - 1)
    assert book.of(CARD) is HEALTHY
    see(book, 9.0)
    back = see(book, 10.0, card())[CARD]
    assert (back.state, back.reason, back.since) == (State.UNHEALTHY, "flapping", 10.0)
    assert back.message == (
        "it went away and came back 5 times in 8 s; it is left out for 60 s, until 2027-01-15 08:01:10 UTC"
    )
    assert states(book.ripen(10.0 + FIRST, WALL + 10.0 + FIRST)) == {CARD: "Healthy"}


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        *((name, "flapping") for name in (CARD, STICK, "usb:1-2.3")),
        *((name, "") for name in ("rdma:0000:3b:00.0", "node:c:10:232", "mig:0000:3b:00.0/gi1", "stub:x/stub-0")),
    ],
)
def test_cards_and_sticks_flap_and_what_a_driver_or_a_program_makes_may_come_and_go(
    book: HealthBook, name: str, reason: str
) -> None:
    comes_back(book, 50, found=[card(hardware=[name])])
    assert book.of(name).reason == reason


def test_failures_and_returns_count_together(book: HealthBook) -> None:
    comes_back(book, 2)
    probe(book, 5.0, signal(NOW, "port-down", CARD, message="Port 1 is down."))
    probe(book, 6.0)
    see(book, 7.0)
    see(book, 8.0, card())
    told = probe(book, 9.0, signal(NOW, "port-down", CARD, message="Port 1 is down."))[CARD].message
    assert told.startswith(
        "it became Unhealthy twice and went away and came back 3 times in 7 s, Unhealthy last with port-down "
        "(Port 1 is down); it is left out"
    )


def test_what_failed_before_it_went_has_failed_once(book: HealthBook) -> None:
    for n in range(FAILURES - 1):
        see(book, 4.0 * n, card())
        probe(book, 4.0 * n + 1, signal(NOW, "off-bus", CARD))
        see(book, 4.0 * n + 2)
        probe(book, 4.0 * n + 2)
    see(book, 30.0, card())
    assert book.of(CARD) is HEALTHY


def test_what_is_back_and_fails_in_the_same_moment_has_failed_once(book: HealthBook) -> None:
    for n in range(FAILURES - 1):
        see(book, 4.0 * n, card())
        probe(book, 4.0 * n, signal(NOW, "off-bus", CARD))
        probe(book, 4.0 * n + 1)
        see(book, 4.0 * n + 2)
    assert book.of(CARD) is HEALTHY


def test_what_a_driver_takes_away_from_a_backend_that_still_sees_it_has_not_gone(book: HealthBook) -> None:
    for n in range(50):
        see(book, 2.0 * n, card())
        book.found("fake", {"card": []}, 2.0 * n + 1, beside={"card": [card("10de:2330")]})
    assert book.of(CARD) is HEALTHY
    comes_back(book, FAILURES, 200.0)
    assert book.of(CARD).reason == "flapping"


def test_hardware_has_gone_when_no_backend_sees_it_any_more(book: HealthBook) -> None:
    see(book, 0.0, card(unusable="it is bound to nvidia"), backend="vfio")
    comes_back(book, 50)
    assert book.of(CARD) is HEALTHY
    see(book, 200.0, backend="vfio")
    comes_back(book, FAILURES, 300.0)
    assert book.of(CARD).reason == "flapping"


def test_a_return_that_two_backends_see_is_one(book: HealthBook) -> None:
    for n in range(FAILURES):
        for at, devices in ((0.0, [card()]), (1.0, [])):
            see(book, 2.0 * n + at, *devices)
            see(book, 2.0 * n + at + 0.1, *devices, backend="vfio")
    assert book.of(CARD) is HEALTHY
    assert states(see(book, 20.0, card(), backend="vfio")) == {CARD: "flapping"}
    assert states(see(book, 20.1, card())) == {}


def test_what_others_depend_on_counts_though_no_device_owns_it(book: HealthBook) -> None:
    part = device("part", hardware=["part:1"], depends=[CARD], identity="MIG-1")
    whole = card(unusable="it is in MIG mode, and offered as its MIG devices")
    comes_back(book, FAILURES, found=[whole, part])
    assert book.of(CARD).reason == "flapping"
    assert book.of("part:1") is HEALTHY


def test_what_moves_to_another_unit_has_not_gone(book: HealthBook) -> None:
    for n in range(50):
        units = {"one": [card()], "other": []} if n % 2 else {"one": [], "other": [card()]}
        book.found("fake", units, float(n))
    for n in range(50, 100):
        left, joined = ("one", "other") if n % 2 else ("other", "one")
        see(book, float(n), unit=left)
        see(book, float(n), card(), unit=joined)
    assert book.of(CARD) is HEALTHY


def test_what_is_drained_may_be_pulled_out_and_put_in_again(book: HealthBook) -> None:
    book.drain([CARD], "", None, 0.0, WALL)
    comes_back(book, 50)
    see(book, 200.0)
    assert states(book.undrain([CARD], 201.0)) == {CARD: "Healthy"}
    see(book, 202.0, card())
    assert book.kept().quarantines == ()
    for n in range(50):
        see(book, 300.0 + 4 * n)
        book.drain([CARD], "", None, 301.0 + 4 * n, WALL)
        see(book, 302.0 + 4 * n, card())
        book.undrain([CARD], 303.0 + 4 * n)
    assert book.kept().quarantines == ()


def test_what_goes_or_comes_while_we_act_is_our_doing(book: HealthBook) -> None:
    for n in range(50):
        ours = partial(eq, n % 2, 0)  # it comes, and then goes; or the other way round
        book.found("fake", {"card": [card()]}, 2.0 * n, ours=ours)
        book.found("fake", {"card": []}, 2.0 * n + 1, ours=ours)
    assert book.of(CARD) is HEALTHY


def test_what_another_instance_of_a_backend_does_not_look_for_has_not_gone(book: HealthBook) -> None:
    for n in range(50):
        book.found("fake", {"card": [card()] if n % 2 else []}, float(n), by_another=True)
    assert book.of(CARD) is HEALTHY


def test_what_an_instance_did_not_find_at_once_has_not_gone_and_what_it_saw_go_has(book: HealthBook) -> None:
    for n in range(50):
        book.found("fake", {}, 2.0 * n, by_another=True)
        see(book, 2.0 * n + 1, *([card()] if n % 2 else []))
    assert book.of(CARD) is HEALTHY
    comes_back(book, FAILURES, 200.0)
    assert book.of(CARD).reason == "flapping"


def test_one_backends_change_of_instance_makes_nothing_gone_that_another_sees(book: HealthBook) -> None:
    see(book, 0.0, card(), backend="vfio")
    see(book, 0.0, card())
    book.found("fake", {"card": []}, 1.0, by_another=True)
    for n in range(FAILURES):
        see(book, 2.0 * n + 2, backend="vfio")
        see(book, 2.0 * n + 3, card(), backend="vfio")
    assert book.of(CARD).reason == "flapping"


def test_what_another_instance_sees_as_before_is_there(book: HealthBook) -> None:
    see(book, 0.0, card(unusable="it is bound to vfio-pci"))
    book.found("fake", {}, 1.0, by_another=True)  # it found nothing that differs
    for n in range(50):
        see(book, 2.0 * n + 2, card(), backend="vfio")
        see(book, 2.0 * n + 3, backend="vfio")
    assert book.of(CARD) is HEALTHY


def test_a_restart_of_ours_knows_nothing_of_what_was_there(book: HealthBook) -> None:
    for n in range(50):
        see(book, 2.0 * n)
        see(book, 2.0 * n + 1, card())
        book, kept = HealthBook(BOOT), book.kept()
        book.restore(kept, 2.0 * n + 1, WALL)
        see(book, 2.0 * n + 1, card())
    assert book.of(CARD) is HEALTHY


def test_the_quarantine_of_what_came_back_too_often_lasts_while_it_is_away_and_over_restarts(book: HealthBook) -> None:
    end = comes_back(book, FAILURES)
    see(book, end + 1)
    after = HealthBook(BOOT)
    after.restore(book.kept(), end + 2, WALL)
    assert see(after, end + 3, card()) == {}
    assert after.of(CARD) == book.of(CARD)


def test_hardware_that_a_record_holds_down_all_the_while_does_not_flap(book: HealthBook) -> None:
    latch(book, 0.0, signal(NOW, "xid-79", CARD, clears_on=[Clears.OPERATOR]))
    comes_back(book, 50)
    assert book.of(CARD).reason == "xid-79"


# --- any sequence ---


@dataclass(frozen=True)
class Sight:
    """How the hardware is seen at a time."""

    identity: str | None
    """None: it is not there."""
    usable: bool = True


def returns(history: Sequence[tuple[float, Sight]]) -> list[float]:
    """When it came back, said as a person would: it was to be had, it was gone, and now the same one is to be had."""
    found = []
    for index, (now, sight) in enumerate(history):
        if sight.identity is None or not sight.usable:
            continue
        before = [at for at in range(index) if history[at][1].identity is not None and history[at][1].usable]
        if not before:
            continue
        gone = next((when for when, it in history[before[-1] : index] if it.identity is None), None)
        last = history[before[-1]][1].identity
        same = not last or not sight.identity or last == sight.identity
        if gone is not None and same and gone < now <= gone + WINDOW:
            found.append(now)
    return found


sights = st.one_of(st.just(Sight(None)), st.builds(Sight, st.sampled_from(["one", "two", ""]), st.booleans()))
steps = st.lists(st.tuples(st.sampled_from([0.0, 1.0, 100.0, WINDOW]), sights), max_size=40)


@given(steps)
def test_it_is_back_when_what_was_to_be_had_was_gone_and_is_to_be_had_again(steps: list[tuple[float, Sight]]) -> None:
    presence, now = Presence(), 0.0
    history: list[tuple[float, Sight]] = []
    told: list[float] = []
    for seconds, sight in steps:
        now += seconds
        history.append((now, sight))
        here = [] if sight.identity is None else [card(sight.identity, unusable="" if sight.usable else "no driver")]
        told += [now for _ in presence.found("fake", {"card": here}, {}, now, lambda _: False)]
    assert told == returns(history)


@given(steps)
def test_it_is_quarantined_for_nothing_but_as_many_returns_as_are_too_many(steps: list[tuple[float, Sight]]) -> None:
    book, now = HealthBook(BOOT), 0.0
    history: list[tuple[float, Sight]] = []
    for seconds, sight in steps:
        now += seconds
        book.ripen(now, WALL + now)
        history.append((now, sight))
        before = book.of(CARD)
        here = [] if sight.identity is None else [card(sight.identity, unusable="" if sight.usable else "no driver")]
        see(book, now, *here)
        if before is HEALTHY and book.of(CARD) is not HEALTHY:
            lately = [when for when in returns(history) if now - when <= WINDOW]
            assert lately[-1] == now
            assert len(lately) >= FAILURES
