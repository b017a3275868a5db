"""The configuration of the sriov-network-device-plugin: a whole one is in golden/; here is what is rare in one."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.importing.helpers import import_text, loads, said


def entry(**keys: Any) -> str:
    return json.dumps({"resourceList": [{"resourceName": "net", **keys}]}, indent="\t")


def test_the_prefix_is_that_of_the_command_line_and_json_may_be_indented_with_tabs() -> None:
    assert loads(import_text(entry(selectors={}))) == ["intel.com/net"]
    assert loads(import_text(entry(selectors={}), domain="a.b")) == ["a.b/net"]
    assert loads(import_text(entry(selectors={}, resourcePrefix="c.d"), domain="a.b")) == ["c.d/net"]


def test_a_selector_without_keys_takes_everything_whatever_stands_beside_it() -> None:
    found = import_text(entry(selectors=[{"vendors": ["8086"]}, {"drivers": []}]))
    assert "select" not in found.toml
    assert found.lossless


def test_a_config_map_may_have_it_on_one_line() -> None:
    text = f"kind: ConfigMap\ndata:\n  config.json: '{json.dumps(json.loads(entry(selectors=None)))}'\n"
    assert [remark.line for remark in import_text(text).remarks] == [3]


@pytest.mark.parametrize(
    ("keys", "remark"),
    [
        ({"selectors": [{"isRdma": True}, {"vendors": ["8086"]}]}, "its selectors differ in isRdma"),
        ({"selectors": {"pfNames": ["a#0"], "rootDevices": ["0000:3b:00.0#1"]}}, "pfNames and rootDevices both choose"),
        ({"selectors": {"auxTypes": ["eth"]}, "deviceType": "auxNetDevice"}, "there are no auxTypes but sf"),
        ({"selectors": {"vendors": "8086"}}, "'vendors' is '8086' and should be a list of texts"),
        ({"selectors": {"vendors": ["0x8086"]}}, "vendor: no device has '0x8086'"),
        ({"selectors": {"vdpaType": "vhost", "isRdma": True}}, "vdpa: is beside rdma"),
        ({"selectors": {"pfNames": ["a#x"]}}, "vf: no device has 'x'"),
        ({"selectors": {}, "deviceType": "gpu"}, "there is no deviceType 'gpu'"),
        ({"selectors": {}, "resourceName": ""}, "it has no resourceName"),
    ],
)
def test_what_does_not_mean_the_same_here_is_not_in_force_and_told(keys: Any, remark: str) -> None:
    found = import_text(entry(**keys))
    assert loads(found) == []
    assert not found.lossless
    assert any(remark in line for line in said(found)), said(found)


def test_several_kinds_of_links_are_noted() -> None:
    found = import_text(entry(selectors={"LinkTypes": ["ether", "infiniband"]}))
    assert 'link_layer = ["Ethernet", "InfiniBand"]' in found.toml
    assert found.lossless
    assert said(found)[0].endswith("note: net: several linkTypes: functions of any of them are offered")
