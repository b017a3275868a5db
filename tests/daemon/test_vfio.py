"""vfio in the daemon: bound for a pod and given back, bound at the start, never by a dry run or out of another's hands."""

from __future__ import annotations

import base64
import json
import threading
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from agent.discovery import runner
from agent.hardware import reconciler
from agent.inventory.inventory import Inventory
from agent.inventory.survey import survey
from agent.kubelet.api.v1beta1 import ContainerAllocateResponse
from agent.simulation.model import Phase
from backends.base import Backend, Device
from backends.linux import pci
from backends.vfio import Vfio, VfioResource
from tests.backends.pci_trees import function
from tests.backends.trees import plant
from tests.backends.vfio.vfio_node import BUS, GPU, SOUND, ActingKernel, acting, gpu, resource, sound
from tests.daemon.node import Node, come_of_age, hurry, pod
from tests.fakes import KIND, Fake, by_unit, device
from tests.fakes import resource as fake_resource
from tests.wait import settled, until

T4 = "nvidia.com/T4"
GPUS = "nvidia.com/gpu"
CARD = gpu("nvidia") + sound("snd_hda_intel")


@pytest.fixture
def node(node: Node) -> Node:
    plant(node.root, BUS + CARD)
    return node


def vfio(node: Node, made: VfioResource) -> dict[str, Backend[Any]]:
    return {"vfio": Vfio(node.host, [made], ActingKernel(node.host, {GPU: "nvidia", SOUND: "snd_hda_intel"}))}


def drivers(root: Path) -> list[str | None]:
    return [driver(root / "sys/bus/pci/devices" / address / "driver") for address in (GPU, SOUND)]


def driver(link: Path) -> str | None:
    try:
        return link.readlink().name
    except FileNotFoundError:  # asked before: it may be taken away in between
        return None


def given(node: Node) -> ContainerAllocateResponse:
    """What the only container there is got, as its kubelet wrote it down."""
    kept = json.loads((node.kubelet.plugin_dir / "kubelet_internal_checkpoint").read_text())
    (entry,) = kept["Data"]["PodDeviceEntries"]
    return ContainerAllocateResponse().parse(base64.b64decode(entry["AllocResp"]))


