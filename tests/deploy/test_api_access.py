"""The components of deploy/kubernetes/api-access: the least rights at the API server, and only where they are asked for."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from agent.dra.slices import Wanted, Write, body
from agent.inventory.shortfall import Missing
from agent.kubernetes import events
from agent.kubernetes.own_node import TYPE, condition
from tests.deploy.manifests import REPOSITORY, built, run
from tests.fakes import device
from tests.needs import skip_without

COMPONENTS = ("events", "condition", "drain-annotation", "dra")
RULES: dict[str, list[tuple[list[str], list[str]]]] = {
    "events": [(["events"], ["create", "patch"])],
    "condition": [(["nodes"], ["get"]), (["nodes/status"], ["patch"])],
    "drain-annotation": [(["nodes"], ["watch"])],
    "dra": [
        (["resourceslices"], ["get", "list", "watch", "create", "update", "delete"]),
        (["resourceclaims"], ["get"]),
        (["nodes"], ["get"]),
    ],
}
MARK = {"apiGroups": ["fairlead.dev"], "resources": ["agents"], "verbs": ["act-as"]}
"""Gives nothing; the policies bind whoever has it."""
_POLICIES_SINCE, _NEWEST = "1.30", "1.37"


class Built:
    """What components come to, on top of a kustomization."""

    def __init__(self, directory: Path, beneath: str, components: tuple[str, ...], prefix: str = "") -> None:
        those = [f"api-access/{it}" for it in components]
        self.manifests = built(directory, beneath, those, namespace="gpus", prefix=prefix)

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [it for it in self.manifests.objects if it["kind"] == kind]


@pytest.fixture(params=["base", "hardened", "openshift"])
def beneath(request: pytest.FixtureRequest) -> str:
    skip_without("kustomize 5 (make build/kustomize/.ready)")
    return str(request.param)


@pytest.mark.parametrize("component", COMPONENTS)
def test_a_component_gives_the_rights_of_what_it_is_called_after_and_no_others(
    beneath: str, component: str, tmp_path: Path
) -> None:
    made = Built(tmp_path, beneath, (component,))
    (role,), (binding,) = made.of("ClusterRole"), made.of("ClusterRoleBinding")
    rules = [it for it in role["rules"] if it != MARK]
    assert [(it["resources"], it["verbs"]) for it in rules] == RULES[component]
    groups = {"resourceslices": "resource.k8s.io", "resourceclaims": "resource.k8s.io"}
    assert all(it["apiGroups"] == [groups.get(it["resources"][0], "")] for it in rules)
    assert all(it.keys() == {"apiGroups", "resources", "verbs"} for it in rules)
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    account = {"kind": "ServiceAccount", "name": made.manifests.pod["serviceAccountName"], "namespace": "gpus"}
    assert binding["subjects"] == [account]
    assert made.manifests.pod["automountServiceAccountToken"] is True
    assert all(it["metadata"]["labels"]["app.kubernetes.io/part-of"] == "fairlead" for it in made.manifests.objects)


@pytest.mark.parametrize("version", [_POLICIES_SINCE, _NEWEST])
def test_all_components_together_are_valid(beneath: str, version: str, tmp_path: Path) -> None:
    made = Built(tmp_path, beneath, COMPONENTS)
    assert len(made.of("ClusterRole")) == len(COMPONENTS)
    file = tmp_path / "built.yaml"
    file.write_text(made.manifests.text)
    run("kubernetes_validate", "--strict", "--kubernetes-version", version, file)


def test_the_docs_name_the_components_that_there_are() -> None:
    text = (REPOSITORY / "docs/operations.md").read_text()
    assert set(re.findall(r"  - fairlead/deploy/kubernetes/api-access/(\S+)", text)) == set(COMPONENTS)
    rows = re.findall(r"^\| `(\S+)` \| (.*?) \|", text, flags=re.MULTILINE)
    told = {name: rights for name, rights in rows if name in COMPONENTS}
    for name, rules in RULES.items():
        assert all(word in told[name] for resources, verbs in rules for word in (*resources, *verbs)), name


def test_where_a_network_policy_lets_nobody_out_the_way_to_the_api_server_is_open(tmp_path: Path) -> None:
    skip_without("kustomize 5 (make build/kustomize/.ready)")
    (policy,) = Built(tmp_path, "hardened", ("events",)).of("NetworkPolicy")
    assert [[port["port"] for port in it["ports"]] for it in policy["spec"]["egress"]] == [[443, 6443]]


@pytest.mark.parametrize("prefix", ["", "team-"])
def test_the_policies_bind_whichever_account_has_the_rights(beneath: str, prefix: str, tmp_path: Path) -> None:
    made = Built(tmp_path, beneath, COMPONENTS, prefix)
    account = {"kind": "ServiceAccount", "name": f"{prefix}fairlead", "namespace": "gpus"}
    assert made.manifests.pod["serviceAccountName"] == account["name"]
    roles = {it["metadata"]["name"]: it["rules"] for it in made.of("ClusterRole")}
    subjects = {it["roleRef"]["name"]: it["subjects"] for it in made.of("ClusterRoleBinding")}
    policies = {it["metadata"]["name"]: it["spec"] for it in made.of("ValidatingAdmissionPolicy")}
    bindings = {it["spec"]["policyName"]: it["spec"] for it in made.of("ValidatingAdmissionPolicyBinding")}
    assert policies.keys() == bindings.keys() == {f"{prefix}fairlead-{it}" for it in ("events", "condition", "dra")}
    assert all(it["validationActions"] == ["Deny"] for it in bindings.values())
    for name, spec in policies.items():
        assert spec["failurePolicy"] == "Fail"
        assert MARK in roles[name]
        assert subjects[name] == [account]
        (matched,) = spec["matchConditions"]
        asked = re.findall(
            r"(!?)authorizer.group\('(.*?)'\).resource\('(.*?)'\).check\('(.*?)'\)", matched["expression"]
        )
        mine, (no, _, _, of_administrators) = asked
        assert mine == ("", *(MARK[key][0] for key in ("apiGroups", "resources", "verbs")))
        assert no
        assert all(of_administrators not in rule["verbs"] for rules in roles.values() for rule in rules)
        assert account["name"] not in matched["expression"].replace("fairlead.dev", "")


def test_of_a_node_the_policy_lets_the_condition_be_written_and_nothing_else(beneath: str, tmp_path: Path) -> None:
    spec = Built(tmp_path, beneath, ("condition",)).manifests.one("ValidatingAdmissionPolicy")["spec"]
    (rule,) = spec["matchConstraints"]["resourceRules"]
    assert (rule["resources"], rule["operations"]) == (["nodes/status"], ["UPDATE"])
    assert "authentication.kubernetes.io/node-name" in spec["variables"][0]["expression"]
    of_node, of_metadata, of_status, of_condition = (" ".join(it["expression"].split()) for it in spec["validations"])
    assert of_node == "variables.node != '' && object.metadata.name == variables.node"
    for part, expression, but in (
        ("metadata", of_metadata, "key in ['managedFields', 'resourceVersion']"),
        ("status", of_status, "key == 'conditions'"),
    ):  # each key of the old and the new one
        assert expression.startswith(
            f"variables.versions.all(it, it.{part}.all(key, {but} || variables.versions.all(other, "
            f"key in other.{part} && other.{part}[key] == it.{part}[key])))"
        )
    others = f"filter(it, it.type != '{TYPE}')"
    assert of_status.endswith(f"&& variables.conditions[0].{others} == variables.conditions[1].{others}")
    missing = Missing("a.b/" + "c" * 1000, "gpu", "gone", "", device("0"))
    longest = condition({}, [missing])
    for key, said in (("message", longest.message), ("reason", longest.reason)):
        (most,) = re.findall(rf"it.{key}.size\(\) <= (\d+)", of_condition)
        assert len(said) < int(most)


def test_an_event_is_written_as_the_agent_does_about_its_node_or_a_pod(beneath: str, tmp_path: Path) -> None:
    spec = Built(tmp_path, beneath, ("events",)).manifests.one("ValidatingAdmissionPolicy")["spec"]
    (rule,) = spec["matchConstraints"]["resourceRules"]
    assert (rule["resources"], rule["operations"]) == (["events"], ["CREATE", "UPDATE"])
    assert "[dyn(oldObject), dyn(object)]" in spec["variables"][1]["expression"]
    written, about = (it["expression"] for it in spec["validations"])
    event = events.event(events.unknown_drain(events.about_node("n"), "gpu0", "…"), "e", 0, 0, 1, "n")
    assert event["source"] == {"component": "fairlead", "host": "n"}
    assert "it.source.component == 'fairlead' && it.source.host == variables.node" in written
    assert (event["reportingComponent"], event["reportingInstance"]) == ("fairlead", "n")
    assert "it.reportingComponent in ['', 'fairlead'] && it.reportingInstance in ['', variables.node]" in written
    for key in ("name", "uid"):
        assert event["involvedObject"][key] == "n"
        assert f"it.involvedObject.{key} == variables.node" in about
    assert all(f"!has(it.{key})" in about for key in ("related", "metadata.finalizers", "metadata.ownerReferences"))


def test_of_slices_the_policy_lets_those_of_the_own_node_be_written_as_the_agent_does(
    beneath: str, tmp_path: Path
) -> None:
    made = Built(tmp_path, beneath, ("dra",))
    spec = made.manifests.one("ValidatingAdmissionPolicy")["spec"]
    (rule,) = spec["matchConstraints"]["resourceRules"]
    assert (rule["resources"], rule["operations"]) == (["resourceslices"], ["CREATE", "UPDATE", "DELETE"])
    of_node, of_metadata = (" ".join(it["expression"].split()) for it in spec["validations"])
    assert of_node.startswith("variables.node != '' && variables.versions.all(it, has(it.spec.nodeName) &&")
    write = Write("s", "p", "", Wanted("s", "p", {"devices": []}, b""), 1, 1)
    document = body(write, "n", "d", {"apiVersion": "v1", "kind": "Node", "name": "n", "uid": "u", "controller": True})
    assert document["spec"]["nodeName"] == "n"
    assert document["metadata"].keys() == {"name", "ownerReferences"}
    assert "owner.kind == 'Node' && owner.name == variables.node" in of_metadata
    mounts = {it["mountPath"]: it.get("readOnly", False) for it in made.manifests.pod["containers"][0]["volumeMounts"]}
    for path in ("/var/lib/kubelet/plugins", "/var/lib/kubelet/plugins_registry", "/run/cdi"):
        assert mounts[path] is False
