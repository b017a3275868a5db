"""vfio on a real kernel: functions bound for pods and given back, groups that are viable and not, virtual functions."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.guest import hardware
from tests.guest.drivers import driver
from tests.guest.guest import Guest
from tests.guest.hardware import E1000, EDU, IGB, PCI, addresses, bound, link, virtual_functions
from tests.guest.node import Log, Node
from tests.guest.vfio_user import MI210, T4

LENT, KEPT, TWIN = "nvidia.com/TU104GL_Tesla_T4", "amd.com/MI210", "example.com/edu"
RESET = "amd.com/MI210_RESET"
CARD, VIRTUAL = "intel.com/82576", "intel.com/82576_VF"
RESOURCES = f"""
[[resource]]
name = "{LENT}"
backend = "vfio"
select = {{ id = "10de:1eb8" }}
bind = "allocate"
release = "restore"

[[resource]]
name = "{KEPT}"
backend = "vfio"
select = {{ id = "1002:740f" }}
bind = "start"

[[resource]]
name = "{RESET}"
backend = "vfio"
select = {{ id = "1002:740f" }}
pre_start = "reset"

[[resource]]
name = "{TWIN}"
backend = "vfio"
select = {{ id = "1234:11e8" }}

[[resource]]
name = "{CARD}"
backend = "vfio"
select = {{ id = "8086:10c9" }}
bind = "allocate"

[[resource]]
name = "{VIRTUAL}"
backend = "vfio"
select = {{ id = "8086:10ca" }}
bind = "allocate"
release = "restore"
pre_start = "reset"
"""


@pytest.fixture(scope="module", name="agent")
async def _agent(node: Node) -> AsyncIterator[Log]:
    async with node.agent(RESOURCES) as log:
        yield log


async def nodes(guest: Guest, address: str) -> list[str]:
    """Those of a function's group."""
    return ["/dev/vfio/vfio", f"/dev/vfio/{await link(guest, f'{PCI}/{address}/iommu_group')}"]


async def has_driver(guest: Guest, address: str, name: str) -> None:
    """Wait until this driver has the function."""
    await guest.until(f'[ "$(readlink {PCI}/{address}/driver)" = ../../../../bus/pci/drivers/{name} ]')


async def test_a_function_is_bound_for_a_pod_and_given_back_to_its_driver(node: Node, agent: Log) -> None:
    guest = node.guest
    async with driver(guest, "nvidia", "pci-stub", [T4]), guest.plugged(T4) as t4:
        await node.shows(LENT, t4.address)
        await node.told("bind", SUBSYSTEM="pci", DRIVER="nvidia")
        for _ in range(2):
            async with node.pod({LENT: 1}) as pod:
                assert pod["gets"][LENT] == {
                    "ids": [t4.address],
                    "envs": {"PCI_RESOURCE_NVIDIA_COM_TU104GL_TESLA_T4": t4.address},
                    "nodes": await nodes(guest, t4.address),
                }
                assert await hardware.driver(guest, t4.address) == "vfio-pci"
                await guest.run(f"[ -c {pod['gets'][LENT]['nodes'][1]} ]")
            await has_driver(guest, t4.address, "nvidia")
            assert await guest.run(f"cat {t4.directory}/driver_override") == "(null)"
        assert not [line for line in agent.said(event="device-changed", resource=LENT) if line["state"] == "Unhealthy"]


async def test_a_function_that_a_pod_has_is_pulled_out_and_comes_back(node: Node, agent: Log) -> None:
    guest = node.guest
    async with driver(guest, "nvidia", "pci-stub", [T4]), guest.plugged(T4) as t4:
        await node.shows(LENT, t4.address)
        await node.told("bind", SUBSYSTEM="pci", DRIVER="nvidia")
        await has_driver(guest, t4.address, "nvidia")  # that event may be of an earlier giving back
        async with node.pod({LENT: 1}):
            await t4.unplug()
            await node.shows(LENT, unhealthy=[t4.address])
            await node.told("remove", SUBSYSTEM="pci")
        await node.shows(LENT)
        await t4.plug()
        await node.shows(LENT, t4.address)
        assert await hardware.driver(guest, t4.address) == "nvidia"


async def test_a_function_is_bound_when_it_is_plugged_in(node: Node, agent: Log) -> None:
    guest = node.guest
    async with driver(guest, "amdgpu", "pci-stub", [MI210]), guest.plugged(MI210) as mi210:
        await node.shows(KEPT, mi210.address)
        await node.told("add", SUBSYSTEM="pci")
        assert await hardware.driver(guest, mi210.address) == "vfio-pci"
        async with node.pod({KEPT: 1}) as pod:
            assert pod["gets"][KEPT]["nodes"] == await nodes(guest, mi210.address)
        await node.shows(KEPT, mi210.address)
        await node.shows(RESET)  # this function cannot be reset by itself


async def test_a_group_is_viable_while_no_driver_has_the_neighbour(node: Node, agent: Log) -> None:
    guest = node.guest
    (edu,), (e1000,) = await addresses(guest, EDU), await addresses(guest, E1000)
    group = await link(guest, f"{PCI}/{edu}/iommu_group")
    await node.shows(TWIN, unhealthy=[edu])
    async with bound(guest, edu, "vfio-pci"):
        await node.shows(TWIN, edu)
        await node.told("bind", SUBSYSTEM="pci", DRIVER="vfio-pci")
        since = len(agent.lines)
        async with bound(guest, e1000, "e1000"):
            await node.shows(TWIN, unhealthy=[edu])
            await node.told("bind", SUBSYSTEM="pci", DRIVER="e1000")
            said = await agent.says(since, event="device-changed", resource=TWIN, state="Unhealthy")
            why = f"IOMMU group {group} cannot be handed out while {e1000}, which is in it, is bound to e1000"
            assert (said["reason"], said["message"]) == ("group-not-viable", why)
        await node.shows(TWIN, edu)
        await node.told("unbind", SUBSYSTEM="pci")
    await node.shows(TWIN, unhealthy=[edu])


async def test_virtual_functions_come_and_go_and_take_their_cards_place(node: Node, agent: Log) -> None:
    guest = node.guest
    (card,) = await addresses(guest, IGB)
    await node.shows(CARD, card)
    async with virtual_functions(guest, 2) as functions:
        await node.shows(VIRTUAL, *functions)
        await node.told("add", SUBSYSTEM="pci")
        await node.shows(CARD)
        await node.told("change", SUBSYSTEM="pci", PCI_SLOT_NAME=card)
        async with node.pod({VIRTUAL: 1}) as pod:
            (given,) = pod["gets"][VIRTUAL]["ids"]
            assert pod["gets"][VIRTUAL]["nodes"] == await nodes(guest, given)
            reset = await agent.says(event="hardware-reset", resource=VIRTUAL)
            assert reset["hardware"] == [f"pci:{given}"]
        await guest.until(f"[ ! -e {PCI}/{given}/driver ]")
    await node.shows(VIRTUAL)
    await node.told("remove", SUBSYSTEM="pci")
    await node.shows(CARD, card)
    await node.told("remove", SUBSYSTEM="pci")
