"""`fairlead suggest`: a whole configuration for the hardware that this machine has; `discover` shows the same proposals."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import anyio
import click
from msgspec import Struct
from msgspec.structs import replace

from agent import __version__
from agent.cli import commands, connection
from agent.cli.output import echo
from agent.config import Config, ConfigError, load, syntax
from agent.config.file import read_tables
from agent.config.problems import Problems
from agent.console.sockets import node_name
from agent.discovery.backend_answers import make_backends
from agent.inventory.lookup import model_of, name_of
from agent.inventory.shortfall import NotOffered, not_offered
from agent.inventory.survey import PATIENCE, Survey, survey
from agent.model import Slot
from agent.runtime import logs
from backends import registry
from backends.base import Device, Host, HostPath, Resource

_NAMED: Final = 8  # devices in one comment


class Proposal(Struct, frozen=True):
    """A resource that hardware of one kind would be offered by."""

    title: str
    toml: str
    """With a comment on every choice."""
    needs_devices: bool = False
    """Whether it is of use only where devices join it now. What only misses a driver is worth its resource."""

    @property
    def resource(self) -> dict[str, Any]:
        """Its table."""
        table: dict[str, Any] = tomllib.loads(self.toml)["resource"][0]
        return table

    @property
    def paths(self) -> list[str]:
        """The paths that it takes nodes from."""
        return [one["path"] for one in self.resource.get("paths", ())]


def _gpu(title: str, name: str, select: str, plugin: str) -> Proposal:
    return Proposal(
        title,
        f"""\
[[resource]]
# What a pod asks for under resources.limits: the name that {plugin} has, so that pods run as they are.
name = "{name}"
backend = "gpu"
# Which GPUs: all of this vendor. One model alone: add model = "…", as `fairlead discover --json` has it.
select = {select}
# So many pods share each GPU, without any isolation; left out: one.
#replicas = 4
# Before a container starts: "check" refuses a GPU that is unhealthy at that moment.
#pre_start = "check"
""",
    )


def _nodes(title: str, name: str, path: str, count: int, why: str) -> Proposal:
    shared = f"count = {count}\n" if count > 1 else "#count = 2\n"
    return Proposal(
        title,
        f"""\
[[resource]]
# {why}
name = "{name}"
backend = "chardev"
# Each node that this path or glob takes is a device; permissions are of "r", "w" and "m".
paths = [{{ path = "{path}", permissions = "rw" }}]
# How many containers may have a node at a time.
{shared}""",
        needs_devices=True,
    )


_KUBEVIRT: Final = (
    "KubeVirt's name for it; where KubeVirt runs, leave it to KubeVirt: a kubelet listens to one plugin alone."
)
_OWN: Final = "A name of your choice: a domain of yours, a slash, a word. Pods ask for it under resources.limits."
_TOKENS: Final = 1000  # as KubeVirt's plugin has it: the node can be opened by any number

PROPOSALS: Final = (
    Proposal(
        "NVIDIA's GPU instances (MIG)",
        """\
[[resource]]
# A resource for each profile that turns up, named as NVIDIA's plugin does with its strategy "mixed". It stands before
# nvidia.com/gpu: a device joins the first resource that takes it.
name = "nvidia.com/mig-{profile}"
backend = "gpu"
# NVIDIA's alone.
select = { vendor = "10de" }
""",
        needs_devices=True,
    ),
    _gpu("NVIDIA's GPUs", "nvidia.com/gpu", '{ vendor = "10de" }', "NVIDIA's own plugin"),
    _gpu("AMD's GPUs", "amd.com/gpu", '{ vendor = "1002" }', "AMD's own plugin"),
    _gpu(
        "Intel's GPUs, with the driver xe",
        "gpu.intel.com/xe",
        '{ vendor = "8086", driver = "xe" }',
        "Intel's own plugin",
    ),
    _gpu(
        "Intel's GPUs, with the driver i915",
        "gpu.intel.com/i915",
        '{ vendor = "8086", driver = "i915" }',
        "Intel's own plugin",
    ),
    Proposal(
        "RDMA adapters (InfiniBand, RoCE, iWARP)",
        """\
[[resource]]
# A name of your choice; each pod gets a whole adapter with its uverbs, umad and issm nodes, and rdma_cm.
name = "rdma/hca"
backend = "infiniband"
# No virtual functions: those are for the backend sriov, or for a resource of their own.
exclude = [{ function = "virtual" }]
# Which ports must be up: "any" (one is enough), "all", or their numbers.
ports = "any"
# All adapters for each of so many pods, in the place of an adapter for each pod.
#shared = 1000
""",
    ),
    Proposal(
        "virtual functions of network cards (SR-IOV)",
        """\
[[resource]]
# A name of your choice; pods also have the variables of the sriov-network-device-plugin.
name = "example.com/sriov-net"
backend = "sriov"
# Virtual functions alone: a whole card might be the node's own.
select = { function = "virtual" }
""",
        needs_devices=True,
    ),
    Proposal(
        "PCI functions that vfio-pci has, for virtual machines",
        """\
