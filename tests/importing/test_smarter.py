"""smarter-device-manager: a resource of every node that a regular expression takes."""

from __future__ import annotations

import json
import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.importing.helpers import import_text, imported, loads, said


def test_a_plain_name_is_a_resource_of_that_node_and_nothing_is_lost() -> None:
    found = imported("- devicematch: ^net/tun$\n  nummaxdevices: 5\n")
    assert found.lossless
    (resource,) = tomllib.loads(found.toml)["resource"]
    assert resource == {
        "name": "smarter-devices/net_tun",
        "backend": "chardev",
        "paths": [{"path": "/dev/net/tun", "permissions": "rw"}],
        "count": 5,
    }


def test_a_pattern_of_few_names_is_a_resource_of_each_and_nothing_is_lost() -> None:
    found = imported("- devicematch: ^ttyUSB[0-3]$\n  nummaxdevices: 1\n- devicematch: ^snd$\n  nummaxdevices: 20\n")
    assert found.lossless
    assert loads(found) == [*(f"smarter-devices/ttyUSB{n}" for n in range(4)), "smarter-devices/snd"]


def test_patterns_name_a_resource_after_each_node_and_nothing_is_lost() -> None:
    found = imported(
        "- {devicematch: '^video[0-9]*$', nummaxdevices: 20}\n- {devicematch: '^ttyUSB[0-9]*$', nummaxdevices: 1}\n"
    )
    assert found.lossless
    assert tomllib.loads(found.toml)["resource"] == [
        {
            "name": "smarter-devices/{devname}",
            "backend": "chardev",
            "groups": [
                {"paths": [{"path": "/dev/video*", "pattern": "^video[0-9]*$", "permissions": "rw"}], "count": 20},
                {"paths": [{"path": "/dev/ttyUSB*", "pattern": "^ttyUSB[0-9]*$", "permissions": "rw"}]},
            ],
        }
    ]


def test_a_name_with_dots_is_written_as_the_plugin_writes_it() -> None:
    assert loads(imported("- {devicematch: '^net.tun/a\\.b$', nummaxdevices: 1}")) == ["smarter-devices/{devname}"]
    assert loads(imported("- {devicematch: '^a\\.b$', nummaxdevices: 1}")) == ["smarter-devices/a_b"]


def test_the_gpu_of_a_jetson_is_told_to_the_runtime_by_its_number_as_by_the_plugin() -> None:
    found = imported("- {devicematch: nvidia-gpu, nummaxdevices: 10}")
    assert found.lossless
    (resource,) = tomllib.loads(found.toml)["resource"]
    assert (resource["name"], resource["replicas"]) == ("smarter-devices/nvidia-gpu0", 10)
    assert (resource["select"]["platform"], resource["device_id_strategy"]) == ("tegra", "index")


@pytest.mark.parametrize(
    ("entry", "remark"),
    [
        ("a", "2: this should be a table with devicematch and nummaxdevices; it is left out"),
        ("{nummaxdevices: 1}", "2: a device: it has no devicematch and is left out"),
        ("{devicematch: [a], nummaxdevices: 1}", "2: a device: 'devicematch' is a list and should be a text"),
        ("{devicematch: ^a$, nummaxdevices: 1.5}", "2: ^a$: 'nummaxdevices' is '1.5' and should be a whole number"),
        ("{devicematch: ^a$, nummaxdevices: -1}", "2: ^a$: 'nummaxdevices' is '-1' and should be a whole number"),
        (
            "{devicematch: '(?i)a', nummaxdevices: 1}",
            "2: (?i)a: this regular expression is not one that Fairlead and Go",
        ),
        ("{devicematch: ^fuse$, nummaxdevices: 1}", "2: smarter-devices/fuse: name: resource[0] has the name"),
        ("{devicematch: ^/$, nummaxdevices: 1}", "2: smarter-devices/devices: path: '/dev//'"),
    ],
)
def test_what_is_lost_is_said_with_its_line(entry: str, remark: str) -> None:
    found = imported(f"- {{devicematch: ^fuse$, nummaxdevices: 1}}\n- {entry}\n")
    assert loads(found) == ["smarter-devices/fuse"]
    assert not found.lossless
    assert said(found)[0].startswith(remark)


def test_a_device_that_was_never_offered_is_not_lost() -> None:
    found = imported("- devicematch: ^fuse$\n")
    assert found.lossless
    assert said(found) == ["1: note: ^fuse$: nummaxdevices is 0 or missing, and so none was offered"]


_PATTERNS = st.text("^$ab/[]0-9.*+?{}\\é \x7f", max_size=12)


@given(st.lists(st.tuples(_PATTERNS, st.integers(0, 10**7)), max_size=4))
def test_whatever_is_imported_loads(entries: list[tuple[str, int]]) -> None:
    conf = [{"devicematch": expression, "nummaxdevices": count} for expression, count in entries]
    loads(import_text(json.dumps(conf), "smarter"))
