"""Whose configuration a file is, seen from its shape or said."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from agent.importing import FORMATS, ImportRefusedError, import_files
from tests.importing.helpers import import_text, loads, said

_SMARTER = "- {devicematch: ^fuse$, nummaxdevices: 1}\n"
_GDP = "devices: [{name: a, groups: [{paths: [{path: /dev/a}]}]}]\n"
_KUBEVIRT = "permittedHostDevices: {}\n"
_CEX = "cryptoconfigsets: []\n"
_SOLARFLARE = "data: {onload-version: 8.1, resource-name: solarflare/smartNIC}\n"
_SRIOV = '{"resourceList": [{"resourceName": "a", "selectors": {}}]}\n'
_NVIDIA = "version: v1\nflags: {migStrategy: mixed}\n"
_GKE = '{"GPUSharingConfig": {"GPUSharingStrategy": "time-sharing", "MaxSharedClientsPerGPU": 2}}'
_RDMA = '{"configList": [{"resourceName": "a", "rdmaHcaMax": 2, "devices": ["ib0"]}]}'
_INTEL = "kind: GpuDevicePlugin\nspec: {sharedDevNum: 2}"
_OWN = {
    "nvidia": _NVIDIA,
    "gke": _GKE,
    "rdma": _RDMA,
    "intel": _INTEL,
    "smarter": _SMARTER,
    "generic": _GDP,
    "kubevirt": _KUBEVIRT,
    "cex": _CEX,
    "solarflare": _SOLARFLARE,
    "sriov": _SRIOV,
}


def test_the_one_configuration_among_other_documents_is_taken() -> None:
    assert "smarter-devices/fuse" in import_text(f"kind: Namespace\n---\n{_SMARTER}---\n").toml
    assert "smarter-devices/fuse" in import_text(f"{_GDP}---\n{_SMARTER}", "smarter").toml


def test_what_stands_in_a_config_map_is_taken_with_its_lines_in_the_file() -> None:
    found = import_text(
        "kind: ConfigMap\ndata:\n  conf.yaml: |\n    - devicematch: ^watchdog$\n      nummaxdevices: 0\n"
    )
    assert [remark.line for remark in found.remarks] == [5]


@pytest.mark.parametrize("text", ["[]", "- {devicematch: ^a$}", "- a"])
def test_a_list_that_is_said_to_be_smarters_is_read_as_such(text: str) -> None:
    assert import_text(text, "smarter").toml.startswith("# From smarter-device-manager's")


@pytest.mark.parametrize(
    ("text", "line", "sentence"),
    [
        ("", None, "the file is empty"),
        ("# nothing\n---\n", None, "the file is empty"),
        ("a: b", None, "this is no configuration of NVIDIA's plugin (version: v1)"),
        ("a", None, "this is no configuration of"),
        ("[]", None, "this is no configuration of"),
        ("devices: 3", None, "this is no configuration of"),
        (
            f"{_SMARTER}---\n{_SMARTER.replace('fuse', 'kvm')}",
            3,
            "here begins a second configuration; import them one by one",
        ),
        ("kind: ConfigMap\ndata: {conf.yaml: ''}", None, "there is no known plugin's configuration in this ConfigMap"),
        ("kind: DaemonSet\nspec: {}", None, "there is no known plugin's configuration in this DaemonSet"),
        ("version: v2\nflags: {}", 1, "this is version 'v2' of the plugin's configuration; v1 is known"),
    ],
)
def test_what_is_not_recognised_is_refused_with_the_reason(text: str, line: int | None, sentence: str) -> None:
    with pytest.raises(ImportRefusedError) as raised:
        import_text(text)
    assert raised.value.line == line
    assert raised.value.sentence.startswith(sentence)


@pytest.mark.parametrize("source", FORMATS)
@pytest.mark.parametrize("text", [*_OWN.values(), "a", "a: b"])
def test_a_file_of_another_shape_than_said_is_refused(source: str, text: str) -> None:
    if text == _OWN.get(source):
        import_text(text, source)
        return
    with pytest.raises(ImportRefusedError) as raised:
        import_text(text, source)
    assert raised.value.line == 1


def test_several_files_are_one_import_and_each_line_is_told_with_its_file() -> None:
    found = import_files({"a.yaml": _SMARTER, "b.yaml": f"# b\n{_NVIDIA}"})
    assert loads(found) == ["nvidia.com/mig-{profile}", "nvidia.com/gpu", "smarter-devices/fuse"]
    found = import_files({"a.yaml": "- {devicematch: ^a$, nummaxdevices: 0}", "b.json": f"\n{_RDMA[:-3]}, 'x': 1}}]}}"})
    assert [found.places.place(remark.line) for remark in found.remarks] == [("a.yaml", 1), ("b.json", 2)]
    assert "# b.json:2: a: Fairlead has nothing for the key 'x'." in found.toml


_TWO = "kind: ConfigMap\ndata:\n  one: |\n    sharing: {}\n  two: |\n    version: v1\n    flags: {migStrategy: mixed}\n"


def test_of_several_named_configurations_one_is_chosen_or_the_default_is_taken() -> None:
    with pytest.raises(ImportRefusedError, match="2 configurations of nvidia: one, two; choose one with --entry"):
        import_text(_TWO)
    assert loads(import_text(_TWO, entry="one")) == ["nvidia.com/gpu"]
    assert loads(import_text(_TWO, entry="two")) == ["nvidia.com/mig-{profile}", "nvidia.com/gpu"]
    assert loads(import_text(_TWO, DEFAULT_CONFIG="one")) == ["nvidia.com/gpu"]


def test_helm_values_are_read_with_the_configurations_in_them() -> None:
    values = "config:\n  map:\n    a: |\n      version: v1\n    b: |\n      version: v1\n  default: b\ngdsEnabled: true\nmigStrategy: mixed\nmofedEnabled: null\n"
    for text in (values, "gdsEnabled: true\nmigStrategy: mixed\n"):
        found = import_text(text)
        assert loads(found) == ["nvidia.com/mig-{profile}", "nvidia.com/gpu"]
        assert found.toml.count("gds_enabled = true") == 2
        assert "mofed" not in found.toml


def test_arguments_win_over_the_environment_and_that_over_the_file() -> None:
    args = "kind: DaemonSet\nspec: {containers: [{image: k8s-device-plugin, args: [--mig-strategy, none]}]}\n---\n"
    assert len(loads(import_text(_NVIDIA, MIG_STRATEGY="single"))) == 1
    assert len(loads(import_text(args + _NVIDIA, MIG_STRATEGY="mixed"))) == 1


def test_what_generic_device_plugin_is_told_by_arguments_is_imported() -> None:
    device = "\n".join(
        f"            {line}" for line in ("name: a", "groups:", "- paths:", "  - path: /dev/a", "    colour: red")
    )
    text = f"""\
