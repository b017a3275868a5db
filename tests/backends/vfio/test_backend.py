"""The backend `vfio`: groups found, what is wrong with them, what a pod gets, what an event is about."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from agent.inventory.inventory import Inventory
from agent.inventory.shortfall import found_missing, not_offered
from agent.inventory.survey import survey
from backends.base import AllocationRefused, Device, Grant, Verdict
from backends.vfio import Vfio, VfioResource
from tests.backends.pci_trees import function
from tests.backends.vfio.vfio_node import (
    GPU,
    ROOT,
    SOUND,
    backend,
    devices,
    gpu,
    grant,
    only,
    own_node,
    resource,
    sound,
)
from tests.fakes import by_unit, held

OTHER = "0000:5e:00.0"


def paths(device: Device) -> list[str]:
    assert all(node.path.text == node.container_path and node.permissions == "mrw" for node in device.nodes)
    return [node.path.text for node in device.nodes]


def reasons(found: Vfio, device: Device) -> list[tuple[str, str, Verdict]]:
    return [(signal.hardware, signal.reason, signal.verdict) for signal in found.probe(device)]


def messages(found: Vfio, device: Device) -> list[str]:
    return [signal.message for signal in found.probe(device)]


# --- what is found ---


def test_a_group_is_one_device_named_by_the_selected_function(tmp_path: Path) -> None:
    found = backend(tmp_path, gpu(numa_node=1) + sound())
    device = only(found)
    assert (device.key, device.unit, device.resource) == (GPU, "12", "nvidia.com/T4")
    assert device.hardware == {f"pci:{GPU}", f"pci:{SOUND}"}
    assert (device.numa_node, device.ancestry) == (1, ("pci0000:3a", "0000:3a:00.0"))
    assert device.identity == "10de:1eb8 10de:16c1"
    assert device.attributes["companions"] == (SOUND,)
    assert (device.unusable, reasons(found, device)) == ("", [])


def test_a_function_is_selected_by_what_goes_with_it(tmp_path: Path) -> None:
    mine = resource("nvidia.com/T4", {"companions": (SOUND,)})
    first, second = devices(backend(tmp_path, gpu() + sound() + CARD, mine))
    assert (first.key, first.resource, second.key, second.resource) == (GPU, mine.name, OTHER, mine.name)
    assert mine.refuses(second) is None, "which reads that it goes with the first"


def test_the_driver_bound_anew_is_another_binding_of_the_same_hardware(tmp_path: Path) -> None:
    found = backend(tmp_path, gpu())
    before = only(found)
    link = tmp_path / f"sys/devices/{ROOT}/{GPU}/driver"
    link.rename(link.with_name("was"))  # a kernel never gives its inode out again, this file system might
    link.symlink_to(link.with_name("was").readlink())
    after = only(found)
    assert before.identity == after.identity
    assert before.bindings.keys() == after.bindings.keys() == after.hardware
    assert before.bindings != after.bindings


def test_of_two_cards_in_one_group_one_is_offered_and_the_other_told_as_going_with_it(tmp_path: Path) -> None:
    other = function(OTHER, "10de:1eb8", driver="vfio-pci", vfio=["vfio9"], group=12)
    found = backend(tmp_path, gpu() + sound() + other, resource("a/x", {"vendor": ("10de",)}))
    device, *_ = devices(found)
    assert device.key == GPU
    assert device.hardware == {f"pci:{GPU}", f"pci:{SOUND}", f"pci:{OTHER}"}
    assert found.edits(found.resources[0], [grant(device)]).env == {"PCI_RESOURCE_A_X": GPU}
    inventory = Inventory(found.resources, {"vfio": found})
    inventory.update("vfio", by_unit(found.discover("12").devices))
    why = f"it goes with {GPU}, since IOMMU group 12 can only be had whole; exclude its address where that is meant"
    told = {one.found.device.key: (one.why, one.missing and one.missing.resource) for one in not_offered(inventory)}
    assert told == {SOUND: (why, None), OTHER: (why, "a/x")}  # a card's sound is expected to go with it
    inventory.claim([held("a/x", GPU, device)])
    assert {one.device for one in found_missing(inventory)} == {OTHER}


def test_a_virtual_function_depends_on_its_physical_one(tmp_path: Path) -> None:
    tree = function(OTHER, "8086:1592", virtual=["0000:5e:01.0"], driver="ice", group=30)
    tree += function("0000:5e:01.0", "8086:1889", physical=OTHER, driver="vfio-pci", vfio=["vfio0"], group=31)
    device = only(backend(tmp_path, tree, resource("intel.com/vf", {"function": ("virtual",)})))
    assert device.key == "0000:5e:01.0"
    assert device.depends == {"iommu:31", f"pci:{OTHER}"}


def test_what_no_selector_takes_is_no_device_unless_it_was_made_ready_for_one(tmp_path: Path) -> None:
    mistaken = resource("a/x", {"id": ("10de:1eb0",)})
    found = backend(tmp_path, gpu() + sound() + function(OTHER, driver="nvme", group=13), mistaken)
    device = only(found)
    assert (device.key, device.resource, reasons(found, device)) == (GPU, None, [])
    inventory = Inventory(found.resources, {"vfio": found})
    inventory.update("vfio", {"12": (device,)})
    assert inventory.unclaimed()[0].why == "a/x does not take it: id is 10de:1eb8, not 10de:1eb0"


async def test_a_selector_that_matches_nothing_is_told_what_is_there_instead(tmp_path: Path) -> None:
    """Although nothing of it is shown: every function of the node would be."""
    mistaken = resource("a/x", {"id": ("10de:1eb9",)}, bind="allocate")
    found = backend(tmp_path, gpu("nvidia") + sound("snd_hda_intel") + function(OTHER, "144d:a80a", group=13), mistaken)
    seen = await survey(found.resources, {"vfio": found}, 5.0)
    ((_, problem),) = seen.problems
    assert problem.sentence == (
        "a/x: its selector id = '10de:1eb9' matches nothing; "
        "the vfio backend found id 10de:1eb8 (1), 10de:10f8 (1), 144d:a80a (1)"
    )
    assert seen.inventory.unclaimed() == []


def test_a_selector_takes_ids_in_any_case(tmp_path: Path) -> None:
    assert only(backend(tmp_path, gpu(), resource("a/x", {"id": ("10De:1Eb8",)}))).key == GPU


def test_two_resources_that_select_one_function_have_a_device_each_for_the_inventory_to_decide(tmp_path: Path) -> None:
    found = devices(backend(tmp_path, gpu(), resource("a/one"), resource("b/two", iommu="legacy")))
    assert [(device.resource, device.key, device.unusable) for device in found] == [
        ("a/one", GPU, ""),
        ("b/two", GPU, ""),
    ]


@pytest.mark.parametrize("first", ["a/gpu", "b/sound"])
def test_a_group_that_two_resources_want_is_the_first_ones_and_the_other_is_told(tmp_path: Path, first: str) -> None:
    parts = {"a/gpu": resource("a/gpu"), "b/sound": resource("b/sound", {"class": ("040300",)})}
    resources = sorted(parts.values(), key=lambda it: it.name != first)
    found = backend(tmp_path, gpu() + sound(), *resources)
    inventory = Inventory(resources, {"vfio": found})
    inventory.update("vfio", by_unit(found.discover("12").devices))
    (other,) = parts.keys() - {first}
    mine, its = (GPU, SOUND) if first == "a/gpu" else (SOUND, GPU)
    assert {name: list(inventory.slots(name)) for name in parts} == {first: [mine], other: []}
    (told,) = not_offered(inventory)
    assert told.missing is not None
    assert (told.found.device.key, told.missing.resource) == (its, other)
    where = {
        "a/gpu": f"pci:{GPU}, which goes with it, belongs to a/gpu",
        "b/sound": f"pci:{GPU} belongs to b/sound, as part of {SOUND}",
    }
    assert told.why == f"{other} selects it, but {where[first]}"


async def test_a_selector_that_matches_what_goes_with_another_function_matches_something(tmp_path: Path) -> None:
    both = resource("a/x", {"id": ("10de:1eb8",)}, {"id": ("10de:10f8",)})
    found = backend(tmp_path, gpu() + sound(), both)
    assert (await survey(found.resources, {"vfio": found}, 5.0)).problems == ()


def test_resources_that_overlap_offer_a_gpu_and_its_sound_so_that_one_machine_can_have_both(tmp_path: Path) -> None:
    both = resource("a/gpu", overlap=True), resource("b/sound", {"class": ("040300",)}, overlap=True)
    found = backend(tmp_path, gpu() + sound("vfio-pci"), *both)
    discovery = found.discover("12")
    assert [(device.resource, device.key, device.unusable) for device in discovery.devices] == [
        ("a/gpu", GPU, ""),
        ("b/sound", SOUND, ""),
    ]
    first, second = (device.hardware for device in discovery.devices)
    assert not first & second
    assert discovery.problems == ()
    found = Vfio(found.host, [both[0], resource("b/sound", {"class": ("040300",)})])
    gpu_, sound_ = devices(found)
    assert gpu_.hardware < sound_.hardware, "the group is the first resource's, as where none overlaps"


# --- what cannot be used as it is ---


def test_a_function_on_another_driver_is_unusable_with_the_reason(tmp_path: Path) -> None:
    found = backend(tmp_path, gpu("nvidia"))
    device = only(found)
    assert device.unusable == 'its driver is nvidia; bind it to vfio-pci, or set bind = "start" or "allocate"'
    assert (device.nodes, reasons(found, device)) == ((), [])


def test_a_function_that_goes_along_and_is_on_another_driver_is_named(tmp_path: Path) -> None:
    """The device is the GPU, which is on vfio-pci: "its driver is snd_hda_intel" would be wrong of it."""
    both = resource("a/x", {"vendor": ("10de",)}, bind="never")
    device = next(iter(devices(backend(tmp_path, gpu() + sound("snd_hda_intel"), both))))
    assert device.key == GPU
    assert device.unusable.startswith(f"{SOUND}, which goes with it, cannot be had: its driver is snd_hda_intel; ")


def test_nothing_is_said_of_the_health_of_what_cannot_be_used_and_may_be_anothers(tmp_path: Path) -> None:
    found = backend(tmp_path, gpu("nvidia"))
    (tmp_path / f"sys/devices/{ROOT}/{GPU}/config").write_bytes(b"\xff" * 64)
    assert reasons(found, only(found)) == []


SCREEN = "it drives the screen of the firmware and the console (boot_vga), and so is left to the host (see force)"
UNSAFE = "sys/module/vfio/parameters/enable_unsafe_noiommu_mode = Y\n"


@pytest.mark.parametrize(
    ("tree", "options", "why"),
    [
        (gpu(None, group=None), {}, "it is in no IOMMU group: turn the IOMMU on, in the firmware and, "),
        (gpu(None, group=None) + UNSAFE, {"bind": "allocate"}, ""),  # it may be used without, and waits for a pod
        (gpu("nouveau", files={"boot_vga": "1"}), {"bind": "start"}, SCREEN),
        (gpu("nouveau", files={"boot_vga": "1"}), {"bind": "allocate"}, SCREEN),
        (gpu("nouveau", files={"boot_vga": "1"}), {"bind": "start", "force": [GPU]}, ""),
        (gpu("nouveau", files={"boot_vga": "1"}), {"bind": "allocate", "force": [GPU]}, ""),
        (gpu(files={"boot_vga": "1"}), {"bind": "allocate"}, ""),  # what is on vfio is nothing that the host needs
    ],
)
def test_what_cannot_be_used_as_it_is_says_why(tmp_path: Path, tree: str, options: dict[str, Any], why: str) -> None:
    device = only(backend(tmp_path, tree, resource(**options)))
    assert device.unit == (GPU if "iommu_group" not in tree else "12")
    assert device.unusable.startswith(why)
    assert bool(device.unusable) == bool(why)


# --- how it is ---


CARD = function(OTHER, "8086:10d3", kind="020000", driver="e1000e", net=["eth1"], group=12)
ROUTER = (
    function(OTHER, kind="020000", driver="e1000e", net=["eth0"], group=12)
    + f"sys/class/net/eth0 -> ../../devices/pci0000:00/{OTHER}/net/eth0\n"
    + "proc/1/net/route = Iface\\neth0\t00000000\t0102A8C0\t0003\t0\t0\t100\t00000000\t0\t0\t0\n"
)


def test_a_card_with_an_address_is_bound_only_where_its_own_address_is_named(tmp_path: Path) -> None:
    connected = "eth1\t0002A8C0\t00000000\t0001\t0\t0\t100\t00FFFFFF\t0\t0\t0"
    tree = CARD + f"sys/class/net/eth1 -> ../../devices/pci0000:00/{OTHER}/net/eth1\n"
    host = backend(tmp_path, tree).host
    (tmp_path / "proc/1/net/route").write_text(f"Iface\n{connected}\n")
    by_model, by_address = (
        only(Vfio(host, [resource("a/nic", it, bind="start")])).unusable
        for it in ({"id": ("8086:10d3",)}, {"address": (OTHER,)})
    )
    assert "has an address or a route of the host at the network interface eth1" in by_model
    assert by_address == ""


NOT_VIABLE = "group-not-viable", Verdict.NOW
BLOCKED = "IOMMU group 12 cannot be handed out while"


@pytest.mark.parametrize(
    ("tree", "options", "said", "words"),
    [
        pytest.param(
            gpu() + sound("snd_hda_intel"), {}, NOT_VIABLE,
            [f"{BLOCKED} {SOUND}, which is in it, is bound to snd_hda_intel"],
            id="a neighbour on another driver",
        ),
        pytest.param(gpu() + sound("snd_hda_intel"), {"bind": "allocate"}, None, [], id="one that may be bound"),
        pytest.param(
            gpu() + CARD, {"bind": "allocate"}, NOT_VIABLE,
            [
                f"{BLOCKED} {OTHER}, which is in it, is bound to e1000e;",
                'companions = "group" would permit to bind it too',
            ],
            id="another card",
        ),
        pytest.param(
            gpu() + CARD, {"bind": "allocate", "companions": "group"}, None, [], id="another card that may be bound",
        ),
        pytest.param(
            gpu() + ROUTER, {"bind": "allocate", "companions": "group"}, NOT_VIABLE,
            [f"{OTHER}, which is in it, is bound to e1000e and carries the default route, through eth0"],
            id="one that the host needs",
        ),
        pytest.param(gpu(None), {}, ("driver-unbound", Verdict.NOW), [], id="between two drivers"),
        pytest.param(gpu(None), {"bind": "allocate"}, None, [], id="it waits for a pod"),
        pytest.param(
            gpu(None, files={"driver_override": "vfio-pci"}), {"bind": "allocate"},
            ("driver-unbound", Verdict.DEGRADED), [], id="it was taken from vfio by hand",
        ),
        pytest.param(
            gpu("nvidia"), {"bind": "start"}, ("not-bound", Verdict.NOW),
            [f"{GPU} is on nvidia: Fairlead binds it to vfio-pci while it runs"],
            id="it is to be bound at the start",
        ),
        pytest.param(
            gpu(), {"iommu": "iommufd"}, ("no-iommufd", Verdict.NOW), ["need Linux 6.6"], id="a kernel without iommufd",
        ),
    ],
)  # fmt: skip
def test_how_a_group_is(
    tmp_path: Path, tree: str, options: dict[str, Any], said: tuple[str, Verdict] | None, words: list[str]
) -> None:
    found = backend(tmp_path, tree, resource(**options))
    assert only(found).unusable == ""
    assert reasons(found, only(found)) == ([("iommu:12", *said)] if said else [])
    for message in messages(found, only(found)):
        assert all(part in message for part in words)


def test_a_companion_without_a_driver_may_be_needed_too(tmp_path: Path) -> None:
    """The firmware's screen needs none."""
    found = backend(tmp_path, gpu("nvidia") + sound(None, files={"boot_vga": "1"}), resource(bind="allocate"))
    assert messages(found, only(found))[0] == (
        f"IOMMU group 12 cannot be handed out while {SOUND}, which is in it, "
        "drives the screen of the firmware and the console (boot_vga)"
    )
    never = Vfio(found.host, [resource()])
    assert "group-not-viable" not in [reason for _, reason, _ in reasons(never, only(never))]


