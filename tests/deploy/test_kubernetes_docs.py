"""docs/installing.md: its commands that need neither a cluster nor a node are run here, and its tables have what there is."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest
import yaml

from backends import registry
from tests.deploy.manifests import KUBERNETES, KUSTOMIZATIONS, OVERLAYS, REPOSITORY, built, helm, kustomize
from tests.deploy.test_podman import settings
from tests.deploy.test_systemd import UNITS
from tests.needs import skip_without

TEXT: Final = (REPOSITORY / "docs/installing.md").read_text()
BLOCKS: Final = re.findall(r"```sh\n(.*?)```", TEXT, flags=re.DOTALL)


def rows(heading: str) -> dict[str, list[str]]:
    """A table's rows by their first cell; a row with an empty one goes on with the row before."""
    found: dict[str, list[str]] = {}
    name = ""
    for line in TEXT.partition(heading)[2].partition("\n\n")[0].splitlines()[1:]:
        first, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        name = first or name
        found.setdefault(name, []).extend(cells)
    return found


@pytest.mark.parametrize("block", BLOCKS)
def test_a_command_without_a_mark_works(block: str) -> None:
    tool, chart = kustomize(), helm()
    skip_without("helm (make build/helm/.ready)", "kustomize 5 (make build/kustomize/.ready)")
    assert tool is not None
    assert chart is not None
    tools = {Path(tool[0]).parent, Path(chart).parent, Path(sys.executable).parent}
    block = block if tool[1:] == ("build",) else block.replace("kustomize build", "kubectl kustomize")
    environment = os.environ | {"PATH": ":".join([*map(str, tools), os.environ["PATH"]])}
    done = subprocess.run(
        ["sh", "-euc", block], cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_every_file_that_it_names_is_there() -> None:
    named = re.findall(r"\b(deploy/(?:kubernetes|helm)/[\w./-]*)", TEXT)
    assert not [name for name in named if not (REPOSITORY / name).exists()]


def test_every_overlay_and_component_has_a_row() -> None:
    clusters = rows("| cluster |")
    assert {cells[0].strip("`") for cells in clusters.values() if "---" not in cells[0]} == {*KUSTOMIZATIONS, *OVERLAYS}
    for cells in clusters.values():
        if "---" not in cells[0]:
            assert cells[1] == f"`overlays/{cells[0].strip('`')}.yaml`"
    files = [*KUBERNETES.glob("components/**/kustomization.yaml"), *KUBERNETES.glob("api-access/*/kustomization.yaml")]
    components = {str(file.parent.relative_to(KUBERNETES)) for file in files} - {"api-access/token"}  # of the others
    assert {
        name for row in rows("| `deploy/kubernetes/` | what it does |") for name in re.findall("`(.*?)`", row)
    } == components


def test_the_kustomization_that_it_prints_can_be_built(tmp_path: Path) -> None:
    skip_without("kustomize 5 (make build/kustomize/.ready)")
    (own,) = re.findall(r"```yaml\n# kustomization\.yaml.*?\n(.*?)```", TEXT, flags=re.DOTALL)
    mine = yaml.safe_load(own)
    made = built(
        tmp_path,
        mine["resources"][0].rpartition("/")[2],
        [one.partition("kubernetes/")[2] for one in mine["components"]],
    )
    assert made.mounts()[Path("/run/nvidia")] == ("/run/nvidia", False)
    assert mine["configMapGenerator"][0]["options"] == {"disableNameSuffixHash": True}


def test_it_says_of_each_backend_which_rights_it_takes() -> None:
    told = rows("| backend | with `hardened` |")
    assert {name.strip("`") for name in told if "---" not in name} == set(registry.names())
    units = [settings(file) for file in (UNITS / "fairlead.service", UNITS / "fairlead.service.d/hardware.conf")]
    known = {name for unit in units for line in unit["Service.CapabilityBoundingSet"] for name in line.split()}
    rights = TEXT.partition("\n### Rights\n")[2].partition("\n### ")[0]
    # CAP_CHOWN is for a node's owner, CAP_NET_ADMIN for a buffer: the units do without.
    assert set(re.findall(r"CAP_\w+", rights)) == known | {"CAP_CHOWN", "CAP_NET_ADMIN"}
    assert "CAP_SYS_PTRACE" in " ".join(told["`vfio`"])
    assert "CAP_SYS_MODULE" in " ".join(told["`vfio`"])
    assert "CAP_SYS_PTRACE" in " ".join(told["`sriov`"])
    assert "CAP_SYSLOG" in " ".join(told["`gpu`"])
