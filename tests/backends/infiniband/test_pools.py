"""All adapters of a resource together: k8s-rdma-shared-dev-plugin's way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agent.inventory.inventory import Inventory
from agent.model import Health, Held, State
from backends.base import Grant
from backends.infiniband import InfiniBand, InfiniBandResource, ports
from tests.backends.infiniband.test_backend import resource
from tests.backends.rdma_trees import ETHERNET, RDMA_CM, adapter, exclusive
from tests.backends.trees import planted_host

A, B, C = "0000:3b:00.0", "0000:5e:00.0", "0000:86:00.0"


TREE = (
    RDMA_CM
    + adapter("mlx5_0", A, number=0, netdevs=["ib0"], numa_node=0)
    + adapter("mlx5_1", B, number=1, netdevs=["ib1"], numa_node=1)
    + adapter("mlx5_2", C, (ETHERNET,), number=2, netdevs=["eth2"], kind="020000")
)

SHARED = resource("rdma/hca_shared", shared=4, select=[{"link_layer": ("InfiniBand",)}])


def backend(tmp_path: Path, *resources: InfiniBandResource, tree: str = TREE) -> InfiniBand:
    return InfiniBand(planted_host(tmp_path, tree), resources or (SHARED,))


def inventory(found: InfiniBand) -> Inventory:
    made = Inventory(found.resources, {"infiniband": found})
    made.update("infiniband", {unit: found.discover(unit).devices for unit in found.units()})
    return made


def test_each_token_gives_all_adapters(tmp_path: Path) -> None:
    """Golden: rdmaHcaMax tokens; the nodes of each adapter, rwm; rdma_cm once and not for each adapter."""
    found = backend(tmp_path)
    assert (
        list(inventory(found).slots("rdma/hca_shared"))
        == [f"rdma/hca_shared::{n}" for n in range(4)]
        == list(found.fixed_ids(SHARED))
    )
    (pool,) = found.discover("pool:rdma/hca_shared").devices
    said = found.edits(SHARED, [Grant("2", pool)])
    names = ["issm0", "umad0", "uverbs0", "issm1", "umad1", "uverbs1", "rdma_cm"]
    assert [(node.path.name, node.permissions) for node in said.nodes] == [(name, "rwm") for name in names]
    assert not said.env
    assert not found.prefers(SHARED)


def test_a_pool_owns_what_is_in_it_and_its_adapters_are_nowhere_else(tmp_path: Path) -> None:
    found = backend(tmp_path, SHARED, resource("example.com/hca"))
    made = inventory(found)
    (pool,) = found.discover("pool:rdma/hca_shared").devices
    assert pool.hardware == {f"{kind}:{address}" for kind in ("pci", "rdma") for address in (A, B)}
    assert list(made.slots("example.com/hca")) == [C]
    assert made.unclaimed() == []


def test_a_pool_leaves_out_what_an_earlier_resource_takes(tmp_path: Path) -> None:
    first = resource("example.com/hca", select=[{"hca": ("mlx5_0",)}])
    made = inventory(backend(tmp_path, first, SHARED))
    assert list(made.slots("example.com/hca")) == [A]
    assert (pool := made.slots("rdma/hca_shared")["rdma/hca_shared::0"].device)
    assert pool.hardware == {f"pci:{B}", f"rdma:{B}"}


def test_a_pool_leaves_out_what_an_earlier_resource_may_take_once_its_port_is_up(tmp_path: Path) -> None:
    first = resource("example.com/hca", select=[{"hca": ("mlx5_0",), "state": ("ACTIVE",)}])
    assert (
        "mlx5_0" not in backend(tmp_path, first, SHARED).discover("pool:rdma/hca_shared").devices[0].attributes["pool"]
    )


def test_what_a_pool_is_chosen_by_is_never_a_mixture(tmp_path: Path) -> None:
    """Each adapter is right; all their attributes in one would be excluded."""
    odd = resource("rdma/all", shared=2, exclude=[{"hca": ("mlx5_0",), "link_layer": ("Ethernet",)}])
    found = backend(tmp_path, odd)
    (pool,) = found.discover("pool:rdma/all").devices
    assert pool.attributes["pool"] == ("mlx5_0", "mlx5_1", "mlx5_2")
    assert list(inventory(found).slots("rdma/all")) == ["rdma/all::0", "rdma/all::1"]


def test_a_pool_without_adapters_has_no_tokens(tmp_path: Path) -> None:
    found = backend(tmp_path, resource("rdma/none", shared=4, select=[{"vendor": ("8086",)}]))
    assert not found.discover("pool:rdma/none").devices


def test_a_pool_is_put_together_without_a_question_to_the_firmware(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One adapter that hangs must not hold up the others' tokens."""

    def hang(*_: object) -> ports.PortState:
        raise AssertionError("the firmware was asked")

    monkeypatch.setattr(ports, "read", hang)
    found = backend(tmp_path)
    (pool,) = found.discover("pool:rdma/hca_shared").devices
    assert list(found.probe(pool)) == []
    with pytest.raises(AssertionError, match="asked"):
        found.discover(A)