def test_a_missing_node_is_told(tmp_path: Path) -> None:
    found = backend(tmp_path, gpu())
    device = only(found)
    (tmp_path / "dev/vfio/12").unlink()
    assert reasons(found, device) == [("iommu:12", "node-missing", Verdict.NOW)]
    assert messages(found, device) == ["/dev/vfio/12 does not exist"]


def test_a_function_that_fell_off_the_bus_is_told_of_the_function(tmp_path: Path) -> None:
    found = backend(tmp_path, gpu())
    (tmp_path / f"sys/devices/{ROOT}/{GPU}/config").write_bytes(b"\xff" * 64)
    assert reasons(found, only(found)) == [(f"pci:{GPU}", "off-bus", Verdict.NOW)]


# --- nodes, in each mode ---


IOMMUFD = "dev/iommu c 10:125\n"
NEW = own_node(GPU, 3, cdev=True) + IOMMUFD
NEW_KERNEL = gpu().replace("vfio0", "vfio3") + NEW
WITHOUT_IOMMU = gpu(group=3) + "sys/kernel/iommu_groups/3/name = vfio-noiommu\n"
GROUP = ["/dev/vfio/vfio", "/dev/vfio/12"]
OWN = ["/dev/vfio/devices/vfio3", "/dev/iommu"]


