"""What deploy/kubernetes sends to a cluster: valid, at one with itself, with the image and with the configuration."""

from __future__ import annotations

import json
import re
import shutil
import tomllib
from pathlib import Path

import msgspec
import pytest

from agent.config import AgentConfig, Config, load
from agent.config.file import DEFAULT_PATH
from agent.daemon import shutdown
from backends.base import Host
from backends.gpu import nvml
from tests.deploy.manifests import (
    KUBERNETES,
    KUSTOMIZATIONS,
    OVERLAYS,
    REPOSITORY,
    Manifests,
    built,
    built_in,
    kustomize,
    run,
)
from tests.needs import skip_without

_OLDEST, _NEWEST = "1.25", "1.37"  # of those that kubernetes-validate knows


@pytest.fixture(scope="module")
def tool() -> tuple[str, ...]:
    skip_without("kustomize 5 (make build/kustomize/.ready)")
    return kustomize() or ()


@pytest.fixture(params=KUSTOMIZATIONS)
def manifests(request: pytest.FixtureRequest, tool: tuple[str, ...]) -> Manifests:
    return Manifests.of(request.param, tool)


@pytest.fixture
def hardened(tool: tuple[str, ...]) -> Manifests:
    return Manifests.of("hardened", tool)


@pytest.fixture
def openshift(tool: tuple[str, ...]) -> Manifests:
    return Manifests.of("openshift", tool)


@pytest.fixture
def config(manifests: Manifests, tmp_path: Path) -> Config:
    file = tmp_path / "config.toml"
    file.write_text(manifests.config)
    return load(file)


def test_the_sources_are_well_written_yaml() -> None:
    run("yamllint", "--strict", "deploy", ".yamllint")


@pytest.mark.parametrize("version", [_OLDEST, _NEWEST])
def test_every_object_is_valid_and_has_no_key_too_many(manifests: Manifests, version: str, tmp_path: Path) -> None:
    file = tmp_path / "built.yaml"
    file.write_text(manifests.text)
    run("kubernetes_validate", "--strict", "--kubernetes-version", version, file)


@pytest.mark.parametrize("version", [_OLDEST, _NEWEST])
def test_every_object_of_the_overlays_is_valid(version: str, tool: tuple[str, ...], tmp_path: Path) -> None:
    objects = [one for name in OVERLAYS for one in built_in(Manifests.of(name, tool).objects)]
    file = tmp_path / "built.yaml"
    file.write_text("\n---\n".join(map(json.dumps, objects)))
    run("kubernetes_validate", "--strict", "--kubernetes-version", version, file)


def test_everything_is_in_one_namespace_and_labelled(manifests: Manifests) -> None:
    for one in manifests.objects:
        metadata = one["metadata"]
        assert metadata.get("namespace", metadata["name"]) == "fairlead", one["kind"]
        assert metadata["labels"]["app.kubernetes.io/part-of"] == "fairlead", one["kind"]


def test_the_image_is_the_one_that_the_containerfile_says_to_build(manifests: Manifests) -> None:
    containerfile = (REPOSITORY / "Containerfile").read_text()
    version = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["version"]
    template = manifests.one("DaemonSet")["spec"]["template"]
    assert manifests.container["image"] == f"fairlead:{version}"
    assert template["metadata"]["labels"]["app.kubernetes.io/version"] == version
    assert f"--tag fairlead:{version}" in containerfile
    assert f'image.version="{version}"' in containerfile


# --- the configuration ---


def test_the_configuration_is_valid(config: Config) -> None:
    assert config.resources


def test_the_configuration_keeps_its_name_when_it_changes(manifests: Manifests) -> None:
    name = manifests.one("ConfigMap")["metadata"]["name"]
    (volume,) = (one for one in manifests.pod["volumes"] if "configMap" in one)
    assert name == volume["configMap"]["name"] == "fairlead"


