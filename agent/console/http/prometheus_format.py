"""Prometheus' text format, version 0.0.4, line by line.

prometheus_client makes a whole exposition in one go and takes 20 us for each sample: 60 ms with 1,000 devices, in which
nothing else on the loop could run. A sample takes 1 us here. The tests have prometheus_client read it.
https://prometheus.io/docs/instrumenting/exposition_formats/
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Literal

from agent.runtime.counts import BOUNDS, Histogram

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
PREFIX: Final = "fairlead_"


def head(name: str, kind: Literal["gauge", "counter", "histogram"], meaning: str) -> str:
    """What comes before a metric's samples; `meaning` is one line."""
    return f"# HELP {PREFIX}{name} {meaning}\n# TYPE {PREFIX}{name} {kind}\n"


def sample(name: str, value: float, /, **labels: str) -> str:
    """One sample."""
    if not labels:
        return f"{PREFIX}{name} {value}\n"
    inside = ",".join([f'{label}="{_escaped(text)}"' for label, text in labels.items()])
    return f"{PREFIX}{name}{{{inside}}} {value}\n"


def histogram(name: str, counted: Histogram, **labels: str) -> Iterator[str]:
    """The samples of a histogram, each bucket with those before it."""
    so_far = 0
    for bound, number in zip((*map(str, BOUNDS), "+Inf"), counted.buckets, strict=True):
        so_far += number
        yield sample(f"{name}_bucket", so_far, **labels, le=bound)
    yield sample(f"{name}_sum", counted.total, **labels)
    yield sample(f"{name}_count", so_far, **labels)


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