@pytest.mark.parametrize(
    ("tree", "iommu", "nodes"),
    [
        pytest.param(gpu(), "legacy", GROUP, id="legacy nodes are KubeVirt's in their order"),
        pytest.param(NEW_KERNEL, "both", GROUP + OWN, id="both have the function's own node after the group's"),
        pytest.param(gpu() + IOMMUFD, "both", GROUP, id="both are the group's alone on an older kernel"),
        pytest.param(NEW_KERNEL, "iommufd", OWN, id="iommufd alone"),
        pytest.param(
            WITHOUT_IOMMU + "dev/vfio/noiommu-3 c 240:3\n",
            "both",
            ["/dev/vfio/vfio", "/dev/vfio/noiommu-3"],
            id="without an IOMMU the group has a name of its own",
        ),
    ],
)
def test_the_nodes_are_those_of_the_mode(tmp_path: Path, tree: str, iommu: str, nodes: list[str]) -> None:
    found = backend(tmp_path, tree, resource(iommu=iommu))
    device = only(found)
    assert (device.unit, paths(device)) == (GPU if "noiommu" in tree else "12", nodes)
    assert reasons(found, device) == []


def test_a_function_without_an_iommu_cannot_be_had_by_iommufd(tmp_path: Path) -> None:
    found = backend(tmp_path, WITHOUT_IOMMU, resource(iommu="iommufd"))
    assert "has no IOMMU, which iommufd needs" in messages(found, only(found))[0]


