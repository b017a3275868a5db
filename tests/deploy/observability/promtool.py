"""Has promtool try rules and queries on what Fairlead's own exposition says at one moment after another."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import yaml
from prometheus_client.parser import text_string_to_metric_families

from agent.console.http.metrics import exposition
from agent.console.views import Status
from agent.runtime.counts import Counts
from tests.deploy.manifests import REPOSITORY

KIT: Final = REPOSITORY / "deploy/observability"
RULES: Final = (KIT / "alerts.yaml", KIT / "fleet.yaml")

_FETCHED: Final = REPOSITORY / "build/promtool/usr/bin/promtool"
_JOB: Final = "fairlead/fairlead"  # as Prometheus' operator names a PodMonitor's

Series = dict[str, float]
"""What is exposed at one moment: a series as PromQL writes it → its value."""


def promtool() -> str | None:
    """The one that `make build/promtool/.ready` fetched: that of Debian 12 knows no Kubernetes. None: there is none."""
    return str(_FETCHED) if _FETCHED.exists() else None


def groups() -> list[dict[str, Any]]:
    """All groups of rules, those that others build on first."""
    return [group for file in RULES for group in yaml.safe_load(file.read_text())["groups"]]


def rules() -> list[dict[str, Any]]:
    """All of them, alerts and records."""
    return [rule for group in groups() for rule in group["rules"]]


def scraped(node: str, status: Status | None, counts: Counts | None = None, **labels: str) -> Series:
    """What Prometheus has of a node; None: Fairlead does not answer there."""
    target = {"node": node, "instance": f"{node}:9440", "job": _JOB, **labels}
    found = {_series("up", target): float(status is not None)}
    if status is not None:
        for family in text_string_to_metric_families("".join(exposition(status, counts or Counts()))):
            for it in family.samples:  # honor_labels: those of the sample go before the target's
                found[_series(it.name, {**target, **it.labels})] = it.value
    return found


def placed(node: str, zone: str, rack: str, **labels: str) -> Series:
    """What kube-state-metrics tells of a node."""
    place = {"label_topology_kubernetes_io_zone": zone, "label_topology_kubernetes_io_rack": rack}
    return {_series("kube_node_labels", {"node": node, "job": "kube-state-metrics", **place, **labels}): 1.0}


@dataclass(frozen=True)
class Try:
    """Queries with the labels of what they have to give, at moments of a course of events."""

    name: str
    course: Sequence[tuple[int, Series]]
    """From which step on what is exposed."""
    asked: list[tuple[int, str, list[dict[str, str]]]] = field(default_factory=list)
    """Step, query, the labels of each sample (its value is 1)."""
    step: str = "1m"

    def group(self) -> dict[str, Any]:
        """As promtool has it."""
        end = max((step for step, _, _ in self.asked), default=0)
        tests = [
            {
                "expr": query,
                "eval_time": f"{step * int(self.step[:-1])}{self.step[-1]}",
                "exp_samples": [{"labels": _series("", labels), "value": 1} for labels in samples],
            }
            for step, query, samples in self.asked
        ]
        return {
            "name": self.name,
            "interval": self.step,
            "input_series": [{"series": it, "values": values} for it, values in _values(self.course, end)],
            "promql_expr_test": tests,
        }


def complaints(directory: Path, tries: Iterable[Try]) -> str:
    """What promtool has against them; empty: all is as they say."""
    by_step: dict[str, list[Try]] = {}
    for one in tries:
        by_step.setdefault(one.step, []).append(one)
    said = ""
    for step, group in by_step.items():
        file = directory / f"{step}.yaml"
        document = {
            "rule_files": [str(file) for file in RULES],
            "group_eval_order": [it["name"] for it in groups()],  # else by chance, and a step later now and then
            "evaluation_interval": step,
            "tests": [one.group() for one in group],
        }
        file.write_text(json.dumps(document))
        command = [promtool() or "promtool", "test", "rules", str(file)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        said += done.stdout + done.stderr if done.returncode else ""
    return said


def _series(name: str, labels: Mapping[str, str]) -> str:
    return name + "{" + ", ".join(f"{label}={json.dumps(labels[label])}" for label in sorted(labels)) + "}"


def _values(course: Sequence[tuple[int, Series]], end: int) -> Iterable[tuple[str, str]]:
    """Each series with its values from step to step; one that is exposed no more is stale."""
    begins = [step for step, _ in course]
    ends = [*begins[1:], max(end, begins[-1]) + 1]
    for series in dict.fromkeys(it for _, exposed in course for it in exposed):
        values, was = [], False
        for begin, until, exposed in zip(begins, ends, (it for _, it in course), strict=True):
            steps = until - begin - 1
            if series in exposed:
                values.append(f"{exposed[series]:f}x{steps}")
                was = True
            else:
                values += ["stale" if was else "_", f"_x{steps}" if steps else ""]
                was = False
        yield series, " ".join(values)
