"""On recordings of real machines every backend looks at everything: all hardware is offered, or a sentence says why not.

What `fairlead suggest` writes for each is valid, and an API server takes the ResourceSlices.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import anyio
import pytest
from click.testing import CliRunner

from agent.cli.commands import fairlead
from agent.config import load
from agent.discovery.backend_answers import make_backends
from agent.dra import slices
from agent.inventory.survey import PATIENCE, survey
from agent.simulation.api_server import check
from backends.base import Host, Resource, ResourceSpec
from backends.infiniband import InfiniBand, InfiniBandOptions
from backends.linux import iommu
from tests.backends.trees import HOST, large_tree, recorded_host
from tests.needs import CORPUS, RECORDINGS

MANIFEST: Final = CORPUS / "manifest.tsv"
SUBSYSTEMS: Final = (
    "gpio",
    "hidraw",
    "i2c-dev",
    "media",
    "rtc",
    "sound",
    "spidev",
    "tpm",
    "video4linux",
    "watchdog",
)
_AGENT: Final = """\
[agent]
plugin_dir = "{root}/plugins"
state_dir = "{root}/state"
admin_socket = "{root}/admin.sock"
"""
IOMMUS: Final = {
    "hwloc-32em64t-2n8c+dax+nvme+mic+dimms": "turn VT-d on",
    "ghw-s390x": "s390x has one",
    "udev-MELLANOX_40GBPS": "turn the IOMMU on, in the",  # a POWER8; its processor is not recorded
}
"""How the advice on some machines' IOMMU begins."""
B200: Final = "udev-DISK_SAMSUNG_KIOXIA"
READS: Final = 4
"""How often a look opens a file or lists a directory, for each file of the recording: it grows with the machine, no faster."""


def recorded() -> list[str]:
    """The recordings' names; one that is skipped where there are none."""
    rows = MANIFEST.read_text().splitlines()[1:] if MANIFEST.is_file() else ["none"]
    return [row.partition("\t")[0] for row in rows]


