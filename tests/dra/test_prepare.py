"""A claim's devices reach the container: the kubelet asks, the API server is asked, the runtime's file is there before the answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from agent.dra.claims import API_VERSION
from agent.dra.claims import KIND as PARAMETERS
from agent.dra.driver import DRA_PACKAGE, DRA_SERVICES
from agent.dra.names import pool_name
from agent.kubelet.api import dra as messages
from agent.kubelet.wire import Encoded
from agent.model import Held
from agent.simulation.dra import ClaimError, ClaimKey
from tests.cdi.runtime import checked, specs
from tests.dra.driven import DRIVER, NODE, POOL, SHARED, TOY, Stage, staged, toy
from tests.kubelet.test_allocation import KIND
from tests.wait import limit


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    async with staged(tmp_path) as stage:
        yield stage


UUID = "4b20d080-1b54-4048-85b3-a6a62d165c01"


def config(source: str, requests: Sequence[str] = (), **parameters: object) -> dict[str, object]:
    """An entry of a claim's configuration."""
    said = {"apiVersion": API_VERSION, "kind": PARAMETERS, **parameters}
    return {"source": source, "requests": list(requests), "opaque": {"driver": DRIVER, "parameters": said}}


async def refusal(stage: Stage, *claims: ClaimKey, pod: str = "refused") -> str:
    with pytest.raises(ClaimError) as caught:
        await stage.admit(pod, *claims)
    sentence = str(caught.value)
    assert sentence.endswith(".")
    return sentence


async def test_a_pod_gets_the_nodes_and_the_environment_of_the_devices_of_its_claim(stage: Stage) -> None:
    claim = stage.api.allocate("train", "a", "b")
    await stage.admit("p", claim)
    assert stage.nodes("p") == ["/dev/a", "/dev/b"]
    assert stage.held() == {"a": "train", "b": "train"}
    assert [it["kind"] for it in map(checked, specs(stage.root))] == [f"dra.{DRIVER}/claim"]
    held = stage.ledger.held()[0]
    assert held.pods == {"pod-uid"}
    assert held.claim is not None
    assert (held.claim.pool, held.claim.device, held.claim.boot) == (POOL, "a", "boot-1")
    assert stage.asked("claim") == [["a", "b"]]


async def test_the_devices_of_one_request_have_their_environment_together_and_each_its_own_nodes(stage: Stage) -> None:
    results = [{"request": "gpus/large", "driver": DRIVER, "pool": POOL, "device": it} for it in ("b", "a")]
    await stage.admit("p", stage.api.put("both", results))
    assert stage.environment("p") == {"IDS": "a,b"}
    assert stage.nodes("p") == ["/dev/b", "/dev/a"]


async def test_what_other_drivers_allocated_to_the_claim_is_none_of_ours(stage: Stage) -> None:
    other = {"request": "nic", "driver": "nic.example.com", "pool": NODE, "device": "nic0"}
    ours = {"request": "toy", "driver": DRIVER, "pool": POOL, "device": "a"}
    await stage.admit("p", stage.api.put("mixed", [other, ours]))
    assert stage.nodes("p") == ["/dev/a"]


async def test_a_claim_of_two_pods_is_prepared_once_and_ends_with_the_last(stage: Stage) -> None:
    claim = stage.api.allocate("shared", "a")
    await stage.admit("one", claim)
    await stage.admit("two", claim)
    assert len(stage.asked("claim")) == 1
    await stage.end("one")
    assert stage.held() == {"a": "shared"}
    await stage.end("two")
    assert (stage.held(), stage.files, [it.id for it in stage.owners.released]) == ({}, {}, ["a"])


async def test_both_calls_may_come_twice_and_do_nothing_the_second_time(stage: Stage) -> None:
    claim = stage.api.allocate("train", "a")
    service = stage.drivers.instances[DRIVER][0]
    calls = {"prepare": "NodePrepareResources", "unprepare": "NodeUnprepareResources"}
    request = Encoded(bytes(messages.Claims([messages.Claim("default", claim.uid, "train")])))

    async def call(what: str) -> messages.PreparedClaims:
        async with limit():
            path = f"/{DRA_PACKAGE}{service.service}/{calls[what]}"
            return await service.channel.call(path, request, messages.PreparedClaims)

    first = await call("prepare")
    assert await call("prepare") == first
    assert first.claims[claim.uid].devices[0].cdi_device_ids == [f"dra.{DRIVER}/claim={claim.uid}-a"]
    assert len(stage.asked("claim")) == 1
    for _ in range(2):
        assert (await call("unprepare")).claims[claim.uid].error == ""
    assert len(stage.owners.released) == 1