# --- what a pod gets ---


def test_kubevirt_finds_its_variable_with_one_address_for_each_id(tmp_path: Path) -> None:
    other = function(OTHER, "10de:1eb8", driver="vfio-pci", vfio=["vfio9"], group=13)
    found = backend(tmp_path, gpu() + sound() + other, resource("nvidia.com/TU104GL-Tesla_T4"))
    first, second = devices(found)
    edits = found.edits(found.resources[0], [grant(first), grant(second)])
    assert edits.env == {"PCI_RESOURCE_NVIDIA_COM_TU104GL-TESLA_T4": f"{GPU},{OTHER}"}
    assert [node.path.text for node in edits.nodes] == ["/dev/vfio/vfio", "/dev/vfio/12", "/dev/vfio/13"]
    assert edits.merge() == edits


def test_ids_are_groups_as_kubevirts_plugin_has_them_where_asked(tmp_path: Path) -> None:
    found = backend(tmp_path, gpu() + sound(), resource(ids="group"))
    device = only(found)
    assert list(found.ids(found.resources[0], device)) == ["12"]
    assert found.edits(found.resources[0], [Grant("12", device)]).env == {"PCI_RESOURCE_NVIDIA_COM_T4": GPU}


def test_what_is_on_no_vfio_driver_is_not_handed_out(tmp_path: Path) -> None:
    found = backend(tmp_path, gpu(None), resource(bind="allocate"))
    with pytest.raises(AllocationRefused, match=f"{GPU} of nvidia.com/T4 is on no vfio driver"):
        found.edits(found.resources[0], [grant(only(found))])


