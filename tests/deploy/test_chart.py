"""The chart of deploy/helm: the same objects as kustomize makes, and no wrong configuration gets past Helm."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest
import yaml

from agent.config import AgentConfig
from tests.config.test_schema import ALL_SETTINGS
from tests.deploy.manifests import (
    CHART,
    KUBERNETES,
    KUSTOMIZATIONS,
    OVERLAYS,
    REPOSITORY,
    Manifests,
    built,
    helm,
    kustomize,
    rendered,
    template,
)
from tests.needs import skip_without

Objects = dict[tuple[str, str], dict[str, Any]]

_CLUSTERS: Final = ("NodeFeatureRule", "ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding")
"""Kinds without a namespace, into which kustomize writes one, not knowing them; API servers drop it."""

_BUILT: Final[tuple[tuple[str, tuple[str, ...], dict[str, Any]], ...]] = (
    (
        "hardened",
        (
            "components/k0s", "components/nvidia/operator", "components/pod-monitor",
            "api-access/events", "api-access/condition", "api-access/drain-annotation",
        ),
        {
            "hardened": True, "kubeletRoot": "/var/lib/k0s/kubelet", "nvidiaDriver": "operator", "podMonitor": True,
            "config": {"kubernetes": {"events": True, "condition": True, "drain_annotation": True}},
        },
    ),
    (
        "openshift",
        ("components/nvidia/host", "components/talos", "components/gke", "api-access/condition"),
        {
            "openshift": True, "nvidiaDriver": "host", "cdi": {"static": ""}, "resourceQuota": True,
            "config": {"kubernetes": {"condition": True}},
        },
    ),
    (
        "hardened",
        ("api-access/dra",),
        {
            "hardened": True,
            "config": {"resource": [{"name": "a.b/c", "backend": "stub", "devices": [{"count": 1}], "serve": "dra"}]},
        },
    ),
)  # fmt: skip
"""A kustomization, components on top of it, and the values that say the same."""


@pytest.fixture(scope="module", autouse=True)
def _tools() -> None:
    skip_without("helm (make build/helm/.ready)", "kustomize 5 (make build/kustomize/.ready)")


def comparable(objects: tuple[dict[str, Any], ...]) -> Objects:
    """By kind and name, without what differs for good: namespaces are Helm's user's, comments and orders nobody's."""
    found = {}
    for one in objects:
        kind, metadata = one["kind"], dict(one["metadata"])
        if kind == "Namespace":
            continue
        metadata["labels"] = {key: value for key, value in metadata["labels"].items() if not key.endswith("/version")}
        if kind in _CLUSTERS:
            metadata.pop("namespace", None)
        one = one | {"metadata": metadata}
        if kind == "ConfigMap":
            one["data"] = {name: tomllib.loads(text) for name, text in one["data"].items()}
        if kind == "DaemonSet":
            pod = one["spec"]["template"]["spec"]
            pod["volumes"].sort(key=lambda volume: volume["name"])
            pod["containers"][0]["volumeMounts"].sort(key=lambda mount: mount["mountPath"])
        found[kind, metadata["name"]] = one
    return found


@pytest.mark.parametrize("name", [*KUSTOMIZATIONS, *OVERLAYS])
def test_with_the_values_of_an_overlay_the_chart_is_that_overlay(name: str) -> None:
    values = CHART / f"overlays/{name}.yaml"
    kustomized = comparable(Manifests.of(name, kustomize() or ()).objects)
    assert comparable(rendered("--values", values)) == kustomized


def test_every_overlay_has_values() -> None:
    there = {path.parent.name for path in KUBERNETES.glob("*/kustomization.yaml")}
    assert there - {"installer", "installer-removal"} == {path.stem for path in (CHART / "overlays").iterdir()}
    assert there - {"installer", "installer-removal"} == {*KUSTOMIZATIONS, *OVERLAYS}