async def test_an_older_kubelet_calls_the_same_by_v1beta1(stage: Stage) -> None:
    claim = stage.api.allocate("train", "a")
    stage.drivers.instances[DRIVER][0].service = DRA_SERVICES[1]
    await stage.admit("p", claim)
    assert stage.nodes("p") == ["/dev/a"]
    await stage.end("p")
    assert stage.held() == {}


async def test_a_container_reads_what_its_devices_are_where_kubevirt_looks_for_it(stage: Stage) -> None:
    stage.found(
        toy("a", hardware=frozenset({"toy:a", "pci:0000:3b:00.0", f"mdev:{UUID}"}), attributes={"is": ("toy",)})
    )
    results = [{"request": "vgpu/large", "driver": DRIVER, "pool": POOL, "device": it} for it in "ab"]
    await stage.admit("p", stage.api.put("direct", results))
    ((host, inside),) = [
        (it["hostPath"], it["containerPath"]) for edits in stage.edits("p") for it in edits.get("mounts", ())
    ]
    assert inside == (f"/var/run/kubernetes.io/dra-device-attributes/resourceclaims/direct/vgpu/{DRIVER}-metadata.json")
    said = json.loads(Path(host).read_text())
    assert (said["kind"], said["apiVersion"]) == ("DeviceMetadata", "metadata.resource.k8s.io/v1alpha1")
    assert said["metadata"] == {"name": "direct", "namespace": "default", "uid": "uid-direct", "generation": 1}
    (request,) = said["requests"]
    assert request["name"] == "vgpu/large"
    assert [it["name"] for it in request["devices"]] == ["a", "b"]
    attributes = request["devices"][0]["attributes"]
    assert attributes["resource.kubernetes.io/pciBusID"] == {"string": "0000:3b:00.0"}
    assert attributes["mdevUUID"] == {"string": UUID}
    await stage.end("p")
    assert not Path(host).exists()


async def test_a_claim_of_a_template_is_found_by_its_name_in_the_pod(stage: Stage) -> None:
    claim = stage.api.allocate("p-gpu-x7k2m", "a")
    stage.api.claims["default", "p-gpu-x7k2m"]["metadata"]["annotations"] = {
        "resource.kubernetes.io/pod-claim-name": "gpu"
    }
    await stage.admit("p", claim)
    ((mount,),) = [edits["mounts"] for edits in stage.edits("p")]
    assert mount["containerPath"].startswith(
        "/var/run/kubernetes.io/dra-device-attributes/resourceclaimtemplates/gpu/r0/"
    )
    assert json.loads(Path(mount["hostPath"]).read_text())["podClaimName"] == "gpu"


# --- sharing ---


async def test_each_share_of_a_device_has_a_token_of_its_own_and_all_of_them_are_not_more_than_there_are(
    stage: Stage,
) -> None:
    pool = pool_name(NODE, SHARED)
    one = stage.api.allocate("one", "kvm", pool=pool, shareID="s-1", consumedCapacity={"tokens": "2"})
    two = stage.api.allocate("two", "kvm", pool=pool, shareID="s-2")
    three = stage.api.allocate("three", "kvm", pool=pool, shareID="s-3")
    await stage.admit("one", one)
    await stage.admit("two", two)
    assert stage.held() == {"kvm::0": "one", "kvm::1": "one", "kvm::2": "two"}
    assert stage.drivers.cdi_devices("one") == [f"dra.{DRIVER}/claim=uid-one-kvm-s-1"]
    assert "in use: ResourceClaim default/one" in await refusal(stage, three)
    await stage.end("one")
    await stage.admit("three", three)
    assert stage.held() == {"kvm::2": "two", "kvm::0": "three"}


async def test_devices_of_one_resource_that_share_a_node_by_configuration_may_be_of_two_claims(stage: Stage) -> None:
    """As bundles of chardev with a path that has a `limit`; what one of them is may not, whatever it is called now."""
    both = frozenset({"node:c:10:229"})
    for key in "xy":
        own = frozenset({f"toy:{key}"})
        stage.found(toy(key, hardware=own | both, exclusive=own, identity=key, attributes={"is": ("toy",)}))
    await stage.admit("one", stage.api.allocate("one", "x"))
    await stage.admit("two", stage.api.allocate("two", "y"))
    assert stage.held() == {"x": "one", "y": "two"}
    stage.gone("x")
    stage.found(toy("z", hardware=frozenset({"toy:x"}), identity="x", attributes={"is": ("toy",)}))
    assert "in use: ResourceClaim default/one has" in await refusal(stage, stage.api.allocate("three", "z"))


