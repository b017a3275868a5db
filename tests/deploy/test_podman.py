"""The Quadlet of deploy/podman: systemd finds no fault in it, and it is the DaemonSet's container started as the unit is."""

from __future__ import annotations

import base64
import re
import subprocess
from collections import defaultdict
from pathlib import Path
from typing import Final

import yaml

from agent.config import AgentConfig
from agent.daemon.shutdown import LEAVE
from tests.deploy.manifests import KUBERNETES, REPOSITORY
from tests.deploy.test_systemd import UNITS, analyze
from tests.needs import skip_without

PODMAN: Final = REPOSITORY / "deploy/podman"
OF_THE_KERNEL: Final = {"/dev", "/sys", "/proc"}


def settings(file: Path) -> dict[str, list[str]]:
    """Section.Name → its values, in order."""
    found: dict[str, list[str]] = defaultdict(list)
    section = ""
    for line in file.read_text().splitlines():
        if line.startswith("["):
            section = line.strip("[]")
        elif line and line[0] != "#":
            name, _, value = line.partition("=")
            found[f"{section}.{name}"].append(value)
    return dict(found)


QUADLET: Final = settings(PODMAN / "fairlead.container")
UNIT: Final = settings(UNITS / "fairlead.service")


def test_systemd_finds_no_fault_in_what_podman_leaves_as_it_is(tmp_path: Path) -> None:
    skip_without("systemd")
    text = (PODMAN / "fairlead.container").read_text().replace("/usr/bin/podman", "/bin/true")
    made = text.replace("[Container]", "[X-Container]").replace(
        "[Service]", "[Service]\nType=notify\nExecStart=/bin/true"
    )
    (tmp_path / "fairlead.service").write_text(made)
    done = analyze("verify", "--man=no", tmp_path / "fairlead.service")
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_the_first_podman_with_quadlets_knows_every_key_of_the_container() -> None:
    known = {"Image", "ContainerName", "Network", "ReadOnly", "PodmanArgs", "Notify", "Volume"}  # podman 4.4
    assert {name for name in QUADLET if name.startswith("Container.")} == {f"Container.{name}" for name in known}


def test_it_is_before_every_kubelet_and_started_again_as_the_unit_is() -> None:
    for name in (
        "Unit.After", "Unit.Before", "Unit.RequiresMountsFor", "Unit.StartLimitIntervalSec",
        "Service.Restart", "Service.RestartSec", "Service.RestartPreventExitStatus", "Install.WantedBy",
    ):  # fmt: skip
        assert QUADLET[name] == UNIT[name], name


def test_it_may_take_as_long_as_the_boot_and_a_handover_do() -> None:
    stop = re.search(r"--stop-timeout=(\d+)", QUADLET["Container.PodmanArgs"][0])
    assert stop is not None
    assert int(QUADLET["Service.TimeoutStartSec"][0].rstrip("s")) > AgentConfig().boot_wait
    assert LEAVE < int(stop[1]) < int(QUADLET["Service.TimeoutStopSec"][0].rstrip("s"))
    assert QUADLET["Container.Notify"] == ["true"]


def mounted() -> dict[str, tuple[str, bool]]:
    """Where → what of the host, and whether it can be written to, as the DaemonSet has it."""
    spec = yaml.safe_load((KUBERNETES / "base/daemonset.yaml").read_text())["spec"]["template"]["spec"]
    hosts = {one["name"]: one.get("hostPath", {"path": "/etc/fairlead"})["path"] for one in spec["volumes"]}
    mounts = spec["containers"][0]["volumeMounts"]
    return {one["mountPath"]: (hosts[one["name"]], not one.get("readOnly", False)) for one in mounts}


def test_it_has_the_mounts_of_the_daemonset() -> None:
    volumes = [volume.split(":") for volume in QUADLET["Container.Volume"]]
    assert {where: (host, options != ["ro"]) for host, where, *options in volumes} == mounted()


def test_every_directory_that_it_mounts_is_made_before() -> None:
    made = {path for line in QUADLET["Service.ExecStartPre"] for path in line.split() if path != "/bin/mkdir"}
    assert {host for host, _ in mounted().values()} - OF_THE_KERNEL <= made


def test_the_machine_config_made_as_the_docs_say_has_the_quadlet_and_the_configuration(tmp_path: Path) -> None:
    text = (REPOSITORY / "docs/installing.md").read_text()
    (command,) = re.findall(r"```sh cluster\n(sed [^`]*machine-config\.yaml[^`]*)\| oc apply[^`]*```", text)
    for name in ("fairlead.container", "machine-config.yaml"):
        (tmp_path / name).write_bytes((PODMAN / name).read_bytes())
    (tmp_path / "config.toml").write_bytes((KUBERNETES / "base/config.toml").read_bytes())
    done = subprocess.run(["sh", "-ec", command], cwd=tmp_path, capture_output=True, text=True, check=True)
    (*files,) = yaml.safe_load(done.stdout)["spec"]["config"]["storage"]["files"]
    contents = {Path(one["path"]).name: base64.b64decode(one["contents"]["source"].partition(",")[2]) for one in files}
    assert contents == {name: (tmp_path / name).read_bytes() for name in ("fairlead.container", "config.toml")}
