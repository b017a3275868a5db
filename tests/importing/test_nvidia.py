"""NVIDIA's plugin: its flags, arguments and environment as keys of a resource."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest

from tests.importing.helpers import import_text, imported, loads, said


def keys(text: str, **environment: str) -> dict[str, Any]:
    """Those of the last resource, beside the usual ones."""
    resource = tomllib.loads(imported(text, **environment).toml)["resource"][-1]
    return {key: value for key, value in resource.items() if key not in ("name", "backend", "select")}


@pytest.mark.parametrize(
    ("imex", "environment", "expected"),
    [
        ("{channelIDs: []}", {}, None),
        ("{channelIDs: [0]}", {}, "optional"),
        ("{channelIDs: [0], required: true}", {}, "required"),
        ("{channelIDs: [], required: true}", {}, None),
        ("{}", {"IMEX_CHANNEL_IDS": "0", "IMEX_REQUIRED": "true"}, "required"),
        ("{channelIDs: [0]}", {"IMEX_CHANNEL_IDS": "[]"}, None),
        ("{channelIDs: [0, 1]}", {}, "optional"),
    ],
)
def test_imex_channel_0_is_handed_out_where_it_was(
    imex: str, environment: dict[str, str], expected: str | None
) -> None:
    assert keys(f"version: v1\nimex: {imex}\n", **environment).get("imex") == expected


def test_channels_that_there_are_not_are_told() -> None:
    assert said(imported("version: v1\nimex: {channelIDs: [0, 1]}\n")) == [
        "2: NVIDIA's device plugin: the plugin knows no IMEX channels but [0], and does not start; 0 is taken"
    ]


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, {}),
        ({"DP_DISABLE_HEALTHCHECKS": "94, 95"}, {"xid_ignored": [94, 95]}),
        ({"DP_ENABLE_HEALTHCHECKS": "13"}, {"xid_critical": [13]}),
        (
            {"DP_DISABLE_HEALTHCHECKS": "13,94", "DP_ENABLE_HEALTHCHECKS": "13"},
            {"xid_critical": [13], "xid_ignored": [94]},
        ),
        ({"DP_DISABLE_HEALTHCHECKS": "all"}, {"xid_ignored": "all"}),
        (
            {"DP_DISABLE_HEALTHCHECKS": "xids", "DP_ENABLE_HEALTHCHECKS": "48"},
            {"xid_critical": [48], "xid_ignored": "all"},
        ),
    ],
)
def test_xids_count_as_they_did_and_the_usual_ones_are_not_written_out(
    environment: dict[str, str], expected: dict[str, Any]
) -> None:
    assert keys("version: v1\n", **environment) == {"mig_devices": False, **expected}


@pytest.mark.parametrize(
    ("health", "expected"),
    [
        ("{eventTypes: [EventTypeXidCriticalError], criticalXIDs: all}", {}),
        ("{ignoredXIDs: [13, 31]}", {"xid_critical": "all", "xid_ignored": [13, 31]}),
        ("{criticalXIDs: [48, 13], ignoredXIDs: [13]}", {"xid_critical": [48], "xid_ignored": "all"}),
        ("{disabled: true, criticalXIDs: [48]}", {"xid_ignored": "all"}),
        ("{eventTypes: [EventTypeDoubleBitEccError]}", {"xid_ignored": "all"}),
    ],
)
def test_the_health_of_a_file_stands_in_the_place_of_the_plugins_own(health: str, expected: dict[str, Any]) -> None:
    assert keys(f"version: v1\nhealth: {health}\n") == {"mig_devices": False, **expected}
    assert keys(f"version: v1\nhealth: {health}\n", DP_ENABLE_HEALTHCHECKS="13")["xid_critical"] == [13]
    assert "'x'" in said(imported(f"version: v1\nhealth: {health[:-1]}, x: 1}}\n"))[0]


@pytest.mark.parametrize(("strategy", "expected"), [("none", {"mig_devices": False}), ("single", {}), ("mixed", {})])
def test_a_gpu_in_mig_mode_is_whole_only_where_it_was(strategy: str, expected: dict[str, Any]) -> None:
    assert keys(f"flags: {{migStrategy: {strategy}}}\n") == expected


def test_mig_devices_that_were_to_be_shared_by_mps_are_a_suggestion_in_a_comment() -> None:
    sharing = "{mps: {resources: [{name: nvidia.com/mig-1g.5gb, replicas: 2}, {name: gpu, replicas: 99}]}}"
    found = import_text(f"flags: {{migStrategy: mixed}}\nsharing: {sharing}\n")
    assert loads(found) == ["nvidia.com/mig-{profile}"]
    assert [line.split(": ", 2)[2] for line in said(found) if "note" not in line] == [
        "MPS cannot share MIG devices, and the plugin does not start with it; it is commented out",
        'replicas: is 99; with sharing = "mps" it is 2 to 48; the resource is left out',
    ]


def test_a_strategy_of_cdi_tells_that_somebody_has_to_write_the_specifications() -> None:
    found = imported("flags: {plugin: {deviceListStrategy: 'envvar, cdi-annotations'}}\n")
    assert tomllib.loads(found.toml)["resource"][0]["device_list_strategy"] == ["envvar", "cdi-annotations"]
    assert not found.lossless
    assert "from now on nvidia-ctk has to" in said(found)[0]