@pytest.mark.parametrize(("beneath", "components", "values"), _BUILT)
def test_components_and_values_say_the_same(
    beneath: str, components: tuple[str, ...], values: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "values.yaml").write_text(json.dumps(values))
    kustomized = comparable(built(tmp_path / "own", beneath, components).objects)
    kustomized["ConfigMap", "fairlead"]["data"]["config.toml"] |= values["config"]
    assert comparable(rendered("--values", tmp_path / "values.yaml")) == kustomized


def test_every_component_is_compared() -> None:
    there = {str(path.parent.relative_to(KUBERNETES)) for path in KUBERNETES.glob("components/**/kustomization.yaml")}
    overlays = {
        f"components/{line.partition('components/')[2]}"
        for name in OVERLAYS
        for line in (KUBERNETES / name / "kustomization.yaml").read_text().splitlines()
        if line.startswith("  - ../components/")
    }
    assert there == overlays | {one for _, components, _ in _BUILT for one in components if "api-access" not in one}


def test_several_releases_can_be_in_one_namespace() -> None:
    one, other = comparable(rendered()), comparable(rendered(release="gpus"))
    assert not one.keys() & other.keys()
    (selector,), (labels,) = (
        [made[kind, name]["spec"] for kind, name in made if kind == "DaemonSet"] for made in (one, other)
    )
    assert not selector["selector"]["matchLabels"].items() <= labels["template"]["metadata"]["labels"].items()
    assert other["DaemonSet", "gpus-fairlead"]["spec"]["template"]["spec"]["serviceAccountName"] == "gpus-fairlead"


# --- the configuration ---


def configuration(objects: tuple[dict[str, Any], ...]) -> str:
    """The file that the daemon reads."""
    (text,) = (one["data"]["config.toml"] for one in objects if one["kind"] == "ConfigMap")
    return str(text)


def test_tables_in_yaml_become_the_same_tables_in_toml(tmp_path: Path) -> None:
    tables = tomllib.loads(ALL_SETTINGS)
    tables["host"]["proc"], tables["http"]["listen"] = "/host/proc", "[::]:9440"
    odd = "".join(map(chr, (*range(1, 127), 0xE9, 0x2028, 0x1F600)))
    devices = [{"count": 1, "attributes": {"odd": odd, "a key": "quoted"}}]
    tables["resource"].append({"name": "example.com/odd", "backend": "stub", "devices": devices})
    (tmp_path / "values.yaml").write_text(yaml.safe_dump({"config": tables}))
    assert tomllib.loads(configuration(rendered("--values", tmp_path / "values.yaml"))) == tables


def test_a_file_goes_to_the_nodes_as_it_is(tmp_path: Path) -> None:
    file = KUBERNETES / "nfd/config.toml"
    assert configuration(rendered("--set-file", f"configText={file}")) == file.read_text()


