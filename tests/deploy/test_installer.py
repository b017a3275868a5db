"""The installer of deploy/kubernetes: what it leaves on a node, what it asks of systemd and when, and its manifests."""

from __future__ import annotations

import os
import shutil
import subprocess
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

from agent.config import load
from tests.deploy.manifests import KUBERNETES, REPOSITORY, Manifests, kustomize, run
from tests.deploy.test_podman import settings
from tests.deploy.test_systemd import UNITS, analyze
from tests.needs import skip_without

INSTALLER: Final = KUBERNETES / "installer"
SHARE: Final = "opt/fairlead/share/fairlead"

_CHROOT: Final = """#!/bin/sh
shift
echo "$*" >> "$CALLS"
case "$*" in
*"is-active"*) grep -q "start fairlead$" "$CALLS" ;;
*"$FAILS"*) exit 1 ;;
esac
"""
"""In the place of chroot: notes what systemctl was asked, and fails where it is to. Started once, the service is active."""


@dataclass(frozen=True, slots=True)
class World:
    """A node's root, images, and a systemd that only listens."""

    place: Path

    @property
    def node(self) -> Path:
        return self.place / "node"

    def image(self, tree: str) -> Path:
        """An image with the files that the Containerfile puts into it."""
        image = self.place / tree
        if not image.exists():
            (image / SHARE).mkdir(parents=True)
            (image / SHARE / "tree").write_text(f"{tree}\n")
            shutil.copytree(UNITS, image / SHARE, dirs_exist_ok=True)
            shutil.copy(INSTALLER / "image.conf", image / SHARE)
        return image

    def asks(self, image: Path, what: str, *, fails: str = "no call") -> list[str]:
        """Run the script of an image; what it asked of systemctl."""
        calls = self.place / "calls"
        calls.touch()
        before = len(calls.read_text().splitlines())
        done = subprocess.run(
            ["sh", INSTALLER / "install.sh", what],
            env={
                "PATH": f"{self.place / 'bin'}:{os.environ['PATH']}", "CALLS": str(calls), "FAILS": fails,
                "HOST": str(self.node), "IMAGE": str(image), "CONFIG": str(self.place / "config.toml"),
            },
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == (fails != "no call"), done.stderr
        return [line.removeprefix("systemctl ") for line in calls.read_text().splitlines()[before:]]

    def left(self) -> set[str]:
        """Every file on the node; a tree's own are left out."""
        found = {
            str(path.relative_to(self.node)) for path in self.node.rglob("*") if path.is_symlink() or not path.is_dir()
        }
        return {path for path in found if f"/{SHARE}/" not in path}

    def trees(self) -> set[str]:
        return {path.name for path in (self.node / "opt/fairlead").iterdir() if not path.is_symlink()}

    def root(self) -> str:
        """Where the unit's files come from."""
        text = (self.node / "etc/systemd/system/fairlead.service.d/image.conf").read_text()
        return text.partition("RootDirectory=")[2].partition("\n")[0]


INSTALLED: Final = {
    "etc/fairlead/config.toml",
    "etc/systemd/system/fairlead.service",
    "etc/systemd/system/fairlead.service.d/hardware.conf",
    "etc/systemd/system/fairlead.service.d/image.conf",
    "opt/fairlead/serving",
}


@pytest.fixture
def world(tmp_path: Path) -> World:
    chroot = tmp_path / "bin/chroot"
    chroot.parent.mkdir()
    chroot.write_text(_CHROOT)
    chroot.chmod(0o755)
    (tmp_path / "node").mkdir()
    (tmp_path / "config.toml").write_text("# mine\n")
    return World(tmp_path)


SWAP: Final = [
    "daemon-reload", "start fairlead-next", "restart fairlead", "stop fairlead-next", "daemon-reload"
]  # fmt: skip


def test_a_node_gets_the_tree_the_unit_and_the_configuration_and_a_second_time_changes_nothing(world: World) -> None:
    one = world.image("one")
    assert world.asks(one, "install") == [
        "daemon-reload", "enable fairlead", "is-active --quiet fairlead", "start fairlead"
    ]  # fmt: skip
    assert world.left() == INSTALLED
    assert (world.node / "opt/fairlead/one" / SHARE / "tree").read_text() == "one\n"
    assert world.root() == "/opt/fairlead/one"
    assert (world.node / "etc/fairlead/config.toml").read_text() == "# mine\n"

    assert "restart fairlead" not in world.asks(one, "install")
    assert world.left() == INSTALLED


def test_another_image_takes_over_by_a_second_service_and_an_older_one_does_so_too(world: World) -> None:
    one, two = world.image("one"), world.image("two")
    world.asks(one, "install")
    for image in (two, one):
        assert [call for call in world.asks(image, "install") if call in SWAP][1:] == SWAP
        assert (world.trees(), world.root()) == ({image.name}, f"/opt/fairlead/{image.name}")
        assert world.left() == INSTALLED


@pytest.mark.parametrize("step", ["enable", "start fairlead-next", "restart", "stop fairlead-next"])
def test_cut_off_anywhere_it_ends_the_next_time_and_the_old_tree_stays_until_then(world: World, step: str) -> None:
    one, two = world.image("one"), world.image("two")
    world.asks(one, "install")
    asked = world.asks(two, "install", fails=step)
    assert step in asked[-1]
    assert world.trees() == {"one", "two"}

    (world.node / "opt/fairlead/new").mkdir()  # of a copy that was cut off
    assert [call for call in world.asks(two, "install") if call in SWAP][1:] == SWAP
    assert (world.trees(), world.left()) == ({"two"}, INSTALLED)


def test_the_second_service_has_the_nodes_own_drop_ins_and_goes_with_the_first(world: World) -> None:
    one, two = world.image("one"), world.image("two")
    world.asks(one, "install")
    (world.node / "etc/systemd/system/fairlead.service.d/k0s.conf").write_text("[Service]\n")
    world.asks(two, "install", fails="restart")
    second = world.node / "run/systemd/system/fairlead-next.service.d"
    assert {path.name for path in second.iterdir()} == {"hardware.conf", "image.conf", "k0s.conf"}
    assert "/opt/fairlead/two\n" in (second / "image.conf").read_text()
    assert world.asks(two, "remove")[0] == "stop fairlead-next"
    assert world.left() == set()


def test_taken_away_nothing_is_left_but_the_state(world: World) -> None:
    one = world.image("one")
    world.asks(one, "install")
    state = world.node / "var/lib/fairlead/state.json"
    state.parent.mkdir(parents=True)
    state.touch()
    assert world.asks(one, "remove") == ["disable --now fairlead", "daemon-reload"]
    assert world.left() == {"var/lib/fairlead/state.json"}
    assert world.asks(one, "remove") == []


@pytest.mark.parametrize("other", ["opt/fairlead/bin", "usr/lib/fairlead", "usr/local/lib/fairlead"])
def test_a_fairlead_that_was_installed_in_another_way_is_left_alone(world: World, other: str) -> None:
    (world.node / other).mkdir(parents=True)
    assert world.asks(world.image("one"), "install", fails="a package") == []
    assert world.asks(world.image("one"), "remove") == []
    assert world.left() == set()


# --- the unit ---


def test_systemd_finds_no_fault_in_the_unit(tmp_path: Path) -> None:
    skip_without("systemd")
    unit = tmp_path / "fairlead.service"
    unit.write_text((UNITS / "fairlead.service").read_text().replace("/opt/fairlead/bin/fairlead", "/bin/true"))
    dropins = tmp_path / "fairlead.service.d"
    shutil.copytree(UNITS / "fairlead.service.d", dropins)
    (dropins / "image.conf").write_text((INSTALLER / "image.conf").read_text().replace("TREE", "/"))
    done = analyze("verify", "--man=no", unit)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_what_the_units_let_be_written_to_can_be_written_to_below_another_root() -> None:
    ours = settings(INSTALLER / "image.conf")["Service.ReadWritePaths"]
    files = (UNITS / "fairlead.service", UNITS / "fairlead.service.d/hardware.conf")
    theirs = [path for file in files for line in settings(file)["Service.ReadWritePaths"] for path in line.split()]
    assert {path.lstrip("-+") for line in ours for path in line.split()} == {path.lstrip("-") for path in theirs}
    assert all(path.lstrip("-").startswith("+") for line in ours for path in line.split())


# --- the manifests ---


@pytest.fixture(params=["installer", "installer-removal"])
def manifests(request: pytest.FixtureRequest) -> Manifests:
    skip_without("kustomize 5 (make build/kustomize/.ready)")
    return Manifests.of(request.param, kustomize() or ())


@pytest.mark.parametrize("version", ["1.25", "1.37"])
def test_every_object_is_valid(manifests: Manifests, version: str, tmp_path: Path) -> None:
    file = tmp_path / "built.yaml"
    file.write_text(manifests.text)
    run("kubernetes_validate", "--strict", "--kubernetes-version", version, file)


def test_the_pod_runs_the_script_of_one_image_with_what_it_needs_of_the_node(manifests: Manifests) -> None:
    (first,) = manifests.pod["initContainers"]
    script, what = first["command"]
    assert script == f"/{SHARE}/install.sh"
    assert what == ("install" if manifests.name == "installer" else "remove")
    assert first["image"] == manifests.container["image"]
    assert {host for host, _ in manifests.mounts().values()} == {None, "/", "/run/fairlead"}
    assert {one["name"] for one in first["volumeMounts"]} <= {one["name"] for one in manifests.pod["volumes"]}
    assert manifests.pod["hostPID"] is True  # systemctl: "Failed to connect to bus: No data available"
    assert "livenessProbe" not in manifests.container


def test_its_configuration_is_that_of_the_base_where_a_service_of_the_node_sees_the_node() -> None:
    base, ours = (tomllib.loads((KUBERNETES / name / "config.toml").read_text()) for name in ("base", "installer"))
    assert ours == {name: value for name, value in base.items() if name != "host"}
    assert load(INSTALLER / "config.toml").resources


def test_the_image_has_what_the_script_reads() -> None:
    containerfile = (REPOSITORY / "Containerfile").read_text()
    (copied,) = (line for line in containerfile.splitlines() if line.startswith("COPY deploy/systemd"))
    _, *sources, target = copied.split()
    assert target == f"/{SHARE}/"
    assert sources == [
        "deploy/systemd",
        *(f"deploy/kubernetes/installer/{name}" for name in ("install.sh", "image.conf")),
    ]
    assert f"> /{SHARE}/tree" in containerfile
    kept = (REPOSITORY / ".dockerignore").read_text().splitlines()
    assert {"!deploy/systemd", "!deploy/kubernetes/installer"} <= set(kept)
