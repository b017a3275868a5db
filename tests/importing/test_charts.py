"""What carries a plugin's settings in a cluster: charts' values, ConfigMaps that are mounted or not, what others fill in."""

from __future__ import annotations

import textwrap
import tomllib

import pytest

from agent.importing import ImportRefusedError, import_files
from tests.importing.helpers import import_text, loads, said

_VALUES = """\
migStrategy: mixed
deviceListStrategy: volume-mounts
config:
  map:
    default: |
      version: v1
      sharing:
        timeSlicing:
          resources: [{name: nvidia.com/gpu, replicas: 6}]
"""
_SLICED = "version: v1\nsharing:\n  timeSlicing:\n    resources: [{name: nvidia.com/gpu, replicas: 6}]\n"


def _in(text: str, spaces: int) -> str:
    return textwrap.indent(text, " " * spaces)


_CARRIERS = {
    "flux": f"kind: HelmRelease\nspec:\n  chart: {{spec: {{chart: nvidia-device-plugin}}}}\n  values:\n{_in(_VALUES, 4)}",
    "flux, oci": "kind: OCIRepository\nmetadata: {name: x}\nspec: {url: oci://a/nvidia-device-plugin}\n---\n"
    f"kind: HelmRelease\nspec:\n  chartRef: {{name: x}}\n  values:\n{_in(_VALUES, 4)}",
    "flux, values from a ConfigMap": f"kind: ConfigMap\nmetadata: {{name: v}}\ndata:\n  values.yaml: |\n{_in(_VALUES, 4)}---\n"
    "kind: HelmRelease\nspec: {chart: {spec: {chart: nvidia-device-plugin}}, valuesFrom: [{kind: ConfigMap, name: v}]}\n",
    "argo": f"kind: Application\nspec:\n  source:\n    chart: nvidia-device-plugin\n    helm:\n      values: |\n{_in(_VALUES, 8)}",
    "argo, an object": "kind: ApplicationSet\nspec:\n  template:\n    spec:\n      sources:\n      - chart: nvidia-device-plugin\n"
    f"        helm:\n          valuesObject:\n{_in(_VALUES, 12)}",
    "argo, parameters": f"kind: Application\nspec:\n  source:\n    chart: nvidia-device-plugin\n    helm:\n"
    "      parameters:\n      - {name: migStrategy, value: mixed}\n      - {name: deviceListStrategy, value: volume-mounts}\n"
    f"      - name: config.map.default\n        value: |\n{_in(_SLICED, 10)}",
    "k3s": f"kind: HelmChart\nspec:\n  chart: nvidia-device-plugin\n  valuesContent: |\n{_in(_VALUES, 4)}",
    "fleet": f"helm:\n  chart: nvidia-device-plugin\n  values:\n{_in(_VALUES, 4)}",
    "kustomize": f"kind: Kustomization\nhelmCharts:\n- name: nvidia-device-plugin\n  valuesInline:\n{_in(_VALUES, 4)}",
    "a chart around it": f"nvidia-device-plugin:\n{_in(_VALUES, 2)}",
}


@pytest.mark.parametrize("text", _CARRIERS.values(), ids=_CARRIERS)
def test_a_charts_values_mean_the_same_wherever_they_stand(text: str) -> None:
    found = import_text(text)
    assert tomllib.loads(found.toml) == tomllib.loads(import_text(_VALUES).toml)
    assert loads(found) == ["nvidia.com/mig-{profile}", "nvidia.com/gpu"]
    assert found.lossless


