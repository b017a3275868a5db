"""deploy/observability as a component: one line in a kustomization has metrics scraped, alerts and dashboards."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.manifests import KUBERNETES, REPOSITORY, Manifests, kustomize
from tests.deploy.observability.promtool import KIT, RULES, promtool
from tests.needs import skip_without

MONITOR = KUBERNETES / "components/pod-monitor/pod-monitor.yaml"
ENDPOINT: dict[str, Any] = yaml.safe_load(MONITOR.read_text())["spec"]["podMetricsEndpoints"][0]


@pytest.fixture(params=["base", "hardened", "openshift", "installer"])
def built(request: pytest.FixtureRequest, tmp_path: Path) -> Manifests:
    skip_without("kustomize 5 (make build/kustomize/.ready)")
    shutil.copytree(KUBERNETES, tmp_path / "deploy/kubernetes")
    shutil.copytree(KIT, tmp_path / "deploy/observability")
    text = f"namespace: gpus\nresources: [deploy/kubernetes/{request.param}]\ncomponents: [deploy/observability]\n"
    (tmp_path / "kustomization.yaml").write_text(text)
    return Manifests.of(tmp_path, kustomize() or ())


def test_it_adds_what_the_operator_and_grafana_look_for_in_the_same_namespace(built: Manifests) -> None:
    monitor = built.one("PodMonitor")
    labels = built.one("DaemonSet")["spec"]["template"]["metadata"]["labels"]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= labels.items()
    objects = {it["metadata"]["name"]: it for it in built.objects if it["kind"] in ("PrometheusRule", "ConfigMap")}
    assert objects.keys() >= {"fairlead-alerts", "fairlead-fleet", "fairlead-dashboards"}
    for it in (monitor, *(it for name, it in objects.items() if name != "fairlead")):
        assert it["metadata"]["namespace"] == "gpus"
        assert it["metadata"]["labels"]["app.kubernetes.io/part-of"] == "fairlead"
    boards = objects["fairlead-dashboards"]
    assert boards["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert {name: json.loads(text) for name, text in boards["data"].items()} == {
        file.name: json.loads(file.read_text()) for file in (KIT / "dashboards").iterdir()
    }
    assert len(json.dumps(boards)) < 262144  # what `kubectl apply` may keep of an object in its annotation


@pytest.mark.parametrize("document", ["fleet.md", "http.md"])
def test_the_scrape_configurations_of_the_docs_are_valid_and_do_what_the_rules_need(
    document: str, tmp_path: Path
) -> None:
    skip_without("promtool (make build/promtool/.ready)")
    blocks = re.findall(r"```yaml\n(.*?)```", (REPOSITORY / "docs" / document).read_text(), flags=re.DOTALL)
    texts = [text for text in blocks if "scrape_configs" in text]
    assert texts
    for file in RULES:
        shutil.copy(file, tmp_path)
    for text in texts:
        (tmp_path / "prometheus.yml").write_text(text)
        command = [promtool() or "", "check", "config", str(tmp_path / "prometheus.yml")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        if document == "fleet.md":
            (job,) = yaml.safe_load(text)["scrape_configs"]
            assert (job["job_name"], job["honor_labels"]) == ("fairlead", True)
            assert "node" in str(job)


def relabeled(labels: dict[str, str]) -> dict[str, str] | None:
    """As Prometheus does it; None: it is no target."""
    for rule in ENDPOINT["relabelings"]:
        pattern = rule.get("regex", "(.*)")
        if rule.get("action") == "labeldrop":
            labels = {name: it for name, it in labels.items() if not re.fullmatch(pattern, name)}
            continue
        found = re.fullmatch(pattern, ";".join(labels.get(name, "") for name in rule["sourceLabels"]))
        if rule.get("action") == "keep":
            if found is None:
                return None
        elif found is not None:
            labels = {
                **labels,
                rule["targetLabel"]: found.expand(rule.get("replacement", "${1}").replace("${1}", r"\1")),
            }
    return labels


def pod(address: str, container: str, name: str) -> dict[str, str]:
    found = {"ip": address, "container_name": container, "node_name": "worker-3", "name": name}
    return {f"__meta_kubernetes_pod_{key}": value for key, value in found.items()} | {
        "__address__": address, "pod": name, "container": container, "namespace": "fairlead",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("address", "asked"), [("10.0.0.7", "10.0.0.7:9440"), ("fd00::7", "[fd00::7]:9440")], ids=["IPv4", "IPv6"]
)
def test_fairlead_is_scraped_at_its_pods_address_under_its_nodes_name(address: str, asked: str) -> None:
    found = relabeled(pod(address, "fairlead", "fairlead-x"))
    assert found is not None
    assert (found["__address__"], found["node"]) == (asked, "worker-3")
    assert ENDPOINT["honorLabels"] is True  # else `pod` would not be the one that has a device


def test_two_pods_of_an_update_on_the_nodes_network_are_one_target_and_an_init_container_is_none() -> None:
    def target(name: str) -> dict[str, str]:
        found = relabeled(pod("10.0.0.7", "fairlead", name)) or {}
        return {label: it for label, it in found.items() if not label.startswith("__meta_")}

    assert target("fairlead-old") == target("fairlead-new")
    assert relabeled(pod("10.0.0.7", "install", "fairlead-x")) is None
