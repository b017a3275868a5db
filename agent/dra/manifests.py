"""Makes what an administrator and users write for a node's devices: DeviceClasses, claims, templates, pods. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from agent.dra.names import device_name
from agent.dra.slices import PCIE_ROOT, Entry, resource_value

_API = "resource.k8s.io/v1"

Manifest = dict[str, Any]


def class_name(resource: str) -> str:
    """The DeviceClass of a resource: `fairlead-gpu.nvidia.com`; never another driver's."""
    domain, _, name = resource.partition("/")
    return f"fairlead-{device_name(name)}.{domain}"


def classes(resources: Sequence[str], driver: str) -> Iterator[Manifest]:
    """A DeviceClass for each resource, by which pods also get its devices as `limits` say that.

    Args:
        resources: their names.
        driver: ours.
    """
    for resource in resources:
        told = f'device.attributes["{driver}"]'
        expression = (
            f'device.driver == "{driver}" && "resource" in {told} && {told}.resource == "{resource_value(resource)}"'
        )
        yield {
            "apiVersion": _API,
            "kind": "DeviceClass",
            "metadata": {"name": class_name(resource)},
            "spec": {"selectors": [{"cel": {"expression": expression}}], "extendedResourceName": resource},
        }


def examples(offered: Mapping[str, Sequence[Entry]]) -> Iterator[Manifest]:
    """For each resource that has devices a pod with a claim of its own and one that asks as before; then what goes together.

    Args:
        offered: resource → its devices, as slices have them.
    """
    for resource, devices in offered.items():
        if not devices:
            continue
        name, request = _short(resource), _request("device", resource, devices[0])
        yield _template(name, [request])
        yield _pod(
            f"{name}-by-claim",
            {"resourceClaims": [{"name": "device", "resourceClaimTemplateName": name}]},
            claims=["device"],
        )
        yield _pod(f"{name}-by-limits", {}, limits={resource: 1})
    roots = {resource: {_root(it) for it in devices} - {""} for resource, devices in offered.items()}
    together = next(((a, b) for a in roots for b in roots if a < b and roots[a] & roots[b]), None)
    if together is not None:
        name = "-and-".join(map(_short, together))
        requests = [_request(f"device-{n}", it, offered[it][0]) for n, it in enumerate(together)]
        near = [{"requests": [it["name"] for it in requests], "matchAttribute": PCIE_ROOT}]
        yield _template(name, requests, near)
        yield _pod(
            name, {"resourceClaims": [{"name": "devices", "resourceClaimTemplateName": name}]}, claims=["devices"]
        )


def _short(resource: str) -> str:
    return device_name(resource.partition("/")[2])


def _root(device: Entry) -> str:
    return str(device["attributes"].get(PCIE_ROOT, {}).get("string", ""))


def _request(name: str, resource: str, device: Entry) -> Manifest:
    exactly: Manifest = {"deviceClassName": class_name(resource), "count": 1}
    if device.get("allowMultipleAllocations"):
        exactly["capacity"] = {"requests": {"tokens": "1"}}
    return {"name": name, "exactly": exactly}


def _template(name: str, requests: list[Manifest], constraints: Sequence[Manifest] = ()) -> Manifest:
    devices: Manifest = {"requests": requests}
    if constraints:
        devices["constraints"] = list(constraints)
    spec = {"spec": {"devices": devices}}
    return {"apiVersion": _API, "kind": "ResourceClaimTemplate", "metadata": {"name": name}, "spec": spec}


def _pod(name: str, more: Manifest, *, claims: Sequence[str] = (), limits: Manifest | None = None) -> Manifest:
    resources: Manifest = {"claims": [{"name": it} for it in claims]} if claims else {"limits": limits or {}}
    container = {"name": "main", "image": "busybox", "command": ["sleep", "infinity"], "resources": resources}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": {"containers": [container], **more}}
