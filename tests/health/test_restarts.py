"""What probes saw before a restart, or another agent saw before a hand-over, and what ends it."""

from __future__ import annotations

import msgspec
import pytest

from agent.health import HealthBook, KeptHealth
from agent.health.drains import FAILURES
from agent.model import HEALTHY
from tests.health.said import BOOT, DEGRADED, DELAYED, INFO, NOW, number, probe, signal, states

DOWN = signal(DELAYED, "port-down", after=10.0)
NO_SM = signal(DELAYED, "no-subnet-manager", after=30.0)


def down(since: float = 0.0) -> HealthBook:
    """A port that has been down for long."""
    book = HealthBook(BOOT)
    probe(book, since, DOWN)
    book.ripen(since + 10.0, since + 10.0)
    assert states({"h": book.of("h")}) == {"h": "port-down"}
    return book


def restarted(book: HealthBook, now: float, boot: str = BOOT) -> HealthBook:
    after = HealthBook(boot)
    after.restore(msgspec.json.decode(msgspec.json.encode(book.kept()), type=KeptHealth), now, now)
    return after


def test_what_was_delayed_counts_at_once_and_since_when_it_did() -> None:
    after = down()
    for now in (1200.0, 1300.0, 1400.0):
        after = restarted(after, now)
        assert (after.of("h").reason, after.of("h").since) == ("port-down", 10.0)
        assert probe(after, now + 1.0, DOWN) == {}, "a look that says the same changes nothing"
        assert (after.of("h").reason, after.of("h").since) == ("port-down", 10.0)


def test_a_restart_is_no_look_that_saw_the_port_up() -> None:
    book = HealthBook(BOOT)
    probe(book, 0.0, DOWN)
    after = restarted(book, 4.0)
    assert after.of("h") is HEALTHY
    probe(after, 5.0, DOWN)
    assert states(after.ripen(10.0, 10.0)) == {"h": "port-down"}


def test_the_first_look_decides() -> None:
    after = restarted(down(), 100.0)
    assert probe(after, 101.0) == {"h": HEALTHY}
    assert after.kept().sightings == ()


def test_another_thing_that_is_delayed_does_not_wait_after_one_that_counted_before_a_restart() -> None:
    after = restarted(down(), 100.0)
    assert states(probe(after, 101.0, NO_SM)) == {"h": "no-subnet-manager"}
    assert restarted(after, 102.0).of("h").reason == "no-subnet-manager"


def test_what_must_stay_away_for_a_while_does_so_over_a_restart() -> None:
    book = HealthBook(BOOT)
    probe(book, 0.0, signal(NOW, "hot", recover_after=60.0))
    probe(book, 10.0)
    after = restarted(book, 20.0)
    probe(after, 21.0)
    assert after.next_deadline() == 70.0
    assert after.ripen(70.0, 70.0) == {"h": HEALTHY}


def test_a_counter_that_rose_before_a_restart_still_counts_for_its_time() -> None:
    book = HealthBook(BOOT)
    for now, value in ((0.0, 1), (30.0, 2)):
        probe(book, now, number(value, verdict=DEGRADED, recover_after=300.0))
    after = restarted(book, 40.0)
    probe(after, 41.0, number(2, verdict=DEGRADED, recover_after=300.0))
    assert after.of("h").reason == "errors-rises"
    assert after.ripen(341.0, 341.0) == {"h": HEALTHY}


def test_what_is_only_shown_is_not_kept() -> None:
    book = HealthBook(BOOT)
    revision = book.revision
    probe(book, 0.0, signal(INFO, "warm"))
    assert (book.kept().sightings, book.revision) == ((), revision)


def test_a_boot_ends_it() -> None:
    assert restarted(down(), 1.0, boot="another boot").of("h") is HEALTHY


@pytest.mark.parametrize("looking", [True, False], ids=["looking", "looked"])
def test_what_was_seen_in_a_unit_that_is_gone_ends_with_the_first_look_at_all(looking: bool) -> None:
    """Its hardware may be in another unit by now, or of another backend alone."""
    after = restarted(down(), 100.0)
    after.probed("fake", {"another unit": ()}, 101.0)
    assert after.of("h").reason == "port-down"
    changes = after.looked({"fake"} if looking else {"another backend"}, 102.0)
    assert changes == ({} if looking else {"h": HEALTHY})


def test_an_agent_that_stood_by_knows_better_what_is_there_and_worse_since_when() -> None:
    standby = HealthBook(BOOT)
    standby.probed("fake", {"u": [DOWN], "v": ()}, 1000.0)
    standby.looked(frozenset(), 1000.0)
    served = down()
    served.probed("fake", {"v": [signal(NOW, "sick", "other")]}, 999.0)
    assert states(standby.restore(served.kept(), 1001.0, 1001.0)) == {"h": "port-down"}
    assert standby.of("h").since == 10.0
    assert standby.of("other") is HEALTHY, "it has looked itself"


def test_restarts_are_no_failures() -> None:
    after = down()
    for n in range(2 * FAILURES):
        after = restarted(after, 20.0 + n)
        probe(after, 20.5 + n, DOWN)
    assert after.of("h").reason == "port-down"
