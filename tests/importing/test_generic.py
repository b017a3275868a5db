"""generic-device-plugin's keys: what each becomes, and what is said where it becomes nothing."""

from __future__ import annotations

import json
import tomllib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.importing import Imported
from tests.importing import helpers
from tests.importing.helpers import import_text, imported, loads

_ONE = "devices: [{name: a, groups: [{paths: [{path: /dev/a}]}]}]\n"


def said(found: Imported) -> list[str]:
    """The remarks but the one that all files without a domain have."""
    return [remark for remark in helpers.said(found) if "no domain is said" not in remark]


def _resources(document: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = tomllib.loads(document).get("resource", [])
    return found


def _groups(*groups: dict[str, Any]) -> str:
    return json.dumps({"devices": [{"name": "a", "groups": groups}]})


def _path(**keys: Any) -> dict[str, Any]:
    (resource,) = _resources(imported(_groups({"paths": [{"path": "/dev/a", **keys}]})).toml)
    (path,) = resource["paths"]
    assert isinstance(path, dict)
    return path


def test_the_domain_is_its_default_or_the_files_or_the_options() -> None:
    assert loads(imported(_ONE)) == ["squat.ai/a"]
    assert loads(imported(f"domain: b.c\n{_ONE}")) == ["b.c/a"]
    assert loads(imported(f"domain: b.c\n{_ONE}", domain="d.e")) == ["d.e/a"]


@pytest.mark.parametrize(
    ("keys", "wanted"),
    [
        ({}, {"permissions": "mrw"}),
        ({"permissions": "r"}, {"permissions": "r"}),
        ({"mountPath": "/dev/b"}, {"permissions": "mrw", "mount_path": "/dev/b"}),
        ({"mountPath": "/dev/b/"}, {"permissions": "mrw", "mount_path": "/dev/b/"}),
        ({"type": "Device", "limit": 1}, {"permissions": "mrw"}),
        ({"type": "Mount"}, {"type": "mount"}),
        ({"type": "Mount", "readOnly": True}, {"type": "mount", "read_only": True}),
        ({"limit": 5, "optional": True}, {"permissions": "mrw", "limit": 5, "optional": True}),
        ({"limit": 0, "optional": False, "mountPath": None}, {"permissions": "mrw"}),
    ],
)
def test_a_path_keeps_what_it_says(keys: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert _path(**keys) == {"path": "/dev/a", **wanted}


def test_gos_globs_become_ours() -> None:
    assert _path(path="/dev/tty[^0-9]**")["path"] == "/dev/tty[!0-9]*"


def test_a_node_that_two_resources_name_is_shared_by_them() -> None:
    found = imported("""\
        devices:
          - {name: a, groups: [{paths: [{path: /dev/x1}, {path: /dev/y}]}]}
          - {name: b, groups: [{paths: [{path: "/dev/x*"}]}]}
          - {name: c, groups: [{paths: [{path: /dev/x1, type: Mount}]}]}
        """)
    shared = [path["path"] for resource in _resources(found.toml) for path in resource["paths"] if path.get("shared")]
    assert shared == ["/dev/x1", "/dev/x*"]
    assert found.lossless
    assert said(found) == [
        "2: note: squat.ai/a: squat.ai/b names /dev/x1 too; it is marked as shared, so that both offer it",
        "3: note: squat.ai/b: squat.ai/a names /dev/x* too; it is marked as shared, so that both offer it",
    ]


def test_a_resource_has_all_its_groups() -> None:
    found = imported(
        _groups(
            {"paths": [{"path": "/dev/ttyUSB*"}]},
            {"count": 3, "paths": [{"path": "/dev/ttyACM*"}, {"path": "/dev/led", "optional": True}]},
            {"count": 2, "usb": [{"vendor": "1a6e", "product": "089a", "serial": "x"}]},
        )
    )
    assert found.lossless
    assert said(found) == []
    (resource,) = _resources(found.toml)
    assert resource == {
        "name": "squat.ai/a",
        "backend": "chardev",
        "groups": [
            {"paths": [{"path": "/dev/ttyUSB*", "permissions": "mrw"}]},
            {
                "paths": [
                    {"path": "/dev/ttyACM*", "permissions": "mrw"},
                    {"path": "/dev/led", "permissions": "mrw", "optional": True},
                ],
                "count": 3,
            },
            {"usb": [{"vendor": "1a6e", "product": "089a", "serial": "x"}], "count": 2},
        ],
    }


@pytest.mark.parametrize(
    "sticks",
    [
        [{"vendor": "1a6e", "product": "089a"}],
        [{"vendor": "1a6e", "product": "089a", "serial": "x"}, {"vendor": "18d1", "product": "9302", "serial": "y"}],
    ],
)
def test_the_sticks_of_a_group_stay_one_device(sticks: list[dict[str, str]]) -> None:
    found = imported(_groups({"usb": sticks}))
    assert found.lossless
    (resource,) = _resources(found.toml)
    assert (resource["usb"], resource["together"]) == (sticks, "all")
    assert said(found) == [
        '1: note: squat.ai/a: all sticks that match are one device, as they were; without together = "all" each is one'
    ]


def test_a_node_that_groups_of_one_resource_name_is_shared_by_their_bundles() -> None:
    found = imported("""\
        devices:
          - name: a
            groups:
              - paths: [{path: /dev/fuse}, {path: "/dev/ttyUSB*"}]
              - paths: [{path: /dev/fuse}, {path: "/dev/ttyACM*"}]
              - paths: [{path: "/dev/ttyUSB*"}]
              - paths: [{path: "/dev/ttyS*"}]
        """)
    (resource,) = _resources(found.toml)
    shared = [[path["path"] for path in group["paths"] if path.get("shared")] for group in resource["groups"]]
    assert shared == [["/dev/fuse", "/dev/ttyUSB*"], ["/dev/fuse"], ["/dev/ttyUSB*"], []]
    assert found.lossless
    assert said(found)[0] == (
        "4: note: squat.ai/a: another group names /dev/fuse too; it is marked as shared, so that both offer it"
    )


def test_a_stick_that_two_groups_take_is_shared_by_them() -> None:
    found = imported("""\
        devices:
          - name: a
            groups:
              - usb: [{vendor: "1a6e", product: "089a", serial: x}, {vendor: "0403", product: "6001", serial: y}]
              - usb: [{vendor: "1a6e", product: "089a", serial: x}]
              - usb: [{vendor: "0403", product: "6001", serial: z}]
        """)
    (resource,) = _resources(found.toml)
    assert [group.get("shared") for group in resource["groups"]] == [True, True, None]
    assert [line for line in said(found) if "shared" in line] == [
        f"{line}: note: squat.ai/a: another group takes the same sticks; they are marked as shared, so that both offer them"
        for line in (4, 5)
    ]


def test_of_several_groups_only_those_that_cannot_be_had_are_left_out() -> None:
    found = imported("""\
        devices:
          - name: a
            groups:
              - paths: [{path: /dev/a}]
              - paths: [{path: /tmp/b}]
              - paths: [{path: /dev/snd}, {path: /dev/b}]
              - count: ten
                paths: [{path: /dev/c}]
              - count: 99999999
                paths: [{path: /tmp/d}]
              - paths: [{path: /dev/a}]
              - paths: [{path: /dev/e}]
        """)
    (resource,) = _resources(found.toml)
    assert [group["paths"][0]["path"] for group in resource["groups"]] == ["/dev/a", "/dev/e"]
    assert [line.partition(";")[0] for line in said(found)] == [
        "5: squat.ai/a: path: '/tmp/b' is not below /dev, where the nodes are",
        "6: squat.ai/a: /dev/snd is a directory, which Fairlead hands out alone, not beside other paths",
        "7: squat.ai/a: 'count' is 'ten' and should be a whole number",
        "9: squat.ai/a: count: is 99999999",
        "10: squat.ai/a: path: '/tmp/d' is not below /dev, where the nodes are",
        "11: squat.ai/a: a group would have a device with the ID a, as one before it would",
    ]
    assert all(line.endswith("the group is left out") for line in said(found) if "ten" not in line)


def test_a_name_that_cannot_be_leaves_all_groups_out_and_is_said_once() -> None:
    found = imported("""\
        devices:
          - name: A b
            groups:
              - paths: [{path: /dev/a}]
              - paths: [{path: /dev/b}]
        """)
    assert loads(found) == []
    assert len(said(found)) == 1
    assert "#[[resource.groups]]" in found.toml


def test_sticks_that_several_resources_take_are_shared_by_them() -> None:
    found = imported("""\
        devices:
          - {name: a, groups: [{usb: [{vendor: "1A6E", product: "89a", serial: x}]}]}
          - {name: b, groups: [{usb: [{vendor: "1a6e", product: "089a", serial: x}]}]}
          - {name: c, groups: [{usb: [{vendor: "1a6e", product: "089a", serial: y}]}]}
          - {name: d, groups: [{usb: [{vendor: "1a6e", product: "089a"}]}]}
        """)
    assert found.lossless
    assert [resource.get("shared") for resource in _resources(found.toml)] == [True, True, True, True]


def test_a_directory_of_dev_is_a_device_and_shared_with_who_names_a_node_in_it() -> None:
    assert _path(path="/dev/snd")["path"] == "/dev/snd"
    found = imported("""\
        devices:
          - {name: a, groups: [{paths: [{path: /dev/snd}]}]}
          - {name: b, groups: [{paths: [{path: /dev/snd/timer}]}]}
          - {name: c, groups: [{paths: [{path: /dev/sndx}]}]}
        """)
    shared = [path.get("shared") for resource in _resources(found.toml) for path in resource["paths"]]
    assert shared == [True, True, None]


def test_a_directory_of_dev_can_be_mounted() -> None:
    assert _path(path="/dev/snd", type="Mount") == {"path": "/dev/snd", "type": "mount"}


def test_an_id_without_quotes_is_the_digits_that_are_written() -> None:
    found = imported("devices: [{name: a, groups: [{usb: [{vendor: 1234, product: 0042, serial: 12}]}]}]")
    assert _resources(found.toml)[0]["usb"] == [{"vendor": "1234", "product": "0042", "serial": "12"}]
    assert said(found) == [
        "1: note: squat.ai/a: 0042 without quotes is no text to YAML; it is taken for the digits of an ID"
    ]


def test_another_plugin_directory_is_carried_over() -> None:
    toml = imported(f"plugin-directory: /k/device-plugins/\n{_ONE}").toml
    assert tomllib.loads(toml)["agent"] == {"plugin_dir": "/k/device-plugins/"}
    assert "agent" not in tomllib.loads(imported(f"plugin-directory: /var/lib/kubelet/device-plugins/\n{_ONE}").toml)


@pytest.mark.parametrize(
    ("text", "remarks"),
    [
        (f"listen: ':80'\n{_ONE}", ["1: generic-device-plugin: listen is left out; where Fairlead serves HTTP is "]),
        (f"log-level: all\n{_ONE}", ["1: generic-device-plugin: log-level is left out; it is said on the command "]),
        (f"color: red\n{_ONE}", ["1: generic-device-plugin: Fairlead has nothing for the key 'color'"]),
        (
            f"plugin-directory: x\n{_ONE}",
            ["1: generic-device-plugin: plugin-directory: 'x' is no absolute path"],
        ),
        ("devices:\n- a\n", ["2: generic-device-plugin: 'a' in 'devices' should be a table; this is left out"]),
        ("devices:\n- groups: []\n", ["2: squat.ai/?: it has no name and is left out"]),
        ("devices:\n- name: a\n", ["2: squat.ai/a: it has no groups, and so no devices; it is left out"]),
        ("devices:\n- name: a\n  groups: 3", ["3: squat.ai/a: 'groups' is '3' and should be a list; this is left out"]),
        (
            "devices:\n- name: a\n  count: 3\n  groups:\n  - paths:\n    - path: /dev/a",
            ["3: squat.ai/a: Fairlead has nothing for the key 'count'"],
        ),
        (
            "devices:\n- name: A b\n  groups:\n  - paths:\n    - path: /dev/a",
            ["4: squat.ai/A b: name: 'A b' (after the '/') may have letters"],
        ),
    ],
)
def test_what_is_wrong_with_a_file_or_a_device_is_said_with_its_line(text: str, remarks: list[str]) -> None:
    found = imported(text)
    assert not found.lossless
    assert len(said(found)) == len(remarks)
    assert all(map(str.startswith, said(found), remarks))


@pytest.mark.parametrize(
    ("group", "remark"),
    [
        ("{}", "4: squat.ai/a: a group has neither paths nor usb, and so no devices; it is left out"),
        (
            "{paths: [{path: /dev/b}], usb: [{vendor: '1', product: '2'}]}",
            "4: squat.ai/a: a group has both paths and usb",
        ),
        ("{count: ten, paths: [{path: /dev/b}]}", "4: squat.ai/a: 'count' is 'ten' and should be a whole number; this"),
        ("{count: 010, paths: [{path: /dev/b}]}", "4: squat.ai/a: 'count' is '010' and should be a whole number; this"),
        ("{paths: [/dev/b, {path: /dev/c}]}", "4: squat.ai/a: '/dev/b' in 'paths' should be a table; this is left out"),
        ("{paths: [{path: /dev/b}, {mountPath: /dev/c}]}", "4: squat.ai/a: a path of a group is missing; the group"),
        ("{paths: [{path: /dev/b, type: Socket}]}", "4: squat.ai/a: 'Socket' is no type, only Device and Mount are"),
        (
            "{paths: [{path: /dev/b, optional: 'true'}]}",
            "4: squat.ai/a: 'optional' is 'true' and should be true or false",
        ),
        (r"{paths: [{path: '/dev/\*'}]}", "4: squat.ai/a: '/dev/\\\\*': what '\\' and '[!' mean to it cannot be said"),
        ("{paths: [{path: '/dev/[!a]'}]}", "4: squat.ai/a: '/dev/[!a]': what '\\' and '[!' mean to it cannot be said"),
        ("{paths: [{path: /tmp/b}]}", "4: squat.ai/a: path: '/tmp/b' is not below /dev"),
        ("{paths: [{path: /dev/b, permissions: rx}]}", "4: squat.ai/a: permissions: 'rx' has 'x'; only r (read)"),
        ("{paths: [{path: /dev/b, mountPath: b}]}", "4: squat.ai/a: mount_path: 'b' is not an absolute path; the res"),
        ("{paths: [{path: /dev/../b}]}", "4: squat.ai/a: path: '/dev/../b' has '..' or '.' in it"),
        ("{paths: [{path: /dev/snd}, {path: /dev/b}]}", "4: squat.ai/a: /dev/snd is a directory, which Fairlead hands"),
        ("{usb: [{vendor: '1234'}]}", "4: squat.ai/a: product of a stick is missing; the group is left out"),
        ("{usb: [{vendor: [], product: '1'}]}", "4: squat.ai/a: 'vendor' is a list and should be a text; this is"),
        (
            "{usb: [{vendor: xyz, product: '1', serial: s}]}",
            "4: squat.ai/a: vendor: 'xyz' is not one to four hexadecimal",
        ),
        ("{count: 99999999, paths: [{path: /dev/b}]}", "4: squat.ai/a: count: is 99999999; it must be from 1 to"),
    ],
)
def test_a_group_that_cannot_be_carried_over_whole_is_left_out_and_says_why(group: str, remark: str) -> None:
    found = imported(f"devices:\n- name: a\n  groups:\n  - {group}\n")
    assert not found.lossless
    assert _resources(found.toml) == []
    assert said(found)[0].startswith(remark)


def test_a_key_that_nobody_knows_costs_nothing_but_a_remark() -> None:
    found = imported("devices:\n- name: a\n  groups:\n  - paths:\n    - path: /dev/a\n      colour: red\n")
    assert said(found) == ["6: squat.ai/a: Fairlead has nothing for the key 'colour'"]
    assert not found.lossless
    assert loads(found) == ["squat.ai/a"]


def test_each_mistake_of_a_bundle_has_the_line_of_its_own_path() -> None:
    found = imported("""\
        devices:
          - name: a
            groups:
              - paths:
                - path: /dev/a
                - path: /dev/b
                  mountPath: b
        """)
    assert [remark.line for remark in found.remarks if remark.lost] == [6]


def test_of_two_devices_with_one_name_the_first_is_taken() -> None:
    found = imported("""\
        devices:
          - {name: a, groups: [{paths: [{path: /dev/x}]}]}
          - {name: a, groups: [{paths: [{path: /dev/y}]}]}
        """)
    assert loads(found) == ["squat.ai/a"]
    assert said(found)[-1].startswith("3: squat.ai/a: name: resource[0] has the name 'squat.ai/a' already")


_ANY = st.recursive(
    st.text(max_size=5) | st.integers() | st.booleans() | st.none(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=4,
)
_PATHS = st.fixed_dictionaries(
    {},
    optional={
        "path": st.sampled_from(["/dev/a", "/dev/b*", "/dev/snd", "/tmp/c", "x", "/dev/[^a]"]) | _ANY,
        "mountPath": st.sampled_from(["/dev/a", "/x/", "y"]) | _ANY,
        "permissions": st.text("rwmx", max_size=3) | _ANY,
        "type": st.sampled_from(["Device", "Mount"]) | _ANY,
        "readOnly": st.booleans() | _ANY,
        "limit": st.integers(0, 5) | _ANY,
        "optional": st.booleans() | _ANY,
    },
)
_STICKS = st.fixed_dictionaries(
    {"vendor": st.sampled_from(["1a6e", 1234, "xyz"]) | _ANY, "product": st.sampled_from(["089a", "1"]) | _ANY},
    optional={"serial": st.text(max_size=4) | _ANY},
)
_GROUPS = st.fixed_dictionaries(
    {},
    optional={
        "count": st.integers(0, 2000) | _ANY,
        "paths": st.lists(_PATHS | _ANY, max_size=3) | _ANY,
        "usb": st.lists(_STICKS | _ANY, max_size=3) | _ANY,
    },
)
_DEVICES = st.fixed_dictionaries(
    {"name": st.sampled_from(["a", "b", "C"]) | _ANY}, optional={"groups": st.lists(_GROUPS, max_size=3) | _ANY}
)


@given(st.lists(_DEVICES, max_size=3), st.sampled_from([None, "a.b", "A", "x/y"]))
def test_whatever_is_imported_loads(devices: list[Any], domain: str | None) -> None:
    loads(import_text(json.dumps({"devices": devices}), domain=domain))
