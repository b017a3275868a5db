"""The components of deploy/kubernetes/api-access: the least rights at the API server, and only where they are asked for."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from agent.kubernetes.notices import COMPONENT
from tests.deploy.manifests import REPOSITORY, built, run
from tests.needs import skip_without

COMPONENTS = ("events", "condition", "drain-annotation")
RULES: dict[str, list[tuple[list[str], list[str]]]] = {
    "events": [(["events"], ["create", "patch"])],
    "condition": [(["nodes"], ["get"]), (["nodes/status"], ["patch"])],
    "drain-annotation": [(["nodes"], ["watch"])],
}
_POLICIES_SINCE, _NEWEST = "1.30", "1.37"


class Built:
    """What components come to, on top of a kustomization."""

    def __init__(self, directory: Path, beneath: str, components: tuple[str, ...]) -> None:
        self.manifests = built(directory, beneath, [f"api-access/{it}" for it in components], namespace="gpus")

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
    assert [(it["resources"], it["verbs"]) for it in role["rules"]] == RULES[component]
    assert all(it["apiGroups"] == [""] and it.keys() == {"apiGroups", "resources", "verbs"} for it in role["rules"])
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


def test_what_is_written_is_bound_to_the_node_that_the_pods_token_names(beneath: str, tmp_path: Path) -> None:
    made = Built(tmp_path, beneath, COMPONENTS)
    policies = {it["metadata"]["name"]: it["spec"] for it in made.of("ValidatingAdmissionPolicy")}
    bindings = {it["spec"]["policyName"]: it["spec"] for it in made.of("ValidatingAdmissionPolicyBinding")}
    assert policies.keys() == bindings.keys() == {"fairlead-events", "fairlead-condition"}
    assert all(it["validationActions"] == ["Deny"] for it in bindings.values())
    for spec in policies.values():
        assert spec["failurePolicy"] == "Fail"
        assert "authentication.kubernetes.io/node-name" in spec["variables"][0]["expression"]
        assert f":{made.manifests.pod['serviceAccountName']}'" in spec["matchConditions"][0]["expression"]
    (rule,) = policies["fairlead-condition"]["matchConstraints"]["resourceRules"]
    assert (rule["resources"], rule["operations"]) == (["nodes/status"], ["UPDATE"])
    assert f"object.source.component == '{COMPONENT}'" in policies["fairlead-events"]["validations"][0]["expression"]
