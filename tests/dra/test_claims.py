"""What a claim gets, whatever the API server says and in whatever order claims come and go."""

from __future__ import annotations

from contextlib import nullcontext, suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from agent.dra.claims import (
    API_VERSION,
    KIND,
    Allocated,
    Candidate,
    Given,
    Parameters,
    Result,
    give,
    is_over,
    narrowed,
    read,
    spread,
)
from agent.health.book import DRAINED
from agent.model import HEALTHY, Health, Held, Slot, State
from backends.base import AllocationRefused, ContainerEdits, Device, HostPath, Mount, Node
from tests.dra.driven import DRIVER, POOL

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=5,
)
RESULT = {"driver": DRIVER, "pool": POOL, "device": "a", "request": "r"}


def claim_with(results: Any, **status: Any) -> dict[str, Any]:
    return {"metadata": {"uid": "u"}, "status": {"allocation": {"devices": {"results": results}}, **status}}


def read_one(**more: Any) -> Result:
    (result,) = read(claim_with([RESULT | more]), "u", "ns", "n", DRIVER).results
    return result


@given(st.fixed_dictionaries({"metadata": JSON, "status": JSON}) | st.builds(claim_with, JSON | st.lists(JSON)))
def test_whatever_stands_in_a_claim_it_is_read_or_refused_with_a_sentence(claim: dict[str, Any]) -> None:
    with suppress(AllocationRefused):
        read(claim, "u", "ns", "n", DRIVER)
    is_over(claim, "u", DRIVER, POOL.partition("/")[0])


@pytest.mark.parametrize(("written", "meant"), [("3", 3), (2, 2), ("1k", 1000), ("2Ki", 2048), ("1M", 1_000_000)])
def test_tokens_are_counted_in_every_form_that_the_api_server_writes(written: Any, meant: int) -> None:
    assert read_one(consumedCapacity={"tokens": written}).tokens == meant
    assert read_one(consumedCapacity={f"{DRIVER}/tokens": written}).tokens == meant


@pytest.mark.parametrize("written", ["0", "-1", "500m", "1.5", "", "much", 0])
def test_less_than_one_token_or_half_a_token_is_refused(written: Any) -> None:
    with pytest.raises(AllocationRefused, match="whole number"):
        read_one(consumedCapacity={"tokens": written})


@pytest.mark.parametrize(
    ("toleration", "sick", "drained"),
    [
        ({"operator": "Exists"}, True, True),
        ({"key": "gpu.nvidia.com/unhealthy", "operator": "Exists"}, False, False),
        ({"key": f"{DRIVER}/degraded", "operator": "Exists"}, False, False),
        ({"key": "unhealthy", "operator": "Exists"}, False, False),
        ({"key": f"{DRIVER}/unhealthy", "operator": "Exists", "effect": "NoExecute"}, True, False),
        ({"key": f"{DRIVER}/drained", "operator": "Exists"}, False, True),
        ({"key": f"{DRIVER}/unhealthy", "operator": "Equal", "value": "xid-79"}, True, False),
        ({"key": f"{DRIVER}/unhealthy", "value": "xid-48"}, False, False),
        ({"key": f"{DRIVER}/unhealthy"}, False, False),
    ],
)
def test_a_device_that_is_not_well_goes_only_to_claims_that_tolerate_the_taint_that_it_has(
    toleration: dict[str, str], sick: bool, drained: bool
) -> None:
    result = read_one(tolerations=[{"key": "another.example.com/taint", "operator": "Exists"}, toleration])
    for reason, fits in (("xid-79", sick), (DRAINED, drained)):
        slots = (Slot("a", DEVICES["one"], Health(State.UNHEALTHY, reason)),)
        there = {(POOL, "a"): Candidate("r/r", "toy", slots)}
        with nullcontext() if fits else pytest.raises(AllocationRefused, match=f"cannot be used now: {reason}"):
            give(Allocated("u", "ns", "n", (result,)), there, "boot")


def test_a_claim_is_over_once_it_is_another_reserved_for_nobody_or_without_devices_of_ours() -> None:
    used = claim_with([RESULT], reservedFor=[{"resource": "pods", "uid": "p"}])
    assert not is_over(used, "u", DRIVER, POOL.partition("/")[0])
    assert is_over(used, "another", DRIVER, POOL.partition("/")[0])
    assert is_over(used, "u", "another.example.com", POOL.partition("/")[0])
    assert is_over(used, "u", DRIVER, "another-node"), "it was allocated again, elsewhere"
    assert is_over(claim_with([RESULT]), "u", DRIVER, POOL.partition("/")[0])


# --- parameters ---


def entry(source: str = "FromClaim", requests: Any = (), driver: str = DRIVER, **said: Any) -> dict[str, Any]:
    parameters = {"apiVersion": API_VERSION, "kind": KIND, **said}
    return {"source": source, "requests": list(requests), "opaque": {"driver": driver, "parameters": parameters}}


def parameters(*config: Any, request: str = "r") -> tuple[Parameters, ...]:
    claim = claim_with([RESULT | {"request": request}])
    claim["status"]["allocation"]["devices"]["config"] = list(config)
    (result,) = read(claim, "u", "ns", "n", DRIVER).results
    return result.parameters


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"permission": "r"}, "did you mean 'permissions'?"),
        ({"permissions": "rr"}, "each once"),
        ({"permissions": "x"}, "each once"),
        ({"permissions": ""}, "each once"),
        ({"permissions": 7}, "permissions"),
        ({"reset": "yes"}, "reset"),
        ({"nodes": 0}, "1 is the least"),
        ({"nodes": True}, "nodes"),
        ({"kind": "Another"}, f"kind '{KIND}'"),
    ],
)
def test_a_mistake_in_parameters_is_told_with_what_may_stand_there(said: dict[str, Any], why: str) -> None:
    for source, who in (
        ("FromClaim", "ResourceClaim ns/n has"),
        ("FromClass", "The DeviceClass of ResourceClaim ns/n has"),
    ):
        with pytest.raises(AllocationRefused, match="Correct them") as caught:
            parameters(entry(source, **said))
        assert why in caught.value.sentence
        assert caught.value.sentence.startswith(who)


