"""The routes that only the kernel tells of, asked for in a network namespace of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.base import Host
from backends.linux import netdevs
from tests.discovery import one_child


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    names = ("several_hops", "other_table", "many", "half_of_everything", "alone")
    roots = {name: [str(tmp_path_factory.mktemp(name))] for name in names}
    return one_child.run("tests.backends.linux.routes_in_child", roots)


@pytest.mark.needs("/dev/net/tun")
class TestTheKernel:
    def test_every_next_hop_of_a_route_with_several_is_told(self, cases: dict[str, Any]) -> None:
        """/proc shows the first alone, which is all there is to be had from another network namespace."""
        assert cases["several_hops"] == [[], ["t0", "t1"], ["t0"]]

    def test_a_default_route_in_another_table_counts_and_one_that_rejects_does_not(self, cases: dict[str, Any]) -> None:
        assert cases["other_table"] == ["t1"]

    def test_more_routes_than_one_message_holds_are_all_told(self, cases: dict[str, Any]) -> None:
        assert cases["many"] == ["t0", "t1"]

    def test_a_route_to_half_of_all_addresses_is_as_good_as_a_default_route(self, cases: dict[str, Any]) -> None:
        assert cases["half_of_everything"] == ["t0"]

    def test_an_address_is_seen_without_a_connected_route_and_the_interfaces_own_does_not_count(
        self, cases: dict[str, Any]
    ) -> None:
        assert cases["alone"] == [[], ["t0"]]


@given(st.binary(max_size=200))
def test_no_message_makes_the_reader_fail(message: bytes) -> None:
    list(netdevs._interfaces(memoryview(message)))


@pytest.mark.needs("/sys")
def test_the_machines_own_routes_are_read() -> None:
    found = netdevs.routes(Host())
    assert found is None or found.default | found.every <= {path.name for path in Path("/sys/class/net").iterdir()}
