"""The module kvm: /dev/kvm goes and comes with it."""

from __future__ import annotations

from tests.guest.node import Node

KVM = "devices.kubevirt.io/kvm"
RESOURCE = f"""
[[resource]]
name = "{KVM}"
backend = "chardev"
paths = [{{ path = "/dev/kvm" }}]
count = 2
"""


async def test_kvm_comes_and_goes_with_its_module(node: Node) -> None:
    async with node.agent(RESOURCE):
        await node.shows(KVM)
        await node.guest.run("modprobe kvm_amd || modprobe kvm_intel")
        await node.shows(KVM, "kvm0", "kvm1")
        await node.told("add", SUBSYSTEM="misc", DEVNAME="kvm")
        await node.guest.run("modprobe -r kvm_amd kvm_intel")
        await node.shows(KVM)
        await node.told("remove", SUBSYSTEM="misc", DEVNAME="kvm")
