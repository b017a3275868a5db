"""The alerts: each fires for what it is about, where that is, when it has lasted; and has its section in docs/alerts.md."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from msgspec.structs import replace

from agent.console.views import Problem, Status
from agent.runtime.counts import Counts
from tests.console.http import nodes
from tests.deploy.manifests import REPOSITORY
from tests.deploy.observability.promtool import KIT, RULES, Series, Try, complaints, placed, rules, scraped
from tests.needs import skip_without

ALERTS = {rule["alert"]: rule for rule in rules() if "alert" in rule}

WELL = nodes.node(nodes.gpus(), nodes.kvm(10, 3))
GPU = "nvidia.com/gpu"
FALLEN = nodes.gpu(3).key


def one_changed(**changes: Any) -> Status:
    """A node whose GPUs' resource is so."""
    return replace(WELL, resources=(replace(WELL.resources[0], **changes), WELL.resources[1]))


def with_fallen(number: int, **how: Any) -> Status:
    """A node on which so many GPUs are so, those that pods hold last."""
    first, *others = WELL.resources
    bad = {1: (3,)}.get(number, (2, 4, 5, 6, 7, 3, 1, 0)[:number])
    devices = (replace(it, **(how or nodes.FALLEN)) if n in bad else it for n, it in enumerate(first.devices))
    return replace(WELL, resources=(replace(first, devices=tuple(devices)), *others))


def with_problem(backend: str, subject: str) -> Status:
    return replace(WELL, problems=(Problem(backend, subject, "it is so"),))


def counted(count: Callable[[Counts], object]) -> Counts:
    counts = Counts()
    counts.allocations[GPU, "refused"] = 0
    count(counts)
    return counts


def observed(counts: Counts, *seconds: float) -> None:
    for one in seconds:
        counts.lateness.observe(one)
        counts.allocating.observe(one)


def lost(counts: Counts) -> None:
    counts.lost_lines = lambda: 3


def registered(counts: Counts) -> None:
    counts.registrations[GPU, "registered"] = 9


def refused(counts: Counts) -> None:
    counts.allocations[GPU, "refused"] = 1


def overflowed(counts: Counts) -> None:
    counts.overflows = 5


def on_bad(status: Status | None, count: Callable[[Counts], object] = lambda _: None) -> Series:
    return scraped("bad", status, counted(count))


def descriptors(number: int) -> Series:
    it = scraped("bad", WELL)
    most = next(value for series, value in it.items() if series.startswith("process_max_fds"))
    (name,) = (series for series in it if series.startswith("process_open_fds"))
    return {**it, name: most * number / 100}


@dataclass(frozen=True)
class Case:
    """When an alert fires on the node that is called bad, while another one is well all the time."""

    fires: int
    """The first step at which it does."""
    what: Mapping[int, Series]
    """What is exposed from which step on; before, all is well."""
    where: Mapping[str, str]
    """Labels of the alert that fires."""
    besides: tuple[str, ...] = ()
    """Other alerts that fire then."""
    step: str = "1m"
    beside: Series | None = None
    """What else is exposed all the time."""
    quiet: int | None = None
    """The last step at which it does not fire, where that is not the one before."""


BAD = {"node": "bad"}
RESOURCE = {**BAD, "resource_name": GPU}
DEVICE = {**RESOURCE, "device": FALLEN, "reason": "xid-79"}