def test_the_configuration_is_mounted_as_a_directory_where_it_is_looked_for(manifests: Manifests) -> None:
    assert manifests.mounts()[DEFAULT_PATH.parent] == (None, False)
    assert not any("subPath" in one for one in manifests.container["volumeMounts"])
    assert DEFAULT_PATH.name in manifests.one("ConfigMap")["data"]


def test_the_hardened_configuration_differs_only_in_where_things_are() -> None:
    base, hardened = (tomllib.loads((KUBERNETES / name / "config.toml").read_text()) for name in ("base", "hardened"))
    assert base["resource"] == hardened["resource"]
    assert base.keys() == hardened.keys() == {"host", "http", "resource"}


# --- host paths ---


def test_every_path_of_the_configuration_is_mounted(manifests: Manifests, config: Config) -> None:
    mounts = manifests.mounts()
    paths = {field.name: getattr(config.agent, field.name) for field in msgspec.structs.fields(AgentConfig)}
    for name, path in paths.items():
        if not isinstance(path, Path):
            continue
        if name == "kubelet_root":
            assert mounts[path / "pod-resources"] == (str(path / "pod-resources"), False)
            continue
        (where,) = (mount for mount in mounts if path.is_relative_to(mount))
        assert mounts[where] == (str(where), True), name


def test_the_kernels_trees_are_where_the_configuration_says(manifests: Manifests, config: Config) -> None:
    mounts = manifests.mounts()
    for name in ("sys", "dev", "proc"):
        where = getattr(config.host, name)
        if where in mounts:
            assert mounts[where][0] == f"/{name}"
        else:
            assert where == getattr(Host(), name)
            assert manifests.name == "hardened"


def test_a_host_path_is_mounted_where_the_host_has_it_or_below_host(manifests: Manifests) -> None:
    for where, (host, _) in manifests.mounts().items():
        assert host is None or str(where) in (host, f"/host{host}")


def test_every_volume_is_mounted(manifests: Manifests) -> None:
    mounted = [one["name"] for one in manifests.container["volumeMounts"]]
    assert sorted(mounted) == sorted(one["name"] for one in manifests.pod["volumes"])


# --- probes ---


def test_the_probes_ask_the_pods_own_daemon_where_no_other_user_can_answer(manifests: Manifests) -> None:
    for name, what in (("startupProbe", "live"), ("livenessProbe", "live"), ("readinessProbe", "ready")):
        assert manifests.container[name]["exec"]["command"] == ["fairlead", "probe", what]
        assert "httpGet" not in manifests.container[name]


def test_http_is_served_to_the_node_alone_or_at_a_port_of_the_pods_own(manifests: Manifests, config: Config) -> None:
    assert config.http.is_on
    address, _, port = config.http.listen.rpartition(":")
    named = {one["name"]: one["containerPort"] for one in manifests.container.get("ports", ())}
    # On the node's network a port that is named keeps a second pod from the node, and with it a rolling update.
    assert named == ({} if manifests.pod.get("hostNetwork") else {"http": int(port)})
    assert manifests.pod.get("hostNetwork", False) == (address == "127.0.0.1")


def test_an_update_starts_the_new_pod_beside_the_old_one_which_has_time_to_hand_over(manifests: Manifests) -> None:
    update = manifests.one("DaemonSet")["spec"]["updateStrategy"]["rollingUpdate"]
    assert update["maxUnavailable"] == 0
    assert update["maxSurge"]
    assert manifests.pod["terminationGracePeriodSeconds"] > shutdown.LEAVE + 5


def test_the_network_policy_lets_scrapers_in(hardened: Manifests) -> None:
    policy = hardened.one("NetworkPolicy")["spec"]
    template = hardened.one("DaemonSet")["spec"]["template"]["metadata"]
    (rule,) = policy["ingress"]
    assert rule["from"] == [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]
    assert [one["port"] for one in rule["ports"]] == [one["containerPort"] for one in hardened.container["ports"]]
    assert policy["podSelector"]["matchLabels"].items() <= template["labels"].items()
    assert policy["egress"] == []


