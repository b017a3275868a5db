from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from agent.devices.looks import NonsenseError, Walk, checked_units, walk
from backends.base import Discovery, Signal, Verdict
from backends.known import Known
from tests.devices.fakes import Fake, device

D = device("d", unit="u")


def walked(backend: Fake, known: Known | None = None, skip: frozenset[str] = frozenset()) -> Walk:
    progress = Walk()
    walk(backend, None, skip, known or Known(), progress, time.monotonic)
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
    assert not walked(backend, Known({"u": (D,)})).looks["u"].changed
    assert not walked(Fake()).looks


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
    walk(backend, None, frozenset(), Known(), progress, time.monotonic)
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
    Discovery((replace(D, unit="another"),)),
    Discovery((replace(D, key=""),)),
    Discovery((replace(D, key=7),)),  # type: ignore[arg-type]
    Discovery((replace(D, hardware={"d"}),)),  # type: ignore[arg-type]
    Discovery((replace(D, hardware=frozenset({7})),)),  # type: ignore[arg-type]
    Discovery((replace(D, depends=["p"]),)),  # type: ignore[arg-type]
    Discovery((replace(D, identity=None),)),  # type: ignore[arg-type]
    Discovery((replace(D, resource=7),)),  # type: ignore[arg-type]
    Discovery((replace(D, numa_node=-1),)),
    Discovery((replace(D, numa_node="0"),)),  # type: ignore[arg-type]
    Discovery((replace(D, attributes=None),)),  # type: ignore[arg-type]
    Discovery((replace(D, attributes={"vendor": "10de"}),)),  # type: ignore[dict-item]
    Discovery((replace(D, hardware=frozenset()),)),
    Discovery((replace(D, exclusive={"d"}),)),  # type: ignore[arg-type]
    Discovery((replace(D, nodes=["/dev/d"]),)),  # type: ignore[arg-type]
    Discovery((replace(D, nodes=("/dev/d",)),)),  # type: ignore[arg-type]
    Discovery((replace(D, mounts=("/etc/d",)),)),  # type: ignore[arg-type]
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