async def test_a_pod_gets_what_is_bound_for_it_and_the_host_gets_it_back(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    hurry(monkeypatch)
    made = resource(T4, bind="allocate", release="restore")
    async with node.running(made, backends=vfio(node, made)):
        await node.has(T4, healthy=1)
        assert drivers(node.root) == ["nvidia", "snd_hda_intel"]
        status = await node.kubelet.admit(pod(resource=T4))
        assert status.phase is Phase.RUNNING, status.message
        answer = given(node)
        assert [spec.host_path for spec in answer.devices] == ["/dev/vfio/vfio", "/dev/vfio/12"]
        assert answer.envs == {"PCI_RESOURCE_NVIDIA_COM_T4": GPU}
        assert drivers(node.root) == ["vfio-pci", "vfio-pci"]
        come_of_age(monkeypatch)
        node.kubelet.end(pod(resource=T4))
        await until(lambda: drivers(node.root) == ["nvidia", "snd_hda_intel"])
        await node.has(T4, healthy=1)


async def test_what_was_bound_before_a_claim_failed_is_given_back(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pod asks for two cards, and the second one cannot be bound."""
    hurry(monkeypatch)
    second = "0000:5e:00.0"
    plant(node.root, function(second, "10de:1eb8", driver="nvidia", group=13, files={"driver_override": "(null)"}))
    made = resource(T4, bind="allocate", release="restore")
    kernel = ActingKernel(node.host, {GPU: "nvidia", SOUND: "snd_hda_intel", second: "nvidia"})
    kernel.deaf.add(second)
    async with node.running(made, backends={"vfio": Vfio(node.host, [made], kernel)}):
        await node.has(T4, healthy=2)
        status = await node.kubelet.admit(pod(count=2, resource=T4))
        assert status.phase is Phase.FAILED
        assert f"{second} of {T4} cannot be made ready: the kernel did not bind {second} to vfio-pci" in status.message
        assert (f"/sys/bus/pci/devices/{GPU}/driver/unbind", GPU) in kernel.written
        come_of_age(monkeypatch)
        await until(lambda: drivers(node.root) == ["nvidia", "snd_hda_intel"])
        await node.has(T4, healthy=2)


async def test_what_a_pod_had_before_a_reboot_is_bound_for_it_again(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kubelet remembers what the pod was given, and allocates nothing anew."""
    hurry(monkeypatch)
    monkeypatch.setattr(reconciler, "RETRY_FIRST", 0.01)
    made = resource(T4, bind="allocate", release="restore")
    async with node.running(made, backends=vfio(node, made)):
        await node.has(T4, healthy=1)
        await node.kubelet.admit(pod(resource=T4))
        assert drivers(node.root) == ["vfio-pci", "vfio-pci"]
    found = Vfio(node.host, [made], ActingKernel(node.host, {GPU: "nvidia", SOUND: "snd_hda_intel"}))
    come_of_age(monkeypatch)
    found.release([], frozenset({f"pci:{GPU}", f"pci:{SOUND}"}))  # all that a reboot undoes, notes and all
    assert drivers(node.root) == ["nvidia", "snd_hda_intel"]
    with capture_logs() as logs:
        async with node.running(made, backends=vfio(node, made)):
            await until(lambda: drivers(node.root) == ["vfio-pci", "vfio-pci"])
            await until(lambda: any(line["event"] == "resumed" for line in logs))
            node.kubelet.end(pod(resource=T4))
            await until(lambda: drivers(node.root) == ["nvidia", "snd_hda_intel"])


async def test_what_is_to_be_bound_at_the_start_is_unhealthy_until_it_is(node: Node) -> None:
    made = resource(T4, bind="start")
    async with node.running(made, backends=vfio(node, made)):
        await node.has(T4, healthy=1)
        assert drivers(node.root) == ["vfio-pci", "vfio-pci"]
        status = await node.kubelet.admit(pod(resource=T4))
        assert status.phase is Phase.RUNNING, status.message


async def test_what_a_template_names_is_bound_at_the_start_and_when_it_comes(node: Node) -> None:
    late = "0000:5e:00.0"
    made = resource("nvidia.com/{device}", {"vendor": ("10de",), "class": ("030200",)}, bind="start")
    kernel = ActingKernel(node.host, {GPU: "nvidia", SOUND: "snd_hda_intel", late: "nvidia"})
    async with node.running(made, backends={"vfio": Vfio(node.host, [made], kernel)}) as agent:
        await node.has("nvidia.com/1eb8", healthy=1)
        assert drivers(node.root) == ["vfio-pci", "vfio-pci"]
        plant(node.root, function(late, "10de:2331", driver="nvidia", group=13, files={"driver_override": "(null)"}))
        agent.discoverers["vfio"].rescan()
        await node.has("nvidia.com/2331", healthy=1)
        assert (f"/sys/bus/pci/devices/{late}/driver/unbind", late) in kernel.written


async def test_a_dry_run_binds_nothing(tmp_path: Path) -> None:
    found, kernel = acting(tmp_path, CARD, resource(T4, bind="start"))
    seen = await survey(found.resources, {"vfio": found}, 5.0)
    (slot,) = seen.inventory.slots(T4).values()
    assert slot.health.reason == "not-bound"
    assert kernel.written == []


class Gpus(Fake):
    """Stands for a backend that offers the same function in another mode."""

    def show(self, node: Node) -> Gpus:
        function = pci.read(node.host, GPU)
        assert function is not None
        self.hardware = {GPU: [device(GPU, GPUS, hardware=[function.hardware])]}
        return self


async def test_what_another_resource_has_is_not_bound_at_the_start(node: Node) -> None:
    made = resource(T4, bind="start")
    theirs = fake_resource(GPUS)
    backends: dict[str, Backend[Any]] = {KIND: Gpus(theirs).show(node), **vfio(node, made)}
    async with node.running(theirs, made, backends=backends) as agent:
        await node.has(GPUS, healthy=1)
        await node.has(T4, healthy=0)
        (lost,) = agent.inventory.unclaimed()
        assert lost.why == f"{T4} selects it, but pci:{GPU} belongs to {GPUS}"
        assert drivers(node.root) == ["nvidia", "snd_hda_intel"]


async def test_nothing_is_bound_at_the_start_before_every_backend_has_looked(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "SETTLE", 0.0)
    made, theirs, go_on = resource(T4, bind="start"), fake_resource(GPUS), threading.Event()
    slow = Gpus(theirs).show(node)
    slow.listed = lambda: go_on.wait() and [GPU]
    async with node.running(theirs, made, backends={KIND: slow, **vfio(node, made)}):
        await node.has(T4, healthy=0, unhealthy=1)
        await settled()
        assert drivers(node.root) == ["nvidia", "snd_hda_intel"]
        go_on.set()
        await node.has(GPUS, healthy=1)
        await node.has(T4, healthy=0)
        assert drivers(node.root) == ["nvidia", "snd_hda_intel"]


@pytest.mark.parametrize("vfio_first", [True, False])
def test_two_resources_that_select_one_function_in_two_modes_are_refused_with_both_names(
    tmp_path: Path, vfio_first: bool
) -> None:
    found, _ = acting(tmp_path, CARD, resource(T4, bind="allocate"))
    theirs = fake_resource(GPUS)
    order = [*found.resources, theirs] if vfio_first else [theirs, *found.resources]
    inventory = Inventory(order, {"vfio": found, KIND: Fake(theirs)})
    mine: list[Device] = list(found.discover("12").devices)
    inventory.update("vfio", by_unit(mine))
    inventory.update(KIND, by_unit([device(GPU, GPUS, hardware=[f"pci:{GPU}"])]))
    winner, loser = (T4, GPUS) if vfio_first else (GPUS, T4)
    assert list(inventory.slots(winner)) == [GPU]
    (lost,) = inventory.unclaimed()
    assert lost.why == f"{loser} selects it, but pci:{GPU} belongs to {winner}"


def test_what_is_said_of_the_binding_does_not_harm_who_has_the_function_in_another_mode(tmp_path: Path) -> None:
    found, _ = acting(tmp_path, CARD, resource(T4, bind="start"))
    (mine,) = found.discover("12").devices
    assert {signal.hardware for signal in found.probe(mine)}.isdisjoint(mine.hardware)