@pytest.mark.parametrize("given", [None, [], "text", {}])
def test_parameters_that_are_no_object_of_ours_are_told_so(given: Any) -> None:
    with pytest.raises(AllocationRefused, match="no object"):
        parameters({"opaque": {"driver": DRIVER, "parameters": given}})


def test_parameters_count_for_the_requests_that_they_name_and_those_of_the_class_come_first() -> None:
    assert parameters(entry(requests=["other"], reset=True), entry(driver="nic.example.com", what="ever")) == ()
    assert parameters(entry(requests=["r"], reset=True), request="r/large") == (Parameters(reset=True),)
    assert parameters(entry(requests=["r/small"], reset=True), request="r/large") == ()
    both = entry(permissions="r"), entry("FromClass", permissions="rw")
    assert parameters(*both) == (Parameters(permissions="rw"), Parameters(permissions="r"))


def given_with(*said: Parameters) -> Given:
    (given,) = give(
        Allocated("u", "ns", "n", (Result("r", POOL, "one", parameters=said),)),
        {(POOL, "one"): candidate("one", [])},
        "b",
    )
    return given


def test_parameters_take_away_and_never_give_what_the_resource_or_the_class_does_not() -> None:
    nodes = tuple(Node(HostPath(f"/dev/{n}"), f"/dev/{n}", "rw") for n in range(3))
    fewer = narrowed(ContainerEdits(nodes), given_with(Parameters(nodes=2), Parameters(permissions="r")))
    assert [(it.container_path, it.permissions) for it in fewer.nodes] == [("/dev/0", "r"), ("/dev/1", "r")]
    for said, why in (
        ((Parameters(permissions="rwm"),), "'m', too"),
        ((Parameters(permissions="r"), Parameters(permissions="rw")), "'w', too"),
        ((Parameters(nodes=4),), "has 3 nodes"),
        ((Parameters(nodes=1), Parameters(nodes=2)), "has 1 nodes"),
    ):
        with pytest.raises(AllocationRefused, match=why):
            narrowed(ContainerEdits(nodes), given_with(*said))


# --- who gets what ---

DEVICES = {
    "one": Device("one", "one", frozenset({"h:one"})),
    "shared": Device("shared", "shared", frozenset({"h:shared"})),
}
IDS = {"one": ["one"], "shared": ["shared::0", "shared::1", "shared::2"]}


def candidate(device: str, held: list[Held]) -> Candidate:
    slots = tuple(Slot(device_id, DEVICES[device], HEALTHY) for device_id in IDS[device])
    on = tuple(it for it in held if it.hardware & DEVICES[device].hardware)
    return Candidate("r/r", "toy", slots, {it.id: it for it in held}, on, device == "one")


def ask(uid: str, device: str, held: list[Held], tokens: int = 1) -> tuple[Given, ...]:
    result = Result("r", POOL, device, tokens=tokens)
    return give(Allocated(uid, "ns", uid, (result,)), {(POOL, device): candidate(device, held)}, "boot")


Step = st.tuples(st.sampled_from("abcd"), st.sampled_from(sorted(DEVICES)), st.integers(1, 4), st.booleans())


@given(st.lists(Step, max_size=30))
def test_no_id_is_ever_of_two_claims_and_what_is_refused_is_in_use(steps: list[tuple[str, str, int, bool]]) -> None:
    held: list[Held] = []
    for uid, device, tokens, ends in steps:
        if ends:
            held = [it for it in held if it.claim is not None and it.claim.uid != uid]
            continue
        before = [it for it in held if it.claim is not None and it.claim.uid == uid]
        if any(it.claim is not None and it.claim.device != device for it in before):
            continue  # a claim's devices are others only after it has ended
        others = {it.id for it in held} - {it.id for it in before}
        try:
            (given,) = ask(uid, device, held, tokens)
        except AllocationRefused:
            assert len(set(IDS[device]) - others) < tokens
            continue
        assert len(given.held) == tokens
        assert others.isdisjoint(it.id for it in given.held)
        kept = [it for it in held if it not in before]
        held = kept + list(given.held)


def test_an_id_that_is_being_given_to_another_claim_at_this_moment_is_not_free() -> None:
    result = Result("r", POOL, "one")
    with pytest.raises(AllocationRefused, match="being prepared"):
        give(Allocated("u", "ns", "n", (result,)), {(POOL, "one"): candidate("one", [])}, "boot", {("r/r", "one")})


# --- what a container gets ---


def test_what_the_request_has_and_no_device_alone_comes_once_with_the_first() -> None:
    a, b, control = (Node(HostPath(f"/dev/{it}"), f"/dev/{it}", "rw") for it in ("a", "b", "control"))
    library = Mount(HostPath("/lib"), "/lib")
    whole = ContainerEdits((a, b, control), (library,), env={"IDS": "a,b"})
    alone = [ContainerEdits((a, control)), ContainerEdits((b, control))]
    first, second = spread(whole, alone)
    assert first == ContainerEdits((a, control), (library,), env={"IDS": "a,b"})
    assert second == ContainerEdits((b, control), env={"IDS": "a,b"})
    assert spread(whole, [replace(it, env={"IDS": "a"}) for it in alone]) == [first, second]
