"""SR-IOV on a real kernel: virtual functions are made, go into a pod's network, and suffer from the card's link."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import AsyncIterator

import pytest

from tests.e2e.forkserver import REPOSITORY
from tests.guest.hardware import IGB, IGB_VF, PCI, addresses
from tests.guest.node import Node

NET = "intel.com/82576_net"
FILES = "/run/k8s.cni.cncf.io/devinfo/dp"


@pytest.fixture(name="card")
async def _card(node: Node) -> AsyncIterator[str]:
    """A card on its driver, with its link up and no virtual functions."""
    guest = node.guest
    (card,) = await addresses(guest, IGB)
    await guest.run("modprobe -a igb igbvf")
    await guest.until(f"[ -e {PCI}/{card}/net ] && ip link set $(ls {PCI}/{card}/net) up")
    yield card
    await guest.run(f"ip netns del pod; echo 0 > {PCI}/{card}/sriov_numvfs; modprobe -r igbvf igb")


async def test_what_the_kernel_says_of_a_network_card_that_the_host_uses(node: Node, card: str) -> None:
    guest = node.guest
    await guest.run("modprobe -a bridge bonding team team_mode_roundrobin vrf 8021q macvlan ipvlan openvswitch")
    command = [sys.executable, "-m", "tests.guest.uplinks", card]
    *_, told = (await guest.run(f"cd {REPOSITORY} && {shlex.join(command)}")).splitlines()
    (name,) = (await guest.run(f"ls {PCI}/{card}/net")).split()
    has = f"has the network interface {name}"
    assert json.loads(told) == {
        "bridge": [f"{has}, which is part of x"],
        "bond": [f"{has}, which is part of x"],
        "team": [f"{has}, which is part of x"],
        "vrf": [f"{has}, which is part of x"],
        "vlan in a bridge": [f"{has}, which is part of y, through x"],
        "macvlan": [f"{has}, of which x is made"],
        "ipvlan with the default route": [f"carries the default route, through {name} and x"],
        "address": [f"has an address or a route of the host at the network interface {name}"],
        "up": [],
        "open vswitch": [f"{has}, which is part of ovs-system"],
        "entries": ["upper_ovs-system"],
    }


async def test_virtual_functions_are_made_and_stay_while_a_pod_has_their_interface(node: Node, card: str) -> None:
    guest = node.guest
    resources = f"""
[[resource]]
name = "{NET}"
backend = "sriov"
select = {{ physical = "{card}", vf = "0-1" }}
create = {{ "{card}" = 2 }}
down_after = "10ms"
"""
    async with node.agent(resources) as agent:
        await agent.says(event="adopted", device=card)
        await guest.until(f"[ -e {PCI}/{card}/virtfn1/net ]")
        functions = await addresses(guest, IGB_VF)
        await node.shows(NET, *functions)
        await node.told("add", SUBSYSTEM="pci")
        async with node.pod({NET: 1}) as pod:
            (given,) = pod["gets"][NET]["ids"]
            envs = pod["gets"][NET]["envs"]
            assert envs["PCIDEVICE_INTEL_COM_82576_NET"] == given
            assert json.loads(envs["PCIDEVICE_INTEL_COM_82576_NET_INFO"]) == {given: {"generic": {"deviceID": given}}}
            told = json.loads(await guest.run(f"cat {FILES}/*"))
            assert told == {"type": "pci", "version": "1.1.0", "pci": {"pci-address": given}}
            await guest.run(f"ip netns add pod && ip link set $(ls {PCI}/{given}/net) netns pod")
            await guest.machine.qmp.execute("set_link", name="igb", up=False)
            await node.shows(NET, unhealthy=functions)
            await guest.machine.qmp.execute("set_link", name="igb", up=True)
            await node.shows(NET, *functions)
        await guest.until(f'[ -z "$(ls {FILES})" ]')