def test_a_pool_in_exclusive_mode_is_a_problem(tmp_path: Path) -> None:
    found = backend(tmp_path, tree=TREE + exclusive()).discover("pool:rdma/hca_shared")
    (problem,) = found.problems
    assert "rdma/hca_shared is shared, but RDMA devices are in one network namespace at a time" in problem.sentence


def unhealthy(name: str) -> Health:
    return Health(State.UNHEALTHY, "port-down", f"{name} is down")


def test_tokens_are_degraded_while_some_adapters_fail_and_unhealthy_once_all_have(tmp_path: Path) -> None:
    made = inventory(backend(tmp_path))

    def states() -> set[tuple[State, str]]:
        return {(s.health.state, s.health.message) for s in made.slots("rdma/hca_shared").values()}

    made.set_health({f"rdma:{A}": unhealthy("a")})
    assert states() == {(State.DEGRADED, "a is down")}
    made.set_health({f"pci:{B}": unhealthy("b")})
    assert states() == {(State.UNHEALTHY, "a is down")}
    made.set_health({f"rdma:{A}": Health(State.DEGRADED, "slow", "a is slow")})
    assert states() == {(State.DEGRADED, "b is down")}
    made.set_health({f"pci:{B}": Health(State.HEALTHY)})
    assert states() == {(State.DEGRADED, "a is slow")}
    made.set_health({f"rdma:{A}": Health(State.HEALTHY)})
    assert states() == {(State.HEALTHY, "")}


def test_a_pool_that_grows_or_shrinks_is_still_the_one_that_a_pod_has(tmp_path: Path) -> None:
    found = backend(tmp_path)
    made = inventory(found)
    (pool,) = found.discover("pool:rdma/hca_shared").devices
    made.claim([Held("rdma/hca_shared", "rdma/hca_shared::1", "infiniband", pool.hardware, pool.identity)])
    (found.host.sys / "class/infiniband/mlx5_1").unlink()
    (found.host.sys / "class/infiniband_verbs/uverbs1").unlink()
    made.update("infiniband", {B: (), "pool:rdma/hca_shared": found.discover("pool:rdma/hca_shared").devices})
    held = made.slots("rdma/hca_shared")["rdma/hca_shared::1"]
    assert held.device is not None
    assert held.device.hardware == {f"pci:{A}", f"rdma:{A}"}
    assert held.health.state is State.HEALTHY


# --- pools that have the same adapters ---


def overlapping(name: str, **more: Any) -> InfiniBandResource:
    return resource(name, shared=2, overlap=True, **more)


ALL_OF_THEM, FABRIC = overlapping("rdma/all"), overlapping("rdma/fabric", select=[{"link_layer": ("InfiniBand",)}])