def test_another_configuration_restarts_no_pod() -> None:
    one = rendered()
    other = rendered("--set-json", 'config.resource=[{"name": "a.b/c", "backend": "stub", "devices": 1}]')
    assert configuration(one) != configuration(other)
    assert comparable(one)["DaemonSet", "fairlead"] == comparable(other)["DaemonSet", "fairlead"]


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"config": {"resource": [{"name": "a.b/c", "backend": "vfoi"}]}}, "/config/resource/0/backend"),
        ({"config": {"resource": [{"name": "a.b/c", "backend": "vfio", "bind": "ever"}]}}, "'allocate', 'never'"),
        ({"config": {"agent": {"resync": ""}}}, "/config/agent/resync"),
        ({"config": {"http": {"listen": "off"}}}, '[http] listen is "off"'),
        ({"hardened": True, "config": {"http": {"listen": "127.0.0.1:9440"}}}, "Prometheus cannot reach that"),
        ({"configText": "[host]\nproc ="}, "configText is no TOML"),
        ({"configText": "[http]\nlisten = '0.0.0.0:1'"}, "[host] proc is"),
        ({"hardened": True, "configText": "[host]\nproc = '/host/proc'"}, "[host] dev is"),
        ({"podMonitor": True}, "which Prometheus cannot reach"),
        ({"maxSurge": 0}, "/maxSurge"),
        ({"image": {"tag": 1.5}}, "/image/tag"),
        ({"hardend": True}, "'hardend'"),
    ],
)
def test_a_mistake_is_refused_before_anything_is_rolled_out(
    values: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    (tmp_path / "values.json").write_text(json.dumps(values))
    done = template("--values", tmp_path / "values.json")
    assert done.returncode != 0
    assert sentence in done.stderr


@pytest.mark.parametrize("key", [it.name for it in msgspec.structs.fields(AgentConfig) if isinstance(it.default, Path)])
def test_a_path_that_the_pod_has_not_is_refused_whichever_way_it_is_written(key: str) -> None:
    for value in (
        f"config.agent.{key}=/elsewhere",
        f"configText=[host]\nproc = '/host/proc'\n[agent]\n{key} = '/elsewhere'",
    ):
        done = template("--set", value)
        assert f'[agent] {key} is "/elsewhere", which is not in the pod' in done.stderr


def test_its_schema_has_that_of_the_configuration_and_the_docs_have_its_values() -> None:
    spec = importlib.util.spec_from_file_location("chart_schema", REPOSITORY / "deploy/helm/schema.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    text, page = module.FILE.read_text(), module.DOCS.read_text()
    assert module.written(json.loads(text)) == text, "make chart"
    assert module.documented(page, json.loads(text)) == page, "make chart"


# --- the chart itself ---


def test_helm_finds_no_fault_in_it() -> None:
    done = subprocess.run([helm() or "helm", "lint", "--strict", CHART], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_value_is_in_its_schema_and_has_a_description() -> None:
    defaults, schema = (
        yaml.safe_load((CHART / "values.yaml").read_text()),
        json.loads((CHART / "values.schema.json").read_text()),
    )
    described = schema["properties"]
    assert defaults.keys() == described.keys() - {"global"}
    for name, one in described.items():
        if "description" not in one:
            assert one["properties"].keys() == defaults[name].keys()
            assert all("description" in value for value in one["properties"].values())


def test_it_is_of_the_programs_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    version = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["version"]
    assert (chart["version"], chart["appVersion"]) == (version, version)


@pytest.mark.parametrize("name", ["base", "hardened"])
@pytest.mark.parametrize("registered", [True, False])
def test_its_test_fails_unless_every_resource_is_registered(name: str, registered: bool, tmp_path: Path) -> None:
    done = template("--values", CHART / f"overlays/{name}.yaml", "--show-only", "templates/tests/registered.yaml")
    pod = yaml.safe_load(done.stdout)
    assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"
    (container,) = pod["spec"]["containers"]
    (daemon,) = (one for one in rendered("--values", CHART / f"overlays/{name}.yaml") if one["kind"] == "DaemonSet")
    assert container["securityContext"] == daemon["spec"]["template"]["spec"]["containers"][0]["securityContext"]
    resources = [{"name": "a.b/c", "registered": True, "streaming": True}]
    resources.append({"name": "a.b/d", "registered": registered, "streaming": registered})
    (tmp_path / "fairlead").write_text(f"#!/bin/sh\necho '{json.dumps({'node': 'n', 'resources': resources})}'\n")
    (tmp_path / "fairlead").chmod(0o755)
    _, *rest = container["command"]
    said = subprocess.run(
        [sys.executable, *rest],
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert said.returncode == (not registered), said.stderr
    assert ("a.b/d; ask" in said.stderr) == (not registered)


def test_its_notes_name_what_the_namespace_must_have() -> None:
    command = [helm() or "helm", "install", "fairlead", str(CHART), "--namespace", "fairlead", "--dry-run=client"]
    notes = subprocess.run([*command, "--set", "openshift=true"], capture_output=True, text=True, check=True).stdout
    namespace = Manifests.of("openshift", kustomize() or ()).one("Namespace")["metadata"]
    wanted = {"pod-security.kubernetes.io/enforce": "privileged", **namespace["annotations"]}
    wanted |= {key: value for key, value in namespace["labels"].items() if "openshift" in key}
    assert set(re.findall(r"--overwrite (\S+)=(\S*)", notes)) == set(wanted.items())
