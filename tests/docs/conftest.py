"""A node for the pages' commands: eight GPUs, a pod that has one, a daemon, and `fairlead` on the path."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from pathlib import Path

import click
import pytest

from agent.cli.commands import fairlead
from tests.backends import machines
from tests.backends.trees import plant
from tests.docs.pages import REPOSITORY
from tests.docs.terminals import Terminals
from tests.e2e.kmsg import KernelLog
from tests.e2e.node import Node, pod
from tests.e2e.process import MAIN

_GPUS = '[[resource]]\nname = "nvidia.com/gpu"\nbackend = "gpu"\nselect = { vendor = "10de" }\n'
_ROOT = click.Context(fairlead)
_COMMANDS = {name: fairlead.get_command(_ROOT, name) for name in fairlead.list_commands(_ROOT)}
_WITH_A_CONFIGURATION = "|".join(
    name for name, it in _COMMANDS.items() if any("--config" in of.opts for of in it.params)
)
_SHIM = f"""\
#!/bin/bash
# The pages rely on the configuration and the daemon that a node has: here they are a test's.
export PYTHONPATH={REPOSITORY}
case $1 in {_WITH_A_CONFIGURATION}) set -- "$1" --config "$FAIRLEAD_OF_THIS_TEST" "${{@:2}}" ;; esac
[ "$*" != validate ] || set -- validate "$FAIRLEAD_OF_THIS_TEST"
exec {sys.executable} -c '{MAIN.replace("'", '"')}' "$@"
"""


@pytest.fixture
async def terminals(tmp_path: Path) -> AsyncIterator[Terminals]:
    """Terminals in an empty directory on a node whose daemon runs."""
    (tmp_path / "node").mkdir()
    node = Node(tmp_path / "node")
    plant(node.root, machines.hgx_h100())
    reading = tmp_path / "reading"
    reading.mkdir()
    shim = tmp_path / "bin" / "fairlead"
    shim.parent.mkdir()
    shim.write_text(_SHIM)
    shim.chmod(0o755)
    environment = {"FAIRLEAD_OF_THIS_TEST": str(node.root / "config.toml")}
    sys_, proc = str(node.root / "sys"), str(node.root / "proc")
    with KernelLog(node.dev / "kmsg"):
        async with node.kubelet, node.agent(_GPUS, sys=sys_, proc=proc):
            await node.admit(pod("trainer", "nvidia.com/gpu"))
            async with Terminals(reading, [shim.parent], environment) as terminals:
                yield terminals