@pytest.mark.parametrize(
    ("text", "remarks"),
    [
        (
            "kind: HelmRelease\nspec:\n  chart: {spec: {chart: nvidia-device-plugin}}\n  valuesFrom:\n  - {kind: Secret, name: v}\n",
            [
                "5: valuesFrom: the values under 'values.yaml' in Secret v are not among these files, and are not read; import them, too"
            ],
        ),
        (
            "kind: Application\nspec:\n  source: {chart: nvidia-device-plugin, helm: {valueFiles: [a/prod.yaml]}}\n",
            [
                "3: the values in a/prod.yaml are not read from here; import that file, too, or what `helm template` prints"
            ],
        ),
        (
            "kind: HelmRelease\nspec:\n  chart: {spec: {chart: nvidia-device-plugin}}\n  values:\n    tolerations: [{key: a}]\n    colour: red\n",
            ["6: the chart's value 'colour' is not known here, and is left out"],
        ),
        (
            "kind: HelmRelease\nspec:\n  chart: {spec: {chart: nvidia-device-plugin}}\n  values:\n    config: {name: elsewhere}\n",
            ["5: ConfigMap elsewhere is not among these files; if a configuration is in it, import it, too"],
        ),
        (
            "kind: HelmRelease\nspec:\n  chart: {spec: {chart: nvidia-device-plugin}}\n  values:\n    migStrategy: ${MIG}\n",
            [
                "5: ${MIG} is filled in by Flux, by postBuild; import what `kubectl get -o yaml` shows",
                "5: there is no migStrategy '${MIG}'; 'none' is taken",
            ],
        ),
    ],
)
def test_what_of_a_chart_is_not_read_is_said_and_is_lost(text: str, remarks: list[str]) -> None:
    found = import_text(text)
    assert said(found) == remarks
    assert not found.lossless


def test_values_files_that_are_imported_too_are_not_missing() -> None:
    text = "kind: Application\nspec:\n  source: {chart: nvidia-device-plugin, helm: {valueFiles: [prod.yaml]}}\n"
    found = import_files({"app.yaml": text, "some/prod.yaml": _VALUES})
    assert loads(found) == ["nvidia.com/mig-{profile}", "nvidia.com/gpu"]
    assert said(found) == []


def test_flags_among_a_charts_values_are_said_to_belong_into_its_configuration() -> None:
    found = import_text(f"{_VALUES}flags: {{migStrategy: single}}\n")
    assert found.lossless
    assert said(found)[0].startswith(
        "10: note: the chart has no value 'flags': it stands in a configuration, below config.map"
    )


_POLICY = """\
apiVersion: nvidia.com/v1
kind: ClusterPolicy
metadata: {name: cluster-policy}
spec:
  mig: {strategy: mixed}
  toolkit: {enabled: true, env: [{name: DEVICE_LIST_STRATEGY, value: volume-mounts}]}
  devicePlugin:
    enabled: true
    config: {name: slices, default: any}
    env:
    - {name: PASS_DEVICE_SPECS, value: "true"}
"""
_SLICES = f"kind: ConfigMap\nmetadata: {{name: slices}}\ndata:\n  any: |\n{_in(_SLICED, 4)}  other: |\n    version: v1\n    flags: {{}}\n"


def test_the_policy_of_nvidias_operator_is_read_with_its_config_map() -> None:
    found = import_text(f"{_POLICY}---\n{_SLICES}")
    mig, gpu = tomllib.loads(found.toml)["resource"]
    assert (mig["name"], gpu["replicas"]) == ("nvidia.com/mig-{profile}", 6)
    assert gpu["pass_device_specs"] is True
    assert "device_list_strategy" not in gpu
    assert found.lossless
    assert found.peers == ("devicePlugin.enabled of ClusterPolicy cluster-policy, by enabled: false",)


def test_the_chart_of_nvidias_operator_is_read_as_its_policy_is() -> None:
    values = "driver: {enabled: false}\nmig: {strategy: none}\ndevicePlugin:\n  config:\n    default: any\n    data:\n      any: |\n"
    found = import_text(values + _in(_SLICED, 8))
    (gpu,) = tomllib.loads(found.toml)["resource"]
    assert (gpu["replicas"], gpu["mig_devices"]) == (6, False)
    assert found.lossless


def test_the_chart_of_intels_plugin_monitors_where_it_does_not_say_otherwise() -> None:
    text = "kind: HelmRelease\nspec:\n  chart: {spec: {chart: intel-device-plugins-gpu}}\n  values: {sharedDevNum: 3, nodeFeatureRule: true"
    assert "gpu.intel.com/monitoring" in loads(import_text(f"{text}}}\n"))
    found = import_text(f"{text}, enableMonitoring: false, allocationPolicy: packed}}\n")
    assert loads(found) == ["gpu.intel.com/i915", "gpu.intel.com/xe"]
    assert {it["replicas"] for it in tomllib.loads(found.toml)["resource"]} == {3}
    assert {it["placement"] for it in tomllib.loads(found.toml)["resource"]} == {"pack"}


