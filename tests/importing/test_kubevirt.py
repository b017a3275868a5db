"""KubeVirt's permitted host devices: sticks, PCI functions and mediated devices."""

from __future__ import annotations

import json
import textwrap
import tomllib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.importing.helpers import import_text, imported, loads, said

_STICK = """\
usb:
- resourceName: kubevirt.io/storage
  externalResourceProvider: true
  selectors:
  - vendor: "46f4"
    product: "0001"
"""


@pytest.mark.parametrize(
    "place",
    [
        [],
        ["permittedHostDevices"],
        ["configuration", "permittedHostDevices"],
        ["spec", "permittedHostDevices"],
        ["spec", "configuration", "permittedHostDevices"],
    ],
)
def test_they_are_found_in_a_whole_resource_and_alone(place: list[str]) -> None:
    text = _STICK
    for key in reversed(place):
        text = f"{key}:\n{textwrap.indent(text, '  ')}"
    found = imported(text)
    assert found.lossless
    assert said(found) == []
    (resource,) = tomllib.loads(found.toml)["resource"]
    assert resource == {
        "name": "kubevirt.io/storage",
        "backend": "chardev",
        "usb": [{"vendor": "46f4", "product": "0001"}],
        "permissions": "mrw",
        "owner": 107,
    }


def test_hyperconverged_has_another_name_for_sticks() -> None:
    assert loads(imported(_STICK.replace("usb", "usbHostDevices"))) == ["kubevirt.io/storage"]


def test_what_kubevirts_own_plugin_does_beside_offering_a_stick_is_said() -> None:
    found = imported(_STICK.replace("true", "false"))
    assert loads(found) == ["kubevirt.io/storage"]
    assert found.lossless
    assert ["say externalResourceProvider: true" in line for line in said(found)] == [True]
    assert tomllib.loads(found.toml)["resource"][0]["owner"] == 107


def test_one_stick_of_each_selector_makes_a_device() -> None:
    found = imported(f'{_STICK}  - vendor: "045e"\n    product: "07a5"\n')
    assert found.lossless
    (resource,) = tomllib.loads(found.toml)["resource"]
    assert resource["together"] == "each"
    assert [stick["vendor"] for stick in resource["usb"]] == ["46f4", "045e"]


def test_two_selectors_of_the_same_sticks_are_lost_and_the_reason_is_said() -> None:
    found = imported(f'{_STICK}  - vendor: "46F4"\n    product: "1"\n')
    assert loads(found) == []
    assert said(found)[0].startswith("7: kubevirt.io/storage: usb[1]: may take the same sticks as one before it")


def test_several_entries_of_one_name_are_groups_of_one_resource() -> None:
    other = _STICK.removeprefix("usb:\n").replace("46f4", "045e")
    found = imported(_STICK + other)
    assert found.lossless
    (resource,) = tomllib.loads(found.toml)["resource"]
    assert [group["usb"][0]["vendor"] for group in resource["groups"]] == ["46f4", "045e"]


def test_what_is_disabled_stays_so() -> None:
    found = imported(f"{_STICK}  disabled: true\n")
    assert found.lossless
    assert loads(found) == []
    assert said(found) == ["2: note: kubevirt.io/storage: it is disabled, and so left out"]


_GPU = "- pciVendorSelector: 10DE:1EB8\n  resourceName: a.b/gpu\n"


@pytest.mark.parametrize("key", ["pciVendorSelector", "pciDeviceSelector"])  # HyperConverged's newer name
def test_a_pci_device_is_a_vfio_resource(key: str) -> None:
    found = imported(f"pciHostDevices:\n{_GPU.replace('pciVendorSelector', key)}  externalResourceProvider: true\n")
    assert (found.lossless, said(found), loads(found)) == (True, [], ["a.b/gpu"])
    (resource,) = tomllib.loads(found.toml)["resource"]
    assert resource == {"name": "a.b/gpu", "backend": "vfio", "select": [{"id": "10de:1eb8"}], "ids": "group"}


def test_a_pci_device_that_kubevirt_itself_offers_is_not_to_be_offered_twice() -> None:
    found = imported(f"pciHostDevices:\n{_GPU}")
    assert found.lossless
    (remark,) = said(found)
    assert remark.startswith("3: note: a.b/gpu: say externalResourceProvider: true here")


def test_pci_devices_of_several_models_are_one_resource() -> None:
    found = imported(f"pciHostDevices:\n{_GPU}{_GPU.replace('1EB8', '2330')}")
    assert loads(found) == ["a.b/gpu"]
    (resource,) = tomllib.loads(found.toml)["resource"]
    assert resource["select"] == [{"id": "10de:1eb8"}, {"id": "10de:2330"}]


def test_a_pci_device_that_is_disabled_is_left_out() -> None:
    found = imported(f"pciHostDevices:\n{_GPU}  disabled: true\n")
    assert (found.lossless, loads(found)) == (True, [])
    assert said(found) == ["2: note: a.b/gpu: it is disabled, and so left out"]


