"""Allocates devices to ResourceClaims, as Kubernetes' scheduler does: by class, by taint, by tokens and by shared counters.

Of CEL it knows what `fairlead dra classes` prints: equalities of the driver and of attributes, and `in`, joined by `&&`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from agent.simulation.api_server import Object, Objects

_DRIVER: Final = re.compile(r'device\.driver == "([^"]*)"')
_HAS: Final = re.compile(r'"([^"]*)" in device\.attributes\["([^"]*)"\]')
_IS: Final = re.compile(r'device\.attributes\["([^"]*)"\]\.(\w+) == "([^"]*)"')
_KEEPS_AWAY: Final = ("NoSchedule", "NoExecute")


class UnschedulableError(Exception):
    """No device that a claim asks for is free; the pod stays Pending."""


class _Device:
    """A device of a pool that is whole."""

    def __init__(self, driver: str, pool: str, entry: Object, counters: Counter[tuple[str, str]]) -> None:
        self.driver, self.pool, self.entry = driver, pool, entry
        self.key = driver, pool, str(entry["name"])
        self.takes = counters
        self.tokens = int(_number(entry.get("capacity", {}).get("tokens", {}).get("value", "1")))

    def attribute(self, domain: str, name: str) -> Any:
        """The value of an attribute; None if it has none of that name. Those without a domain are the driver's."""
        attributes = self.entry["attributes"]
        value = attributes.get(f"{domain}/{name}") or (attributes.get(name) if domain == self.driver else None)
        return next(iter(value.values())) if value else None

    def is_selected(self, expression: str) -> bool:
        """Whether a selector takes it.

        Raises:
            ValueError: it says something that is not known here.
        """
        for clause in expression.split(" && "):
            if found := _DRIVER.fullmatch(clause):
                holds = self.driver == found[1]
            elif found := _HAS.fullmatch(clause):
                holds = self.attribute(found[2], found[1]) is not None
            elif found := _IS.fullmatch(clause):
                holds = self.attribute(found[1], found[2]) == found[3]
            else:
                raise ValueError(f"no CEL is known here as this: {clause}")
            if not holds:
                return False
        return True

    def is_tolerated(self, tolerations: Sequence[Mapping[str, Any]]) -> bool:
        """Whether no taint keeps away what tolerates these."""
        taints = (it for it in self.entry.get("taints", ()) if it["effect"] in _KEEPS_AWAY)
        return all(any(one.get("key", it["key"]) == it["key"] for one in tolerations) for it in taints)


def allocate(objects: Objects, namespace: str, name: str, pod: str) -> Object:
    """Give a ResourceClaim its devices, and reserve it for a pod; returns it as it is then.

    Raises:
        UnschedulableError: not all that it asks for is free.
    """
    path = f"namespaces/{namespace}/resourceclaims/{name}"
    claim = objects.kept[path]
    devices, counters = list(_devices(objects)), _counters(objects)
    used = Counter[tuple[str, str, str]]()  # tokens; of a device without, the claims that have it
    by_key = {it.key: it for it in devices}
    for result in _allocated(objects):
        key = result["driver"], result["pool"], result["device"]
        used[key] += int(_number(result.get("consumedCapacity", {}).get("tokens", "1")))
        if key in by_key:
            counters.subtract(by_key[key].takes)
    results: list[Object] = []
    for request in claim["spec"]["devices"]["requests"]:
        exactly = request["exactly"]
        selectors = [
            *objects.kept[f"deviceclasses/{exactly['deviceClassName']}"]["spec"]["selectors"],
            *exactly.get("selectors", ()),
        ]
        for number in range(exactly.get("count", 1)):
            chosen = next(
                (
                    it
                    for it in devices
                    if used[it.key] < it.tokens
                    and all(it.is_selected(one["cel"]["expression"]) for one in selectors)
                    and it.is_tolerated(exactly.get("tolerations", ()))
                    and all(counters[one] >= much for one, much in it.takes.items())
                ),
                None,
            )
            if chosen is None:
                raise UnschedulableError("cannot allocate all claims")
            used[chosen.key] += 1
            counters.subtract(chosen.takes)
            driver, pool, device = chosen.key
            result = {"request": request["name"], "driver": driver, "pool": pool, "device": device}
            if chosen.entry.get("allowMultipleAllocations"):
                share = f"{claim['metadata']['uid']}-{len(results)}-{number}"
                result |= {"shareID": share, "consumedCapacity": {"tokens": "1"}}
            results.append(result)
    allocation = {"devices": {"results": results, "config": []}}
    status = {"allocation": allocation, "reservedFor": [{"resource": "pods", "name": pod, "uid": f"uid-of-{pod}"}]}
    return objects.put(path, {**claim, "status": status})


def _devices(objects: Objects) -> Iterator[_Device]:
    for spec in objects.whole():
        pool = spec["pool"]["name"]
        for entry in spec.get("devices", ()):
            yield _Device(spec["driver"], pool, entry, _amounts(pool, entry.get("consumesCounters", ()), "counterSet"))


def _counters(objects: Objects) -> Counter[tuple[str, str]]:
    """What there is of each counter."""
    there = Counter[tuple[str, str]]()
    for spec in objects.whole():
        there.update(_amounts(spec["pool"]["name"], spec.get("sharedCounters", ()), "name"))
    return there


def _amounts(pool: str, sets: Sequence[Mapping[str, Any]], key: str) -> Counter[tuple[str, str]]:
    """By pool and set with counter: how much."""
    return Counter(
        {(pool, f"{it[key]}/{name}"): int(_number(of["value"])) for it in sets for name, of in it["counters"].items()}
    )


def _allocated(objects: Objects) -> Iterator[Mapping[str, Any]]:
    """What claims have."""
    for path, it in objects.kept.items():
        if "/resourceclaims/" in path:
            yield from it.get("status", {}).get("allocation", {}).get("devices", {}).get("results", ())


def _number(quantity: str) -> float:
    number, unit = re.fullmatch(r"([0-9.]+)([kMG]?)", quantity).groups()  # type: ignore[union-attr]  # ours alone
    return float(number) * {"": 1, "k": 1e3, "M": 1e6, "G": 1e9}[unit]