def test_a_key_of_intels_resource_that_is_not_known_is_said() -> None:
    found = import_text("kind: GpuDevicePlugin\nspec:\n  sharedDevNum: 2\n  image: a\n  colour: red\n")
    assert said(found) == ["5: Fairlead has nothing for the key 'colour' of a GpuDevicePlugin"]


def _template(controllers: str) -> str:
    return f"kind: HelmRelease\nspec:\n  chartRef: {{name: app-template}}\n  values:\n    controllers:\n{controllers}"


def _controller(name: str, *words: str) -> str:
    image = "{repository: ghcr.io/squat/generic-device-plugin, tag: 0.2.0@sha256:00}"
    return f"      {name}: {{containers: {{app: {{image: {image}, args: [{', '.join(words)}]}}}}}}\n"


_TUN = "--device, '{name: tun, groups: [{paths: [{path: /dev/net/tun}]}]}'"
_DRI = "--device, '{name: kvm, groups: [{paths: [{path: /dev/kvm}]}]}'"


def test_containers_of_app_template_are_read_and_the_domain_is_that_of_the_images_release() -> None:
    assert loads(import_text(_template(_controller("a", _TUN, _DRI)))) == ["devic.es/tun", "devic.es/kvm"]
    assert loads(import_text(_template(_controller("a", "--domain=b.c", _TUN)))) == ["b.c/tun"]


def test_of_two_daemonsets_that_are_told_different_things_one_is_chosen() -> None:
    both = _template(_controller("big", _TUN) + _controller("small", _DRI))
    with pytest.raises(ImportRefusedError, match="told different things: big, small; choose one with --entry"):
        import_text(both)
    assert loads(import_text(both, entry="small")) == ["devic.es/kvm"]


@pytest.mark.parametrize(
    ("image", "domain"),
    [("x:0.2.0", "devic.es"), ("x:v0.3", "devic.es"), ("x:1.0.1@sha256:a", "devic.es"), ("x:0.1.9", "squat.ai")],
)
def test_the_default_domain_is_that_of_the_release(image: str, domain: str) -> None:
    image = image.replace("x", "squat/generic-device-plugin")
    found = import_text(f"kind: Pod\nspec: {{containers: [{{image: '{image}', args: [{_TUN}]}}]}}\n")
    assert loads(found) == [f"{domain}/tun"]
    assert said(found) == []


@pytest.mark.parametrize("tag", [":latest", "", ":36bfc606bba2064de6ede0ff2764cbb52edff70d", "@sha256:0200"])
def test_where_nothing_tells_the_release_the_domain_is_said_to_be_a_guess(tag: str) -> None:
    found = import_text(f"kind: Pod\nspec: {{containers: [{{image: 'generic-device-plugin{tag}', args: [{_TUN}]}}]}}\n")
    assert loads(found) == ["squat.ai/tun"]
    assert "no domain is said, nor which release it is" in said(found)[0]


def test_arguments_and_the_environment_count_beside_the_file_of_generic_device_plugin() -> None:
    file = "domain: f.f\ndevices: [{name: a, groups: [{paths: [{path: /dev/a}]}]}]\n"
    pod = "kind: Pod\nspec: {{containers: [{{image: generic-device-plugin, {}}}]}}\n---\n"
    assert loads(import_text(pod.format("env: [{name: DOMAIN, value: e.e}]") + file)) == ["e.e/a"]
    assert loads(import_text(pod.format("args: [--domain, a.a], env: [{name: DOMAIN, value: e.e}]") + file)) == [
        "a.a/a"
    ]
    assert loads(import_text(pod.format(f"args: [{_TUN}]") + file)) == ["f.f/tun"]


