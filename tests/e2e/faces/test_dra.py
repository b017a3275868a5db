"""Resources that are served by dynamic resource allocation: the API server has them, the kubelet no plugin of them, and never both."""

from __future__ import annotations

import json
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from agent.simulation.dra import ClaimKey
from tests.apiserver import NODE, ApiServer
from tests.e2e.node import UNHURRIED, WIDGET, Node, chardev
from tests.e2e.process import AgentProcess, finish
from tests.wait import until

OTHER = "fl.test/other"
IMPATIENT = """
from agent.dra import preparation, publisher
from agent.kubernetes import api
api._FIRST_PAUSE = api._LONGEST_PAUSE = publisher._RECORD_AGAIN = 0.02
preparation._COLLECT_AGAIN = 0.2
"""


@pytest.fixture
async def server() -> AsyncIterator[ApiServer]:
    async with ApiServer().running() as server:
        yield server


def claimed(name: str = WIDGET, path: str = "/dev/w*", count: int = 1) -> str:
    return chardev(path, name, count) + 'serve = "dra"\n'


def dra(server: ApiServer, node: Node) -> str:
    return f'[dra]\nkubeconfig = "{server.kubeconfig(node.root / "kubeconfig")}"\nnode = "{NODE}"\n'


@asynccontextmanager
async def agent(node: Node, *resources: str) -> AsyncIterator[AgentProcess]:
    async with AgentProcess(node.config(*resources, run=str(node.root)), UNHURRIED + IMPATIENT) as it:
        await it.says("ready")
        yield it


def names(server: ApiServer, resource: str = WIDGET) -> list[str]:
    return [it["name"] for it in server.objects.pool(f"{NODE}/{resource}")]


async def offers(server: ApiServer, *devices: str, resource: str = WIDGET) -> None:
    await until(
        lambda: names(server, resource) == list(devices), f"slices of {resource}", lambda: server.objects.slices
    )


async def test_the_api_server_has_the_devices_as_they_come_and_go_and_the_kubelet_no_plugin(
    node: Node, server: ApiServer
) -> None:
    node.mknod("w1", "o1")
    async with agent(node, claimed(count=10), chardev("/dev/o*", OTHER), dra(server, node)):
        await node.registered(OTHER)
        await offers(server, "dev-w1")
        (device,) = server.objects.pool(f"{NODE}/{WIDGET}")
        assert device["allowMultipleAllocations"] is True
        assert device["capacity"]["tokens"]["value"] == "10"
        assert device["attributes"]["devname"] == {"string": "w1"}
        node.mknod("w2")
        await offers(server, "dev-w1", "dev-w2")
        node.unlink("w1")
        await offers(server, "dev-w2")
        server.objects.wipe()
        await offers(server, "dev-w2")
        assert WIDGET not in node.kubelet.resources
        await server.stop()
        node.mknod("w3")
        await server.start()
        await offers(server, "dev-w2", "dev-w3")


async def allocated(
    server: ApiServer, name: str, *devices: str, resource: str = WIDGET, driver: str = "fairlead.dev"
) -> ClaimKey:
    """A claim to which a scheduler has given these devices."""
    pool = f"{NODE}/{resource}"
    results = [{"request": "it", "driver": driver, "pool": pool, "device": it} for it in devices]
    made = server.objects.put(
        f"namespaces/default/resourceclaims/{name}",
        {
            "metadata": {"name": name, "namespace": "default"},
            "spec": {},
            "status": {
                "allocation": {"devices": {"results": results}},
                "reservedFor": [{"resource": "pods", "name": name, "uid": f"pod-{name}"}],
            },
        },
    )
    return ClaimKey(driver, made["metadata"]["uid"], name)


async def test_a_pod_gets_its_device_by_a_claim_and_gives_it_back(node: Node, server: ApiServer) -> None:
    node.mknod("w1", "w2")
    node.kubelet.serves_dra = True
    await node.kubelet.restart()

    async def wipe(_driver: str | None) -> None:
        server.objects.wipe()

    node.kubelet.wipe_slices = wipe
    async with agent(node, claimed(), dra(server, node)):
        await offers(server, "dev-w1", "dev-w2")
        await until(lambda: "fairlead.dev" in node.kubelet.drivers.instances)
        await offers(server, "dev-w1", "dev-w2")  # though the kubelet has deleted them
        claim = await allocated(server, "mine", "dev-w1")
        await node.kubelet.drivers.admit("mine", [claim])
        (name,) = node.kubelet.drivers.cdi_devices("mine")
        (file,) = (node.root / "cdi").iterdir()
        (given,) = json.loads(file.read_text())["devices"]
        assert name.endswith(f"={given['name']}")
        assert [it["path"] for it in given["containerEdits"]["deviceNodes"]] == ["/dev/w1"]
        _, out, _ = await finish("status", "--config", str(node.root / "config.toml"))
        assert "registered" in out
        await node.kubelet.drivers.end("mine")
        assert list((node.root / "cdi").iterdir()) == []


