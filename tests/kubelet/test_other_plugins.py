"""Kubelet contract: A9.1; what tells that another plugin has a name of ours, and what does not."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from agent.kubelet.other_plugins import Observation, Offer, confirmed, ended, observe, sentence, unlike_since
from agent.model import HEALTHY, Slot
from tests.kubelet.plugins import SICK

TOY = "example.com/toy"
BEGAN, SENT = 900.0, 1000.0
A, B = Slot("a", None, HEALTHY), Slot("b", None, SICK)
OFFER = Offer({"a": A, "b": B}, ("c",), BEGAN, SENT)


def record(*ids: str, written: float) -> Observation:
    return Observation(written, {TOY: frozenset(ids)})


@pytest.mark.parametrize(
    ("observed", "since"),
    [
        pytest.param(record("a", written=SENT + 9), None, id="ours"),
        pytest.param(record("x", written=SENT - 50), BEGAN, id="IDs that were never ours"),
        pytest.param(record("a", "x", written=SENT - 50), BEGAN, id="theirs among ours"),
        pytest.param(record("x", written=BEGAN - 1), None, id="of before our stream, as on a full disk"),
        pytest.param(record("b", written=SENT + 2), SENT, id="ours that is not healthy"),
        pytest.param(record("c", written=SENT + 2), SENT, id="ours that has left our lists"),
        pytest.param(record("b", "c", written=SENT - 1), None, id="ours of before our list, as on a full disk"),
        pytest.param(record(written=SENT + 2), None, id="none: what is lost is asked of podresources"),
        pytest.param(Observation(SENT + 2), None, id="a kubelet that has forgotten the name"),
    ],
)
def test_from_which_of_our_lists_the_kubelets_record_differs(observed: Observation, since: float | None) -> None:
    assert unlike_since(OFFER, observed, TOY) == since


LATER = {"new.sock": (1, int(SENT * 1e9))}
EARLIER = {"old.sock": (1, int((BEGAN - 1) * 1e9))}


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
    sockets: dict[str, tuple[int, int]],
    answering: bool,
    allocatable: dict[str, set[str]] | None,
    theirs: set[str],
) -> None:
    observed = Observation(SENT + 2, {TOY: frozenset(recorded)}, sockets, frozenset(sockets if answering else ()))
    assert confirmed(OFFER, observed, TOY, allocatable) == theirs


def test_who_it_is_is_told_as_far_as_can_be_seen() -> None:
    early, late = (1, int((SENT - 200) * 1e9)), (2, int(SENT * 1e9))
    ids = [f"x{n}" for n in range(6)]
    assert "socket is not in the plugin directory" in sentence(Observation(), OFFER, ids)
    assert "the socket new.sock," in sentence(Observation(sockets={"old.sock": early, "new.sock": late}), OFFER, ids)
    found = sentence(Observation(sockets={"b.sock": early, "a.sock": early}), OFFER, ids)
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
