"""Fairlead passes its own suite, with the kubelets until 1.36 and from 1.37 on."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from agent.simulation.conformance.checks import CHECKS
from agent.simulation.conformance.process import used_by
from agent.simulation.conformance.stage import Terms
from agent.simulation.conformance.suite import Check, Outcome, run
from agent.simulation.conformance.timeline import Used
from agent.simulation.demo_stage import write_stub_file
from agent.simulation.model import Version
from tests.backends import machines
from tests.backends.trees import plant
from tests.e2e.process import AgentProcess

PATIENCE = 300.0  # seconds; only a bug reaches them
ROUNDS = 100  # restarts of each kubelet in the checks of many
_CONFIG = """
[agent]
plugin_dir = "{root}/device-plugins"
kubelet_root = "{root}"
state_dir = "{root}/state"
admin_socket = "{root}/admin.sock"
uevents = "off"

[host]
dev = "{root}/dev"
sys = "{root}/sys"
proc = "{root}/proc"
{resources}"""
STUB = """
[[resource]]
name = "fl.test/stub"
backend = "stub"
devices = [{{ count = 4, numa_node = 0 }}]
file = "{root}/hardware/stub"

[[resource]]
name = "fl.test/null"
backend = "chardev"
paths = [{{ path = "/dev/null" }}]

[[resource]]
name = "fl.test/empty"
backend = "stub"
devices = 0
"""
GPUS = """
[[resource]]
name = "nvidia.com/gpu"
backend = "gpu"
select = {{ vendor = "10de" }}
pre_start = "check"
"""
OF_GPUS = {"choosing"}
NOT_APPLICABLE = {
    "registration-options-agree",  # our Register has no options
    "allocate-absolute-paths",  # the backend `stub` gives containers a variable
    "allocate-paths-exist",
    "allocate-permissions",
    "allocate-cdi-names",
    "unplug-refuses",  # what is gone leaves the list, unless a pod has it
}


class Forked:
    """`fairlead run`, forked from a process that has imported it."""

    def __init__(self, config: Path) -> None:
        self._process = AgentProcess(config)
        self._stack = AsyncExitStack()

    async def start(self) -> None:
        await self._stack.enter_async_context(self._process)

    def signal(self, number: int) -> None:
        self._process.signal(number)

    async def ended(self) -> int:
        return await self._process.ended()

    def last_words(self) -> str:
        return ""

    def usage(self, label: str, at: float) -> Used | None:
        return used_by(self._process.pid, label, at)

    async def close(self) -> None:
        await self._stack.aclose()


async def not_passed(root: Path, resources: str, version: Version, checks: list[Check]) -> dict[str, str]:
    """The checks that Fairlead does not pass, and why."""
    stub, config = root / "hardware" / "stub", root / "config.toml"
    stub.parent.mkdir()
    config.write_text(_CONFIG.format(root=root, resources=resources.format(root=root)))

    async def unplug() -> None:
        write_stub_file(stub, "stub-1 gone\n")

    async def plug() -> None:
        write_stub_file(stub, "")

    terms = Terms(
        lambda _: Forked(config),
        root,
        version,
        PATIENCE,
        rounds=ROUNDS,
        hooks={"unplug": unplug, "plug": plug},
        state=(root / "state",),
    )
    results = [result async for result in run(checks, terms)]
    return {it.check.name: f"{it.outcome}: {it.why}" for it in results if it.outcome is not Outcome.PASS}


@pytest.mark.timeout(900)  # 35 s, many times that on a busy machine; both at once, since most of it is waiting
async def test_fairlead_passes_every_check_with_both_kubelets(tmp_path: Path) -> None:
    checks = [it for it in CHECKS if it.subject not in OF_GPUS]
    versions: tuple[Version, Version] = ("1.36", "1.37")
    for version in versions:
        (tmp_path / version).mkdir()
    tried = (not_passed(tmp_path / version, STUB, version, checks) for version in versions)
    for version, found in zip(versions, await asyncio.gather(*tried), strict=True):
        assert not [why for why in found.values() if not why.startswith(Outcome.NOT_APPLICABLE)], (version, found)
        assert found.keys() == NOT_APPLICABLE | ({"stream-ended"} if version == "1.37" else set())


async def test_fairlead_chooses_gpus_as_a_kubelet_asks(tmp_path: Path) -> None:
    plant(tmp_path, machines.hgx_h100())
    assert await not_passed(tmp_path, GPUS, "1.36", [it for it in CHECKS if it.subject in OF_GPUS]) == {}
