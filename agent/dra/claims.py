"""Decides what a ResourceClaim gives: from the claim as the API server has it to IDs in the ledger and devices for CDI. Pure.

The scheduler has allocated the devices. What it cannot see is decided here: whether a device is still there, is well, and is
held by no other workload. A driver is the last that can refuse one device to two workloads.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from agent.dra.names import is_pool_of
from agent.dra.slices import TOKENS, taint
from agent.model import Held, ResourceClaim, Slot
from agent.runtime.errors import brief, unknown
from backends.base import AllocationRefused, ContainerEdits, Device, Grant
from backends.interface.decoding import converted

K = TypeVar("K", bound=Hashable)

AGAIN: Final = "The kubelet tries again by itself"
"""What a refusal says that heals by itself."""

_UNITS: Final = {"": 1, "k": 1000, "M": 1000**2, "Ki": 1024, "Mi": 1024**2}
"""Suffixes of a whole quantity (k8s.io/apimachinery/pkg/api/resource): the API server writes 1000 as `1k`."""

_QUANTITY: Final = re.compile(rf"([1-9][0-9]{{0,8}})({'|'.join(_UNITS)})")


_REQUEST: Final = re.compile("[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")  # a DNS label
_POD_CLAIM: Final = "resource.kubernetes.io/pod-claim-name"  # `PodResourceClaimAnnotation`, resource.k8s.io/v1

API_VERSION: Final = "fairlead.dev/v1alpha1"
KIND: Final = "DeviceParameters"


class Parameters(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, rename="camel"):
    """What a claim, or its DeviceClass, may ask for of the devices of a request; what is not said is as configured here."""

    permissions: str | None = None
    """Of the device nodes, in the letters of a resource's `permissions`; none that the resource does not give."""
    reset: bool = False
    """Whether the hardware is reset before use, also where the resource's `pre_start` does not say so."""
    nodes: int | None = None
    """How many of each device's nodes a container gets, the first ones."""


class Toleration(Struct, frozen=True):
    """A taint that a claim puts up with (`DeviceToleration`, resource.k8s.io/v1).

    Its effect is not read: of a device that is not well, NoSchedule becomes NoExecute between the scheduler's look and ours.
    """

    key: str = ""
    """Empty: any."""
    operator: str = ""
    value: str = ""

    def covers(self, key: str, value: str) -> bool:
        """Whether a taint with this key and value keeps the claim from nothing."""
        return self.key in ("", key) and (self.operator == "Exists" or self.value == value)


class Result(Struct, frozen=True):
    """One allocated device of a claim (`DeviceRequestAllocationResult`, resource.k8s.io/v1)."""

    request: str
    """Without the name of the subrequest."""
    pool: str
    device: str
    share: str = ""
    """Its `shareID`; empty where the device has one allocation."""
    tokens: int = 1
    is_admin: bool = False
    """Whether it is for observing alone. Others may have the device meanwhile, and nothing is done to it."""
    tolerations: tuple[Toleration, ...] = ()
    """The taints that it puts up with, so that it gets a device that has one of them; the keys without the driver's name."""
    subrequest: str = ""
    """Which of a request's alternatives it is; empty where it has none."""
    parameters: tuple[Parameters, ...] = ()
    """What its DeviceClass says, then what the claim says; each can only ask for less than the one before gives."""

    @property
    def resets(self) -> bool:
        """Whether the hardware is to be reset before use, also where the resource does not say so."""
        return any(it.reset for it in self.parameters)

    @property
    def key(self) -> tuple[str, str, str]:
        """Names the allocation within the claim."""
        return self.pool, self.device, self.share

    @property
    def cdi_name(self) -> str:
        """The device's name in the claim's specification, behind the claim's UID; who uses a device may observe it, too."""
        name = f"{self.device}-{self.share}" if self.share else self.device
        return f"{name}.{self.request}" if self.is_admin else name