async def test_an_admin_observes_a_device_that_another_claim_has_and_nothing_is_done_to_it(stage: Stage) -> None:
    await stage.admit("p", stage.api.allocate("train", "a"))
    admin = stage.api.allocate("observe", "a", adminAccess=True)
    await stage.admit("monitor", admin)
    assert stage.nodes("monitor") == ["/dev/a"]
    assert stage.held() == {"a": "train"}
    assert len(stage.asked("claim")) == 1
    await stage.end("monitor")
    assert stage.held() == {"a": "train"}
    assert len(stage.files) == 1


async def test_a_claim_that_uses_and_observes_one_device_has_each_request_with_its_own_permissions(
    stage: Stage,
) -> None:
    use = {"request": "use", "driver": DRIVER, "pool": POOL, "device": "a"}
    read = {"apiVersion": API_VERSION, "kind": PARAMETERS, "permissions": "r"}
    observing = {"requests": ["look"], "opaque": {"driver": DRIVER, "parameters": read}}
    claim = stage.api.put("both", [use, use | {"request": "look", "adminAccess": True}], config=[observing])
    await stage.admit("p", claim)
    assert [node["permissions"] for edits in stage.edits("p") for node in edits["deviceNodes"]] == ["rw", "r"]


# --- refusals ---


async def test_a_device_that_another_claim_has_is_refused_until_that_ends(stage: Stage) -> None:
    first, second = stage.api.allocate("first", "a"), stage.api.allocate("second", "a")
    await stage.admit("p", first)
    assert "in use: ResourceClaim default/first has" in await refusal(stage, second)
    assert stage.counts.prepares[TOY, "prepared"] == 1
    assert stage.counts.prepares[TOY, "refused"] >= 1
    assert sum(stage.counts.preparing.buckets) == stage.counts.prepares.total()
    await stage.end("p")
    await stage.admit("q", second)
    assert stage.held() == {"a": "second"}


async def test_a_device_that_a_pod_has_by_the_device_plugin_api_is_refused(stage: Stage) -> None:
    for slot, said in (
        ((TOY, "a"), "a pod has a of example.com/toy"),
        (("example.com/old", "x"), "by another resource"),
    ):
        held = Held(*slot, KIND, frozenset({"toy:a"}))
        stage.ledger.allocate([held], 0.0)
        stage.inventory.claim([held])
        assert said in await refusal(stage, stage.api.allocate("train", "a"))
        stage.inventory.unclaim([held])
    assert stage.held() == {}


async def test_of_two_claims_at_once_one_gets_the_device(stage: Stage) -> None:
    both = [stage.api.allocate(name, "a") for name in ("one", "two")]
    outcomes = await asyncio.gather(*(stage.admit(it.name, it) for it in both), return_exceptions=True)
    assert sum(isinstance(it, ClaimError) for it in outcomes) == 1
    assert list(stage.held()) == ["a"]


async def test_as_many_claims_as_a_node_has_pods_are_made_ready_a_few_at_a_time(stage: Stage) -> None:
    names = [f"g{n}" for n in range(30)]
    for name in names:
        stage.found(toy(name, attributes={"is": ("toy",)}))
    claims = [stage.api.allocate(name, name) for name in names]
    await asyncio.gather(*(stage.admit(it.name, it) for it in claims))
    assert sorted(stage.held()) == sorted(names)


async def test_a_device_that_is_not_well_is_refused_with_the_reason_unless_the_claim_tolerates_it(stage: Stage) -> None:
    stage.sick("a")
    assert "it does not answer" in await refusal(stage, stage.api.allocate("train", "a"))
    tolerations = [{"key": f"{DRIVER}/unhealthy", "operator": "Exists"}]
    await stage.admit("p", stage.api.allocate("brave", "a", tolerations=tolerations))
    assert stage.nodes("p") == ["/dev/a"]