@pytest.mark.parametrize(
    ("text", "remark"),
    [
        ("mediatedDevices:\n- {}", "2: mediatedDevices: it has no resourceName and is left out"),
        ("mediatedDevices:\n- resourceName: a.b/c", "2: a.b/c: it has no mdevNameSelector, and so no devices; it is"),
        (
            "mediatedDevices:\n- resourceName: vgpu\n  mdevNameSelector: GRID T4-1Q",  # KubeVirt's plugin panics
            "2: vgpu: name: ",
        ),
        ("pciHostDevices:\n- {}", "2: pciHostDevices: it has no resourceName and is left out"),
        ("pciHostDevices:\n- resourceName: a.b/c", "2: a.b/c: it selects nothing, not IDs as in 10de:1eb8; it is left"),
        (
            "pciHostDevices:\n- resourceName: a.b/c\n  pciVendorSelector: 10de",
            "3: a.b/c: it selects 10de, not IDs as in 10de:1eb8; it is left out",
        ),
        (
            "permittedHostDevices: {usb: {}}",
            "1: permittedHostDevices: 'usb' is a table and should be a list; this is left out",
        ),
        ("usb:\n- a", "2: permittedHostDevices: 'a' in 'usb' should be a table; this is left out"),
        ("usb:\n- resourceName: a.b/c", "2: a.b/c: it has no selectors, and so no devices; it is left out"),
        ("usb:\n- selectors: [{vendor: '1', product: '2'}]", "2: usb: it has no resourceName and is left out"),
        ("usb:\n- resourceName: a.b/c\n  selectors:\n  - vendor: '1'", "4: a.b/c: a selector has no product; the"),
        (
            "usb:\n- resourceName: a.b/c\n  selectors: [x, {vendor: '1', product: '2'}]",
            "3: a.b/c: 'x' in 'selectors' sho",
        ),
        (
            "usb:\n- resourceName: a.b/c\n  selectors:\n  - {vendor: q, product: '2'}",
            "4: a.b/c: vendor: 'q' is not one",
        ),
        ("usb: []\nnetwork: []", "2: permittedHostDevices: Fairlead has nothing for the key 'network'"),
    ],
)
def test_what_is_lost_is_said_with_its_line(text: str, remark: str) -> None:
    found = imported(text)
    assert loads(found) == []
    assert not found.lossless
    assert any(line.startswith(remark) for line in said(found))


_VGPU = "mediatedDevices: [{resourceName: a.b/vgpu, mdevNameSelector: GRID T4-1Q, externalResourceProvider: true}]"


def test_a_mediated_device_is_a_resource_of_its_type() -> None:
    found = imported(_VGPU)
    assert (found.lossless, said(found)) == (True, [])
    (resource,) = tomllib.loads(found.toml)["resource"]
    assert resource == {"name": "a.b/vgpu", "backend": "mdev", "select": [{"type": "GRID_T4-1Q"}]}


_MADE = "mediatedDevicesConfiguration: {mediatedDeviceTypes: [GRID T4-1Q]}"


@pytest.mark.parametrize(
    ("text", "creates"),
    [
        ("permittedHostDevices: {%s}", False),
        (f"permittedHostDevices: {{%s}}\n{_MADE}", True),
        (f"spec: {{permittedHostDevices: {{%s}}, {_MADE}}}", True),
        (f"spec: {{permittedHostDevices: {{%s}}, {_MADE.replace('DeviceTypes', 'DevicesTypes')}}}", True),
        (f"spec: {{permittedHostDevices: {{%s}}, {_MADE}, featureGates: {{disableMDevConfiguration: true}}}}", False),
        (f"spec: {{permittedHostDevices: {{%s}}, {_MADE}, featureGates: {{disableMDevConfiguration: false}}}}", True),
        (
            f"configuration: {{permittedHostDevices: {{%s}}, {_MADE}, developerConfiguration: {{featureGates: "
            "[HostDevices, DisableMDEVConfiguration]}}}}".replace("}}}}", "}}"),
            False,
        ),
    ],
)
def test_what_kubevirt_makes_is_made_for_pods(text: str, creates: bool) -> None:
    found = imported(text % _VGPU)
    assert found.lossless
    (resource,) = tomllib.loads(found.toml)["resource"]
    assert resource.get("create", False) == creates


def test_types_that_kubevirt_makes_by_their_ids_or_for_some_nodes_are_told() -> None:
    made = "mediatedDevicesConfiguration: {mediatedDeviceTypes: [nvidia-230], mediatedDevicesTypes: {}, nodeMediatedDeviceTypes: [{}]}"
    found = imported(f"permittedHostDevices: {{{_VGPU}}}\n{made}\n")
    assert not found.lossless
    assert [line.split(": ", 2)[2][:40] for line in said(found)] == [
        "'mediatedDevicesTypes' is a table and sh",
        "some nodes make other types; give those ",
        "mediatedDevicesConfiguration: a device i",
        "KubeVirt makes devices of type nvidia-23",
    ]


_TEXTS = st.sampled_from(["a.b/c", "46f4", "1", "xyz", ""]) | st.text(max_size=6) | st.integers() | st.none()
_SELECTORS = st.lists(st.dictionaries(st.sampled_from(["vendor", "product", "x"]), _TEXTS) | _TEXTS, max_size=3)
_ENTRIES = st.lists(
    st.fixed_dictionaries(
        {},
        optional={
            "resourceName": _TEXTS,
            "selectors": _SELECTORS | _TEXTS,
            "externalResourceProvider": st.booleans() | _TEXTS,
            "pciVendorSelector": _TEXTS,
            "mdevNameSelector": _TEXTS,
        },
    )
    | _TEXTS,
    max_size=3,
)


@given(st.dictionaries(st.sampled_from(["usb", "pciHostDevices", "mediatedDevices", "usbHostDevices"]), _ENTRIES))
def test_whatever_is_imported_loads(permitted: dict[str, Any]) -> None:
    loads(import_text(json.dumps({"permittedHostDevices": permitted})))
