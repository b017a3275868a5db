"""The small helpers of the shared values and of the interface."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from backends.base import ContainerEdits, Device, Grant, Host, HostPath, Mount, Node, Resource, ResourceSpec, Uevent
from backends.stub import Stub, StubOptions


def test_edits_of_grants_have_every_node_and_mount_once_in_the_order_of_the_grants() -> None:
    node, other = (Node(HostPath(path), path, "rw") for path in ("/dev/b", "/dev/a"))
    mount = Mount(HostPath("/etc/b"), "/etc/b")
    shared = Device("b", "b", frozenset({"b"}), nodes=(node,), mounts=(mount,))
    grants = [
        Grant("b::0", shared),
        Grant("b::1", shared),
        Grant("c", Device("c", "c", frozenset({"c"}), nodes=(other,))),
    ]
    assert ContainerEdits.of(grants) == ContainerEdits(nodes=(node, other), mounts=(mount,))
    assert ContainerEdits.of([]) == ContainerEdits()


def test_a_node_that_is_shared_by_one_of_the_devices_is_given_once() -> None:
    own = Node(HostPath("/dev/a"), "/dev/a", "rw")
    devices = [
        Device(key, key, frozenset({key}), nodes=(node,))
        for key, node in (("a", own), ("b", replace(own, shared=True)))
    ]
    (node,) = ContainerEdits.of([Grant(device.key, device) for device in devices]).nodes
    assert node.path == own.path


def test_an_event_has_the_name_of_its_device() -> None:
    assert Uevent("add", "ptp", "/devices/pci0000:00/0000:00:1f.6/ptp/ptp0").name == "ptp0"


def test_all_trees_of_a_host_may_lie_below_one_directory() -> None:
    host = Host.below(Path("/pretend"))
    for path in ("/sys/class", "/dev/x", "/proc/1", "/run/udev", "/etc/x"):
        assert host.local(HostPath(path)) == Path(f"/pretend{path}")


def test_a_backend_finds_its_resources_by_name() -> None:
    one, other = (Resource(name, ResourceSpec("stub", StubOptions(1))) for name in ("a.example/x", "b.example/x"))
    backend = Stub(Host(), [one, other])
    assert backend.resource("b.example/x") is other
    with pytest.raises(LookupError, match=r"there is no resource c\.example/x"):
        backend.resource("c.example/x")


def test_a_resource_that_a_template_gave_knows_the_name_as_configured() -> None:
    template = Resource("a.b/{p}-{q}-{p}", ResourceSpec("stub", StubOptions(devices=1)))
    assert (template.is_template, template.named_by, template.configured) == (True, ("p", "q"), template.name)
    given = replace(template, name="a.b/1-2-1", template=template.name)
    assert (given.is_template, given.named_by, given.configured) == (False, (), template.name)


def test_a_refusal_does_not_name_hundreds_of_values() -> None:
    select = ({"vf": tuple(map(str, range(64)))},)
    chosen = Resource("a.b/c", ResourceSpec("stub", StubOptions(1), select=select))
    refused = chosen.refuses(Device("x", "x", frozenset({"x"}), attributes={"vf": ("70",)}))
    assert refused == "vf is 70, not any of the 64 that are selected"