[[resource]]
# A name of your choice; KubeVirt's permittedHostDevices must say the same, with externalResourceProvider: true.
name = "example.com/vfio"
backend = "vfio"
# What is bound to vfio-pci already. By kind: select = { id = "10de:1eb8" }, as `lspci -nn` shows it.
select = { driver = "vfio-pci" }
# Fairlead binds nothing by itself; "allocate" binds a function when a pod is to have it.
bind = "never"
""",
        needs_devices=True,
    ),
    Proposal(
        "mediated devices (vGPUs) for virtual machines",
        """\
[[resource]]
# A resource for each type that turns up, named after it.
name = "example.com/{type_name}"
backend = "mdev"
""",
        needs_devices=True,
    ),
    Proposal(
        "Solarflare's cards, for Onload",
        """\
[[resource]]
# The name that sfc-device-plugin has.
name = "solarflare/smartNIC"
backend = "solarflare"
""",
        needs_devices=True,
    ),
    _nodes("hardware virtualization", "devices.kubevirt.io/kvm", "/dev/kvm", _TOKENS, _KUBEVIRT),
    _nodes("network tunnels", "devices.kubevirt.io/tun", "/dev/net/tun", _TOKENS, _KUBEVIRT),
    _nodes("virtual machines' fast network", "devices.kubevirt.io/vhost-net", "/dev/vhost-net", _TOKENS, _KUBEVIRT),
    _nodes("sockets to virtual machines", "devices.kubevirt.io/vhost-vsock", "/dev/vhost-vsock", _TOKENS, _KUBEVIRT),
    _nodes("AMD's encrypted virtual machines", "devices.kubevirt.io/sev", "/dev/sev", _TOKENS, _KUBEVIRT),
    _nodes("file systems of containers (FUSE)", "example.com/fuse", "/dev/fuse", _TOKENS, _OWN),
    _nodes(
        "Intel's SGX enclaves", "sgx.intel.com/enclave", "/dev/sgx_enclave", 110, "The name that Intel's plugin has."
    ),
    _nodes("compute accelerators", "example.com/accel", "/dev/accel/accel*", 1, _OWN),
    _nodes("Coral's Edge TPUs", "example.com/coral", "/dev/apex_*", 1, _OWN),
    _nodes("Hailo's accelerators", "example.com/hailo", "/dev/hailo*", 1, _OWN),
    _nodes("USB serial adapters", "example.com/serial", "/dev/ttyUSB*", 1, _OWN),
    _nodes("USB modems and boards", "example.com/modem", "/dev/ttyACM*", 1, _OWN),
    _nodes("cameras", "example.com/video", "/dev/video*", 1, _OWN),
    _nodes("sound", "example.com/sound", "/dev/snd", 1, _OWN),
    _nodes("television cards", "example.com/dvb", "/dev/dvb/adapter*", 1, _OWN),
    _nodes("the TPM, by way of its resource manager", "example.com/tpm", "/dev/tpmrm*", 16, _OWN),
    _nodes("GPIO", "example.com/gpio", "/dev/gpiochip*", 1, _OWN),
    _nodes("SPI", "example.com/spi", "/dev/spidev*", 1, _OWN),
)
"""What is looked for, in the order in which a configuration should have it."""


def proposals(host: Host) -> Iterator[Proposal]:
    """All of them, with those that the host's own numbers or an installed backend make."""
    yield from PROPOSALS
    yield from _queues(host)
    built_in = {proposal.resource["backend"] for proposal in PROPOSALS} | {"cex", "stub"}
    for name in registry.names():
        if name not in built_in:
            text = (
                f'[[resource]]\n# {_OWN}\nname = "example.com/{name}"\n# A backend that is installed beside Fairlead.\n'
            )
            it = Proposal(f"what the backend {name} finds", f'{text}backend = "{name}"\n', needs_devices=True)
            if _is_valid(it):
                yield it


def _queues(host: Host) -> Iterator[Proposal]:
    """IBM's crypto queues, which have to be named by their numbers: `02.0006` in sysfs is adapter 2, domain 6."""
    try:
        names = sorted(path.name for path in host.local(HostPath("/sys/bus/ap/devices")).iterdir())
    except OSError:
        return
    numbers = (name.split(".") for name in names if not name.startswith("card") and "." in name)
    queues = [f"{{ adapter = {int(card, 16)}, domain = {int(domain, 16)} }}" for card, domain in numbers]
    if queues:
        listed = "".join(f"    {queue},\n" for queue in queues)
        yield Proposal(
            "queues of IBM's Crypto Express cards",
            f"""\
[[resource]]
# The name of a set of queues, as k8s-cex-dev-plugin has it; what pods of one owner may use together.
name = "cex.s390.ibm.com/all"
backend = "cex"
# Every queue of this machine, by adapter and domain. Divide them into sets, a resource each.
apqns = [
{listed}]
""",
            needs_devices=True,
        )


