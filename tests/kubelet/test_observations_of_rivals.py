"""Kubelet contract: A9.1; what tells that another plugin has a name of ours, and what does not."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import cast

import pytest
from msgspec.structs import replace

from agent.kubelet.rivals import Observation, Offer, confirmed, ended, is_late, observe, sentence, unlike_since
from agent.kubelet.witnesses import Version
from agent.model import HEALTHY, Slot
from tests.kubelet.plugins import SICK

TOY = "example.com/toy"
BEGAN, SENT = 900.0, 1000.0
BEFORE, SINCE, AFTER = (1, 3, 0), (2, 2, 0), (3, 1, 0)  # the wall clock goes backwards
A, B = Slot("a", None, HEALTHY), Slot("b", None, SICK)
OFFER = Offer({"a": A, "b": B}, {"b"}, ("c",), BEGAN, SENT, BEFORE, SINCE)


def record(*ids: str, version: Version) -> Observation:
    return Observation(version, {TOY: frozenset(ids)})


@pytest.mark.parametrize(
    ("observed", "since"),
    [
        pytest.param(record("a", version=AFTER), None, id="ours"),
        pytest.param(record("x", version=SINCE), BEGAN, id="IDs that were never ours"),
        pytest.param(record("a", "x", version=SINCE), BEGAN, id="theirs among ours"),
        pytest.param(record("b", version=AFTER), SENT, id="ours that is not healthy"),
        pytest.param(record("c", version=AFTER), SENT, id="ours that has left our lists"),
        pytest.param(record("b", "c", version=SINCE), None, id="ours of before our list, as on a full disk"),
        pytest.param(record(version=AFTER), None, id="none: what is lost is asked of podresources"),
        pytest.param(Observation(AFTER), None, id="a kubelet that has forgotten the name"),
    ],
)
def test_from_which_of_our_lists_the_kubelets_record_differs(observed: Observation, since: float | None) -> None:
    assert unlike_since(OFFER, observed, TOY) == since


def test_a_record_that_the_kubelet_has_not_written_since_tells_nothing() -> None:
    """As on a full disk."""
    assert unlike_since(replace(OFFER, record_since=BEFORE), record("x", version=BEFORE), TOY) is None


def test_the_record_is_compared_without_a_look_at_each_slot() -> None:
    """It is compared after every list, which may have 10,000."""
    slots = dict.fromkeys("ab", cast("Slot", None))
    assert unlike_since(replace(OFFER, slots=slots), record("a", version=AFTER), TOY) is None


LATER, EARLIER = {"new.sock": SENT}, {"old.sock": BEGAN - 1}


@pytest.mark.parametrize(
    ("recorded", "sockets", "answering", "allocatable", "theirs"),
    [
        pytest.param({"x"}, LATER, True, {TOY: {"a"}}, set(), id="the kubelet has our list"),
        pytest.param({"x"}, LATER, True, {"example.com/other": {"x"}}, set(), id="the kubelet has nothing of the name"),
        pytest.param({"x"}, {}, False, {TOY: {"x"}}, {"x"}, id="the kubelet has theirs, whose socket is elsewhere"),
        pytest.param({"x"}, LATER, True, None, {"x"}, id="the kubelet does not say, and a plugin came"),
        pytest.param({"x"}, LATER, False, None, set(), id="it came, and has ended"),
        pytest.param({"x"}, EARLIER, True, None, set(), id="it was there before us"),
        pytest.param({"c"}, LATER, True, None, set(), id="the kubelet does not say, and the IDs were ours"),
    ],
)
def test_a_second_witness_tells_whether_another_plugin_has_the_name(
    recorded: set[str],
    sockets: dict[str, float],
    answering: bool,
    allocatable: dict[str, set[str]] | None,
    theirs: set[str],
) -> None:
    observed = Observation(
        AFTER,
        {TOY: frozenset(recorded)},
        dict.fromkeys(sockets, (1, 1)),
        frozenset(sockets if answering else ()),
        sockets,
    )
    assert confirmed(OFFER, observed, TOY, allocatable) == theirs


@pytest.mark.parametrize(
    ("theirs", "came", "late"),
    [
        pytest.param({"b"}, EARLIER, True, id="of a list before the last"),
        pytest.param({"c"}, {}, True, id="of a list before, and gone since"),
        pytest.param({"a", "x"}, EARLIER, False, id="one was never ours"),
        pytest.param({"b"}, LATER, False, id="another plugin has come"),
    ],
)
def test_a_list_of_our_earlier_stream_that_the_kubelet_read_last_is_no_other_plugins(
    theirs: set[str], came: dict[str, float], late: bool
) -> None:
    observed = Observation(sockets=dict.fromkeys(came, (1, 1)), came=came, at=OFFER.sent)
    assert is_late(OFFER, observed, theirs) is late
    assert not is_late(OFFER, replace(observed, at=OFFER.began), theirs), "who has not looked since cannot know"


def test_who_it_is_is_told_as_far_as_can_be_seen() -> None:
    def seen(**came: float) -> Observation:
        return Observation(
            sockets={f"{name}.sock": (1, 1) for name in came}, came={f"{k}.sock": v for k, v in came.items()}
        )

    ids = [f"x{n}" for n in range(6)]
    assert "socket is not in the plugin directory" in sentence(Observation(), OFFER, ids)
    assert "the socket new.sock," in sentence(seen(old=BEGAN - 200, new=SENT), OFFER, ids)
    found = sentence(seen(b=BEGAN - 200, a=BEGAN - 200), OFFER, ids)
    assert "one of the sockets a.sock, b.sock," in found
    assert "x0, x1, x2, x3 and 2 more;" in found


def test_a_plugin_ends_when_its_socket_goes_is_replaced_or_answers_no_more(tmp_path: Path) -> None:
    nothing = Observation()
    with socket.socket(socket.AF_UNIX) as theirs:
        theirs.bind(str(tmp_path / "theirs.sock"))
        theirs.listen()
        (tmp_path / "file.sock").touch()
        alive = observe(tmp_path, nothing, doubt=False)
    assert set(alive.sockets) == alive.answering == {"theirs.sock"}
    assert not ended(nothing, alive)
    assert not ended(alive, observe(tmp_path, alive, doubt=False)), "it is tried only where there is a doubt"
    dead = observe(tmp_path, alive, doubt=True)
    assert ended(alive, dead) == {"theirs.sock"}
    assert not ended(dead, observe(tmp_path, dead, doubt=True)), "it has ended once"
    (tmp_path / "theirs.sock").unlink()
    assert ended(alive, observe(tmp_path, alive, doubt=False)) == {"theirs.sock"}
    replaced = Observation(sockets={"theirs.sock": (0, 0)}, answering=frozenset({"theirs.sock"}))
    assert ended(alive, replaced) == {"theirs.sock"}


def test_a_directory_that_is_gone_has_no_plugins(tmp_path: Path) -> None:
    assert observe(tmp_path / "gone", Observation(), doubt=True) == Observation()
