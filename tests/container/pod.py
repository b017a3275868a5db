"""Runs an unpacked image as the pods of deploy/kubernetes would run it, beside a simulated kubelet, and asks it.

pod.py ROOT IMAGE: ROOT is where the image lies unpacked, IMAGE what `buildah inspect --type image` says of it. Each
kustomization's pod has its mounts, its rights, and a root file system that is read-only; its probes are asked, its commands
run, its ConfigMap is changed, and a browser opens the page of the one that serves its own node. The node's /sys, /dev, /proc and
so on are this machine's; its network, the kubelet's directories and what the daemon writes are its own.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from playwright.sync_api import expect, sync_playwright

from tests.console.http.browsing import MILLISECONDS, Visit
from tests.container import inside
from tests.deploy.manifests import CHART, KUSTOMIZATIONS, REPOSITORY, Manifests, kustomize
from tests.needs import CHROMIUM
from tests.wait import PATIENCE, block_until

_THIS_MACHINES: Final = frozenset({"/dev", "/sys", "/proc", "/run/udev", "/lib/modules"})
_OF_THIS_MACHINE: Final = frozenset({"modules", "hardware"})  # checks that find what a test machine lacks
_FAILURE: Final = 2
_LONGEST: Final = int(2 * PATIENCE)  # seconds for one pod; it takes two, where nothing else runs
_GET: Final = (
    "import sys, urllib.request; url, seconds = sys.argv[1:]; "
    "print(urllib.request.urlopen(url, timeout=float(seconds)).read().decode())"
)
_NEW: Final = "example.com/added"
_ADDED: Final = f'\n[[resource]]\nname = "{_NEW}"\nbackend = "stub"\ndevices = 1\n'
_BROWSED: Final = "base"  # a start of chromium takes seconds, and the page is the same everywhere
_SHORT: Final = "/tmp"  # TMPDIR may be too long for the paths of sockets

Lines = Iterator[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Node:
    """A pretend node: its scratch directory, and the pod's manifests."""

    scratch: Path
    manifests: Manifests

    def host(self, path: str) -> Path:
        """What lies at a path of the node; what this machine lacks of its own part is made up, too."""
        own = Path(path)
        return own if path in _THIS_MACHINES and own.exists() else self.scratch / "host" / path.lstrip("/")

    def mounts(self) -> list[tuple[str, str, bool]]:
        """Source, which is made if it is missing, target, and whether it can be written to; shallow targets first."""
        found = []
        for target, (path, writable) in sorted(self.manifests.mounts().items()):
            source = self.scratch / "config" if path is None else self.host(path)
            source.mkdir(parents=True, exist_ok=True)
            found.append((str(source), str(target), writable))
        return found

    def write_config(self, version: str, more: str = "") -> None:
        """Put the ConfigMap where it is mounted, as the kubelet does: a version's directory, swapped in by a link."""
        config = self.scratch / "config"
        (config / version).mkdir(parents=True)
        (config / version / "config.toml").write_text(self.manifests.config + more)
        (config / "..new").symlink_to(version)
        (config / "..new").replace(config / "..data")
        if not (config / "config.toml").is_symlink():
            (config / "config.toml").symlink_to("..data/config.toml")


class Pod:
    """The running container."""

    def __init__(self, runner: subprocess.Popen[bytes], manifests: Manifests) -> None:
        """`runner` is unshare(1), whose only child is the container's first process."""
        self._runner = runner
        self._manifests = manifests

    @property
    def pid(self) -> int:
        """The first process, as this machine numbers it."""
        runner = self._runner.pid
        return int(Path(f"/proc/{runner}/task/{runner}/children").read_text())

    def run(self, *command: str, codes: tuple[int, ...] = (0,)) -> str:
        """Run a command in it, as `kubectl exec` does; what it says."""
        join = ["nsenter", "--target", str(self.pid), "--mount", "--pid", "--net", "--root", "--wd=/", "--"]
        rights = () if self._manifests.privileged else inside.NO_RIGHTS
        environment = dict(
            pair.split("=", 1) for pair in Path(f"/proc/{self.pid}/environ").read_text().split("\0") if pair
        )
        done = subprocess.run([*join, *rights, *command], env=environment, capture_output=True, text=True, check=False)
        if done.returncode not in codes:
            raise SystemExit(f"{command} ended with {done.returncode}: {done.stdout}{done.stderr}")
        return done.stdout

    @property
    def url(self) -> str:
        """Its page, within its network."""
        return "http://127.0.0.1:9440/"

    def get(self, path: str) -> str:
        """What HTTP has there."""
        return self.run("python3", "-c", _GET, self.url + path.lstrip("/"), str(PATIENCE))

    def probe(self, name: str) -> None:
        """Ask one of its probes until it succeeds."""
        command = self._manifests.container[name]["exec"]["command"]
        refusals: list[object] = []

        def succeeds() -> bool:
            try:
                self.run(*command)
            except SystemExit as refusal:
                refusals.append(refusal)
                return False
            return True

        block_until(succeeds, f"the {name} succeeds", lambda: refusals[-1])

    def memory(self) -> dict[str, float]:
        """Resident memory in MiB: RssAnon is its own, RssFile is shared with other processes of the image."""
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return {
            name: int(value.split()[0]) / 1024
            for name, _, value in (line.partition(":") for line in lines)
            if name in ("VmRSS", "VmHWM", "RssAnon")
        }

    def end(self) -> None:
        """Stop it as the kubelet does."""
        os.kill(self.pid, signal.SIGTERM)
        if code := self._runner.wait(PATIENCE):
            raise SystemExit(f"it ended with {code}")