def test_which_functions_a_machine_has_together_matters(tmp_path: Path) -> None:
    found = backend(tmp_path, "")
    assert found.prefers(found.resources[0])


# --- reset before use ---


def methods(address: str, root: Path, text: str) -> None:
    directory = root / f"sys/devices/{ROOT}/{address}"
    (directory / "reset_method").write_text(text)
    (directory / "reset").write_text("")


def test_all_functions_of_the_group_are_reset_that_can_be_by_themselves(tmp_path: Path) -> None:
    found = backend(tmp_path, gpu() + sound())
    methods(GPU, tmp_path, "flr\n")
    methods(SOUND, tmp_path, "flr\n")
    assert found.prepare(found.resources[0], [grant(only(found))]) == [f"pci:{GPU}", f"pci:{SOUND}"]
    assert (tmp_path / f"sys/devices/{ROOT}/{SOUND}/reset").read_text() == "1"


@pytest.mark.parametrize("driver", ["nvidia", None])
def test_what_was_taken_from_vfio_by_hand_is_not_passed_off_as_reset(tmp_path: Path, driver: str | None) -> None:
    found = backend(tmp_path, gpu(driver) + sound(), resource(bind="allocate"))
    with pytest.raises(AllocationRefused, match=f"{GPU} is to be reset .* is on {driver or 'no driver'} and no longer"):
        found.prepare(found.resources[0], [grant(only(found))])