@pytest.mark.parametrize(
    ("entry", "line"),
    [
        ("config.yaml: |\n    version: v1\n    flags:\n      a: b: c\n", 6),
        ('any: "version: v1\\nflags:\\n  a: b: c"\n', 3),
    ],
)
def test_what_is_no_yaml_inside_a_config_map_is_said_with_its_line_in_the_file(entry: str, line: int) -> None:
    text = f"kind: ConfigMap\ndata:\n  {entry}"
    with pytest.raises(ImportRefusedError, match="this is no YAML: mapping values are not allowed here") as raised:
        import_text(text)
    assert raised.value.line == line
    found = import_text(f"{text}---\n{_SLICED}")
    assert [(remark.line, remark.lost) for remark in found.remarks] == [(line, True)]


def test_what_stands_beside_a_configuration_in_its_config_map_and_is_none_is_said() -> None:
    found = import_text(f"{_SLICES}  typo: |\n    versoin: v1\n    sharing: {{}}\n", entry="any")
    assert said(found) == [
        "12: 'typo' beside it in ConfigMap slices is no configuration that is known here, and is not read"
    ]


def _mounting(name: str) -> str:
    volume = f"{{name: v, configMap: {{name: {name}}}}}"
    container = "{image: k8s-device-plugin, volumeMounts: [{name: v, mountPath: /c}]}"
    return f"kind: DaemonSet\nmetadata: {{name: d}}\nspec: {{containers: [{container}], volumes: [{volume}]}}\n---\n"


def test_a_config_map_that_no_container_mounts_is_said_not_to_be_in_force() -> None:
    one = f"kind: ConfigMap\nmetadata: {{name: one}}\ndata:\n  c: |\n{_in(_SLICED, 4)}---\n"
    two = one.replace("name: one", "name: two").replace("replicas: 6", "replicas: 2")
    assert import_text(_mounting("one") + one).lossless
    found = import_text(_mounting("two") + one)
    assert not found.lossless
    assert (
        "c: no container here mounts ConfigMap one, so this is not in force; it is imported all the same"
        in found.toml.replace("\n# ", " ")
    )
    found = import_text(one + _mounting("two") + two)
    assert tomllib.loads(found.toml)["resource"][0]["replicas"] == 2
    assert found.lossless
    assert ["it is left out" in remark for remark in said(found)] == [True]
    unmounted = _mounting("one").replace("volumeMounts", "other")
    assert not import_text(unmounted + one).lossless


def test_of_two_config_maps_that_two_daemonsets_mount_one_is_chosen_by_either_name() -> None:
    one = f"kind: ConfigMap\nmetadata: {{name: one}}\ndata:\n  c: |\n{_in(_SLICED, 4)}---\n"
    two = one.replace("name: one", "name: two").replace("replicas: 6", "replicas: 2")
    other = _mounting("two").replace("name: d}", "name: e}")
    with pytest.raises(ImportRefusedError, match="2 configurations of nvidia: one, two; choose one with --entry"):
        import_text(one + two + _mounting("one") + other)
    for entry in ("two", "e"):
        found = import_text(one + two + _mounting("one") + other, entry=entry)
        assert tomllib.loads(found.toml)["resource"][0]["replicas"] == 2


def test_what_a_config_map_had_when_it_was_last_applied_is_no_second_configuration() -> None:
    applied = '{"apiVersion":"v1","data":{"c":"version: v1\\nflags: {migStrategy: single}\\n"},"kind":"ConfigMap"}'
    meta = f"metadata:\n  name: one\n  annotations:\n    kubectl.kubernetes.io/last-applied-configuration: |\n      {applied}\n"
    assert loads(import_text(f"kind: ConfigMap\n{meta}data:\n  c: |\n{_in(_SLICED, 4)}")) == ["nvidia.com/gpu"]


def test_pods_and_revisions_of_a_daemonset_say_nothing_new() -> None:
    device = f"{{containers: [{{image: generic-device-plugin:0.2.0, args: [{_TUN}]}}]}}"
    old = device.replace("/dev/net/tun", "/dev/kvm")
    text = (
        f"kind: DaemonSet\nmetadata: {{name: d}}\nspec: {device}\n---\n"
        f"kind: Pod\nmetadata: {{name: d-x, ownerReferences: [{{kind: DaemonSet, name: d}}]}}\nspec: {device}\n---\n"
        f"kind: ControllerRevision\nmetadata: {{name: d-1}}\ndata: {old}\n"
    )
    found = import_text(text)
    assert loads(found) == ["devic.es/tun"]
    assert found.peers == ("daemonset d of namespace default",)