CASES = {
    "FairleadDeviceInTwoPods": Case(
        6,
        {5: on_bad(with_fallen(1, state="Unhealthy", reason="two-pods", message="two pods hold it"))},
        {**DEVICE, "reason": "two-pods"},
    ),
    "FairleadDown": Case(10, {5: on_bad(None)}, BAD),
    "FairleadMissing": Case(75, {30: {}}, BAD),
    "FairleadRestarting": Case(8, {at: on_bad(replace(WELL, started=WELL.started + at)) for at in (2, 4, 6, 8)}, BAD),
    "FairleadPartDead": Case(6, {5: on_bad(with_problem("", "watchdog"))}, BAD),
    "FairleadLoopBlocked": Case(5, {5: on_bad(WELL, lambda it: observed(it, *[0.001] * 40, 0.6, 0.6))}, BAD),
    "FairleadProblem": Case(20, {5: on_bad(with_problem("gpu", FALLEN))}, {**BAD, "part": "gpu"}),
    "FairleadStandbyWaits": Case(35, {5: on_bad(replace(WELL, standing_by=True))}, BAD),
    "FairleadDescriptorsShort": Case(10, {5: descriptors(81)}, BAD),
    "FairleadLogLinesLost": Case(5, {5: on_bad(WELL, lost)}, BAD),
    "FairleadReloadRefused": Case(
        10, {5: on_bad(replace(WELL, configuration=replace(WELL.configuration, mistakes=("3: no key 'x'",))))}, BAD
    ),
    "FairleadStateNotKept": Case(10, {5: on_bad(with_problem("", "state"))}, BAD),
    "FairleadNotRegistered": Case(7, {5: on_bad(one_changed(registered=False, streaming=False))}, RESOURCE),
    "FairleadOvertaken": Case(6, {5: on_bad(one_changed(registered=False, complaint="another plugin"))}, RESOURCE),
    "FairleadRegistersAgain": Case(5, {5: on_bad(WELL, registered)}, RESOURCE),
    "FairleadAllocationsRefused": Case(5, {5: on_bad(WELL, refused)}, RESOURCE),
    "FairleadAllocateSlow": Case(10, {5: on_bad(WELL, lambda it: observed(it, *[0.001] * 7, 3.0))}, BAD),
    "FairleadDeviceUnhealthy": Case(10, {5: on_bad(with_fallen(1))}, DEVICE, ("FairleadPodHasBadDevice",)),
    "FairleadPodHasBadDevice": Case(6, {5: on_bad(with_fallen(1))}, DEVICE),
    "FairleadDeviceDegraded": Case(
        65,
        {5: on_bad(with_fallen(1, state="Degraded", reason="pcie-width"))},
        {**RESOURCE, "device": FALLEN, "reason": "pcie-width"},
    ),
    "FairleadDeviceFlapping": Case(  # of a minute
        10,
        {5: on_bad(with_fallen(1, state="Unhealthy", reason="flapping")), 6: on_bad(WELL)},
        {**RESOURCE, "device": FALLEN},
        quiet=4,
    ),
    "FairleadDrainForgotten": Case(
        173,
        {5: on_bad(with_fallen(1, state="Unhealthy", reason="drained"))},
        {**RESOURCE, "device": FALLEN},
        step="1h",
    ),
    "FairleadDevicesNotOffered": Case(
        15, {5: on_bad(replace(WELL, unclaimed=(nodes.unusable(3),)))}, {**RESOURCE, "reason": "unusable"}
    ),
    "FairleadBackendDown": Case(10, {5: on_bad(with_problem("gpu", "gpu"))}, {**BAD, "backend": "gpu"}),
    "FairleadKernelEventsLost": Case(5, {5: on_bad(WELL, overflowed)}, BAD),
    "FairleadModelFails": Case(
        20,
        {5: on_bad(with_fallen(5))},
        {"model": "H100"},
        ("FairleadDeviceUnhealthy",),
    ),
    "FairleadRackFails": Case(
        20,
        {5: on_bad(with_fallen(5))},
        {"zone": "z1", "rack": "r7"},
        ("FairleadDeviceUnhealthy", "FairleadModelFails"),
        beside={**placed("bad", "z1", "r7"), **placed("good", "z1", "r8")},
    ),
    "FairleadOffersFewer": Case(
        31,
        {30: on_bad(with_fallen(1, state="Unhealthy", reason="drained"))},
        RESOURCE,
        step="1h",
    ),
    "FairleadVersionsMixed": Case(29, {5: on_bad(replace(WELL, version="0.2.0"))}, {}, step="1h"),
}


def attempt(alert: str, case: Case) -> Try:
    """The case as promtool is told it: a step earlier the alert does not fire, then it and those besides it do."""
    beside = {**scraped("good", WELL), **(case.beside or {})}
    course = [(0, {**on_bad(WELL), **beside}), *((at, {**it, **beside}) for at, it in sorted(case.what.items()))]
    firing = f'ALERTS{{alertname="{alert}",alertstate="firing"}}'
    names = [{"alertname": name} for name in sorted((alert, *case.besides))]
    asked: list[tuple[int, str, list[dict[str, str]]]] = [
        (case.fires - 1 if case.quiet is None else case.quiet, firing, []),
        (case.fires, f"group by ({', '.join(case.where) or 'alertname, job'}) ({firing})",
         [dict(case.where) or {"alertname": alert}]),
        (case.fires, 'group by (alertname) (ALERTS{alertstate="firing"})', names),
    ]  # fmt: skip
    return Try(alert, course, asked, case.step)


def test_each_alert_fires_where_and_when_it_should_and_no_other_with_it(tmp_path: Path) -> None:
    skip_without("promtool (make build/promtool/.ready)")
    assert not complaints(tmp_path, [attempt(alert, case) for alert, case in CASES.items()])