class Allocated(Struct, frozen=True):
    """What of a claim concerns one driver."""

    uid: str
    namespace: str
    name: str
    results: tuple[Result, ...]
    pods: frozenset[str] = frozenset()
    """The UIDs of those that it is reserved for."""
    called_in_pod: str = ""
    """The name by which a pod's template made it; empty where pods name the claim itself."""
    driver: str = ""
    """By whose name the devices are allocated."""


# --- the claim, as the API server has it ---


class _Result(Struct, rename="camel"):
    driver: str
    pool: str
    device: str
    request: str = ""
    share_id: str | None = msgspec.field(default=None, name="shareID")
    admin_access: bool | None = None
    consumed_capacity: dict[str, str | int] = {}
    tolerations: list[Toleration] = []


class _Opaque(Struct):
    driver: str = ""
    parameters: Any = None


class _Config(Struct):
    source: str = ""
    requests: list[str] = []
    opaque: _Opaque | None = None


class _Devices(Struct):
    results: list[_Result] = []
    config: list[_Config] = []


class _Allocation(Struct):
    devices: _Devices = msgspec.field(default_factory=_Devices)


class _Consumer(Struct):
    uid: str = ""
    resource: str = ""


class _Status(Struct, rename="camel"):
    allocation: _Allocation | None = None
    reserved_for: list[_Consumer] = []


class _Metadata(Struct):
    uid: str = ""
    annotations: dict[str, str] = {}


class _Claim(Struct):
    metadata: _Metadata
    status: _Status = msgspec.field(default_factory=_Status)


def read(claim: Mapping[str, Any], uid: str, namespace: str, name: str, driver: str) -> Allocated:
    """What a ResourceClaim says for this driver.

    Args:
        claim: as the API server has it (resource.k8s.io/v1).
        uid: of the claim that the kubelet means.
        namespace: where it is.
        name: its name.
        driver: ours.

    Raises:
        AllocationRefused: it is another claim by now, is not allocated, or asks for what there is not.
    """
    called = f"ResourceClaim {namespace}/{name}"
    try:
        found = converted(claim, _Claim)
    except msgspec.ValidationError as error:
        raise AllocationRefused(f"{called} is not understood: {error}. {AGAIN}.") from None
    if found.metadata.uid != uid:
        raise AllocationRefused(
            f"{called} was replaced: its UID is {brief(found.metadata.uid)}, and the pod's claim has {uid}. "
            "Create the pod again."
        )
    if found.status.allocation is None:
        raise AllocationRefused(f"{called} is not allocated. {AGAIN}.")
    devices = found.status.allocation.devices
    results = tuple(_result(it, called, devices.config) for it in devices.results if it.driver == driver)
    pods = frozenset(it.uid for it in found.status.reserved_for if it.resource == "pods")
    return Allocated(uid, namespace, name, results, pods, found.metadata.annotations.get(_POD_CLAIM, ""), driver)


def _result(found: _Result, called: str, config: Iterable[_Config]) -> Result:
    consumed = {name.rpartition("/")[2]: str(it) for name, it in found.consumed_capacity.items()}.get(TOKENS, "1")
    number = _QUANTITY.fullmatch(consumed)
    if number is None:
        raise AllocationRefused(
            f"{called} consumes {brief(consumed)!r} {TOKENS} of {found.device}, which must be a whole number, 1 at least. "
            "Create the claim again."
        )
    ours = f"{found.driver}/"
    request, _, subrequest = found.request.partition("/")
    if _REQUEST.fullmatch(request) is None:
        raise AllocationRefused(
            f"{called} has a request called {brief(request)!r}, which is no name. Create the claim again."
        )
    return Result(
        request,
        found.pool,
        found.device,
        found.share_id or "",
        int(number[1]) * _UNITS[number[2]],
        bool(found.admin_access),
        tuple(
            replace(it, key=it.key.removeprefix(ours))
            for it in found.tolerations
            if not it.key or it.key.startswith(ours)
        ),
        subrequest,
        tuple(_parameters(found, called, config)),
    )


