"""The simulated scheduler: what the real one gives and does not give to claims (DRA contract: D6 to D9)."""

from __future__ import annotations

from typing import Any

import pytest

from agent.dra import names
from agent.simulation import scheduler
from agent.simulation.api_server import Object, Objects
from agent.simulation.scheduler import UnschedulableError

DRIVER, RESOURCE, POOL = "fairlead.dev", "example.com/toy", "n/toy"


def device(name: str, resource: str = RESOURCE, **more: Any) -> Object:
    return {"name": name, "attributes": {"resource": {"string": resource}}, **more}


def put(objects: Objects, number: int, spec: Object, generation: int = 1, count: int = 1) -> None:
    pool = {"name": POOL, "generation": generation, "resourceSliceCount": count}
    it = {"metadata": {"name": f"s-{number}"}, "spec": {"driver": DRIVER, "nodeName": "n", "pool": pool, **spec}}
    objects.put(f"resourceslices/s-{number}", it)


def cluster(*devices: Object) -> Objects:
    objects = Objects("n")
    for it in names.classes([RESOURCE], DRIVER):
        objects.put(f"deviceclasses/{it['metadata']['name']}", it)
    put(objects, 0, {"devices": list(devices)})
    return objects


def ask(objects: Objects, name: str, **exactly: Any) -> list[str]:
    """The devices that a claim gets; none where it stays pending."""
    asked = {"name": "it", "exactly": {"deviceClassName": names.class_name(RESOURCE), **exactly}}
    spec = {"devices": {"requests": [asked]}}
    objects.put(f"namespaces/default/resourceclaims/{name}", {"metadata": {"name": name}, "spec": spec})
    try:
        claim = scheduler.allocate(objects, "default", name, "p")
    except UnschedulableError:
        return []
    return [it["device"] for it in claim["status"]["allocation"]["devices"]["results"]]


def test_a_claim_gets_a_free_device_of_its_class_once() -> None:
    objects = cluster(device("other", "example.com/other"), device("a"), device("b"))
    assert [ask(objects, name) for name in ("one", "two", "three")] == [["a"], ["b"], []]
    objects.remove("namespaces/default/resourceclaims/one")
    assert ask(objects, "three") == ["a"]
    assert ask(cluster(device("a"), device("b")), "both", count=2) == ["a", "b"]


@pytest.mark.parametrize(("effect", "got"), [("NoSchedule", []), ("NoExecute", []), ("None", ["a"])])
def test_a_taint_keeps_claims_away_that_do_not_tolerate_it(effect: str, got: list[str]) -> None:
    sick = device("a", taints=[{"key": "k", "value": "v", "effect": effect}])
    assert ask(cluster(sick), "one") == got
    assert ask(cluster(sick), "one", tolerations=[{"key": "k", "operator": "Exists"}]) == ["a"]


def test_a_device_that_is_shared_is_given_as_often_as_it_has_tokens() -> None:
    objects = cluster(device("kvm", allowMultipleAllocations=True, capacity={"tokens": {"value": "2"}}))
    assert [ask(objects, name) for name in ("one", "two", "three")] == [["kvm"], ["kvm"], []]


def test_of_devices_that_take_of_one_counter_no_more_are_given_than_it_has() -> None:
    def takes(much: str) -> list[Object]:
        return [{"counterSet": "stick", "counters": {"parts": {"value": much}}}]

    objects = cluster()
    parts = [device("part-0", consumesCounters=takes("1")), device("part-1", consumesCounters=takes("1"))]
    put(objects, 0, {"devices": [device("stick", consumesCounters=takes("2")), *parts]}, count=2)
    assert ask(objects, "early") == [], "a slice of the pool is missing"
    put(objects, 1, {"sharedCounters": [{"name": "stick", "counters": {"parts": {"value": "2"}}}]}, count=2)
    assert [ask(objects, name) for name in ("one", "two")] == [["stick"], []]
    objects.remove("namespaces/default/resourceclaims/one")
    other = [{"cel": {"expression": f'device.driver == "{DRIVER}"'}}]
    sick = {"devices": [device("stick", taints=[{"key": "k", "value": "", "effect": "NoSchedule"}]), *parts]}
    put(objects, 0, sick, count=2)
    assert [ask(objects, name, selectors=other) for name in ("one", "two", "three")] == [["part-0"], ["part-1"], []]
