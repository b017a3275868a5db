"""Builds what deploy/ has for clusters: kustomizations with whichever kustomize there is, the chart with Helm."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final, Self

import yaml

REPOSITORY: Final = Path(__file__).parents[2]
KUBERNETES: Final = REPOSITORY / "deploy/kubernetes"
CHART: Final = REPOSITORY / "deploy/helm/fairlead"
KUSTOMIZATIONS: Final = ("base", "hardened", "openshift")
OVERLAYS: Final = ("gke", "k0s", "microk8s", "nfd", "talos")
"""The base on kinds of clusters."""

_FETCHED: Final = REPOSITORY / "build/kustomize/usr/bin/kustomize"
_FETCHED_HELM: Final = REPOSITORY / "build/helm/helm"
_LEAST: Final = 5  # the major version from which `labels` reach templates


def run(module: str, *arguments: str | Path) -> None:
    """Run a checking tool of the virtual environment, which has nothing to say against."""
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@cache
def kustomize() -> tuple[str, ...] | None:
    """The command that builds: what `make build/kustomize/.ready` fetched, kustomize itself, or a kubectl with it."""
    if _FETCHED.exists():
        return str(_FETCHED), "build"
    if (own := shutil.which("kustomize")) is not None:
        return own, "build"
    if (kubectl := shutil.which("kubectl")) is not None:
        said = subprocess.run([kubectl, "version", "--client", "--output=json"], capture_output=True, check=True)
        version = json.loads(said.stdout).get("kustomizeVersion", "v0")
        if int(version.removeprefix("v").partition(".")[0]) >= _LEAST:
            return kubectl, "kustomize"
    return None


@cache
def helm() -> str | None:
    """What `make build/helm/.ready` fetched, or the machine's own."""
    return str(_FETCHED_HELM) if _FETCHED_HELM.exists() else shutil.which("helm")


def template(*arguments: str | Path, release: str = "fairlead") -> subprocess.CompletedProcess[str]:
    """Run `helm template` on the chart."""
    command = [helm() or "helm", "template", release, CHART, "--namespace", "fairlead", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@cache
def rendered(*arguments: str | Path, release: str = "fairlead") -> tuple[dict[str, Any], ...]:
    """The chart's objects, without its tests."""
    done = template("--skip-tests", *arguments, release=release)
    assert done.returncode == 0, done.stderr
    return tuple(one for one in yaml.safe_load_all(done.stdout) if one)


def built(
    directory: Path, beneath: str, components: Sequence[str], namespace: str = "fairlead", prefix: str = ""
) -> Manifests:
    """A kustomization of one's own, written into a directory that is empty: components on top of another kustomization."""
    shutil.copytree(KUBERNETES, directory / "kubernetes")
    named = ", ".join(f"kubernetes/{it}" for it in components)
    text = f"namespace: {namespace}\nresources: [kubernetes/{beneath}]\ncomponents: [{named}]\n"
    text += f"namePrefix: {prefix}\n" * bool(prefix)
    (directory / "kustomization.yaml").write_text(text)
    return Manifests.of(directory, kustomize() or ())


def built_in(objects: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those of Kubernetes' own kinds, whose schemas are known."""
    return [one for one in objects if not one["apiVersion"].partition("/")[0].endswith((".k8s-sigs.io", ".com"))]


@dataclass(frozen=True, slots=True)
class Manifests:
    """What a kustomization comes to."""

    name: str
    text: str
    """As `kubectl apply --kustomize` would send it."""
    objects: tuple[dict[str, Any], ...]

    @classmethod
    @cache
    def of(cls, directory: str | Path, tool: tuple[str, ...]) -> Self:
        """Build one, by its name or its directory, and read it."""
        where = KUBERNETES / directory
        text = subprocess.run([*tool, where], capture_output=True, text=True, check=True).stdout
        return cls(where.name, text, tuple(yaml.safe_load_all(text)))

    def one(self, kind: str) -> dict[str, Any]:
        """The only object of this kind."""
        (found,) = (one for one in self.objects if one["kind"] == kind)
        return found

    @property
    def pod(self) -> dict[str, Any]:
        """The DaemonSet's pod."""
        spec: dict[str, Any] = self.one("DaemonSet")["spec"]["template"]["spec"]
        return spec

    @property
    def container(self) -> dict[str, Any]:
        """Its only container."""
        (found,) = self.pod["containers"]
        return dict(found)

    @property
    def privileged(self) -> bool:
        """Whether the container may do anything."""
        return bool(self.container["securityContext"].get("privileged", False))

    @property
    def config(self) -> str:
        """The configuration in the ConfigMap."""
        data: dict[str, str] = self.one("ConfigMap")["data"]
        (text,) = data.values()
        return text

    def mounts(self) -> dict[Path, tuple[str | None, bool]]:
        """Where → what of the host (None: the ConfigMap), and whether it can be written to."""
        hosts = {one["name"]: one.get("hostPath", {}).get("path") for one in self.pod["volumes"]}
        return {
            Path(one["mountPath"]): (hosts[one["name"]], not one.get("readOnly", False))
            for one in self.container["volumeMounts"]
        }