def counting() -> Any:
    """What counts a tree's hardware without Fairlead; it comes with the recordings."""
    spec = importlib.util.spec_from_file_location("corpus_count", CORPUS / "count.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def resource(name: str, backend: str, *lines: str) -> str:
    return "\n".join(["[[resource]]", f'name = "r.example/{name}"', f'backend = "{backend}"', *lines, "", ""])


def wide_open(counted: Mapping[str, Any]) -> Iterator[str]:
    """Every kind of hardware that containers use where it is."""
    for name, vendor in (("nvidia", "10de"), ("amd", "1002"), ("intel", "8086")):
        yield resource(name, "gpu", f'select = {{ vendor = "{vendor}" }}')
    yield resource("hca", "infiniband")
    for subsystem in SUBSYSTEMS:
        yield resource(f"m-{subsystem}", "chardev", f'match = {{ subsystem = "{subsystem}" }}')
    if vendors := sorted({stick["id"][:4] for stick in counted["usb"].values() if not stick["hub"]}):
        sticks = ", ".join(f'{{ vendor = "{vendor}" }}' for vendor in vendors)
        yield resource("usb", "chardev", f"usb = [{sticks}]", 'id = "port"', 'nodes = "usb"')


def taking(counted: Mapping[str, Any]) -> Iterator[str]:
    """What is taken from the host for a container."""
    yield resource("net", "sriov")
    yield resource("accelerator", "sriov", 'device_type = "accelerator"')


def binding(counted: Mapping[str, Any]) -> Iterator[str]:
    """The same for virtual machines; by itself, since hardware that two resources miss is told once."""
    yield resource("vfio", "vfio", 'select = { function = ["physical", "virtual"] }', 'bind = "never"')


@dataclass
class Reads:
    """Counts what this process opens and lists; an audit hook cannot be taken away again."""

    number: int | None = None

    def __call__(self, event: str, _: object) -> None:
        if self.number is not None and event in {"open", "os.listdir", "os.scandir"}:
            self.number += 1


READING: Final = Reads()
sys.addaudithook(READING)


@dataclass
class Machine:
    """A recording, and what Fairlead says of it."""

    name: str
    host: Host
    counted: dict[str, Any]
    devices: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """By their resources."""
    left_out: dict[tuple[str, str], str] = field(default_factory=dict)
    """Backend and device → why no resource offers it."""

    @classmethod
    def recorded(cls, name: str, root: Path) -> Machine:
        found = cls(name, recorded_host(root, name), counting().count(root))
        for resources in (wide_open, taking, binding):
            found.look("".join(resources(found.counted)))
        return found

    @property
    def root(self) -> Path:
        return self.host.root

    def run(self, *arguments: str) -> str:
        result = CliRunner().invoke(fairlead, [*arguments, "--config", str(self.root / "config.toml")])
        assert isinstance(result.exception, SystemExit | None), result.exception
        assert "Traceback" not in result.output
        return result.stdout

    def look(self, resources: str) -> None:
        self.root.joinpath("config.toml").write_text((_AGENT + HOST).format(root=self.root) + resources)
        READING.number = 0
        try:
            answer = json.loads(self.run("discover", "--json"))
        finally:
            reads, READING.number = READING.number, None
        assert reads < READS * self.files + 1000
        for of_one in answer["resources"]:
            self.devices[of_one["name"].partition("/")[2]] = of_one["devices"]
        self.left_out |= {(it["backend"], it["device"]): it["why"] for it in answer["unclaimed"]}
        self.run("doctor")

    @cached_property
    def files(self) -> int:
        return sum(len(files) + len(folders) for _, folders, files in os.walk(self.root / "sys"))

    def offered(self, *names: str) -> set[str]:
        """The hardware of all devices that these resources offer."""
        return {it for name in names for device in self.devices.get(name, ()) for it in device["hardware"]}

    def told(self, backend: str) -> str:
        """All that is said of what a backend leaves out."""
        return "\n".join(f"{device}: {why}" for (kind, device), why in self.left_out.items() if kind == backend)

    def unsaid(self, backend: str, names: Iterable[str], hardware: Iterable[tuple[str, str]]) -> list[str]:
        """Of (hardware, what a person calls it) what is neither offered by these resources nor told."""
        offered, told = self.offered(*names), self.told(backend)
        return [name for key, name in hardware if key not in offered and name not in told]


@pytest.fixture(scope="module", params=recorded())
def machine(request: pytest.FixtureRequest) -> Iterator[Machine]:
    """Each in turn; to unpack one takes many times as long as all that is asked of it."""
    with large_tree() as root:
        yield Machine.recorded(request.param, Path(root))


def test_what_is_suggested_for_a_recorded_machine_is_valid(machine: Machine) -> None:
    machine.root.joinpath("config.toml").write_text(HOST.format(root=machine.root))
    suggested = machine.root / "suggested.toml"
    suggested.write_text(machine.run("suggest"))
    result = CliRunner().invoke(fairlead, ["validate", str(suggested)])
    assert result.exit_code == 0, result.output


def test_the_api_server_takes_what_a_recorded_machine_has(machine: Machine) -> None:
    served = [it.rstrip() + '\nserve = "dra"\n' for it in (*wide_open(machine.counted), *binding(machine.counted))]
    (file := machine.root / "config.toml").write_text(HOST.format(root=machine.root) + "\n".join(served))
    resources = load(file).resources
    backends = make_backends(machine.host, resources)
    found = anyio.run(survey, resources, backends, PATIENCE).inventory
    for it in resources:
        placed = slices.named(found.placed_in(it.name))
        offered = slices.offers(placed, found.slots(it.name), {})
        assert len(offered) == len(placed)
        known = backends[it.spec.backend].attributes
        devices = [one.entry for one in slices.entries(offered, it.name, known, "driver", (), 0.0, {}).values()]
        counters, takes = slices.exclusions(offered)
        assert not takes
        for part in slices.wanted("node", "driver", "pool", devices, counters):
            check({**part.spec, "pool": {"resourceSliceCount": 1}})
        assert len({frozenset(n for n in one["attributes"] if "/" not in n) for one in devices}) <= 1


def test_a_dgx_b200_offers_its_adapters_and_none_of_its_switches(machine: Machine) -> None:
    found = InfiniBand(machine.host, [Resource("a.com/hca", ResourceSpec("infiniband", InfiniBandOptions()))])
    every = {it.key: it for unit in found.units() for it in found.discover(unit).devices}
    withheld = sorted(key for key, it in every.items() if it.unusable.startswith("it leads to the NVSwitches"))
    is_b200 = machine.name == B200
    assert withheld == ([f"0000:05:00.{n}" for n in range(4)] if is_b200 else [])
    assert len([it for it in every.values() if it.nodes]) == 14 or not is_b200


@pytest.mark.needs(RECORDINGS)
def test_the_machines_that_are_asked_for_something_are_recorded() -> None:
    assert {*IOMMUS, B200} <= {*recorded()}


def test_recorded_machines_are_told_of_no_other_vendors_iommu(machine: Machine) -> None:
    assert iommu.how_to_turn_on(machine.host).startswith(IOMMUS.get(machine.name, ""))


def test_all_hardware_of_a_recorded_machine_is_offered_or_a_sentence_says_why_not(machine: Machine) -> None:
    counted = machine.counted
    functions = {address: it for address, it in counted["pci"].items() if it["class"] != "000000"}  # or not recorded
    gpus = {
        address: it
        for address, it in counted["gpu"].items()
        if address in functions and not (it["id"].startswith("8086") and it["class"].startswith("12"))  # an NPU
    }
    adapters = {
        match for path in counted["rdma"].values() for match in re.findall(r"[0-9a-f]+:\S\S:\S\S\.\d", path)[-1:]
    }
    sticks = [port for port, stick in counted["usb"].items() if not stick["hub"]]
    assert {
        "gpu": machine.unsaid("gpu", ("nvidia", "amd", "intel"), _pci(gpus)),
        "infiniband": machine.unsaid("infiniband", ("hca",), _pci(adapters)),
        "sriov": machine.unsaid("sriov", ("net",), _pci(counted["nic"].keys() & functions.keys())),
        "vfio": machine.unsaid("vfio", ("vfio",), _pci(_ends(functions))),
        "usb": machine.unsaid("chardev", ("usb",), [(f"usb:{port}", port) for port in sticks]),
        "nodes": machine.unsaid("chardev", [f"m-{name}" for name in SUBSYSTEMS], list(_nodes(machine.root))),
    } == {"gpu": [], "infiniband": [], "sriov": [], "vfio": [], "usb": [], "nodes": []}
    assert all(why.strip() for why in machine.left_out.values())
    partitions = len(machine.devices["amd"]) + machine.told("gpu").count("\n") + bool(machine.told("gpu"))
    assert len(counted["kfd"]) <= partitions, "each GPU and partition that KFD has"


def _pci(addresses: Iterable[str]) -> list[tuple[str, str]]:
    return [(f"pci:{address}", address) for address in addresses]


def _ends(functions: Mapping[str, Mapping[str, str]]) -> list[str]:
    """All functions but bridges, which no group is asked for."""
    return [address for address, it in functions.items() if not it["class"].startswith("06")]


def _nodes(root: Path) -> Iterator[tuple[str, str]]:
    for subsystem in SUBSYSTEMS:
        for number in sorted(root.glob(f"sys/class/{subsystem}/*/dev")):
            yield f"node:c:{number.read_text().strip()}", number.parent.name
