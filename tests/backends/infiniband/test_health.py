"""The health of adapters: what their ports, nodes, functions and namespaces mean, and over time."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.health import HealthBook
from agent.inventory.inventory import Inventory
from agent.model import Health, Held
from agent.model import State as Is
from backends.base import Device, Measure, Seconds, Signal, Trend, Verdict
from backends.infiniband import InfiniBand, InfiniBandOptions, ports
from backends.infiniband.ports import Physical, PortState, State
from backends.linux import rdma
from backends.linux.rdma import Port
from tests.backends.infiniband.test_backend import PF, VF, resource, take_away
from tests.backends.rdma_trees import DOWN, ETHERNET, PortTree, adapter, exclusive, hca, rxe
from tests.backends.trees import entries, planted_host, restored
from tests.nodes import make_node

NOW, DELAYED, DEGRADED = Verdict.NOW, Verdict.DELAYED, Verdict.DEGRADED


def state(
    logical: State | None = State.ACTIVE,
    physical: Physical | None = Physical.LINK_UP,
    *,
    number: int = 1,
    link_layer: str = "InfiniBand",
    lid: int | None = 7,
    **more: Any,
) -> PortState:
    return PortState(Port("mlx5_0", number, link_layer), logical, physical, lid, **more)


def off(number: int = 1) -> PortState:
    return state(State.DOWN, Physical.POLLING, number=number)


def init(number: int = 1) -> PortState:
    return state(State.INIT, number=number, lid=0)


def judged(*states: PortState, **options: Any) -> list[tuple[str, Verdict, float]]:
    """Reasons, verdicts and delays; without what needs a past."""
    said = ports.signals("rdma:x", states, InfiniBandOptions(**options))
    return [(signal.reason, signal.verdict, signal.after) for signal in said if signal.measure is None]


# --- the table, port by port ---


@pytest.mark.parametrize(
    ("port", "said"),
    [
        (state(), []),
        (state(State.ACTIVE_DEFER), []),
        (off(), [("port-down", DELAYED, 10.0)]),
        (state(State.DOWN, Physical.DISABLED), [("port-down", DELAYED, 10.0)]),
        (state(State.DOWN, None), [("port-down", DELAYED, 10.0)]),
        (state(None, Physical.POLLING), [("port-down", DELAYED, 10.0)]),
        (state(None, Physical.DISABLED), [("port-down", DELAYED, 10.0)]),
        (state(State.ACTIVE, Physical.POLLING), []),  # rxe before Linux 4.20 always says so
        (init(), [("no-subnet-manager", DELAYED, 30.0)]),
        (state(State.ARMED), [("no-subnet-manager", DELAYED, 30.0)]),
        (state(State.ACTIVE, lid=0), [("no-subnet-manager", DELAYED, 30.0)]),
        (state(State.INIT, link_layer="Ethernet", lid=None), []),
        (state(State.ACTIVE, link_layer="Ethernet", lid=0), []),
        (state(None, None, lid=None), []),
        (state(State.NOP), []),
        (state(None, None, lid=None, fault="connection timed out"), [("state-unreadable", DELAYED, 10.0)]),
        (state(State.ACTIVE_DEFER, Physical.LINK_ERROR_RECOVERY), [("link-error-recovery", DEGRADED, 0.0)]),
    ],
)
def test_what_a_port_says(port: PortState, said: list[tuple[str, Verdict, float]]) -> None:
    assert judged(port) == said


@pytest.mark.parametrize(
    ("states", "wanted", "said"),
    [
        ((state(), off(2)), "any", [("port-down", DEGRADED, 0.0)]),
        ((off(), off(2)), "any", [("port-down", DELAYED, 10.0), ("port-down", DELAYED, 10.0)]),
        ((off(), init(2)), "any", [("port-down", DELAYED, 30.0), ("no-subnet-manager", DELAYED, 30.0)]),
        ((state(), off(2)), "all", [("port-down", DELAYED, 10.0)]),
        ((off(), init(2)), "all", [("port-down", DELAYED, 10.0), ("no-subnet-manager", DELAYED, 30.0)]),
        ((state(), off(2)), [1], []),
        ((off(), state(number=2)), [1], [("port-down", DELAYED, 10.0)]),
        ((state(), off(2)), [1, 2], [("port-down", DELAYED, 10.0)]),
        ((state(), off(2)), [3], []),
        ((), "any", []),
    ],
)
def test_which_ports_must_be_up(
    states: tuple[PortState, ...], wanted: Any, said: list[tuple[str, Verdict, float]]
) -> None:
    assert judged(*states, ports=wanted) == said


def test_the_delays_are_options() -> None:
    times: dict[str, Any] = {"down_after": Seconds(3), "up_after": Seconds(4), "subnet_manager_grace": Seconds(9)}
    assert judged(off(), **times) == [("port-down", DELAYED, 3.0)]
    assert judged(init(), **times) == [("no-subnet-manager", DELAYED, 9.0)]
    (signal,) = ports.signals("rdma:x", [off()], InfiniBandOptions(**times))
    assert signal.recover_after == 4.0


def test_sentences_name_the_port_and_the_cause() -> None:
    said = [s.message for s in ports.signals("rdma:x", [off(), state(number=2)], InfiniBandOptions())]
    assert said == ["mlx5_0 port 1 is down (polling: no cable, or nothing at its other end); another port is up"]


def test_rates_and_counters_are_compared_with_their_past() -> None:
    port = state(rate=4000, lanes=4, counters={"symbol_error": 65535})
    said = list(ports.signals("rdma:x", [port], InfiniBandOptions()))
    assert [(signal.reason, signal.verdict, signal.measure) for signal in said] == [
        ("rate-reduced", DEGRADED, Measure("mlx5_0 port 1 rate", 4000, Trend.BELOW_BEST)),
        ("width-reduced", DEGRADED, Measure("mlx5_0 port 1 width", 4, Trend.BELOW_BEST)),
        ("errors-rise", DEGRADED, Measure("mlx5_0 port 1 symbol_error", 65535, Trend.RISES)),
    ]
    assert not any(character.isdigit() for s in said for character in s.message.replace("mlx5_0 port 1", ""))


_STATES = st.builds(
    PortState,
    st.builds(Port, st.just("mlx5_0"), st.integers(1, 4), st.sampled_from(["", "InfiniBand", "Ethernet"])),
    st.none() | st.sampled_from(State),
    st.none() | st.sampled_from(Physical),
    st.none() | st.integers(0, 3),
    fault=st.sampled_from(["", "connection timed out"]),
)


@given(st.lists(_STATES, max_size=4), st.sampled_from(["any", "all", [1], [1, 2]]))
def test_one_port_that_is_up_is_enough_for_any(states: list[PortState], wanted: Any) -> None:
    said = list(ports.signals("rdma:x", states, InfiniBandOptions(ports=wanted)))
    assert all(signal.verdict in (DELAYED, DEGRADED) for signal in said)
    up = any(s.is_active and s.lid != 0 and not s.fault for s in states)
    if wanted == "any" and up:
        assert not [signal for signal in said if signal.verdict is DELAYED]
    if all(s.state is None and s.physical is None and not s.fault for s in states):
        assert not said


# --- probes ---


def probed(found: InfiniBand, device: Device) -> dict[str, Verdict]:
    return {signal.reason: signal.verdict for signal in found.probe(device) if signal.measure is None}


def made(tmp_path: Path, tree: str, unit: str = PF, **options: Any) -> tuple[InfiniBand, Device]:
    found = InfiniBand(planted_host(tmp_path, tree), [resource(**options)])
    (device,) = found.discover(unit).devices
    return found, device


@pytest.mark.parametrize("name", ["uverbs0", "umad1", "issm1"])
def test_a_node_that_is_gone_or_another_is_told_at_once_of_every_port(tmp_path: Path, name: str) -> None:
    found, device = made(tmp_path, adapter("mlx4_0", PF, (PortTree(), PortTree())))
    node = found.host.local(rdma.NODES / name)
    node.unlink()
    assert probed(found, device) == {"node-missing": NOW}
    make_node(node, "c", 231, 100)
    (signal,) = (s for s in found.probe(device) if s.measure is None)
    assert (signal.reason, signal.verdict, signal.hardware) == ("wrong-node", NOW, f"rdma:{PF}")
    assert signal.message.startswith(f"/dev/infiniband/{name} is 231:100, but the kernel's is 231:")
    node.unlink()
    node.touch()
    assert probed(found, device) == {"not-a-device": NOW}


def test_a_node_without_a_known_number_is_only_looked_for(tmp_path: Path) -> None:
    host = planted_host(tmp_path, adapter("mlx5_0", PF))
    host.local(rdma.VERBS / "uverbs0/dev").write_text("zebra")
    found = InfiniBand(host, [resource()])
    assert probed(found, found.discover(PF).devices[0]) == {}


def test_an_adapter_without_uverbs_says_so(tmp_path: Path) -> None:
    tree = adapter("mlx5_0", PF, seen=False).split("sys/class/")[0] + hca("mlx5_0", f"pci0000:00/{PF}", nodes=False)
    assert probed(*made(tmp_path, tree)) == {"uverbs-missing": NOW}


def test_ports_of_virtual_functions_and_subfunctions_count_only_where_asked(tmp_path: Path) -> None:
    aux = f"pci0000:00/{PF}/mlx5_core.sf.4"
    tree = adapter("mlx5_0", PF) + adapter("mlx5_1", VF, (DOWN,), physical=PF, number=1)
    tree += hca("mlx5_2", aux, (DOWN,), number=2)
    for unit in (VF, f"{PF}/mlx5_core.sf.4"):
        root = tmp_path / unit.replace("/", "-")
        assert probed(*made(root / "by-default", tree, unit)) == {}
        assert probed(*made(root / "asked", tree, unit, virtual_ports=True)) == {"port-down": DELAYED}


def test_the_ports_of_software_count(tmp_path: Path) -> None:
    port = PortTree("1: DOWN", "3: Disabled", link_layer="Ethernet", lid="0x0")
    assert probed(*made(tmp_path, rxe(port=port), "rxe0")) == {"port-down": DELAYED}
    assert probed(*made(tmp_path / "up", rxe(port=ETHERNET), "rxe0")) == {}


def test_a_function_that_has_fallen_off_the_bus_is_told(tmp_path: Path) -> None:
    found, device = made(tmp_path, adapter("mlx5_0", PF))
    (found.host.sys / f"devices/pci0000:00/{PF}/config").write_bytes(b"\xff" * 64)
    (signal,) = (s for s in found.probe(device) if s.measure is None)
    assert (signal.reason, signal.verdict, signal.hardware) == ("off-bus", NOW, f"pci:{PF}")


def test_a_driver_that_has_left_is_told(tmp_path: Path) -> None:
    found, device = made(tmp_path, adapter("mlx5_0", PF))
    take_away_all(found)
    (found.host.sys / f"devices/pci0000:00/{PF}/driver").unlink()
    assert probed(found, device)["driver-unbound"] is NOW
    assert "hca-missing" not in probed(found, device)


def test_an_adapter_that_vanishes_is_told(tmp_path: Path) -> None:
    found, device = made(tmp_path, adapter("mlx5_0", PF))
    take_away_all(found)
    assert probed(found, device) == {"hca-missing": NOW}


def take_away_all(found: InfiniBand) -> None:
    (found.host.sys / "class/infiniband/mlx5_0").unlink()


def test_an_adapter_in_a_pods_namespace_is_unhealthy_to_all_but_that_pod(tmp_path: Path) -> None:
    found = InfiniBand(planted_host(tmp_path, exclusive() + adapter("mlx5_0", PF, netdevs=["ib0"])), [resource()])
    (before,) = found.discover(PF).devices
    take_away(found.host)
    (after,) = found.discover(PF).devices
    for device in (before, after):  # whichever is known when the poll comes round
        (signal,) = (s for s in found.probe(device) if s.measure is None)
        assert (signal.reason, signal.verdict, signal.unless_held) == ("in-another-namespace", NOW, True)


def test_the_options_are_those_of_the_resource_that_takes_the_adapter(tmp_path: Path) -> None:
    tree = adapter("mlx5_0", PF, (PortTree(), DOWN)) + adapter("mlx5_1", VF, (PortTree(), DOWN), number=1, first_port=2)
    lenient = resource("example.com/a", select=[{"hca": ("mlx5_0",)}], ports=[1])
    strict = resource("example.com/b", select=[{"hca": ("mlx5_1",)}], ports="all")
    found = InfiniBand(planted_host(tmp_path, tree), [lenient, strict])
    assert [probed(found, found.discover(unit).devices[0]) for unit in (PF, VF)] == [{}, {"port-down": DELAYED}]


# --- at a glance ---


def test_a_glance_shows_the_state_of_every_port(tmp_path: Path) -> None:
    found, device = made(tmp_path, adapter("mlx4_0", PF, (PortTree(), PortTree())))
    before = found.glance(device)
    assert found.glance(device) == before
    for port in ("1", "2"):
        state = found.host.local(rdma.INFINIBAND / "mlx4_0/ports" / port / "state")
        for change in (lambda state=state: state.write_text("1: DOWN"), state.unlink, state.mkdir):
            change()
            assert found.glance(device) != before
            before = found.glance(device)


def test_a_glance_reads_no_more_than_that(tmp_path: Path) -> None:
    """Each file may be a trip to the firmware, every two seconds, of every port."""
    found, device = made(tmp_path, adapter("mlx5_0", PF))
    before = found.glance(device)
    port = found.host.local(rdma.INFINIBAND / "mlx5_0/ports/1")
    for path in sorted(port.rglob("*")):
        if path.is_file() and path.name != "state":
            path.unlink()
    assert found.glance(device) == before


@pytest.mark.parametrize("virtual_ports", [False, True])
@pytest.mark.parametrize("unit", [PF, VF])
def test_a_glance_shows_that_an_adapter_has_gone(tmp_path: Path, unit: str, virtual_ports: bool) -> None:
    tree = adapter("mlx5_1", PF, number=1) + adapter("mlx5_0", VF, physical=PF)
    tree = tree if unit == VF else adapter("mlx5_0", PF)
    found, device = made(tmp_path, tree, unit, virtual_ports=virtual_ports)
    before = found.glance(device)
    take_away_all(found)
    assert found.glance(device) != before


@pytest.mark.parametrize("asked", [False, True])
def test_a_glance_is_taken_at_virtual_ports_where_any_resource_asks_for_them(tmp_path: Path, asked: bool) -> None:
    found, device = made(tmp_path, adapter("mlx5_0", VF, physical=PF), VF, virtual_ports=asked)
    before = found.glance(device)
    found.host.local(rdma.INFINIBAND / "mlx5_0/ports/1/state").write_text("1: DOWN")
    assert (found.glance(device) != before) is asked


# --- over time ---


def at(book: HealthBook, signals: Iterable[Signal], now: float) -> Is:
    book.probed("infiniband", {PF: [signal for signal in signals if signal.measure is None]}, now)
    return book.of("rdma:x").state


def look(book: HealthBook, now: float, options: InfiniBandOptions, *states: PortState) -> str:
    """The reason that is shown when the ports are found like this."""
    at(book, list(ports.signals("rdma:x", states, options)), now)
    return book.of("rdma:x").reason


def test_a_port_is_down_for_ten_seconds_before_it_counts_and_up_for_five(tmp_path: Path) -> None:
    book, options = HealthBook(), InfiniBandOptions()
    down, up = (list(ports.signals("rdma:x", [port], options)) for port in (off(), state()))
    seen = {now: at(book, down if now < 16 else up, now) for now in (0.0, 2.0, 8.0, 10.0, 14.0, 16.0, 18.0, 20.0, 21.0)}
    assert [now for now, is_ in seen.items() if is_ is Is.UNHEALTHY] == [10.0, 14.0, 16.0, 18.0, 20.0]
    assert seen[21.0] is Is.HEALTHY


def test_a_port_that_was_down_and_waits_for_its_subnet_manager_stays_unhealthy_until_it_is_active() -> None:
    book, options = HealthBook(), InfiniBandOptions()
    look(book, 0.0, options, off())
    assert look(book, 60.0, options, off()) == "port-down"
    assert look(book, 62.0, options, init()) == "port-down", "it has been up for a moment only"
    assert [look(book, now, options, init()) for now in (67.0, 68.0, 90.0)] == ["no-subnet-manager"] * 3
    assert look(book, 92.0, options, state(State.ARMED)) == "no-subnet-manager"
    assert [look(book, now, options, state()) for now in (94.0, 98.9, 99.0)] == ["no-subnet-manager"] * 2 + [""]
    assert [look(book, now, options, init()) for now in (100.0, 129.9, 130.0)] == ["", "", "no-subnet-manager"]


def test_a_port_of_two_that_were_down_and_waits_for_its_subnet_manager_makes_nothing_well() -> None:
    book, options = HealthBook(), InfiniBandOptions()
    look(book, 0.0, options, off(), off(2))
    assert look(book, 12.0, options, off(), off(2)) == "port-down"
    assert look(book, 14.0, options, off(), init(2)) != "", "although the other port now has more patience"
    assert look(book, 20.0, options, off(), init(2)) != ""
    assert [look(book, now, options, off(), state(number=2)) for now in (22.0, 27.0)] == ["port-down"] * 2
    assert book.of("rdma:x").state is Is.DEGRADED


looks = st.lists(
    st.tuples(
        st.sampled_from([0.5, 2.0, 6.0, 31.0]),
        st.tuples(*(st.sampled_from([off(n), init(n), state(number=n)]) for n in (1, 2))),
    ),
    max_size=30,
)


@given(looks, st.sampled_from(["any", "all", [1]]))
def test_an_unhealthy_adapter_is_well_once_its_ports_were_active_for_long_enough_and_not_before(
    looks: list[tuple[float, tuple[PortState, PortState]]], wanted: Any
) -> None:
    book, options, now = HealthBook(), InfiniBandOptions(ports=wanted), 0.0
    up_since: float | None = None
    for seconds, ports_now in looks:
        before, now = book.for_pod("rdma:x", now), now + seconds  # whom quarantine does not concern
        after = book.for_pod("rdma:x", now)
        assert after.offered or not before.offered or up_since is None
        if after.offered and not before.offered:
            assert up_since is not None
            assert now - up_since >= options.up_after
        look(book, now, options, *ports_now)
        named = ports_now[:1] if wanted == [1] else ports_now
        is_up = (any if wanted == "any" else all)(port.is_active for port in named)
        up_since = (now if up_since is None else up_since) if is_up else None
        if not after.offered:
            assert not book.for_pod("rdma:x", now).offered
        if up_since is not None and now - up_since >= options.up_after:
            assert book.for_pod("rdma:x", now).offered


def test_a_rate_that_falls_and_a_counter_that_rises_are_degraded_until_they_are_not() -> None:
    book, options = HealthBook(), InfiniBandOptions()

    def look(now: float, rate: int = 4000, errors: int | None = 5) -> tuple[Is, str]:
        counters = {} if errors is None else {"symbol_error": errors}
        book.probed("infiniband", {PF: ports.signals("rdma:x", [state(rate=rate, counters=counters)], options)}, now)
        return book.of("rdma:x").state, book.of("rdma:x").reason

    well = (Is.HEALTHY, "")
    assert [look(0.0), look(2.0), look(4.0, errors=0)] == [well] * 3  # a counter that was reset is no alarm
    assert look(6.0, rate=2000, errors=0) == (Is.DEGRADED, "rate-reduced")
    assert look(8.0, errors=0) == (Is.DEGRADED, "rate-reduced")
    assert look(14.0, errors=0) == well
    assert look(16.0, errors=1) == (Is.DEGRADED, "errors-rise")
    assert look(18.0, errors=1) == (Is.DEGRADED, "errors-rise")
    assert look(78.0, errors=1) == well
    assert look(80.0, errors=65535) == (Is.DEGRADED, "errors-rise")
    assert look(82.0, errors=65535) == (Is.DEGRADED, "errors-rise")
    assert [look(142.0, errors=65535), look(144.0, errors=None)] == [well] * 2  # saturated, and "N/A"


def test_a_pod_that_took_its_adapter_along_keeps_it_and_nobody_else_is_offered_it(tmp_path: Path) -> None:
    found = InfiniBand(planted_host(tmp_path, exclusive() + adapter("mlx5_0", PF, netdevs=["ib0"])), [resource()])
    it, book = Inventory(found.resources, {"infiniband": found}), HealthBook()

    def look(now: float) -> Health:
        discovery = found.discover(PF)
        it.update("infiniband", {PF: discovery.devices})
        said = [signal for device in discovery.devices for signal in found.probe(device)]
        it.set_health(book.probed("infiniband", {PF: said}, now))
        return it.slots("example.com/hca")[PF].health

    assert look(0.0).offered
    (device,) = found.discover(PF).devices
    claim = Held("example.com/hca", PF, "infiniband", device.hardware, device.identity)
    it.claim([claim])
    take_away(found.host)
    assert look(2.0).offered
    it.unclaim([claim])
    health = it.slots("example.com/hca")[PF].health
    assert (health.state, health.reason) == (Is.UNHEALTHY, "in-another-namespace")
    (found.host.root / "elsewhere").rename(found.host.sys / f"devices/pci0000:00/{PF}/infiniband")
    (found.host.sys / "class/infiniband/mlx5_0").symlink_to(f"../../devices/pci0000:00/{PF}/infiniband/mlx5_0")
    assert look(4.0).offered


# --- whatever is there ---


def test_garbage_never_makes_ports_unhealthy(tmp_path: Path) -> None:
    found, device = made(tmp_path / "host", adapter("mlx4_0", PF, (PortTree(), ETHERNET)))
    files = [path for path in entries(found.host.local(rdma.INFINIBAND / "mlx4_0/ports")) if path.is_file()]

    @given(st.dictionaries(st.sampled_from(files), st.none() | st.binary(max_size=64)))
    @settings(max_examples=40, deadline=None)
    def check(spoilt: dict[Path, bytes | None]) -> None:
        with restored(tmp_path / "host") as take:
            for path, garbage in spoilt.items():
                take(path)
                if garbage is not None:
                    path.write_bytes(b"?" + garbage)
            assert probed(found, device) == {}
            found.discover(PF)

    check()