def test_pools_that_overlap_have_the_same_adapters_and_no_other_resource_has(tmp_path: Path) -> None:
    found = backend(tmp_path, ALL_OF_THEM, FABRIC, resource("example.com/hca"), SHARED)
    made = inventory(found)
    pooled = {name: slot.device for name in made.names() if (slot := made.slots(name).get(f"{name}::0"))}
    assert {name: pool.attributes["pool"] for name, pool in pooled.items() if pool} == {
        "rdma/all": ("mlx5_0", "mlx5_1", "mlx5_2"),
        "rdma/fabric": ("mlx5_0", "mlx5_1"),
    }
    assert not made.slots("example.com/hca")
    assert not any(problem for name in pooled for problem in found.discover(f"pool:{name}").problems)
    above = inventory(
        backend(tmp_path / "above", resource("a.com/x", select=[{"hca": ("mlx5_0",)}]), FABRIC, ALL_OF_THEM)
    )
    of_two = [above.slots(name)[f"{name}::0"].device for name in ("rdma/fabric", "rdma/all")]
    assert [pool and pool.attributes["pool"] for pool in of_two] == [("mlx5_1",), ("mlx5_1", "mlx5_2")]


def test_each_of_two_pools_is_as_well_as_its_adapters_whoever_holds_the_other(tmp_path: Path) -> None:
    made = inventory(backend(tmp_path, ALL_OF_THEM, FABRIC))
    held = made.slots("rdma/fabric")["rdma/fabric::1"].device
    assert held
    made.claim([Held("rdma/fabric", "rdma/fabric::1", "infiniband", held.hardware, held.identity)])

    def states() -> list[State]:
        return [made.slots(name)[f"{name}::1"].health.state for name in ("rdma/all", "rdma/fabric")]

    assert states() == [State.HEALTHY, State.HEALTHY]
    made.set_health({f"rdma:{A}": unhealthy("a")})
    assert states() == [State.DEGRADED, State.DEGRADED]
    made.set_health({f"pci:{B}": unhealthy("b")})
    assert states() == [State.DEGRADED, State.UNHEALTHY]


def test_a_pool_whose_adapters_all_belong_to_resources_above_says_so(tmp_path: Path) -> None:
    found = backend(tmp_path, resource("example.com/ib", select=[{"hca": ("mlx5_0",)}]), SHARED, FABRIC)
    (problem,) = found.discover("pool:rdma/fabric").problems
    assert problem.sentence == (
        "rdma/fabric has no adapters and no tokens, because what it selects belongs to resources above it: 0000:3b:00.0 to "
        "example.com/ib and 0000:5e:00.0 to rdma/hca_shared. Pools that all say overlap = true share adapters"
    )
    assert not found.discover("pool:rdma/hca_shared").problems


def test_the_kubelet_is_not_told_a_pools_numa_node_where_that_is_not_wanted(tmp_path: Path) -> None:
    select = [{"hca": ("mlx5_0",)}]
    for topology, numa_node in ((True, 0), (False, None)):
        found = backend(tmp_path / str(topology), resource("rdma/one", shared=1, topology=topology, select=select))
        (pool,) = found.discover("pool:rdma/one").devices
        assert pool.numa_node == numa_node


def test_tokens_of_two_pools_have_no_id_in_common_and_a_pod_keeps_the_one_it_was_given_before(tmp_path: Path) -> None:
    """Kubelet contract: A9. Kubernetes 140323; older versions of Fairlead numbered each pool's tokens from 0."""
    two = [resource(f"rdma/{name}", shared=4, overlap=True) for name in ("one", "other")]
    made = inventory(backend(tmp_path, *two))
    one, other = (made.slots(it.name) for it in two)
    assert one.keys().isdisjoint(other)
    device = one["rdma/one::0"].device
    assert device is not None
    made.claim([Held("rdma/one", "1", "infiniband", device.hardware, device.identity)])
    assert made.slots("rdma/one")["1"].health.offered
    assert sum(slot.health.offered for slot in made.slots("rdma/one").values()) == 4, "as many pods as before"