def _parameters(found: _Result, called: str, config: Iterable[_Config]) -> Iterator[Parameters]:
    """What is said of a request, by its class before the claim: a claim cannot take back what its class says."""
    request = found.request.partition("/")[0]
    for it in sorted(config, key=lambda it: it.source == "FromClaim"):
        if it.opaque is None or it.opaque.driver != found.driver:
            continue
        if not it.requests or request in it.requests or found.request in it.requests:
            yield _checked(it.opaque.parameters, called if it.source == "FromClaim" else f"The DeviceClass of {called}")


def _checked(given: Any, where: str) -> Parameters:
    """The parameters that an object says, which is checked as strictly as our configuration.

    Raises:
        AllocationRefused: it has a mistake; which, and what may stand there.
    """
    kind = {"apiVersion": API_VERSION, "kind": KIND}
    why = ""
    if not isinstance(given, dict) or any(given.get(key) != value for key, value in kind.items()):
        why = f"they are no object with apiVersion {API_VERSION!r} and kind {KIND!r}"
    else:
        rest = {key: value for key, value in given.items() if key not in kind}
        known = Parameters.__struct_encode_fields__
        if strange := [key for key in rest if key not in known]:
            why = unknown("key", str(strange[0]), known)
        else:
            try:
                found = converted(rest, Parameters)
            except msgspec.ValidationError as error:
                why = str(error)
            else:
                why = _mistake(found)
    if why:
        raise AllocationRefused(
            f"{where} has parameters that cannot be met: {why}. Correct them, and create the claim again."
        )
    return found


def _mistake(said: Parameters) -> str:
    if said.permissions is not None and re.fullmatch("(?!.*(.).*\\1)[rwm]{1,3}", said.permissions) is None:
        return f"permissions is {brief(said.permissions)!r}; it is letters of 'rwm', each once"
    if said.nodes is not None and said.nodes < 1:
        return f"nodes is {said.nodes}; 1 is the least"
    return ""


def is_over(claim: Mapping[str, Any], uid: str, driver: str, node: str, had: Iterable[ResourceClaim] = ()) -> bool:
    """Whether a claim that the kubelet no longer knows has ended: it is another one, not reserved, or has none of ours.

    Ours is what the driver allocated on this node (it may be another node's since), and what the claim `had`: driver and node
    may have had other names then.
    """
    try:
        found = converted(claim, _Claim)
    except msgspec.ValidationError:
        return False
    allocation = found.status.allocation
    results = allocation.devices.results if allocation is not None else ()
    known = {(it.pool, it.device) for it in had}
    ours = any((it.driver == driver and is_pool_of(node, it.pool)) or (it.pool, it.device) in known for it in results)
    return found.metadata.uid != uid or not ours or not found.status.reserved_for


# --- which IDs it gets ---


class Candidate(Struct, frozen=True):
    """A device that a result names, as this node knows it."""

    resource: str
    backend: str
    slots: tuple[Slot, ...]
    """Its IDs; none where it is gone."""
    claims: Mapping[str, Held] = {}
    """What is held of its resource, by ID."""
    on_hardware: tuple[Held, ...] = ()
    """What is held of its hardware, by any resource."""
    is_for_one: bool = True
    """Whether only one claim or pod at a time may have it."""


class Given(Struct, frozen=True):
    """What a result becomes."""

    result: Result
    resource: str
    grants: tuple[Grant, ...]
    held: tuple[Held, ...]
    """For the ledger; nothing of an admin's access."""

    @property
    def device(self) -> Device:
        """The device."""
        return self.grants[0].device