async def test_a_reload_moves_a_resource_from_one_api_to_the_other_and_back(node: Node, server: ApiServer) -> None:
    node.mknod("w1", "o1")
    both = chardev("/dev/o*", OTHER), dra(server, node)
    async with agent(node, chardev(), *both) as it:
        await node.registered(WIDGET, OTHER)
        assert server.requests == []
        node.config(claimed(), *both)
        await offers(server, "dev-w1")
        await node.kubelet.wait_for(lambda k: not k.streams(WIDGET))
        server.objects.refuses = lambda method, _path: 503 if method == "DELETE" else None
        node.config(chardev(), *both)
        await it.says("dra-slices-left")
        assert not node.kubelet.streams(WIDGET), "as long as the API server may give it away, the kubelet may not"
        server.objects.refuses = lambda _method, _path: None
        await node.registered(WIDGET)
        assert server.objects.slices == {}


async def test_what_an_earlier_run_offered_is_withdrawn_before_the_kubelet_gets_it(
    node: Node, server: ApiServer
) -> None:
    node.mknod("w1", "o1")
    async with agent(node, claimed(), dra(server, node)):
        await offers(server, "dev-w1")
    await server.stop()
    async with agent(node, chardev(), chardev("/dev/o*", OTHER), dra(server, node)) as it:
        await node.registered(OTHER)
        await it.says("dra-slices-left")
        assert not node.kubelet.streams(WIDGET)
        await server.start()
        await node.registered(WIDGET)
        assert server.objects.slices == {}
    async with agent(node, chardev(), dra(server, node)):
        await node.registered(WIDGET)


async def test_what_is_offered_is_recorded_once_there_is_room_on_the_disk_and_withdrawn_by_the_next_run(
    node: Node, server: ApiServer
) -> None:
    node.mknod("w1")
    no_room = node.state / ".dra.json.new" / "x"  # where it is written first: stands for a full disk
    no_room.mkdir(parents=True)
    async with agent(node, claimed(), dra(server, node)) as it:
        await offers(server, "dev-w1")
        await it.says("dra-record-unwritten")
        no_room.rmdir()
        no_room.parent.rmdir()
        await until((node.state / "dra.json").exists)
        _, out, _ = await finish("status", "--config", str(node.root / "config.toml"))
        assert "cannot be written" not in out
    async with agent(node, chardev(), dra(server, node)):
        await node.registered(WIDGET)
        assert server.objects.slices == {}


async def test_what_a_pod_has_by_a_claim_is_offered_by_no_device_plugin_though_our_state_is_lost_and_the_device_away(
    node: Node, server: ApiServer
) -> None:
    node.mknod("w1", "w2", "o1")
    node.kubelet.serves_dra = True
    await node.kubelet.restart()
    both = chardev("/dev/o*", OTHER), dra(server, node)
    async with agent(node, claimed(), *both):
        await offers(server, "dev-w1", "dev-w2")
        await until(lambda: "fairlead.dev" in node.kubelet.drivers.instances)
        await node.kubelet.drivers.admit("mine", [await allocated(server, "mine", "dev-w1")])
    for file in node.state.glob("state*"):
        file.unlink()
    node.unlink("w1")
    async with agent(node, chardev(), *both) as it:
        await it.says("claim-not-adopted")
        await node.registered(OTHER)
        await until(lambda: server.objects.slices == {})
        assert not node.kubelet.streams(WIDGET)
        node.mknod("w1")
        await node.registered(WIDGET)
        assert node.kubelet.resources[WIDGET].healthy == {"w2"}
        await until(lambda: node.kubelet.drivers.connected("fairlead.dev"))
        await node.kubelet.drivers.end("mine")
        await until(lambda: node.kubelet.resources[WIDGET].healthy == {"w1", "w2"})


async def test_a_resource_changes_its_api_with_the_drivers_name_only_once_all_claims_of_pods_are_known(
    node: Node, server: ApiServer
) -> None:
    node.mknod("w1", "w2", "o1")
    node.kubelet.serves_dra = True
    await node.kubelet.restart()
    async with agent(node, claimed(), claimed(OTHER, "/dev/o*"), dra(server, node)):
        await offers(server, "dev-w1", "dev-w2")
        await until(lambda: "fairlead.dev" in node.kubelet.drivers.instances)
        await node.kubelet.drivers.admit("mine", [await allocated(server, "mine", "dev-w1")])
    for file in node.state.glob("state*"):
        file.unlink()
    node.unlink("w1")
    renamed = f'{dra(server, node)}driver = "other.dev"\n'
    async with agent(node, chardev(), claimed(OTHER, "/dev/o*"), renamed) as it:
        await it.says("claim-not-adopted")
        await until(lambda: {it["spec"]["driver"] for it in server.objects.slices.values()} == {"other.dev"})
        node.mknod("o2")
        await offers(server, "dev-o1", "dev-o2", resource=OTHER)
        assert not node.kubelet.streams(WIDGET)
        node.mknod("w1")
        await node.registered(WIDGET)
        assert node.kubelet.resources[WIDGET].healthy == {"w2"}


