from __future__ import annotations

import errno
import os
import socket
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.discovery.uevents import LinkSource, parse
from backends.base import LinkChange
from tests.discovery import one_child
from tests.discovery.sources.links_in_child import link_message

names = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1)
indexes = st.integers(1, (1 << 31) - 1)


CASES: dict[str, Sequence[object]] = {
    "changes": (),
    "unwanted": (),
    "wanted_late": (),
    "overflow": (1000, 4096),
    "burst": (40, 4),
    "impostors": (),
    "run_again": (),
}


@pytest.fixture(scope="module")
def cases() -> dict[str, Any]:
    return one_child.run("tests.discovery.sources.links_in_child", CASES)


@given(st.lists(st.tuples(st.sampled_from([16, 17]), names, indexes)))
def test_every_message_of_a_datagram_is_read(messages: list[tuple[int, str, int]]) -> None:
    other = link_message(20, "no-link", 1)  # RTM_NEWADDR
    datagram = b"".join(link_message(*message) + other for message in messages)
    assert list(parse(datagram)) == [LinkChange(name, index) for _, name, index in messages]


@given(st.binary(), st.integers(0, 60))
def test_no_bytes_upset_it(data: bytes, cut: int) -> None:
    list(parse(data))
    list(parse(link_message(16, "ib0", 1)[:cut] + data))


def test_of_a_message_that_was_cut_off_the_name_is_enough() -> None:
    whole = link_message(16, "ib0", 1)
    longer = (len(whole) + 4000).to_bytes(4, "little") + whole[4:]
    assert list(parse(longer)) == [LinkChange("ib0", 1)]


@pytest.mark.needs("/dev/net/tun")
class TestRealInterfaces:
    def test_they_are_seen_coming_going_up_down_and_renamed(self, cases: dict[str, Any]) -> None:
        assert cases["changes"] == {
            "emitted": ["ib0", "then", "ib0", "then", "ib0", "then", "ib7", "then", "ib7"],
            "right index": True,
        }

    def test_what_is_not_wanted_is_not_handed_on(self, cases: dict[str, Any]) -> None:
        assert cases["unwanted"] == []

    def test_a_socket_is_opened_when_it_is_wanted_and_then_everything_is_looked_at(self, cases: dict[str, Any]) -> None:
        assert cases["wanted_late"] == ["resync", "0 and then 1 sockets"]

    def test_an_overflow_is_told_once_after_what_was_saved_and_before_what_follows(self, cases: dict[str, Any]) -> None:
        assert cases["overflow"] == ["ib0", "resync", "ib7"]

    def test_a_burst_leaves_the_loop_its_turns(self, cases: dict[str, Any]) -> None:
        seen = cases["burst"]
        assert seen["emitted"] == ["ib0"]
        assert seen["taken"] >= 40
        assert seen["most in one turn"] == 4

    def test_only_the_kernel_is_believed(self, cases: dict[str, Any]) -> None:
        assert cases["impostors"] == []

    def test_running_again_asks_for_a_full_look_and_leaves_no_socket(self, cases: dict[str, Any]) -> None:
        assert cases["run_again"] == {"emitted": ["resync"], "open sockets": 0}


@pytest.mark.parametrize("number", [errno.EPERM, errno.EAFNOSUPPORT])
async def test_a_refused_socket_is_told_in_a_sentence(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    source = LinkSource(print)
    source.watch(wanted=True)
    monkeypatch.setattr(socket, "socket", refuse)
    with pytest.raises(OSError, match=rf"NETLINK_ROUTE\) was refused \({os.strerror(number)}\); allow AF_NETLINK"):
        await source.run()