@contextmanager
def kubelet(root: Path) -> Iterator[Lines]:
    """A simulated kubelet; what it sees, line by line."""
    command = [sys.executable, "-m", "agent.simulation", "--root", str(root)]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield (json.loads(line) for line in process.stdout)
        finally:
            process.terminate()
            process.communicate()


@contextmanager
def running(node: Node, root: Path, image: Mapping[str, Any]) -> Iterator[Pod]:
    """The container of the node's pod; killed when the context is left, if it still runs."""
    environment = dict(pair.split("=", 1) for pair in image["Env"])
    pod = {
        "root": str(root),
        "mounts": node.mounts(),
        "privileged": node.manifests.privileged,
        "environment": environment | {one["name"]: "node-1" for one in node.manifests.container["env"]},
        "command": [f"/opt/fairlead/bin/{image['Entrypoint'][0]}", *image["Cmd"]],
    }
    namespaces = ["--mount", "--pid", "--net", "--fork", "--kill-child", "--propagation=private"]
    command = ["unshare", *namespaces, sys.executable, inside.__file__, json.dumps(pod)]
    with (node.scratch / "log").open("wb") as log, subprocess.Popen(command, stderr=log) as runner:
        try:
            yield Pod(runner, node.manifests)
        finally:
            runner.kill()


def try_out(node: Node, root: Path, image: Mapping[str, Any]) -> None:
    """One kustomization's pod, from its start to its end."""
    wanted = {resource["name"] for resource in tomllib.loads(node.manifests.config)["resource"]}
    node.write_config("..1")
    with kubelet(node.host("/var/lib/kubelet")) as lines:
        next(line for line in lines if line["change"] == "started")
        with running(node, root, image) as pod:
            until_registered(wanted, lines)
            for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
                pod.probe(probe)
            check_status(wanted, pod)
            pod.run("python3", "-c", (CHART / "registered.py").read_text())  # what `helm test` runs
            node.write_config("..2", _ADDED)
            until_registered({_NEW}, lines)
            if node.manifests.name == _BROWSED:
                check_page(wanted | {_NEW}, pod, node.scratch)
            version = pod.run("fairlead", "--version").strip()
            json.loads(pod.run("fairlead", "schema"))
            findings = json.loads(pod.run("fairlead", "doctor", "--json", codes=(0, 1, 2)))["findings"]
            memory = pod.memory()
            pod.end()
    found = [(one["check"], one["level"], one["found"]) for one in findings if one["level"]]
    if failures := [one for one in found if one[1] == _FAILURE and one[0] not in _OF_THIS_MACHINE]:
        raise SystemExit(f"The doctor finds that something does not work: {failures}")
    print(f"{node.manifests.name}: {version} registered everything, took in another configuration and ended")
    print("  " + ", ".join(f"{name} {value:.1f} MiB" for name, value in memory.items()))
    print(f"  the doctor warns: {', '.join(dict.fromkeys(check for check, _, _ in found))}")


def until_registered(wanted: Set[str], lines: Lines) -> None:
    """Wait until the kubelet knows all of these."""
    missing = set(wanted)
    while missing:
        line = next(lines)
        if line["change"] == "registered":
            missing.discard(line["resource"])


def check_status(wanted: Set[str], pod: Pod) -> None:
    """Ends the program unless the command and the metrics say that everything is registered."""
    resources = json.loads(pod.run("fairlead", "status", "--json"))["resources"]
    if {one["name"] for one in resources if one["registered"] and one["streaming"]} != wanted:
        raise SystemExit(f"status has something else: {resources}")
    lines = [line for line in pod.get("/metrics").splitlines() if line and not line.startswith("#")]
    samples = dict(line.rsplit(" ", 1) for line in lines)
    for name in wanted:
        if float(samples.get(f'fairlead_registered{{resource_name="{name}"}}', 0)) != 1:
            raise SystemExit(f"the metrics do not say that {name} is registered: {samples}")


def check_page(wanted: Set[str], pod: Pod, scratch: Path) -> None:
    """Checks that a browser in its network shows the page, alive, with every resource, and without complaints."""
    chromium = scratch / "chromium"
    chromium.write_text(f'#!/bin/sh\nexec nsenter --target {pod.pid} --net {CHROMIUM} "$@"\n')
    chromium.chmod(0o755)
    expect.set_options(timeout=MILLISECONDS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"], timeout=MILLISECONDS)
        visit = Visit(browser, pod)
        expect(visit.page.locator("#live")).to_contain_text("Live")
        for name in wanted:
            expect(visit.page.locator("#resources")).to_contain_text(name)
        print(f"the page in chromium: {visit.page.locator('#verdict').inner_text().splitlines()}")
        visit.leave()
        browser.close()


def _give_up(*_: object) -> None:
    raise TimeoutError(f"it was not done within {_LONGEST} s")


def main() -> None:
    """The command."""
    root, image = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text())["OCIv1"]["config"]
    if (tool := kustomize()) is None:
        raise SystemExit("There is no kustomize: make build/kustomize/.ready")
    signal.signal(signal.SIGALRM, _give_up)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    for name in KUSTOMIZATIONS:
        with tempfile.TemporaryDirectory(dir=_SHORT) as scratch:
            signal.alarm(_LONGEST)
            node = Node(Path(scratch), Manifests.of(name, tool))
            try:
                try_out(node, root, image)
            except BaseException:
                print((node.scratch / "log").read_text(), file=sys.stderr)
                raise


if __name__ == "__main__":
    main()
