"""The Debian package on a real systemd: installed, upgraded while a pod holds a device, removed, purged."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Final

import pytest

from agent import __version__
from agent.cdi import spec
from tests.e2e.forkserver import REPOSITORY
from tests.guest.guest import Guest, guest
from tests.guest.machine import Accelerator
from tests.guest.node import CONFIG, KUBELET_ROOT, Line, Node, node
from tests.guest.test_systemd import SYSTEM, TEST_ONLY, Service

BUILT: Final = REPOSITORY / "build/deb"
NEXT: Final = REPOSITORY / "build/deb-next"
"""Not in /tmp, which the guest has another of."""
DROP_INS: Final = SYSTEM / "fairlead.service.d"
SOCKETS: Final = KUBELET_ROOT / "device-plugins/fairlead"
NULL: Final = "example.com/null"
COUNT: Final = 3
RESOURCE: Final = f"""
[[resource]]
name = "{NULL}"
backend = "chardev"
paths = [{{ path = "/dev/null" }}]
count = {COUNT}
edits = "cdi"
"""
COMPILED: Final = ("/usr/bin/python3", "-m", "compileall", "-q", "-f", "--invalidation-mode", "unchecked-hash")
"""As deploy/install.sh does it."""
LISTED: Final = "find /run -xdev; find /etc /var -xdev -path '*fairlead*'"
"""All else is this machine's own root, where files come and go."""
OF_OTHERS: Final = re.compile(r"/run/(systemd|log)/|/run/cdi$")
"""What systemd writes meanwhile, and a directory that others have as well."""


def release(version: str) -> Path:
    """The package that was built as a later release: another version, and a unit that tells it."""
    (built,) = BUILT.glob("*.deb")
    tree = NEXT / version
    subprocess.run(["dpkg-deb", "--raw-extract", built, tree], check=True)
    control = tree / "DEBIAN/control"
    control.write_text(re.sub(r"(?m)^Version: .*", f"Version: {version}", control.read_text()))
    (program,) = tree.glob("usr/lib/fairlead/lib/python3*/site-packages/agent/__init__.py")
    program.write_text(program.read_text().replace(f'"{__version__}"', f'"{version}"'))
    # Python takes the package's compiled file for the source's, without a look; without one it would write one, which is
    # no file of the package.
    subprocess.run([*COMPILED, program], check=True)
    unit = tree / "usr/lib/systemd/system/fairlead.service"
    unit.write_text(unit.read_text().replace("[Service]\n", f"[Service]\nEnvironment=RELEASE={version}\n"))
    done = NEXT / f"fairlead_{version}.deb"
    subprocess.run(["dpkg-deb", "--root-owner-group", "-Znone", "--build", tree, done], check=True, stdout=sys.stderr)
    shutil.rmtree(tree)
    return done


@pytest.fixture(scope="module")
def releases() -> Iterator[tuple[Path, Path, Path]]:
    """The package, and two that follow it."""
    subprocess.run(["make", "--no-print-directory", "deb"], cwd=REPOSITORY, check=True, stdout=sys.stderr)
    shutil.rmtree(NEXT, ignore_errors=True)
    NEXT.mkdir()
    (built,) = BUILT.glob("*.deb")
    yield built, release("0.2.0"), release("0.3.0")
    shutil.rmtree(NEXT)


@pytest.fixture
async def booted(accelerator: Accelerator) -> AsyncIterator[Guest]:
    async with guest(accelerator, systemd=True) as up:
        await up.run("rm -f /usr/sbin/policy-rc.d")  # of a machine that is a container
        await up.write(DROP_INS / "test.conf", TEST_ONLY)
        yield up
        print(await up.run("journalctl --output=short-monotonic --no-hostname"))


async def dpkg(guest: Guest, *arguments: str | Path) -> str:
    """What dpkg says; the machine's own triggers (mandb) take minutes under emulation."""
    return await guest.run(f"dpkg --no-triggers --force-unsafe-io {' '.join(map(str, arguments))} < /dev/null")


async def files(guest: Guest) -> set[str]:
    """Every path where a service keeps things."""
    return {path for path in (await guest.run(LISTED)).splitlines() if not OF_OTHERS.search(path)}


async def service(guest: Guest) -> tuple[str, str]:
    """Its main process, and the release whose unit has started that."""
    pid = (await Service(guest).properties("MainPID"))["MainPID"]
    return pid, await guest.run(f"tr '\\0' '\\n' < /proc/{pid}/environ | sed -n s/^RELEASE=//p")