# --- rights ---


def test_no_token_is_mounted(manifests: Manifests) -> None:
    assert manifests.one("ServiceAccount")["automountServiceAccountToken"] is False
    assert manifests.pod["automountServiceAccountToken"] is False
    assert manifests.pod["serviceAccountName"] == manifests.one("ServiceAccount")["metadata"]["name"]


def test_nothing_writes_to_the_image(manifests: Manifests) -> None:
    assert manifests.container["securityContext"]["readOnlyRootFilesystem"] is True


def test_the_hardened_variant_has_no_privilege_left(hardened: Manifests) -> None:
    context = hardened.container["securityContext"]
    assert "privileged" not in context
    assert context["capabilities"] == {"drop": ["ALL"]}
    assert context["allowPrivilegeEscalation"] is False
    assert context["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not {"hostNetwork", "hostPID", "hostIPC"} & hardened.pod.keys()
    writable = {host for host, can_write in hardened.mounts().values() if can_write}
    assert writable == {
        "/var/lib/kubelet/device-plugins",
        "/var/lib/fairlead",
        "/run/fairlead",
        "/etc/kubernetes/node-feature-discovery/features.d",
    }


def test_openshift_binds_its_constraint_to_our_service_account(openshift: Manifests) -> None:
    (subject,) = openshift.one("RoleBinding")["subjects"]
    assert subject == {"kind": "ServiceAccount", "name": openshift.pod["serviceAccountName"], "namespace": "fairlead"}
    labels = openshift.one("Namespace")["metadata"]["labels"]
    assert labels["security.openshift.io/scc.podSecurityLabelSync"] == "false"
    assert labels["pod-security.kubernetes.io/enforce"] == "privileged"


def test_a_kustomization_of_ones_own_is_as_the_docs_print_it(tool: tuple[str, ...], tmp_path: Path) -> None:
    text = (REPOSITORY / "docs/installing.md").read_text()
    (own,) = re.findall(r"```yaml\n# kustomization\.yaml\n(.*?)```", text, flags=re.DOTALL)
    shutil.copytree(KUBERNETES, tmp_path / "fairlead/deploy/kubernetes")
    (tmp_path / "kustomization.yaml").write_text(own)
    (tmp_path / "config.toml").write_text("# mine\n")
    mine = Manifests.of(tmp_path, tool)
    assert mine.container["image"] == "registry.example/fairlead:0.1.0"
    assert mine.config == "# mine\n"
    assert mine.pod["nodeSelector"] == {
        "kubernetes.io/os": "linux",
        "feature.node.kubernetes.io/pci-10de.present": "true",
    }


def test_everything_follows_into_another_namespace(tool: tuple[str, ...], tmp_path: Path) -> None:
    shutil.copytree(KUBERNETES, tmp_path / "ours")
    (tmp_path / "kustomization.yaml").write_text("namespace: gpus\nresources: [ours/openshift]\n")
    mine = Manifests.of(tmp_path, tool)
    assert {one["metadata"].get("namespace", one["metadata"]["name"]) for one in mine.objects} == {"gpus"}
    (subject,) = mine.one("RoleBinding")["subjects"]
    assert subject["namespace"] == "gpus"


# --- kinds of clusters ---


@pytest.mark.parametrize("name", OVERLAYS)
def test_an_overlay_is_the_base_but_for_what_the_cluster_has_elsewhere(name: str, tool: tuple[str, ...]) -> None:
    base, overlay = (Manifests.of(one, tool) for one in ("base", name))
    here, there = base.mounts(), overlay.mounts()
    differ = {
        str(where): there.get(where) for where in here.keys() | there.keys() if here.get(where) != there.get(where)
    }
    assert (
        differ
        == {
            "gke": {"/home/kubernetes/bin/nvidia": ("/home/kubernetes/bin/nvidia", False)},
            "k0s": {"/var/lib/kubelet/pod-resources": ("/var/lib/k0s/kubelet/pod-resources", False)},
            "microk8s": {
                "/var/lib/kubelet/pod-resources": ("/var/snap/microk8s/common/var/lib/kubelet/pod-resources", False)
            },
            "nfd": {},
            "talos": {"/etc/cdi": None},
        }[name]
    )
    changed = {key for key in base.pod if base.pod[key] != overlay.pod.get(key)}
    assert changed <= {"containers", "volumes", "nodeSelector"}
    assert {one["metadata"]["labels"]["app.kubernetes.io/part-of"] for one in overlay.objects} == {"fairlead"}


def test_on_gke_the_pods_may_be_of_their_class(tool: tuple[str, ...]) -> None:
    gke = Manifests.of("gke", tool)
    (scope,) = gke.one("ResourceQuota")["spec"]["scopeSelector"]["matchExpressions"]
    assert scope["values"] == [gke.pod["priorityClassName"]]


def test_node_feature_discovery_chooses_the_nodes_and_reads_what_is_on_them(tool: tuple[str, ...]) -> None:
    nfd = Manifests.of("nfd", tool)
    (rule,) = nfd.one("NodeFeatureRule")["spec"]["rules"]
    chosen = {f"feature.node.kubernetes.io/{label}": value for label, value in rule["labels"].items()}
    assert nfd.pod["nodeSelector"] == {"kubernetes.io/os": "linux"} | chosen
    written = Path(tomllib.loads(nfd.config)["agent"]["nfd_features"])
    assert nfd.mounts()[written.parent] == (str(written.parent), True)
    base = tomllib.loads((KUBERNETES / "base/config.toml").read_text())
    assert tomllib.loads(nfd.config) == base | {"agent": {"nfd_features": str(written)}}


@pytest.mark.parametrize("where", ["host", "operator", "cos"])
def test_nvidias_driver_is_mounted_where_its_library_is_looked_for(where: str, tmp_path: Path) -> None:
    skip_without("kustomize 5 (make build/kustomize/.ready)")
    mine = built(tmp_path, "base", [f"components/nvidia/{where}"])
    (mount,) = (one for one in mine.container["volumeMounts"] if one["name"] == "nvidia-driver")
    assert mount["mountPropagation"] == "HostToContainer"
    within = Path(mount["mountPath"])
    candidates = [Path(one) for one in nvml._candidates(Host(), ())]
    assert any(one.is_relative_to(within) for one in candidates)
    assert not any(str(within).startswith(one) for one in ("/usr", "/lib", "/opt"))  # the image's own


@pytest.mark.parametrize(
    ("found", "scraped"),
    [
        ("10.0.0.1", "10.0.0.1:9440"), ("10.0.0.1:9440", "10.0.0.1:9440"),
        ("fd00::1", "[fd00::1]:9440"), ("[fd00::1]:9440", "[fd00::1]:9440"),
    ],
)  # fmt: skip
def test_prometheus_finds_the_port_on_the_nodes_network_and_on_the_pods_own(
    found: str, scraped: str, tmp_path: Path
) -> None:
    skip_without("kustomize 5 (make build/kustomize/.ready)")
    mine = built(tmp_path, "hardened", ["components/pod-monitor"])
    (endpoint,) = mine.one("PodMonitor")["spec"]["podMetricsEndpoints"]
    for rule in endpoint["relabelings"]:
        if rule.get("sourceLabels") == [rule.get("targetLabel")] and (match := re.fullmatch(rule["regex"], found)):
            found = rule["replacement"].replace("${1}", match[1])
    assert found == scraped
    selected = mine.one("PodMonitor")["spec"]["selector"]["matchLabels"]
    assert selected.items() <= mine.one("DaemonSet")["spec"]["template"]["metadata"]["labels"].items()
