"""Kubelet contract: A9.1; what tells that another plugin has a name of ours, and what does not."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from agent.kubelet.other_plugins import SETTLED, Observation, Offer, ended, observe, sentence, strange
from agent.model import HEALTHY, Slot
from tests.kubelet.plugins import SICK

TOY = "example.com/toy"
SENT = 1000.0
A, B = Slot("a", None, HEALTHY), Slot("b", None, SICK)
OFFER = Offer({"a": A, "b": B}, (), SENT - 100, SENT)


def record(*ids: str, written: float) -> Observation:
    return Observation(written, {TOY: frozenset(ids)})


@pytest.mark.parametrize(
    ("observed", "now", "told"),
    [
        pytest.param(record("a", written=SENT + 9), SENT + 9, False, id="ours"),
        pytest.param(record("x", written=SENT - 50), SENT + 9, True, id="IDs that were never ours"),
        pytest.param(record("a", "x", written=SENT - 50), SENT, True, id="theirs among ours"),
        pytest.param(record("x", written=SENT - 101), SENT + 9, False, id="of before our stream, as on a full disk"),
        pytest.param(record("b", written=SENT + 2), SENT + SETTLED, True, id="ours that is not healthy"),
        pytest.param(record("b", written=SENT + 0.5), SENT + 0.9, False, id="a list that is on its way"),
        pytest.param(record("b", written=SENT - 1), SENT + 9, False, id="ours of before our list, as on a full disk"),
        pytest.param(record(written=SENT + 2), SENT + 9, False, id="none: what is lost is asked of podresources"),
        pytest.param(Observation(SENT + 2), SENT + 9, False, id="a kubelet that has forgotten the name"),
    ],
)
def test_the_kubelets_record(observed: Observation, now: float, told: bool) -> None:
    assert (strange(OFFER, observed, TOY, now) is not None) is told


def test_a_record_from_before_the_kubelet_took_in_our_first_list_is_not_believed_at_once() -> None:
    first = Offer({"a": A}, (), SENT, SENT)
    theirs = record("x", written=SENT + 0.1)
    assert strange(first, theirs, TOY, SENT + 0.5) is None
    assert strange(first, theirs, TOY, SENT + SETTLED) == frozenset({"x"})


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