async def test_pods_end_though_the_drivers_name_was_changed_and_nothing_is_served_by_dra_any_more(
    node: Node, server: ApiServer
) -> None:
    node.mknod("w1", "w2")
    node.kubelet.serves_dra = True
    await node.kubelet.restart()
    drivers = node.kubelet.drivers

    async def admit(pod: str, device: str, driver: str) -> None:
        await until(lambda: drivers.connected(driver))
        await drivers.admit(pod, [await allocated(server, pod, device, driver=driver)])

    def named(driver: str) -> str:
        return f'{dra(server, node)}driver = "{driver}"\n'

    async with agent(node, claimed(), named("first.dev")):
        await offers(server, "dev-w1", "dev-w2")
        await admit("first", "dev-w1", "first.dev")
        await admit("second", "dev-w2", "first.dev")
        node.config(claimed(), named("other.dev"))
        await until(lambda: {it["spec"]["driver"] for it in server.objects.slices.values()} == {"other.dev"})
        await until(lambda: drivers.connected("first.dev"))
        await offers(server)
        await drivers.end("second")
        await offers(server, "dev-w2")
        await admit("third", "dev-w2", "other.dev")
    async with agent(node, chardev()):  # as it was before anybody tried DRA
        await node.registered(WIDGET)
        assert node.kubelet.resources[WIDGET].healthy == set()
        assert server.objects.slices == {}
    for file in (node.root / "cdi").iterdir():
        file.unlink()
    async with agent(node, chardev()):
        await until(lambda: drivers.connected("first.dev") and drivers.connected("other.dev"))
        await drivers.end("first")
        await until(lambda: node.kubelet.resources[WIDGET].healthy == {"w1"})
        await drivers.end("third")
        await until(lambda: node.kubelet.resources[WIDGET].healthy == {"w1", "w2"})
    async with agent(node, chardev()) as it:
        await node.registered(WIDGET)
        node.mknod("w3")
        await until(lambda: node.kubelet.resources[WIDGET].healthy == {"w1", "w2", "w3"})
        assert not it.said("dra-serving")
        assert list((node.root / "cdi").iterdir()) == []


async def test_a_node_that_is_installed_in_another_way_goes_on_with_the_slices_that_it_has(
    node: Node, server: ApiServer
) -> None:
    node.mknod("w1", "o1")
    both = chardev("/dev/o*", OTHER), dra(server, node)
    async with agent(node, claimed(), *both):
        await offers(server, "dev-w1")
    slices = list(server.objects.slices)
    (node.root / "kubeconfig").rename(node.root / "admin.conf")  # a service's, and now a pod's
    moved = both[1].replace("/kubeconfig", "/admin.conf")
    async with agent(node, claimed(), both[0], moved):
        node.mknod("w2")
        await offers(server, "dev-w1", "dev-w2")
        assert list(server.objects.slices) == slices
    (node.root / "admin.conf").rename(node.root / "kubeconfig")
    async with agent(node, claimed(), both[0], f'{both[1]}driver = "other.dev"\n'):
        await until(lambda: {it["spec"]["driver"] for it in server.objects.slices.values()} == {"other.dev"})


async def test_a_node_that_does_not_reach_the_api_server_says_why_it_is_not_ready(
    node: Node, server: ApiServer
) -> None:
    node.mknod("w1")
    both = claimed(), dra(server, node)
    (node.root / "kubeconfig").unlink()
    async with agent(node, *both) as it:
        await it.says("dra-api-away")
        code, out, err = await finish("probe", "ready", "--config", str(node.root / "config.toml"))
    assert code == 1
    assert f"{WIDGET} is not registered: Kubernetes' API server cannot be reached: " in out + err


async def test_without_such_a_resource_nothing_of_it_is_loaded(node: Node) -> None:
    node.mknod("w1")
    spy = "import atexit, sys\natexit.register(lambda: print(*(it for it in sys.modules if 'dra' in it), file=sys.stderr))\n"
    async with AgentProcess(node.config(chardev(), "[dra]\n"), UNHURRIED + spy) as it:
        await node.registered(WIDGET)
        it.signal(signal.SIGTERM)
        await it.ended()
    loaded = {name for line in it.said("no-json") for name in str(line["text"]).split()}
    assert "agent.daemon.dra" in loaded
    assert not any(name.startswith("agent.dra") for name in loaded)
