"""The units of deploy/systemd on a real systemd: a start without a kubelet, bad ends, a reload, and what each unit may do."""

from __future__ import annotations

import json
import re
import sys
import sysconfig
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import pytest

from tests.e2e.forkserver import REPOSITORY
from tests.e2e.process import MAIN
from tests.guest.guest import SLOWER, Guest, guest
from tests.guest.hardware import EDU, addresses, driver
from tests.guest.machine import Accelerator
from tests.guest.node import CONFIG, KUBELET_ROOT, Node, node
from tests.wait import limit

UNITS: Final = REPOSITORY / "deploy/systemd"
SYSTEM: Final = Path("/etc/systemd/system")
PROGRAM: Final = Path("/opt/fairlead")
HCA: Final = "example.com/widget"
EDUS: Final = "example.com/edu"
RESOURCES: Final = f"""
[[resource]]
name = "{HCA}"
backend = "stub"
[resource.options]
devices = [{{ count = 2 }}]

[[resource]]
name = "{EDUS}"
backend = "vfio"
select = {{ id = "1234:11e8" }}
bind = "start"
"""
WATCHDOG: Final = 15
"""Seconds; emulated, the agent needs some of them for its imports, which systemd does not count."""

TEST_ONLY: Final = f"""
[Unit]
DefaultDependencies=no
[Service]
WatchdogSec={WATCHDOG}s
TimeoutStartSec=infinity
"""


async def install(guest: Guest) -> None:
    """The program as the unit expects it, and the unit; without what the rest of a system would be started for."""
    parts = {"source": REPOSITORY, "venv": Path(sys.prefix), "python": Path(sys.base_prefix).resolve()}
    for name, path in parts.items():  # which may all lie in /root, where the unit sees nothing
        await guest.run(f"mkdir -p {PROGRAM}/{name} && mount --bind {path} {PROGRAM}/{name}")
    python = PROGRAM / "python" / Path(sys.executable).resolve().relative_to(parts["python"])
    packages = PROGRAM / "venv" / Path(sysconfig.get_path("purelib")).relative_to(sys.prefix)
    environment = f"PYTHONPATH={packages} LD_LIBRARY_PATH={PROGRAM}/python/lib"
    script = f"cd {PROGRAM}/source && {environment} exec {python} -c '{MAIN}' \"$@\""
    await guest.write(PROGRAM / "bin/fairlead", f"#!/bin/sh\n{script}\n")
    await guest.write(CONFIG, RESOURCES)
    await guest.write(SYSTEM / "fairlead.service", (UNITS / "fairlead.service").read_text())
    await guest.write(SYSTEM / "fairlead.service.d/test.conf", TEST_ONLY)
    await guest.run(f"chmod +x {PROGRAM}/bin/fairlead && systemctl daemon-reload")


class Service:
    """The unit, as systemd and its journal tell of it."""

    def __init__(self, guest: Guest) -> None:
        self.guest = guest

    async def properties(self, *names: str) -> dict[str, str]:
        said = await self.guest.run(f"systemctl show fairlead --property={','.join(names)}")
        return dict(line.split("=", 1) for line in said.splitlines())

    async def ends(self) -> list[str]:
        """How each of its processes has ended that systemd started again, in systemd's words."""
        said = await self.guest.run("journalctl --sync; journalctl --unit=fairlead --output=cat")
        return re.findall(r"Failed with result '(.+)'\.", said)

    async def says(self, event: str) -> dict[str, Any]:
        """The first line with this event, waited for, and its PRIORITY in the journal."""
        follow = "journalctl --unit=fairlead --output=json --output-fields=MESSAGE,PRIORITY --lines=all --follow"
        async with await self.guest.start(follow) as process, limit(f"the event {event}", slower=SLOWER):
            async for text in process.lines():
                entry = json.loads(text)
                if entry["MESSAGE"].startswith("{") and (line := json.loads(entry["MESSAGE"]))["event"] == event:
                    return {**line, "PRIORITY": entry["PRIORITY"]}
        raise AssertionError("journalctl has ended")


@pytest.fixture
async def booted(accelerator: Accelerator) -> AsyncIterator[Guest]:
    async with guest(accelerator, ["-device edu,id=edu,bus=port0"], systemd=True) as up:
        await install(up)
        yield up
        print(await up.run("journalctl --unit=fairlead --output=short-monotonic --no-hostname"))


async def test_the_service_starts_reloads_and_comes_back_from_every_end(booted: Guest) -> None:
    service = Service(booted)
    (edu,) = await addresses(booted, EDU)

    await booted.run("modprobe vfio-pci && systemctl start fairlead")
    assert await service.properties("ActiveState", "StatusText") == {
        "ActiveState": "active",
        "StatusText": f"waiting for {KUBELET_ROOT}/device-plugins/kubelet.sock",
    }

    async with node(booted) as kubelet:
        await kubelet.shows(HCA, "stub-0", "stub-1")
        await observes_only(service, kubelet, edu)
        await reloads(service)
        await bites(service, kubelet)
        await acts_on_hardware(service, kubelet, edu)

    await booted.run("systemctl stop fairlead")
    assert await service.properties("ActiveState", "Result") == {"ActiveState": "inactive", "Result": "success"}


async def observes_only(service: Service, kubelet: Node, edu: str) -> None:
    """It sees what there is, and can write nothing to /sys."""
    await kubelet.shows(EDUS, unhealthy=[edu])
    await service.guest.run("[ -S /run/fairlead/admin.sock ]")
    refused = await service.says("not-adopted")
    assert (refused["resource"], refused["device"], refused["PRIORITY"]) == (EDUS, edu, "4")
    assert "read-only" in refused["reason"]
    assert await driver(service.guest, edu) == ""


async def reloads(service: Service) -> None:
    await service.guest.run("systemctl reload fairlead")
    await service.says("config-unchanged")
    assert (await service.properties("ActiveState")) == {"ActiveState": "active"}
    assert await service.ends() == []


async def bites(service: Service, kubelet: Node) -> None:
    """Stopped, as if its loop hung, it is restarted, here as the unit that may act on hardware."""
    since = len(kubelet.log.lines)
    hardware = "fairlead.service.d/hardware.conf"
    await service.guest.write(SYSTEM / hardware, (UNITS / hardware).read_text())
    await service.guest.run("modprobe -r vfio-pci")  # it loads it itself now
    await service.guest.run("systemctl daemon-reload && systemctl kill --signal=STOP fairlead")
    await kubelet.log.says(since, change="list", resource=HCA)
    assert await service.ends() == ["watchdog"]


async def acts_on_hardware(service: Service, kubelet: Node, edu: str) -> None:
    await kubelet.shows(EDUS, edu)
    assert await driver(service.guest, edu) == "vfio-pci"
    since = len(kubelet.log.lines)
    await service.guest.run("systemctl kill --signal=KILL fairlead")
    await kubelet.log.says(since, change="list", resource=EDUS)
    await kubelet.shows(EDUS, edu)
    assert await service.ends() == ["watchdog", "signal"]
