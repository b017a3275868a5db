"""The test guest itself: what its tests rely on when they say that a thing is there."""

from __future__ import annotations

import pytest

from tests.guest.guest import CommandError, Guest, guest
from tests.guest.hardware import (
    E1000,
    EDU,
    PCI,
    addresses,
    bound,
    driver,
    link,
    soft_rdma,
    virtual_functions,
)
from tests.guest.machine import Accelerator, MachineError
from tests.guest.vfio_user import FLEX170, H100, MI210, PciFunction

# --- commands ---


async def test_a_command_is_given_its_input_and_says_what_it_makes_of_it(guest: Guest) -> None:
    async with await guest.start("tr a-z A-Z") as process:
        await process.write(b"one\ntwo\n")
        await process.write(None)
        assert [line async for line in process.lines()] == ["ONE", "TWO"]


async def test_a_command_that_fails_is_an_error_with_what_it_said(guest: Guest) -> None:
    with pytest.raises(CommandError, match=r"ended with 3:\nno such card"):
        await guest.run("echo no such card; exit 3")


async def test_a_command_ends_with_its_context_and_takes_its_children_along(guest: Guest) -> None:
    alive = "grep -q sleep /proc/$(cat /run/child)/cmdline"
    async with await guest.start("sleep 1234 & echo $! > /run/child; sleep 1234"):
        await guest.until(alive)
    await guest.until(f"! {alive}")


async def test_a_guest_that_dies_ends_the_commands_in_it(accelerator: Accelerator) -> None:
    async with guest(accelerator) as mortal:
        with pytest.raises(MachineError, match="the guest is gone"):
            await mortal.run("echo o > /proc/sysrq-trigger; sleep 1234")


# --- functions ---


@pytest.mark.parametrize("function", [H100, MI210, FLEX170], ids=["H100", "MI210", "Flex"])
async def test_a_function_is_in_sys_as_long_as_it_is_plugged_in(guest: Guest, function: PciFunction) -> None:
    async with guest.plugged(function) as card:
        for _ in range(2):
            ids = await guest.run(f"cd {card.directory} && cat vendor device class subsystem_vendor")
            wanted = (function.vendor, function.device, function.pci_class, function.subsystem[0])
            assert tuple(int(line, 16) for line in ids.split()) == wanted
            assert await driver(guest, card.address) == ""
            assert await link(guest, f"{card.directory}/iommu_group") != ""
            await card.unplug()
            await guest.until(f"[ ! -e {card.directory} ]")
            await card.plug()


async def test_functions_are_plugged_in_side_by_side(guest: Guest) -> None:
    async with guest.plugged(H100, 0) as one, guest.plugged(H100, 1) as other:
        assert sorted(await addresses(guest, "0x2330")) == sorted([one.address, other.address])


# --- vfio ---


async def test_a_function_that_vfio_has_is_a_node_in_dev(guest: Guest) -> None:
    async with guest.plugged(H100) as card:
        group = await link(guest, f"{card.directory}/iommu_group")
        async with bound(guest, card.address, "vfio-pci"):
            assert await driver(guest, card.address) == "vfio-pci"
            await guest.run(f"[ -c /dev/vfio/{group} ]")
        await guest.until(f"[ ! -e /dev/vfio/{group} ]")


async def test_two_functions_behind_a_conventional_bridge_are_one_group(guest: Guest) -> None:
    (edu,), (e1000,) = await addresses(guest, EDU), await addresses(guest, E1000)
    assert await link(guest, f"{PCI}/{edu}/iommu_group") == await link(guest, f"{PCI}/{e1000}/iommu_group")
    async with bound(guest, edu, "vfio-pci"), bound(guest, e1000, "e1000"):
        assert await driver(guest, e1000) == "e1000"


# --- virtual functions ---


async def test_virtual_functions_are_made_and_removed(guest: Guest) -> None:
    async with virtual_functions(guest, 3) as functions:
        assert len(functions) == 3
        groups = {await link(guest, f"{PCI}/{address}/iommu_group") for address in functions}
        assert len(groups) == 3
    for address in functions:
        await guest.run(f"[ ! -e {PCI}/{address} ]")


# --- soft RDMA ---


async def test_soft_rdma_has_its_nodes_and_a_port_that_follows_the_card(guest: Guest) -> None:
    async with soft_rdma(guest) as netdev:
        hca = "/sys/class/infiniband/rxe0"
        assert await guest.run(f"cat {hca}/ports/1/link_layer") == "Ethernet"
        await guest.run(
            "[ -c /dev/infiniband/uverbs0 ] && [ -c /dev/infiniband/umad0 ] && [ -c /dev/infiniband/rdma_cm ]"
        )
        await guest.until(f"grep -q ACTIVE {hca}/ports/1/state")
        await guest.run(f"ip link set {netdev} down")
        await guest.until(f"grep -q DOWN {hca}/ports/1/state")
        await guest.run(f"ip link set {netdev} up")
        await guest.until(f"grep -q ACTIVE {hca}/ports/1/state")
    await guest.run(f"[ ! -e {hca} ]")