def test_what_one_alert_says_no_other_says_again_later(tmp_path: Path) -> None:
    skip_without("promtool (make build/promtool/.ready)")
    lasting = {
        "FairleadDown": on_bad(None),
        "FairleadPartDead": on_bad(with_problem("", "watchdog")),
        "FairleadStateNotKept": on_bad(with_problem("", "state")),
        "FairleadStandbyWaits": on_bad(replace(WELL, standing_by=True, resources=(replace(WELL.resources[0], registered=False),))),
    }  # fmt: skip
    query = 'group by (alertname) (ALERTS{alertstate="firing"})'
    tries = [
        Try(alert, [(0, on_bad(WELL)), (30, exposed)], [(at, query, [{"alertname": alert}]) for at in (62, 75, 80)])
        for alert, exposed in lasting.items()
    ]
    assert not complaints(tmp_path, tries)


def test_every_alert_is_tried() -> None:
    assert CASES.keys() == ALERTS.keys()


def test_a_drain_an_update_a_reload_and_a_pod_of_another_plugin_alarm_nobody(tmp_path: Path) -> None:
    skip_without("promtool (make build/promtool/.ready)")
    drained = with_fallen(6, state="Unhealthy", reason="drained")
    waiting = tuple(replace(it, registered=False, streaming=False, devices=()) for it in WELL.resources)
    course = [
        (0, scraped("a", WELL)),
        (10, scraped("a", drained)),
        (100, {**scraped("a", drained), **scraped("a", replace(WELL, standing_by=True, resources=waiting), instance="b")}),
        (105, scraped("a", replace(WELL, started=WELL.started + 1), instance="b")),
        (120, scraped("a", with_fallen(3, state="Unhealthy", reason="held"), instance="b")),
    ]  # fmt: skip
    moments = (1, 30, 99, 101, 104, 106, 119, 150, 200)
    assert not complaints(tmp_path, [Try("well", course, [(at, 'ALERTS{alertstate="firing"}', []) for at in moments])])


def test_what_a_rule_says_of_a_rack_counts_a_node_once_whatever_is_known_of_its_place(tmp_path: Path) -> None:
    skip_without("promtool (make build/promtool/.ready)")
    moved = scraped("a", replace(WELL, standing_by=True), instance="other")
    exposed = {**scraped("a", WELL), **moved, **scraped("b", with_fallen(2)), **placed("a", "z", "r")}
    of = "cluster_zone_rack_model:fairlead_device"
    h100, here = {"model": "H100"}, {"zone": "z", "rack": "r"}
    asked: list[tuple[int, str, list[dict[str, str]]]] = [
        (2, f'{of}:sum{{model!=""}} == bool 8', [{**h100, **here}, h100]),
        (2, f'{of}:sum{{model=""}} == bool 1', [here, {}]),
        (2, f'{of}_healthy:sum{{model!="",rack=""}} == bool 6', [h100]),
        (2, f'{of}_failing:sum{{model!="",rack=""}} == bool 2', [h100]),
        (2, f'{of}_in_use:sum{{model!="",rack="r"}} == bool 3', [{**h100, **here}]),
        (2, 'cluster_node_resource:fairlead_offered:sum{resource_name="nvidia.com/gpu",node="b"} == bool 6',
         [{"node": "b", "resource_name": GPU}]),
    ]  # fmt: skip
    assert not complaints(tmp_path, [Try("racks", [(0, exposed)], asked)])


# --- what is written about them ---


def test_every_alert_has_its_section_with_a_first_command_and_how_it_ends() -> None:
    text = (REPOSITORY / "docs/alerts.md").read_text()
    sections = dict(re.findall(r"^## (Fairlead\w+)\n(.*?)(?=^## |\Z)", text, flags=re.MULTILINE | re.DOTALL))
    assert sections.keys() == ALERTS.keys()
    for name, rule in ALERTS.items():
        assert rule["annotations"]["runbook"] == f"docs/alerts.md#{name.lower()}"
        for part in ("**It means**", "**First**", "**It ends**"):
            assert part in sections[name], (name, part)
        assert f"`{rule['labels']['severity']}`" in sections[name], name


def test_the_operators_objects_have_the_same_rules() -> None:
    objects = list(yaml.safe_load_all((KIT / "prometheus-rules.yaml").read_text()))
    specs = [yaml.safe_load(file.read_text()) for file in RULES]
    assert [it["spec"] for it in objects] == specs, "make rules"
    assert [it["metadata"]["name"] for it in objects] == ["fairlead-alerts", "fairlead-fleet"]


@pytest.mark.parametrize("name", sorted(ALERTS))
def test_an_alert_says_what_is_the_matter_and_where(name: str) -> None:
    rule = ALERTS[name]
    assert rule.keys() >= {"expr", "labels", "annotations"}
    assert rule["labels"]["severity"] in ("critical", "warning", "info")
    assert rule["annotations"].keys() == {"summary", "description", "runbook"}
    for label in re.findall(r"\$labels\.(\w+)", str(rule["annotations"])):
        assert label == "instance" or label in CASES[name].where, label