def test_a_companion_that_cannot_be_reset_is_left_and_what_was_asked_for_is_not(tmp_path: Path) -> None:
    found = backend(tmp_path, gpu() + sound())
    methods(GPU, tmp_path, "flr bus\n")
    methods(SOUND, tmp_path, "bus\n")
    assert found.prepare(found.resources[0], [grant(only(found))]) == [f"pci:{GPU}"]
    methods(GPU, tmp_path, "bus\n")
    with pytest.raises(AllocationRefused, match=f"{GPU} is to be reset before each use"):
        found.prepare(found.resources[0], [grant(only(found))])


# --- bad trees ---


def everything(found: Vfio) -> None:
    """All that the daemon asks of what it found."""
    for device in devices(found):
        list(found.probe(device))
        if device.resource is None:
            continue
        made: VfioResource = found.resource(device.resource)
        found.ids(made, device)
        if device.nodes:
            found.edits(made, [grant(device)])


@pytest.mark.parametrize("spoilt", ["uevent", "driver", "iommu_group", "numa_node", "vfio-dev/vfio9"])
def test_one_function_that_cannot_be_read_leaves_the_other_groups_as_they_are(tmp_path: Path, spoilt: str) -> None:
    """A bug of the Crypto Express and Intel plugins: it ends the look at all of them."""
    other = function(OTHER, "10de:1eb8", driver="vfio-pci", vfio=["vfio9"], group=13)
    found = backend(tmp_path, gpu() + sound() + other)
    before = {device.key: device for device in devices(found)}
    assert set(before) == {GPU, OTHER}
    path = tmp_path / f"sys/devices/pci0000:00/{OTHER}/{spoilt}"
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    path.symlink_to("/proc/self/mem")  # opens, and cannot be read
    everything(found)
    assert {device.key: device for device in devices(found)}[GPU] == before[GPU]


def test_the_machines_own_functions_are_read() -> None:
    from backends.base import Host

    everything(Vfio(Host(), [resource("a/all", {"function": ("physical",)}, bind="allocate")]))


def test_functions_have_names_of_their_own_where_the_name_is_a_template(tmp_path: Path) -> None:
    other = function(OTHER, "10de:2331", driver="vfio-pci", vfio=["vfio9"], group=13)
    cards = resource("nvidia.com/{device}", {"vendor": ("10de",), "class": ("030000", "030200")})
    found = backend(tmp_path, gpu() + other, cards)
    made = Inventory(found.resources, {"vfio": found})
    made.update("vfio", {unit: found.discover(unit).devices for unit in found.units()})
    assert {name: list(made.slots(name)) for name in made.names()} == {
        "nvidia.com/1eb8": [GPU],
        "nvidia.com/2331": [OTHER],
    }
    slot, given_by = made.slots("nvidia.com/1eb8")[GPU], made.resource("nvidia.com/1eb8")
    assert slot.device is not None
    assert given_by is not None
    assert found.edits(given_by, [grant(slot.device)]).env == {"PCI_RESOURCE_NVIDIA_COM_1EB8": GPU}
    assert [*found.probe(slot.device)] == []
