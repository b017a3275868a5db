"""The metrics, as Prometheus' own client reads them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.parser import text_string_to_metric_families

from agent.console.http.metrics import METRICS, Metric, Seen, exposition, written
from agent.console.views import Held, Holder, Status
from agent.runtime.counts import BOUNDS, Counts, Histogram
from tests.console.http import nodes

PAGE = (Path(__file__).parents[3] / "docs" / "http.md").read_text()


def families(status: Status, counts: Counts | None = None) -> dict[str, Family]:
    text = "".join(exposition(status, counts or Counts()))
    return {family.name: family for family in text_string_to_metric_families(text)}


def values(family: Family, *labels: str) -> dict[tuple[str, ...], float]:
    return {tuple(it.labels[label] for label in labels): it.value for it in family.samples}


def test_all_of_the_table_and_nothing_else_is_there_from_the_start() -> None:
    assert sorted(families(nodes.busy())) == sorted(it.name.removesuffix("_total") for it in METRICS)


def test_the_page_has_each_metric_with_its_labels() -> None:
    told = re.findall(r"^\| `(fairlead_\w+)` \| (.*?)\|", PAGE, re.MULTILINE)
    ours = {it.name: it.labels for it in METRICS if not it.name.startswith("process_")}
    assert {name: tuple(re.findall(r"\w+", labels)) for name, labels in told} == ours


def test_each_sample_has_a_value_for_each_label() -> None:
    seen = Seen(nodes.busy(), Counts())
    assert {len(it) - 1 - len(metric.labels) for metric in METRICS for it in metric.read(seen) if it} == {0}


def test_what_the_process_takes_of_the_machine_is_told_as_by_other_programs() -> None:
    found = families(nodes.busy())
    assert values(found["process_start_time_seconds"]) == {(): nodes.busy().started}
    assert values(found["process_resident_memory_bytes"])[()] > 1 << 20
    assert 1 <= values(found["process_open_fds"])[()] <= values(found["process_max_fds"])[()]


def test_no_series_is_there_twice() -> None:
    tokens = nodes.kvm(10, 3)
    (device,) = tokens.devices
    sick = replace(device, ids=("kvm::10",), state="Unhealthy", reason="gone", held=device.held)
    counts = Counts()
    counts.transitions["nvidia.com/gpu", "healthy"] += 1
    status = nodes.node(nodes.gpus(**nodes.FALLEN), replace(tokens, devices=(device, sick)))
    series = [
        (it.name, tuple(sorted(it.labels.items())))
        for family in families(status, counts).values()
        for it in family.samples
    ]
    assert len(series) == len(set(series))


def test_devices_are_counted_by_their_health_as_the_kubelet_counts_them() -> None:
    found = values(families(nodes.busy())["fairlead_devices"], "resource_name", "health")
    assert (found["nvidia.com/gpu", "Healthy"], found["nvidia.com/gpu", "Unhealthy"]) == (7, 1)
    assert found["devices.kubevirt.io/kvm", "Healthy"] == 1000
    assert found["example.com/camera", "Degraded"] == 0


def test_a_device_is_healthy_if_all_of_its_ids_are_offered() -> None:
    found = values(families(nodes.busy())["fairlead_device_healthy"], "device")
    assert (found[(nodes.gpu(3).key,)], found[(nodes.gpu(2).key,)], found[("0000:d8:02.0",)]) == (0, 1, 1)


def test_what_is_not_well_is_told_with_its_reason_until_it_is_well() -> None:
    found = values(families(nodes.busy())["fairlead_device_not_healthy"], "device", "health", "reason")
    assert found[nodes.gpu(3).key, "Unhealthy", "xid-79"] == 1
    assert found["0000:d8:02.0", "Degraded", "port-down"] == 1
    assert not values(families(nodes.node(nodes.gpus(), nodes.kvm()))["fairlead_device_not_healthy"])


def test_what_no_pod_can_get_is_told_by_name_with_its_reason_and_of_thousands_the_first() -> None:
    labels = ("resource_name", "device", "name", "model", "reason")
    found = values(families(nodes.broken())["fairlead_device_not_offered"], *labels)
    assert found["nvidia.com/gpu", nodes.gpu(5).key, "nvidia5", "H100", "unusable"] == 1
    assert found["rdma/hca", nodes.hca(7).key, "mlx5_7", "ConnectX-7", "gone"] == 1
    assert len(found) == 3
    functions = tuple(replace(nodes.unusable(5), device=f"vf-{n}") for n in range(2000))
    many = families(nodes.node(unclaimed=functions))
    assert len(values(many["fairlead_device_not_offered"], *labels)) == 200
    assert values(many["fairlead_devices_not_offered"], "reason")[("unusable",)] == 2000


def test_a_device_is_told_with_what_people_call_it() -> None:
    found = values(families(nodes.busy())["fairlead_device_info"], "device", "name", "model")
    assert found[nodes.gpu(3).key, "nvidia3", "H100"] == 1


def test_who_has_what() -> None:
    found = values(families(nodes.busy())["fairlead_device_assigned"], "device", "namespace", "pod", "container")
    assert found[nodes.gpu(3).key, "training", "notebook-7d9f", "main"] == 1


def test_how_many_claims_have_devices_of_a_resource() -> None:
    """A claim has several devices, and several pods."""
    by_claim = [replace(Holder("training", f"job-{n}", "main"), claim=claim) for n, claim in enumerate("aab")]
    gpus = nodes.gpus()
    held = tuple(Held(f"id-{n}", (who,)) for n, who in enumerate((*by_claim, Holder("training", "job-9", "main"))))
    devices = (replace(gpus.devices[0], held=held[:2]), replace(gpus.devices[1], held=held[2:]), *gpus.devices[2:])
    found = families(nodes.node(replace(gpus, devices=devices), nodes.kvm()))["fairlead_claims_held"]
    assert values(found, "resource_name") == {("nvidia.com/gpu",): 2, ("devices.kubevirt.io/kvm",): 0}


def test_label_values_that_are_known_are_there_before_anything_happened() -> None:
    found = families(nodes.node(nodes.gpus()))
    gpu = "nvidia.com/gpu"
    assert values(found["fairlead_registrations"], "resource_name", "result") == {
        (gpu, "registered"): 0, (gpu, "refused"): 0, (gpu, "unreachable"): 0,
    }  # fmt: skip
    assert values(found["fairlead_allocations"], "resource_name", "result") == {
        (gpu, "granted"): 0, (gpu, "refused"): 0,
    }  # fmt: skip
    assert values(found["fairlead_health_transitions"], "reason") == {("healthy",): 0, ("gone",): 0}
    assert values(found["fairlead_backend_up"], "backend") == {("gpu",): 1}


def test_a_backend_that_cannot_list_its_units_is_down() -> None:
    assert values(families(nodes.busy())["fairlead_backend_up"], "backend") == {
        ("chardev",): 1, ("gpu",): 1, ("infiniband",): 1,
    }  # fmt: skip
    problem = replace(nodes.busy().problems[0], subject="infiniband")
    status = replace(nodes.busy(), problems=(problem,))
    assert values(families(status)["fairlead_backend_up"], "backend")[("infiniband",)] == 0


def test_a_reload_with_mistakes_is_not_successful() -> None:
    status = nodes.busy()
    status = replace(status, configuration=replace(status.configuration, mistakes=("3: no key 'x'",)))
    found = families(status)
    assert found["fairlead_config_last_reload_successful"].samples[0].value == 0
    assert found["fairlead_config_last_reload_timestamp_seconds"].samples[0].value == nodes.STARTED


def test_what_was_counted() -> None:
    counts = Counts()
    counts.updates = 7
    counts.uevents["pci", "add"] += 3
    counts.overflows = 1
    counts.hotplug.observe(0.002)
    counts.discovery["gpu"].observe(0.5)
    found = families(nodes.node(nodes.gpus()), counts)
    assert found["fairlead_list_and_watch_updates"].samples[0].value == 7
    assert values(found["fairlead_uevents"], "subsystem", "action") == {("pci", "add"): 3}
    assert found["fairlead_uevent_overflows"].samples[0].value == 1
    buckets = {it.labels.get("le"): it.value for it in found["fairlead_hotplug_latency_seconds"].samples}
    assert (buckets["0.001"], buckets["0.0025"], buckets["+Inf"]) == (0, 1, 1)
    assert [it.value for it in found["fairlead_discovery_duration_seconds"].samples[-2:]] == [0.5, 1]


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_a_label_is_read_as_it_was_written(text: str) -> None:
    it = Metric("x", "gauge", "A thing.", ("label",), lambda _: [(1, text)])
    text_of = "".join(written(it, Seen(nodes.busy(), Counts())))
    (family,) = text_string_to_metric_families(text_of)
    assert family.samples[0].labels == {"label": text}


@given(st.lists(st.floats(0, 100)))
def test_a_histogram_has_everything_in_its_bucket(seconds: list[float]) -> None:
    counted = Histogram()
    for one in seconds:
        counted.observe(one)
    below = 0
    for bound, number in zip(BOUNDS, counted.buckets, strict=False):
        below += number
        assert below == sum(one <= bound for one in seconds)
    assert sum(counted.buckets) == len(seconds)
    assert counted.total == pytest.approx(sum(seconds))


def test_pieces_are_small() -> None:
    pieces: Iterator[str] = exposition(nodes.many(1000), Counts())
    assert max(len(piece) for piece in pieces) < 1000
