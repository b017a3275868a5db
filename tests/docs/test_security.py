"""docs/security.md names every host path, capability and device that the deployments have."""

from __future__ import annotations

import re
import stat
from pathlib import Path

import pytest
import yaml

from tests.docs.pages import REPOSITORY, text

_PAGE = text("docs/security.md")
_SYSTEMD = REPOSITORY / "deploy/systemd"


def _settings(name: str, *units: Path) -> set[str]:
    """The words that these units set `name` to."""
    lines = "\n".join(unit.read_text() for unit in units)
    return {word for value in re.findall(rf"^{name}=(.*)$", lines, re.MULTILINE) for word in value.split()}


def test_it_has_every_host_path_of_the_pod_with_what_may_be_done_there() -> None:
    documents = yaml.safe_load((REPOSITORY / "deploy/kubernetes/base/daemonset.yaml").read_text())
    pod = documents["spec"]["template"]["spec"]
    read_only = {it["name"] for it in pod["containers"][0]["volumeMounts"] if it.get("readOnly")}
    expected = {
        it["hostPath"]["path"]: "read" if it["name"] in read_only else "write"
        for it in pod["volumes"]
        if "hostPath" in it
    }
    assert dict(re.findall(r"^\| `(/[^`]*)` \| (read|write) \|", _PAGE, re.MULTILINE)) == expected


def test_it_has_every_host_path_of_the_container_before_the_kubelet() -> None:
    volumes = _settings("Volume", REPOSITORY / "deploy/podman/fairlead.container")
    hosts = {volume.partition(":")[0] for volume in volumes} - {"/etc/fairlead"}
    assert hosts == set(re.findall(r"^\| `(/[^`]*)` \| (?:read|write) \|", _PAGE, re.MULTILINE))


@pytest.mark.parametrize("unit", ["fairlead.service", "fairlead.service.d/hardware.conf"])
@pytest.mark.parametrize("setting", ["CapabilityBoundingSet", "AmbientCapabilities", "DeviceAllow", "ReadWritePaths"])
def test_it_has_what_the_service_may_do(unit: str, setting: str) -> None:
    said = _settings(setting, _SYSTEMD / unit)
    for word in (word.lstrip("-+") for word in said):
        if word not in ("r", "rw", "m"):
            assert any(form in _PAGE for form in (f"`{word}`", f"={word}", f"`{word} ", word.rpartition("/")[2])), word


@pytest.mark.usefixtures("terminals")  # with them comes a daemon
async def test_the_files_of_a_daemon_have_the_modes_that_it_says(tmp_path: Path) -> None:
    node = tmp_path / "node"
    places = {
        "/var/lib/fairlead/": node / "state",
        "/var/lib/kubelet/device-plugins/": node / "device-plugins",
        "/run/fairlead/admin": node,
    }
    modes = dict(re.findall(r"^\| `(/[^`]+)` \| (0[0-7]{3}) \|", _PAGE, re.MULTILINE))
    seen = 0
    for written, mode in modes.items():
        for place, there in places.items():
            if written.startswith(place):
                found = list(there.glob(written.removeprefix(place.rpartition("/")[0] + "/")))
                assert found, written
                assert {f"{stat.S_IMODE(path.lstat().st_mode):04o}" for path in found} == {mode}, written
                seen += 1
    assert seen == 5
