"""k8s-rdma-shared-dev-plugin: pools, and which of them may have the same adapters."""

from __future__ import annotations

import json
import tomllib
from typing import Any

import pytest

from tests.importing.helpers import imported, said


def pools(*selectors: dict[str, Any]) -> list[bool]:
    """Which of the pools with these selectors may overlap."""
    listed = [{"resourceName": f"p{n}", "rdmaHcaMax": 2, "selectors": it} for n, it in enumerate(selectors)]
    resources = tomllib.loads(imported(json.dumps({"configList": listed})).toml)["resource"]
    return [resource.get("overlap", False) for resource in resources]


@pytest.mark.parametrize(
    ("selectors", "overlap"),
    [
        ([{"ifNames": ["ib0"]}], [False]),
        ([{"ifNames": ["ib0"]}, {"ifNames": ["ib1"]}], [False, False]),
        ([{"ifNames": ["ib0", "ib1"]}, {"ifNames": ["ib1"]}], [True, True]),
        ([{"vendors": ["15b3"]}, {"vendors": ["15B3"], "deviceIDs": ["1017"]}], [True, True]),
        ([{"vendors": ["15b3"]}, {"vendors": ["14e4"]}, {"ifNames": ["ib7"]}], [True, True, True]),
        ([{"vendors": ["15b3"], "ifNames": ["ib0"]}, {"vendors": ["14e4"], "ifNames": ["ib0"]}], [False, False]),
    ],
)
def test_pools_that_may_have_the_same_adapters_say_so(selectors: list[dict[str, Any]], overlap: list[bool]) -> None:
    assert pools(*selectors) == overlap


@pytest.mark.parametrize(
    ("most", "remark"), [(0, "note: p: rdmaHcaMax is 0"), (None, "note: p: "), (-1, "p: 'rdmaHcaMax'")]
)
def test_a_pool_without_tokens_is_left_out_and_told(most: int | None, remark: str) -> None:
    found = imported(json.dumps({"configList": [{"resourceName": "p", "rdmaHcaMax": most, "devices": ["ib0"]}]}))
    assert "[[resource]]" not in found.toml
    assert said(found)[0].startswith(f"1: {remark}")