async def test_a_claim_that_is_prepared_is_answered_though_its_device_has_failed_since(stage: Stage) -> None:
    claim = stage.api.allocate("train", "a")
    await stage.admit("p", claim)
    stage.sick("a")
    stage.lose_record()  # the kubelet has lost its record
    await stage.admit("p", claim)
    assert stage.nodes("p") == ["/dev/a"]


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda it: it.api.claims.clear(), "not found"),
        (lambda it: it.api.claims["default", "train"]["metadata"].update(uid="another"), "was replaced"),
        (lambda it: it.api.claims["default", "train"]["status"].pop("allocation"), "is not allocated"),
        (lambda it: it.api.claims["default", "train"].update(status=7), "is not understood"),
        (lambda it: it.gone("a"), "is not in that pool"),
        (lambda it: setattr(it.api, "away", "https://10.0.0.1: it does not answer"), "it does not answer"),
        (lambda it: setattr(it.backend, "fails", ValueError("no such thing")), "no such thing"),
    ],
)
async def test_what_is_wrong_with_a_claim_is_a_sentence_and_once_it_is_right_it_is_prepared(
    stage: Stage, spoil: object, said: str
) -> None:
    claim = stage.api.allocate("train", "a")
    good = stage.api.claims["default", "train"]
    spoil(stage)  # type: ignore[operator]
    assert said in await refusal(stage, claim)
    await stage.end("refused", claim)  # the kubelet unprepares also what it could not have prepared
    assert stage.held() == {}
    stage.api.allocate("train", "a")
    stage.api.away, stage.backend.fails = "", None
    stage.found(toy("a", attributes={"is": ("toy",)}))
    assert good
    await stage.admit("p", claim)
    assert stage.nodes("p") == ["/dev/a"]


async def test_parameters_with_a_mistake_are_refused_and_those_of_other_drivers_are_theirs(stage: Stage) -> None:
    results = [{"request": "r", "driver": DRIVER, "pool": POOL, "device": "a"}]
    others = [{"source": "FromClass", "opaque": {"driver": "nic.example.com", "parameters": {"mtu": 9000}}}]
    ours = [config("FromClaim", resett=True)]
    assert "did you mean 'reset'?" in await refusal(stage, stage.api.put("wrong", results, config=ours))
    await stage.end("refused")
    await stage.admit("p", stage.api.put("right", results, config=others))


async def test_a_claim_asks_for_fewer_permissions_and_for_a_reset_and_gets_both(stage: Stage) -> None:
    results = [{"request": it, "driver": DRIVER, "pool": POOL, "device": it} for it in "ab"]
    wanted = [config("FromClaim", requests=["a"], permissions="r", reset=True)]
    await stage.admit("p", stage.api.put("careful", results, config=wanted))
    permissions = [node["permissions"] for edits in stage.edits("p") for node in edits["deviceNodes"]]
    assert permissions == ["r", "rw"]
    assert stage.asked("prepare") == [["a"]]


async def test_one_claim_of_a_call_that_fails_does_not_fail_the_others(stage: Stage) -> None:
    good, bad = stage.api.allocate("good", "a"), stage.api.allocate("bad", "z")
    await refusal(stage, good, bad)
    assert stage.held() == {"a": "good"}


async def test_bytes_that_are_no_message_end_their_call_alone(stage: Stage) -> None:
    service = stage.drivers.instances[DRIVER][0]
    with pytest.raises(Exception, match="malformed"):
        await service.channel.call(
            f"/{DRA_PACKAGE}v1.DRAPlugin/NodePrepareResources",
            Encoded(b"\x0a\x03\x0a\x01\xff"),
            messages.PreparedClaims,
        )
    await stage.admit("p", stage.api.allocate("train", "a"))


async def test_a_uid_that_would_be_a_path_is_none(stage: Stage) -> None:
    claim = stage.api.allocate("train", "a", uid="../../etc/x")
    assert "which is none" in await refusal(stage, claim)
    assert stage.files == {}


async def test_a_claim_that_was_allocated_another_device_meanwhile_gives_the_first_back(stage: Stage) -> None:
    claim = stage.api.allocate("train", "a")
    await stage.admit("p", claim)
    stage.api.allocate("train", "b")
    stage.lose_record()
    await stage.admit("p", claim)
    assert stage.held() == {"b": "train"}
    assert [it.id for it in stage.owners.released] == ["a"]


async def test_a_disk_that_takes_no_file_is_a_sentence_and_the_claim_is_prepared_once_it_does(stage: Stage) -> None:
    (stage.root / "run").mkdir(exist_ok=True)
    (stage.root / "run/cdi").write_text("no directory")
    claim = stage.api.allocate("train", "a")
    assert "cannot be written" in await refusal(stage, claim)
    (stage.root / "run/cdi").unlink()
    await stage.admit("p", claim)
    assert stage.nodes("p") == ["/dev/a"]


async def test_a_resource_that_resets_before_use_does_so_for_each_claim_and_not_for_an_admin(tmp_path: Path) -> None:
    async with staged(tmp_path, "reset") as stage:
        await stage.admit("p", stage.api.allocate("train", "a"))
        assert stage.asked("prepare") == [["a"]]
        await stage.admit("monitor", stage.api.allocate("observe", "a", adminAccess=True))
        assert stage.asked("prepare") == [["a"]]