def _is_valid(it: Proposal) -> bool:
    try:
        read_tables({"resource": [it.resource]}, Problems(Path("proposal"), it.toml), registry, None)
    except ConfigError:
        return False
    return True


class Found(Struct, frozen=True):
    """A proposal, and what this machine has for it."""

    proposal: Proposal
    devices: Mapping[str, Sequence[Slot]]
    """By the resource that would offer them; several where the proposal's name is made of attributes."""
    missing: tuple[NotOffered, ...]
    """What it is meant to have, and cannot offer as it is now."""

    def every(self) -> list[Device]:
        """Its devices, each once."""
        slots = (slot for of_one in self.devices.values() for slot in of_one)
        return list({it.device.key: it.device for it in slots if it.device is not None}.values())

    def headline(self) -> str:
        """What they are, and how many."""
        return f"{self.proposal.title[:1].upper()}{self.proposal.title[1:]}: {len(self.every())} found"


def look(config: Config) -> tuple[Survey, list[Found]]:
    """Look at the machine with every backend; what the configuration offers already is proposed no more."""
    taken = {resource.name for resource in config.resources}
    offered = [it for it in proposals(config.host) if it.resource["name"] not in taken]
    tables = {"resource": [it.resource for it in offered]}
    resources = read_tables(tables, Problems(Path("proposals"), ""), registry, None).resources
    every: tuple[Resource[Any], ...] = (*config.resources, *resources)
    seen = anyio.run(survey, every, make_backends(config.host, every), PATIENCE)
    inventory, given, told = seen.inventory, seen.inventory.selection.given(), not_offered(seen.inventory)
    found = []
    for it in offered:
        names = given.get(it.resource["name"], (it.resource["name"],))
        devices = {name: tuple(inventory.slots(name).values()) for name in names if inventory.slots(name)}
        missing = tuple(one for one in told if one.missing is not None and one.missing.resource == it.resource["name"])
        if devices or (missing and not it.needs_devices):
            found.append(Found(it, devices, missing))
    subjects = {it.resource["name"] for it in offered} | {path for it in offered for path in it.paths}
    problems = tuple(
        one for one in seen.problems if one[1].subject not in subjects
    )  # that nothing matches them is no fault
    return replace(seen, problems=problems), found


@click.command(epilog="Exit codes: 0 done, 2 the configuration that is named has mistakes.")
@commands.config
def suggest(config: Path | None) -> None:
    """Print a whole configuration that offers what this machine has, with a comment on every choice.

    \b
    fairlead suggest > config.toml
    fairlead validate config.toml

    It looks with every backend and changes nothing. Of the configuration that is in force, if there is one, the tables
    [agent], [host], [http] and [kubernetes] are kept; resources are proposed again.
    """  # noqa: D301  # click looks for the character
    logs.set_up("error")
    loaded = load(connection.in_force(config)[0])
    seen, found = look(Config(loaded.agent, loaded.host))
    kept = tomllib.loads(loaded.source.read_text(encoding="utf-8-sig")) if loaded.source else {}
    for line in _document(seen, found, kept):
        echo(line)


def _document(seen: Survey, found: Sequence[Found], kept: Mapping[str, Any]) -> Iterator[str]:
    yield from syntax.comment(
        f"Fairlead's configuration, which `fairlead suggest` {__version__} made of what {node_name()} has. Put it at "
        "/etc/fairlead/config.toml, or into the ConfigMap. `fairlead validate FILE` checks it after a change, "
        "`fairlead discover --config FILE` shows what it offers. config.example.toml explains every key."
    )
    tables = {name: kept[name] for name in ("agent", "host", "http", "kubernetes") if kept.get(name)}
    for name, table in tables.items():
        yield from ("", f"[{name}]")
        for key, value in table.items():
            yield from syntax.pair(key, value)
    if "http" not in tables:
        yield from (
            "",
            "[http]",
            '# Metrics, probes and the live page: "127.0.0.1:9440" serves them to this node alone.',
        )
        yield 'listen = "off"'
    for it in found:
        yield ""
        for line in _summary(it):
            yield from syntax.comment(line)
        yield from it.proposal.toml.rstrip("\n").split("\n")
    if not found:
        yield ""
        yield from syntax.comment(
            'Nothing was found that pods could have. Made-up devices, to try pods with: name = "example.com/widget", '
            'backend = "stub", devices = 4.'
        )
    for kind, problem in seen.problems:
        yield from syntax.comment(f"{kind}: {problem.sentence}")


def _summary(it: Found) -> Iterator[str]:
    """What was found for a proposal, in sentences."""
    devices = it.every()
    shown = ", ".join(map(_described, devices[:_NAMED]))
    more = f" and {len(devices) - _NAMED} more" if len(devices) > _NAMED else ""
    yield f"{it.headline()}{f': {shown}{more}' if devices else ''}."
    for one in it.missing[:_NAMED]:
        yield f"{one.found.device.key} is there and cannot be offered yet: {one.why}."


def _described(device: Device) -> str:
    words = (model_of(device.attributes), name_of(device.attributes))
    return " ".join(filter(None, words)) or device.key