def give(
    claim: Allocated,
    candidates: Mapping[tuple[str, str], Candidate | None],
    boot: str,
    taken: Collection[tuple[str, str]] = (),
    *,
    is_prepared: bool = False,
) -> tuple[Given, ...]:
    """The IDs that a claim gets: those that it has, then free ones.

    Args:
        claim: what is allocated.
        candidates: pool and device → what is there; None: no pool or no device of that name.
        boot: the machine's, for the record.
        taken: slots that are being given to other claims at this moment.
        is_prepared: a pod may run with it already, so that a device that has failed since is no reason to refuse.

    Raises:
        AllocationRefused: a device is gone, is not well, or another claim or pod has it.
    """
    given = list[Given]()
    taken = set(taken)
    for result in claim.results:
        candidate = candidates.get((result.pool, result.device))
        if candidate is None or not candidate.slots:
            raise AllocationRefused(
                f"Device {brief(result.device)} of pool {brief(result.pool)} is not in that pool at the moment: it is gone, "
                f"or a pod has it by another resource's name, or its resource has another API now. {AGAIN}."
            )
        slots = candidate.slots[:1] if result.is_admin else _chosen(claim, result, candidate, taken)
        if not is_prepared:
            for slot in slots:
                _check(result, slot)
        grants = tuple(Grant(it.id, it.device) for it in slots if it.device is not None)
        held = () if result.is_admin else tuple(_held(claim, result, candidate, it, boot) for it in grants)
        taken.update(it.slot for it in held)
        given.append(Given(result, candidate.resource, grants, held))
    return tuple(given)


def _chosen(
    claim: Allocated, result: Result, candidate: Candidate, taken: Collection[tuple[str, str]]
) -> Sequence[Slot]:
    """As many IDs as a result consumes, the claim's own first."""
    own, free = list[Slot](), list[Slot]()
    for slot in candidate.slots:
        held = candidate.claims.get(slot.id)
        if held is not None and _is_of(held, claim, result):
            own.append(slot)
        elif held is None and (candidate.resource, slot.id) not in taken:
            free.append(slot)
    if candidate.is_for_one:
        others = (it for it in candidate.on_hardware if it.claim is None or it.claim.uid != claim.uid)
        if (other := next(others, None)) is not None:
            raise _in_use(result, other)
    if len(chosen := [*own, *free][: result.tokens]) < result.tokens:
        held = next((it for slot in candidate.slots if (it := candidate.claims.get(slot.id)) is not None), None)
        raise _in_use(result, held)
    return chosen


def _is_of(held: Held, claim: Allocated, result: Result) -> bool:
    by = held.claim
    return by is not None and by.uid == claim.uid and (by.pool, by.device, by.share) == result.key


def _check(result: Result, slot: Slot) -> None:
    if slot.health.offered or result.is_admin or any(it.covers(*taint(slot.health)) for it in result.tolerations):
        return
    why = (slot.health.message or slot.health.reason).rstrip(".")
    raise AllocationRefused(f"Device {brief(result.device)} of pool {result.pool} cannot be used now: {why}. {AGAIN}.")


def _held(claim: Allocated, result: Result, candidate: Candidate, grant: Grant, boot: str) -> Held:
    by = ResourceClaim(claim.uid, claim.namespace, claim.name, *result.key, boot, claim.driver)
    held = Held.of(candidate.resource, grant.id, candidate.backend, grant.device)
    return replace(held, pods=claim.pods, claim=by)


def _in_use(result: Result, other: Held | None) -> AllocationRefused:
    if other is None:
        who = "other claims, which are being prepared at this moment, have"
    elif other.claim is not None:
        who = f"ResourceClaim {other.claim.namespace}/{other.claim.name} has"
    else:
        who = f"a pod has {brief(other.id)} of {other.resource}, which is"
    return AllocationRefused(
        f"Device {brief(result.device)} of pool {result.pool} is in use: {who} the same hardware. It is given to this claim "
        f"once that is over. {AGAIN}."
    )


def is_stale(held: Held, claim: Allocated) -> bool:
    """Whether this was given for an earlier allocation of the same claim."""
    return not any(_is_of(held, claim, result) for result in claim.results if not result.is_admin)


# --- what a container gets ---


