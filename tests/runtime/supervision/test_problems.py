from __future__ import annotations

from structlog.testing import capture_logs

from agent.runtime.problems import Lasting, Problems, Trouble, Troubles


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def disk(problems: Problems) -> Trouble:
    return problems.trouble("disk", "it is not written", "not-written", "written-again", file="/x", then="trying again")


def test_a_problem_is_logged_once_for_each_reason_and_once_when_it_is_over() -> None:
    it = disk(Problems())
    with capture_logs() as logs:
        it.healed()
        for reason in ("full", "full", "slow", "slow"):
            it.report_once(reason)
        it.healed()
        it.healed()
        it.report_once("full")
    begun = {"file": "/x", "then": "trying again", "event": "not-written", "log_level": "warning"}
    assert logs == [
        {**begun, "reason": "full"},
        {**begun, "reason": "slow"},
        {"file": "/x", "event": "written-again", "log_level": "info"},
        {**begun, "reason": "full"},
    ]


def test_it_is_shown_as_long_as_it_lasts_by_its_last_reason() -> None:
    problems = Problems()
    it, other = disk(problems), problems.trouble("net", "it is down", "down", level="info")
    with capture_logs():
        it.report_once("full")
        other.report_once("no cable")
        it.report_once("slow")
    assert problems.lasting() == [
        Lasting("disk", "it is not written: slow; trying again"),
        Lasting("net", "it is down: no cable"),
    ]
    it.healed()
    other.healed()
    assert problems.lasting() == []


def test_what_nobody_sees_the_end_of_is_over_when_it_has_not_come_again() -> None:
    clock = Clock()
    problems = Problems(clock)
    it = problems.trouble("connections", "they wait", "wait", fades=60.0)
    with capture_logs() as logs:
        for _ in range(5):
            it.report_once("short")
            clock.now += 59.0
        assert problems.lasting()
        clock.now += 1.0
        assert not problems.lasting()
        it.report_once("short")
    assert len(logs) == 2


def test_where_an_error_comes_from_is_logged_with_it() -> None:
    error = KeyError("x")
    with capture_logs() as logs:
        disk(Problems()).report_once("'x'", error)
    assert logs[0]["exc_info"] is error


def test_what_the_faces_show_elsewhere_is_logged_once_and_not_shown_twice() -> None:
    problems = Problems()
    with capture_logs() as logs:
        for _ in range(2):
            problems.trouble("", "the kubelet does not answer", "silent").report_once("refused")
    assert len(logs) == 2
    assert problems.lasting() == []


def test_what_is_done_about_it_may_depend_on_the_reason() -> None:
    problems = Problems()
    it = disk(problems)
    with capture_logs() as logs:
        it.report_once("a link", then="waiting")
    assert logs[0]["then"] == "waiting"
    assert problems.lasting() == [Lasting("disk", "it is not written: a link; waiting")]


def test_of_things_alike_each_begins_and_ends_by_itself() -> None:
    problems = Problems()
    them = Troubles(lambda key: problems.trouble("cdi", f"{key} is not written", "cut", "whole", resource=key))
    with capture_logs() as logs:
        them.tell({"a": "full", "b": "full"})
        them.tell({"b": "full", "c": "slow"})
        them.heal("b", "never failed")
    assert [(line["event"], line["resource"]) for line in logs] == [
        ("cut", "a"), ("cut", "b"), ("whole", "a"), ("cut", "c"), ("whole", "b"),
    ]  # fmt: skip
    assert [it.sentence for it in problems.lasting()] == ["c is not written: slow"]