kind: DaemonSet
spec:
  template:
    spec:
      containers:
      - image: ghcr.io/squat/generic-device-plugin
        args:
        - --domain=a.b
        - --device
        - |
{device}
"""
    found = import_text(text)
    assert loads(found) == ["a.b/a"]
    assert said(found) == ["15: a.b/a: Fairlead has nothing for the key 'colour'"]


def _daemonset(name: str, *images: str, kind: str = "DaemonSet") -> str:
    containers = ", ".join(f"{{image: {image}, args: [--mig-strategy=mixed]}}" for image in images)
    return f"kind: {kind}\nmetadata: {{name: {name}, namespace: gpu}}\nspec: {{containers: [{containers}]}}\n---\n"


@pytest.mark.parametrize(
    ("text", "peers"),
    [
        (_daemonset("other", "kube-proxy") + _daemonset("a", "k8s-device-plugin"), ["daemonset a of namespace gpu"]),
        (_daemonset("mine", "registry/ours") + _NVIDIA, ["daemonset mine of namespace gpu"]),
        (
            _daemonset("a", "k8s-device-plugin").replace(
                "name: a,", "name: a, ownerReferences: [{kind: ClusterPolicy, name: cluster-policy}],"
            ),
            ["daemonset a of namespace gpu, by ClusterPolicy cluster-policy, which would make it again"],
        ),
        (
            _daemonset("a", "k8s-device-plugin")
            + "kind: DaemonSet\nspec: {containers: [{image: k8s-device-plugin, command: [mps-control-daemon]}]}\n---\n"
            + "kind: DaemonSet\nspec: {containers: [{image: k8s-device-plugin, command: [gpu-feature-discovery]}]}\n",
            ["daemonset a of namespace gpu"],
        ),
        (
            _daemonset("made", "intel/intel-gpu-plugin") + f"{_INTEL}\n---\n{_daemonset('a', 'k8s-device-plugin')}",
            ["daemonset a of namespace gpu", "the GpuDevicePlugin, whose operator takes the DaemonSet away"],
        ),
        (_NVIDIA, ["the plugin's DaemonSet"]),
        (f"{_NVIDIA}---\n{_RDMA}", ["the DaemonSet of nvidia", "the DaemonSet of rdma"]),
    ],
)
def test_only_what_is_the_plugins_own_has_to_go(text: str, peers: list[str]) -> None:
    assert list(import_text(text).peers) == peers


def test_what_other_workloads_are_told_is_not_taken_for_the_plugins_settings() -> None:
    text = _daemonset("other", "kube-proxy") + "kind: Pod\nspec: {containers: [{image: k8s-device-plugin}]}\n"
    assert loads(import_text(text)) == ["nvidia.com/gpu"]
    assert len(loads(import_text(_daemonset("mine", "registry/ours") + _NVIDIA.replace("mixed", "none")))) == 2


def _opened(tree: Any) -> Any:
    """A tree with what stands in its texts, as in ConfigMaps."""
    if isinstance(tree, dict):
        return {key: _opened(below) for key, below in tree.items()}
    if isinstance(tree, list):
        return [_opened(below) for below in tree]
    return yaml.safe_load(tree) if isinstance(tree, str) and "\n" in tree else tree


def _places(tree: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a tree, as the keys that lead there."""
    yield place
    for key in tree if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ():
        yield from _places(tree[key], (*place, key))


def _spoilt(tree: Any, place: tuple[Any, ...], value: object) -> Any:
    if not place:
        return value
    copy = tree.copy()
    copy[place[0]] = _spoilt(tree[place[0]], place[1:], value)
    return copy


_ODD = itertools.cycle([None, "x", {"x": None}, ["x"], 70000])


@pytest.mark.parametrize("file", sorted((Path(__file__).parent / "golden").glob("*.yaml")), ids=lambda file: file.stem)
def test_whatever_stands_at_any_place_of_a_file_it_ends_in_an_import_that_loads_or_in_a_sentence(file: Path) -> None:
    documents = [_opened(document) for document in yaml.safe_load_all(file.read_text())]
    for place in itertools.islice(_places(documents), 1, None):
        with suppress(ImportRefusedError):
            loads(import_files({"a.json": "\n---\n".join(map(json.dumps, _spoilt(documents, place, next(_ODD))))}))
