from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.discovery.uevents import parse
from backends.base import LinkChange
from tests.discovery import one_child
from tests.discovery.sources.stages import link_message

names = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1)
indexes = st.integers(1, (1 << 31) - 1)


CASES: dict[str, Sequence[object]] = {"changes": (), "wanted_late": ()}


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
            "told": [["ib0"], ["ib0"], ["ib0"], ["ib7"], ["ib7"]],
            "right index": [True, True],
        }

    def test_a_socket_is_opened_when_it_is_wanted_and_then_everything_is_looked_at(self, cases: dict[str, Any]) -> None:
        assert cases["wanted_late"] == {"told": ["resync"], "sockets": [0, 1]}