def lacking(kubelet: Node, since: int) -> list[Line]:
    """When the kubelet lost the service, or had fewer devices for pods."""
    told = kubelet.log.said(since, resource=NULL)
    return [it for it in told if it["change"] == "disconnected" or it.get("allocatable", COUNT) < COUNT]


async def test_it_is_upgraded_while_a_pod_has_a_device_and_once_purged_leaves_nothing(
    booted: Guest, releases: tuple[Path, Path, Path]
) -> None:
    async with node(booted) as kubelet:
        before = await files(booted)
        await installs(booted, releases[0])
        await kubelet.holds(NULL, lambda shown: [*shown.values()] == ["Healthy"] * COUNT, f"{COUNT} healthy devices")
        async with kubelet.pod({NULL: 1}) as pod:
            since = len(kubelet.log.lines)
            await upgrades(booted, releases[1], pod["gets"][NULL]["ids"])
            await is_refused(booted, releases[2])
            assert kubelet.log.said(since, change="registered", resource=NULL)
            assert lacking(kubelet, since) == []
            await is_removed(booted, kubelet)
        await is_purged(booted)
        assert await files(booted) - before == set()


async def installs(guest: Guest, package: Path) -> None:
    """It runs and is there at the next boot; what it may do is what the operator has linked to."""
    await guest.run(f"ln -s /usr/share/fairlead/hardware.conf {DROP_INS}")
    await dpkg(guest, "--install", package)
    state = await Service(guest).properties("ActiveState", "UnitFileState")
    assert state == {"ActiveState": "active", "UnitFileState": "enabled"}
    assert await guest.run("stat --format='%a %U %G' /run/fairlead-http") == "2750 root fairlead"
    await guest.write(CONFIG, RESOURCE)
    await guest.run("dpkg --listfiles fairlead | grep fairlead > /tmp/files && [ $(wc -l < /tmp/files) -gt 1000 ]")


async def upgrades(guest: Guest, package: Path, held: list[str]) -> None:
    """The program and the unit are the new ones, and know what the pod has."""
    await dpkg(guest, "--install", package)
    assert (await service(guest))[1] == "0.2.0"
    status = json.loads(await guest.run("fairlead status --pods --json"))
    assert status["version"] == "0.2.0"
    assert [it["id"] for it in status["resources"][0]["devices"][0]["held"]] == held
    assert await Service(guest).properties("ActiveState", "NRestarts") == {"ActiveState": "active", "NRestarts": "0"}
    await guest.run("! systemctl cat fairlead-next")


async def is_refused(guest: Guest, package: Path) -> None:
    """A release that cannot read the configuration says so, is installed, and takes nobody's place."""
    serves = await service(guest)
    await guest.write(CONFIG, f"{RESOURCE}nonsense = 1\n")
    said = await dpkg(guest, "--install", package)
    assert "nonsense" in said
    assert "run /usr/share/fairlead/replace.sh" in said
    assert (
        await guest.run("dpkg-query --show --showformat='${Status} ${Version}' fairlead")
        == "install ok installed 0.3.0"
    )
    assert await service(guest) == serves
    await guest.run("! systemctl cat fairlead-next")


async def is_removed(guest: Guest, kubelet: Node) -> None:
    """The service is gone, and what a pod's containers may be made of again is there."""
    since = len(kubelet.log.lines)
    await dpkg(guest, "--remove", "fairlead")
    await kubelet.log.says(since, change="disconnected", resource=NULL)
    await guest.run("! systemctl cat fairlead")
    await guest.run(f"[ -f {spec.file(NULL)} ] && [ -f {CONFIG} ] && [ -f /var/lib/fairlead/state.json ]")


async def is_purged(guest: Guest) -> None:
    """None of its files is there any more, nor its group; what the operator has put beside is.

    While another Fairlead has the node, all that it needs stays.
    """
    await guest.run(f"flock --exclusive {SOCKETS}/lock /var/lib/dpkg/info/fairlead.postrm purge")
    await guest.run(f"[ -f {spec.file(NULL)} ] && [ -d {SOCKETS} ] && [ -f /var/lib/fairlead/state.json ]")
    await dpkg(guest, "--purge", "fairlead")
    assert await guest.run("xargs ls -d < /tmp/files 2> /dev/null || true") == ""
    await guest.run("! getent group fairlead")
    await guest.run(f"rm {DROP_INS}/test.conf && rmdir {DROP_INS}")
