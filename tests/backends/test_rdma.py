"""RDMA adapters and their ports as sysfs shows them."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from backends.base import Host
from backends.infiniband import ports
from backends.infiniband.ports import Physical, PortState, State
from backends.linux import rdma
from backends.linux.rdma import Port
from tests.backends.rdma_trees import DOWN, ETHERNET, PortTree, adapter, exclusive, hca
from tests.backends.trees import plant, planted_host

PF = "0000:3b:00.0"
BELOW = "pci0000:3a/0000:3a:01.0"


def only(host: Host, place: str = PF) -> rdma.Adapter:
    found = rdma.read(host, place)
    assert found is not None
    return found


def nodes(found: rdma.Adapter) -> list[tuple[str, str, str]]:
    return [(node.path.name, node.number, node.hca) for node in found.nodes]


def test_nodes_come_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    found = only(planted_host(tmp_path, adapter("mlx4_0", PF, (PortTree(), PortTree()), first_port=9)))
    assert [node.path.name for node in found.nodes] == ["issm9", "issm10", "umad9", "umad10", "uverbs0"]


def test_a_renamed_adapter_is_where_it_was(tmp_path: Path) -> None:
    host = planted_host(tmp_path, adapter("ibp59s0", PF))
    assert rdma.places(host) == [PF]
    assert only(host).names == ("ibp59s0",)


def test_all_adapters_of_a_function_are_at_one_place(tmp_path: Path) -> None:
    """In switchdev mode a function may have several."""
    tree = adapter("mlx5_0", PF) + hca("mlx5_10", f"pci0000:00/{PF}", number=10)
    host = planted_host(tmp_path, tree)
    assert rdma.places(host) == [PF]
    assert only(host).names == ("mlx5_0", "mlx5_10")
    assert {name for _, _, name in nodes(only(host))} == {"mlx5_0", "mlx5_10"}


def test_software_in_the_hardware_of_its_interface_does_not_own_it(tmp_path: Path) -> None:
    """As kernels before 5.11 have it."""
    below = f"pci0000:00/{PF}"
    tree = adapter("mlx5_0", PF, (ETHERNET,)) + hca(
        "rxe0", below, (ETHERNET,), number=1, files={"parent": "eth0"}, guid="5054:00ff:fe12:3456"
    )
    host = planted_host(tmp_path, tree)
    assert rdma.places(host) == [PF, "rxe0"]
    assert (only(host).names, only(host, "rxe0").names) == (("mlx5_0",), ("rxe0",))
    assert {name for _, _, name in nodes(only(host))} == {"mlx5_0"}
    assert {name for _, _, name in nodes(only(host, "rxe0"))} == {"rxe0"}


@pytest.mark.parametrize("place", [PF, "rxe0"])
def test_an_adapter_in_another_namespace_is_known_by_its_nodes(tmp_path: Path, place: str) -> None:
    software = hca("rxe0", "virtual", (ETHERNET,), number=7, seen=False)
    host = planted_host(tmp_path, exclusive() + adapter("mlx5_0", PF, seen=False) + software)
    assert rdma.places(host) == [PF, "rxe0"]
    assert rdma.is_exclusive(host)
    found = only(host, place)
    assert found.hcas == ()
    assert found.away == ("mlx5_0" if place == PF else "rxe0",)
    assert found.names == found.away
    assert len(found.nodes) == 3


def test_a_place_without_an_adapter_is_none(tmp_path: Path) -> None:
    host = planted_host(tmp_path, adapter("x", PF, seen=False).split("sys/class/")[0])
    assert rdma.places(host) == []
    assert [rdma.read(host, place) for place in (PF, "0000:00:00.0", "rxe0", f"{PF}/mlx5_core.sf.1")] == [None] * 4


def test_a_node_whose_number_is_garbage_is_a_problem_and_unknown(tmp_path: Path) -> None:
    host = planted_host(tmp_path, adapter("mlx5_0", PF))
    host.local(rdma.VERBS / "uverbs0" / "dev").write_text("zebra\n")
    found = only(host)
    assert ("uverbs0", "", "mlx5_0") in nodes(found)
    (problem,) = found.problems
    assert problem.subject == PF
    assert "'zebra', which is no device number" in problem.sentence


@pytest.mark.parametrize(
    ("devpath", "place"),
    [
        (f"/devices/{BELOW}/{PF}/infiniband/mlx5_0", PF),
        (f"/devices/{BELOW}/{PF}/infiniband_verbs/uverbs0", PF),
        (f"/devices/{BELOW}/{PF}/mlx5_core.sf.4/infiniband_mad/umad3", f"{PF}/mlx5_core.sf.4"),
        ("/devices/virtual/infiniband/rxe0", "rxe0"),
    ],
)
def test_an_event_names_a_place(devpath: str, place: str) -> None:
    assert rdma.place_of(devpath) == place


# --- ports ---


def one_port(tmp_path: Path, tree: PortTree, *counters: str) -> PortState:
    host = planted_host(tmp_path, adapter("mlx5_0", PF, (tree,)))
    return ports.read(host, Port("mlx5_0", 1, tree.link_layer), counters)


def test_a_port_that_is_up(tmp_path: Path) -> None:
    found = one_port(tmp_path, PortTree(counters={"symbol_error": "7"}), "symbol_error", "link_downed", "no_such")
    assert (found.state, found.physical, found.lid) == (State.ACTIVE, Physical.LINK_UP, 0x2A)
    assert (found.rate, found.lanes) == (4000, 4)
    assert found.counters == {"symbol_error": 7, "link_downed": 0}
    assert found.is_active
    assert not found.fault


def test_a_port_that_is_down_is_not_asked_for_what_it_counts(tmp_path: Path) -> None:
    found = one_port(tmp_path, DOWN, "symbol_error")
    assert (found.state, found.physical, found.rate, found.counters) == (State.DOWN, Physical.POLLING, None, {})


@pytest.mark.parametrize(
    ("text", "rate", "lanes"),
    [
        ("2.5 Gb/sec (1X)", 25, 1),
        ("100 Gb/sec (4X EDR)", 1000, 4),
        ("25 Gb/sec", 250, None),
        ("", None, None),
        ("fast", None, None),
    ],
)
def test_rates(tmp_path: Path, text: str, rate: int | None, lanes: int | None) -> None:
    found = one_port(tmp_path, PortTree(rate=text))
    assert (found.rate, found.lanes) == (rate, lanes)


@pytest.mark.parametrize("count", ["N/A (no PMA)", "-1", "many", ""])
def test_a_counter_that_does_not_count_is_unknown(tmp_path: Path, count: str) -> None:
    assert one_port(tmp_path, PortTree(counters={"symbol_error": count}), "symbol_error").counters == {}


@pytest.mark.parametrize("text", ["", "9: UNKNOWN", "ACTIVE", "\x00\x01", "4 ACTIVE"])
def test_a_state_that_is_garbage_is_unknown(tmp_path: Path, text: str) -> None:
    found = one_port(tmp_path, PortTree(state=text))
    assert (found.state, found.fault) == (None, "")


def test_a_state_that_is_missing_is_unknown_and_one_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    host = planted_host(tmp_path, adapter("mlx5_0", PF))
    state = host.local(rdma.INFINIBAND / "mlx5_0/ports/1/state")
    state.unlink()
    port = Port("mlx5_0", 1, "InfiniBand")
    assert ports.read(host, port) == PortState(port)
    state.mkdir()
    assert ports.read(host, port).fault == "is a directory"


@pytest.mark.parametrize(
    ("number", "fault"),
    [(errno.ENODEV, ""), (errno.ETIMEDOUT, "connection timed out"), (errno.EIO, "input/output error")],
)
def test_a_firmware_that_does_not_answer_is_told_and_an_adapter_that_leaves_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, fault: str
) -> None:
    host = planted_host(tmp_path, adapter("mlx5_0", PF))

    def fail(_file: int, _count: int) -> bytes:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "read", fail)
    assert ports.read(host, Port("mlx5_0", 1, "InfiniBand")).fault == fault


# --- anything may be missing, or be garbage ---


def test_a_half_removed_adapter_is_what_is_left_of_it(tmp_path: Path) -> None:
    host = planted_host(tmp_path, hca("mlx5_0", f"pci0000:00/{PF}", nodes=False))
    assert rdma.places(host) == [PF]
    assert rdma.read(host, PF) is None  # its function has left the bus
    plant(tmp_path, adapter("mlx5_0", PF).split("sys/class/")[0])
    assert (only(host).names, only(host).nodes) == (("mlx5_0",), ())
