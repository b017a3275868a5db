"""Threads that read values of one type for the first time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

_CHILD: Final = """
import sys, threading
import msgspec
from backends.interface.decoding import converted, decoded

def read(start, kind):
    start.wait()
    assert {call} == kind(inner(name={{"one": 1}}))

sys.setswitchinterval(1e-6)
for _ in range(100):
    inner = msgspec.defstruct("Inner", [("name", "dict[str, int]"), ("more", "list[str] | None", None)])
    outer = msgspec.defstruct("Outer", [("inner", inner)])
    start = threading.Barrier(3)
    threads = [threading.Thread(target=read, args=(start, outer)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
"""


@pytest.mark.parametrize(
    "call",
    ["""decoded('{"inner": {"name": {"one": 1}}}', kind)""", """converted({"inner": {"name": {"one": 1}}}, kind)"""],
    ids=["json", "tables"],
)
def test_threads_may_read_a_type_for_the_first_time_at_once(call: str) -> None:
    """msgspec alone ends the process with SIGSEGV: for an operator, a daemon that crashed on its start, now and then."""
    child = [sys.executable, "-c", _CHILD.format(call=call)]
    ended = subprocess.run(child, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
