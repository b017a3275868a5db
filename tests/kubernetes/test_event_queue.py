from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.kubernetes.events import BURST, REFILL, WAITING, Bucket, EventQueue, Notice, Subject, about_node

NODE = about_node("worker-1")
POD = Subject("Pod", "trainer", "u-1", "ml")


def notice(device: str, reason: str = "DeviceUnhealthy", subject: Subject = NODE, message: str = "") -> Notice:
    return Notice(subject, reason, device, message, is_warning=True)


@given(st.lists(st.floats(0, 30), max_size=300))
def test_no_more_events_go_out_in_any_time_than_the_burst_and_one_for_each_span(pauses: list[float]) -> None:
    bucket, now, sent = Bucket(), 1000.0, list[float]()
    for pause in pauses:
        now += pause
        if not bucket.wait(now):
            bucket.take()
            sent.append(now)
    for first in range(len(sent)):
        for last in range(first, len(sent)):
            assert last - first + 1 <= BURST + (sent[last] - sent[first]) / REFILL + 1e-6


def test_after_the_burst_the_next_event_waits_as_long_as_is_said() -> None:
    bucket = Bucket()
    for _ in range(BURST):
        assert bucket.wait(100.0) == 0
        bucket.take()
    assert bucket.wait(100.0) == pytest.approx(REFILL)
    assert bucket.wait(100.0 + REFILL) == 0


def test_a_device_that_flaps_waits_as_one_event_with_a_count_and_the_last_message() -> None:
    queue = EventQueue(NODE)
    for n in range(50):
        queue.put(notice("gpu-0", message=f"{n}"), float(n))
        queue.put(notice("gpu-0", "DeviceHealthy"), float(n))
    queue.put(notice("gpu-0", subject=POD), 50.0)
    first, second, third = (queue.take() for _ in range(3))
    assert first is not None and second is not None and third is not None  # noqa: PT018
    assert (first.notice.message, first.first, first.last, first.count) == ("49", 0.0, 49.0, 50)
    assert (second.notice.reason, second.count) == ("DeviceHealthy", 50)
    assert third.notice.subject == POD
    assert queue.take() is None


@given(st.integers(1, 3 * WAITING))
def test_of_too_many_the_rest_is_one_event_that_counts_them(number: int) -> None:
    queue = EventQueue(NODE)
    for n in range(number):
        queue.put(notice(f"gpu-{n}"), float(n))
    taken = []
    while (waiting := queue.take()) is not None:
        taken.append(waiting.notice)
    assert [it.device for it in taken[:WAITING]] == [f"gpu-{n}" for n in range(min(number, WAITING))]
    if number > WAITING:
        (last,) = taken[WAITING:]
        assert last.message.startswith(f"{number - WAITING} more changes")


def test_what_could_not_be_sent_is_the_next_again_with_what_came_meanwhile() -> None:
    queue = EventQueue(NODE)
    queue.put(notice("gpu-0", message="old"), 1.0)
    queue.put(notice("gpu-1"), 2.0)
    failed = queue.take()
    assert failed is not None
    queue.put(notice("gpu-0", message="new"), 3.0)
    queue.put_back(failed)
    again = queue.take()
    assert again is not None
    assert (again.notice.message, again.first, again.last, again.count) == ("new", 1.0, 3.0, 2)
