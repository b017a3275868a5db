"""The dashboards: each query gives data, with the labels that a panel shows, from what Fairlead and our rules expose."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from msgspec.structs import replace

from agent.runtime.counts import Counts
from tests.console.http import nodes
from tests.deploy.observability.promtool import KIT, Series, Try, complaints, placed, rules, scraped
from tests.deploy.observability.test_alerts import WELL, with_fallen
from tests.needs import skip_without

FILES = sorted((KIT / "dashboards").glob("*.json"))
BOARDS: dict[str, dict[str, Any]] = {file.stem: json.loads(file.read_text()) for file in FILES}

RATES = "3h"  # of samples an hour apart
FLEET_LABELS = {"cluster", "node", "instance", "job", "zone", "rack"}
OTHERS = {"up", "kube_node_labels", "label_topology_kubernetes_io_zone", "label_topology_kubernetes_io_rack"}
"""What Prometheus and kube-state-metrics tell."""


def counts(times: int) -> Counts:
    """A daemon that has seen a little of everything, so often."""
    it = Counts()
    it.updates, it.overflows = times, times
    it.uevents["pci", "add"] = times
    for result in ("granted", "refused"):
        it.allocations["nvidia.com/gpu", result] = times
    for _ in range(times):
        for one in (it.allocating, it.preferring, it.hotplug, it.lateness, it.discovery["gpu"]):
            one.observe(0.002)
    return it


def fleet() -> list[tuple[int, Series]]:
    """A day on two nodes: one does not answer, and on the other a bit of everything goes wrong in the last hour."""
    beside = {**scraped("b", None, cluster="c"), **placed("a", "z", "r", cluster="c")}
    bad = replace(
        with_fallen(1), resources=(*with_fallen(1).resources, *nodes.busy().resources[3:]),
        unclaimed=(nodes.unusable(4),), problems=nodes.busy().problems,
    )  # fmt: skip
    return [
        (0, {**scraped("a", WELL, counts(0), cluster="c"), **beside}),
        (25, {**scraped("a", bad, counts(9), cluster="c"), **beside}),
    ]


class Query(NamedTuple):
    panel: str
    expression: str
    labels: tuple[str, ...]
    """Those that the panel shows of each sample."""


def queries(board: dict[str, Any]) -> Iterator[Query]:
    for panel in board["panels"]:
        columns = [
            name
            for step in panel.get("transformations", ())
            for name in step["options"].get("renameByName", ())
            if not name.startswith("Value")
        ]
        for target in panel.get("targets", ()):
            shown = re.findall(r"\{\{(\w+)\}\}", target.get("legendFormat", ""))
            yield Query(panel["title"], target["expr"], (*columns, *shown))
    for variable in board["templating"]["list"][1:]:
        found = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"]["query"])
        assert found is not None
        yield Query(f"${variable['name']}", found[1], (found[2],))


def written_out(expression: str) -> str:
    """As Grafana asks it where everything is chosen."""
    return re.sub(r"\$\w+", ".*", expression.replace("$__rate_interval", RATES))


EACH = [(name, query) for name, board in BOARDS.items() for query in queries(board)]


def asks(query: Query) -> Iterator[str]:
    """What must give nothing, as it asks for what is missing."""
    expression = written_out(query.expression)
    yield f"absent({expression})"
    for label in query.labels:
        marked = f'label_replace({expression}, "found", "yes", "{label}", ".+")'
        yield f'absent({marked} and on (found) label_replace(vector(1), "found", "yes", "", ""))'


def test_every_query_gives_data_with_what_its_panel_shows_of_it(tmp_path: Path) -> None:
    skip_without("promtool (make build/promtool/.ready)")
    tries = [
        Try(name, fleet(), [(26, ask, []) for of, query in EACH for ask in asks(query) if of == name], "1h")
        for name in BOARDS
    ]
    assert not complaints(tmp_path, tries)


def test_every_metric_and_label_of_a_rule_or_panel_is_one_that_there_is() -> None:
    exposed = [series for _, moment in fleet() for series in moment]
    metrics = {series.partition("{")[0] for series in exposed} | {rule.get("record", "") for rule in rules()}
    labels = {label for series in exposed for label in re.findall(r"(\w+)=", series)} | FLEET_LABELS | OTHERS
    for expression in (*(rule["expr"] for rule in rules()), *(query.expression for _, query in EACH)):
        bare = re.sub(r'"[^"]*"', '""', expression)
        named = set(re.findall(r"\b(?:(?:fairlead|process)_\w+|cluster_[a-z_]+:\w+:\w+|up|kube_\w+)\b", bare))
        assert named <= metrics | OTHERS, (named - metrics, expression)
        asked = {label for inner in re.findall(r"\{([^}]*)\}", bare) for label in re.findall(r"(\w+)[=!]", inner)}
        lists = re.findall(r"\b(?:by|on|ignoring|group_left) \(([^)]*)\)", bare)
        asked |= {label for inner in lists for label in re.findall(r"\w+", inner)}
        assert asked <= labels, (asked - labels, expression)


@pytest.mark.parametrize("name", sorted(BOARDS))
def test_a_dashboard_can_be_taken_in_by_grafana(name: str) -> None:
    board = BOARDS[name]
    assert board["uid"] == name
    assert board["schemaVersion"] >= 36  # data sources by uid
    assert "id" not in board  # Grafana gives it
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    source = board["templating"]["list"][0]
    assert (source["type"], source["query"], source["name"]) == ("datasource", "prometheus", "datasource")
    for it in (*board["templating"]["list"][1:], *(it for it in board["panels"] if it["type"] != "row")):
        assert it["datasource"] == {"type": "prometheus", "uid": "${datasource}"}, it
    variables = {f"${it['name']}" for it in board["templating"]["list"]} | {"$__rate_interval"}
    for query in queries(board):
        assert set(re.findall(r"\$\w+", query.expression)) <= variables, query


@pytest.mark.parametrize("name", sorted(BOARDS))
def test_panels_stand_side_by_side_and_each_has_a_title(name: str) -> None:
    taken = set[tuple[int, int]]()
    for panel in BOARDS[name]["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24, panel["title"]
        cells = {(place["x"] + n, place["y"] + m) for n in range(place["w"]) for m in range(place["h"])}
        assert not cells & taken, panel["title"]
        assert panel["title"]
        taken |= cells
    rows = [panel["gridPos"]["y"] for panel in BOARDS[name]["panels"]]
    assert all(one <= other for one, other in pairwise(rows))


def test_a_link_of_a_table_leads_to_the_other_dashboard() -> None:
    linked = set(re.findall(r"/d/([\w-]+)", "".join(file.read_text() for file in FILES)))
    assert linked == set(BOARDS)
