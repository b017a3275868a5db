from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from agent.runtime.pacing import Credit

AT_ONCE, PERIOD = 3, 1.0


@given(st.lists(st.integers(0, 8), max_size=60))
def test_nobody_waits_longer_than_a_period_and_no_more_come_than_were_earned(pauses: list[int]) -> None:
    """Quarters of a period pass between two wishes; each is met as soon as it may."""
    credit, now = Credit(AT_ONCE, PERIOD), 1000.0
    times: list[float] = []
    for pause in pauses:
        now += pause / 4
        wait = max(0.0, credit.wait(now))
        assert wait <= PERIOD
        assert wait == 0 or times[-AT_ONCE] + AT_ONCE * PERIOD > now, "who waits has had all of it lately"
        now += wait
        credit.spend(now)
        times.append(now)
    for first, time in enumerate(times):
        for last in range(first, len(times)):
            assert last - first + 1 <= AT_ONCE + (times[last] - time) / PERIOD
