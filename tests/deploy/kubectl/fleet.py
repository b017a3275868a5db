"""A cluster as kubectl shows it: its answers are those of the real commands, asked of made-up daemons and recorded."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import msgspec
from click.testing import CliRunner

from agent.cli.commands import fairlead
from agent.runtime.errors import FairleadError
from tests.cli.daemon import running
from tests.console.fakes import FakeDaemon
from tests.deploy.manifests import REPOSITORY

PLUGIN: Final = REPOSITORY / "deploy/kubectl/kubectl-fairlead"

Result = subprocess.CompletedProcess[str]
Said = Callable[[Sequence[str]], Result]
"""What a node's `fairlead` answers to arguments."""


def plugin() -> ModuleType:
    """kubectl-fairlead as a module."""
    loader = SourceFileLoader("kubectl_fairlead", str(PLUGIN))
    spec = importlib.util.spec_from_loader("kubectl_fairlead", loader)
    assert spec is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # dataclasses look for it there
    loader.exec_module(module)
    return module


def ended(code: int = 0, stdout: str = "", stderr: str = "") -> Result:
    """As kubectl ends that ran a command in a pod."""
    frame = f"command terminated with exit code {code}\n" if code else ""
    return subprocess.CompletedProcess((), code, stdout, stderr + frame)


class Recorder:
    """Runs the real commands against a made-up daemon and keeps what they print, so that a thousand nodes say the same."""

    _lock = threading.Lock()
    """The runner puts files of its own in the place of the process's output: one at a time."""

    def __init__(self, daemon: FakeDaemon, directory: Path) -> None:
        self._daemon, self._directory = daemon, directory
        self._kept: dict[tuple[str, ...], Result] = {}
        directory.mkdir()
        (directory / "config.toml").write_text(f'[agent]\nadmin_socket = "{directory}/a.sock"\n')

    def __call__(self, arguments: Sequence[str]) -> Result:
        with self._lock:
            if (known := self._kept.get(tuple(arguments))) is None:
                with running(self._daemon, self._directory / "a.sock"):
                    known = self._kept[tuple(arguments)] = self._run(list(arguments))
        return known

    def _run(self, arguments: list[str]) -> Result:
        command, *others = arguments
        done = CliRunner().invoke(fairlead, [command, "--config", str(self._directory / "config.toml"), *others])
        if isinstance(done.exception, FairleadError):  # `main` shows it
            return ended(done.exception.exit_code, stderr=f"{done.exception.sentence}\n")
        return ended(done.exit_code, done.stdout, done.stderr)


def findings(*found: Any) -> Result:
    """As `fairlead doctor --json` prints them, and ends."""
    worst = max((it.level for it in found), default=0)
    return ended(int(worst), msgspec.json.encode({"findings": found}).decode() + "\n")


@dataclass
class Kubectl:
    """Takes the place of `subprocess.run`."""

    nodes: dict[str, Said] = field(default_factory=dict)
    """Those with a pod that runs, and what it answers."""
    pods: list[dict[str, Any]] = field(default_factory=list)
    """Others."""
    beneath: dict[str, Said] = field(default_factory=dict)
    """What those answer, if they do."""
    labels: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Selector → nodes."""
    refusal: str = ""
    """Of the API server, for whatever is asked."""
    asked: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)
    """Node and command."""
    barrier: threading.Barrier | None = None
    """Of so many commands at once; more wait for ever."""

    def run(self, command: Sequence[str], **options: Any) -> Result:
        """What kubectl would answer."""
        assert command[0] == "kubectl"
        assert (options["timeout"], options["stdin"]) == (30, subprocess.DEVNULL)
        words = [it for it in command[1:] if not it.startswith(("--context=", "--kubeconfig="))]
        if self.refusal:
            return ended(1, stderr=self.refusal)
        if words[0] == "get":
            return ended(stdout=json.dumps({"items": self._get(words)}))
        assert words[:2] == ["exec", "--namespace"]
        assert words[4:7] == ["--container", "fairlead", "--"]
        node = words[3].removeprefix("fairlead-")
        self.asked.append((node, tuple(words[7:])))
        if self.barrier is not None:
            self.barrier.wait()
        return (self.nodes | self.beneath)[node](words[words.index("fairlead", 7) + 1 :])

    def _get(self, words: list[str]) -> list[dict[str, Any]]:
        if words[1] == "nodes":
            return [{"metadata": {"name": name}} for name in self.labels[words[words.index("--selector") + 1]]]
        assert words[words.index("--selector") + 1] == "app.kubernetes.io/part-of=fairlead,app.kubernetes.io/component=device-plugin"  # fmt: skip
        return [*(pod(node) for node in self.nodes), *self.pods]


def pod(node: str, phase: str = "Running", waits: str = "", command: Sequence[str] = (), **metadata: Any) -> dict[str, Any]:  # fmt: skip
    """As `kubectl get pods --output json` has it, in what matters."""
    waiting = [{"name": "fairlead", "state": {"waiting": {"reason": waits}}}] if waits else []
    return {
        "metadata": {"name": f"fairlead-{node}", "namespace": "fairlead", **metadata},
        "spec": {"nodeName": node, "containers": [{"name": "fairlead", "command": list(command)}]},
        "status": {
            "phase": phase,
            "conditions": [{"type": "Ready", "status": str(phase == "Running")}],
            "containerStatuses": waiting,
        },
    }
