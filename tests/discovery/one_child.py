"""Many cases in one isolated child process: its start costs more than they do."""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

from tests.e2e import hermetic


def run(module: str, cases: Mapping[str, Sequence[object]]) -> dict[str, Any]:
    """What each function of a module returns for these arguments, called in this order; where it raises, the traceback."""
    results: dict[str, Any] = hermetic.call(f"{__name__}:run_here", module, cases)
    return results


def run_here(module: str, cases: Mapping[str, Sequence[object]]) -> dict[str, Any]:
    """The same in this process."""
    functions, results = importlib.import_module(module), dict[str, Any]()
    for name, arguments in cases.items():
        try:
            results[name] = getattr(functions, name)(*arguments)
        except Exception:  # noqa: BLE001  # the test that asks for this case shows it
            results[name] = traceback.format_exc()
    return results