def spread(whole: ContainerEdits, alone: Sequence[ContainerEdits]) -> list[ContainerEdits]:
    """What each device of a request brings by itself, so that containers with the same request get all of it once.

    Nodes and mounts are each device's own; the first also has those that the request has and no device alone. Environment is
    the whole request's with each of them: of a variable that two devices set, the runtime would keep the last one's value.
    """
    nodes = [it for it in whole.nodes if not any(it in one.nodes for one in alone)]
    mounts = [it for it in whole.mounts if not any(it in one.mounts for one in alone)]
    rest = (ContainerEdits(tuple(nodes), tuple(mounts)), *(ContainerEdits() for _ in alone[1:]))
    return [
        ContainerEdits(
            (*(it for it in one.nodes if it in whole.nodes), *more.nodes),
            (*(it for it in one.mounts if it in whole.mounts), *more.mounts),
            env=whole.env,
        )
        for one, more in zip(alone, rest, strict=True)
    ]


def narrowed(edits: ContainerEdits, given: Given) -> ContainerEdits:
    """What a device brings, as far as the claim's parameters want it.

    Raises:
        AllocationRefused: they ask for what the resource does not give.
    """
    named = f"Device {brief(given.result.device)} of pool {given.result.pool}"
    for said in given.result.parameters:
        if said.nodes is not None:
            if said.nodes > len(edits.nodes):
                raise AllocationRefused(
                    f"{named} has {len(edits.nodes)} nodes to give, and parameters ask for {said.nodes}. Create the claim again."
                )
            edits = replace(edits, nodes=edits.nodes[: said.nodes])
        if said.permissions is not None:
            for node in edits.nodes:
                if more := set(said.permissions) - set(node.permissions):
                    raise AllocationRefused(
                        f"{node.path} of {named[0].lower()}{named[1:]} is given with the permissions {node.permissions!r}, and "
                        f"parameters ask for {''.join(sorted(more))!r}, too. Create the claim again."
                    )
            edits = replace(edits, nodes=tuple(replace(it, permissions=said.permissions) for it in edits.nodes))
    return edits


def grouped(given: Iterable[Given], key: Callable[[Given], K]) -> dict[K, list[Given]]:
    """The results that have something in common, by that, in their order."""
    groups: dict[K, list[Given]] = {}
    for it in given:
        groups.setdefault(key(it), []).append(it)
    return groups


# --- what a container can read of its devices ---

_METADATA: Final = "/var/run/kubernetes.io/dra-device-attributes"
"""Where containers find it (KEP-5304; k8s.io/dynamic-resource-allocation/api/metadata/doc.go)."""
_METADATA_VERSION: Final = "metadata.resource.k8s.io/v1alpha1"
_MDEV: Final = "mdevUUID"
"""KubeVirt's name for a mediated device's UUID (kubevirt/kubevirt, pkg/dra); PCI addresses are under the standard name."""


def metadata_path(claim: Allocated, request: str, driver: str) -> str:
    """Where a container finds the metadata of a request, which it has to know from its pod alone."""
    kind, name = (
        ("resourceclaimtemplates", claim.called_in_pod) if claim.called_in_pod else ("resourceclaims", claim.name)
    )
    return f"{_METADATA}/{kind}/{name}/{request}/{driver}-metadata.json"


def metadata(
    claim: Allocated, driver: str, given: Sequence[Given], attributes: Mapping[tuple[str, str], Mapping[str, Any]]
) -> bytes:
    """What a request's devices are (DeviceMetadata of KEP-5304); `attributes` are as ResourceSlices have them, by pool and device."""
    devices = []
    for it in given:
        mdevs = sorted(name.removeprefix("mdev:") for name in it.device.hardware if name.startswith("mdev:"))
        told = dict(attributes[it.result.pool, it.result.device]) | ({_MDEV: {"string": mdevs[0]}} if mdevs else {})
        devices.append({"driver": driver, "pool": it.result.pool, "name": it.result.device, "attributes": told})
    first = given[0].result
    name = f"{first.request}/{first.subrequest}" if first.subrequest else first.request
    meta = {"name": claim.name, "namespace": claim.namespace, "uid": claim.uid, "generation": 1}
    said: dict[str, Any] = {"kind": "DeviceMetadata", "apiVersion": _METADATA_VERSION, "metadata": meta}
    if claim.called_in_pod:
        said["podClaimName"] = claim.called_in_pod
    return msgspec.json.encode(said | {"requests": [{"name": name, "devices": devices}]}) + b"\n"