def test_variables_that_stand_in_config_maps_are_looked_up_or_said_to_be_missing() -> None:
    pod = "kind: Pod\nspec:\n  containers:\n  - image: k8s-device-plugin\n    env:\n    - {name: MIG_STRATEGY, valueFrom: {configMapKeyRef: {name: m, key: k}}}\n"
    found = import_text(f"{pod}---\nkind: ConfigMap\nmetadata: {{name: m}}\ndata: {{k: mixed}}\n")
    assert (loads(found)[0], found.lossless) == ("nvidia.com/mig-{profile}", True)
    assert said(import_text(pod)) == [
        "6: MIG_STRATEGY: its value is in 'm', which is not among these files, and is not read"
    ]
    assert not import_text(
        "kind: Pod\nspec: {containers: [{image: k8s-device-plugin, envFrom: [{configMapRef: {name: m}}]}]}\n"
    ).lossless


def test_what_a_shell_runs_is_taken_apart() -> None:
    pod = "kind: Pod\nspec: {containers: [{image: k8s-device-plugin, command: [sh, -c, 'exec nvidia-device-plugin --mig-strategy=mixed']}]}\n"
    assert "nvidia.com/mig-{profile}" in loads(import_text(pod))


def test_what_sops_has_encrypted_is_said() -> None:
    found = import_text("version: v1\nflags:\n  migStrategy: ENC[AES256_GCM,data:x,type:str]\n")
    assert said(found)[0].startswith("3: ENC[AES256 is encrypted by SOPS; import what `sops --decrypt` prints")


@pytest.mark.parametrize(
    "text",
    ["a: {{ .Values.a }}\n", "b: 1\n{{- if .Values.a }}\na: b\n{{- end }}\n", "a:\n{% if a %}\n  - b\n{% endif %}\n"],
)
def test_a_template_is_refused_with_what_to_import_instead(text: str) -> None:
    with pytest.raises(
        ImportRefusedError, match="this is a template and no YAML yet; import what it makes: `helm template`"
    ):
        import_text(text)


def test_a_kustomization_says_what_of_it_is_not_read() -> None:
    text = (
        "kind: Kustomization\nconfigMapGenerator:\n- name: m\n  files:\n  - config/config.yaml\npatches:\n- patch: x\n"
    )
    with pytest.raises(ImportRefusedError, match=r"ConfigMap m is made of config/config\.yaml, which is not among"):
        import_text(text)
    found = import_files({"kustomization.yaml": text, "app/config/config.yaml": _SLICED})
    assert said(found) == ["7: patches: what they change is not read; import what `kustomize build` prints"]


def test_a_resource_of_another_operator_beside_a_configuration_is_said() -> None:
    found = import_text(f"kind: QatDevicePlugin\nspec: {{}}\n---\n{_SLICED}")
    assert said(found) == ["1: QatDevicePlugin: Fairlead has nothing that reads what Intel's Qat plugin is told"]


def test_a_merge_key_brings_in_what_it_names() -> None:
    found = import_text("- &p {devicematch: ^a$, nummaxdevices: 3}\n- {<<: *p, devicematch: ^b$}\n")
    assert [it["count"] for it in tomllib.loads(found.toml)["resource"]] == [3, 3]
    assert loads(found) == ["smarter-devices/a", "smarter-devices/b"]


def test_keys_at_the_wrong_place_are_said_to_belong_elsewhere_and_lose_nothing() -> None:
    found = import_text("version: v1\nflags:\n  renameByDefault: true\n  colour: red\n")
    assert said(found) == [
        "3: note: NVIDIA's device plugin: renameByDefault belongs below sharing.timeSlicing or sharing.mps; the plugin passes over it here, and so does this",
        "4: NVIDIA's device plugin: Fairlead has nothing for the key 'colour'",
    ]
