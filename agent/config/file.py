"""Reads a configuration file into a `Config`, typed and with defaults, or raises everything that is wrong with it at once.

What differs between two decides what a reload changes.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Struct
from msgspec.structs import fields, replace

from agent.config import syntax, typed
from agent.config.problems import ConfigError, ConfigProblem, Problems
from agent.config.resources import Registry, read_resources
from agent.config.typed import DriverName, Listen, PathOrNone, PathOrOff
from agent.runtime.errors import unknown
from agent.runtime.limits import plugin_directory_problem
from backends import registry as installed
from backends.base import Host, Resource, Seconds
from backends.linux import files

_FIVE_MINUTES: Final = Seconds(300)
_HALF_A_MINUTE: Final = Seconds(30)
_OFF: Final = Listen("off")
_NO_FILE: Final = PathOrOff("off")
_NO_KUBECONFIG: Final = PathOrNone("")
_DRIVER: Final = DriverName("fairlead.dev")

MOST_BYTES: Final = 4 << 20
"""Of a configuration: a ConfigMap has 1 MiB at most."""

DEFAULT_PATH: Final = Path("/etc/fairlead/config.toml")


# --- what a configuration is ---


class AgentConfig(Struct, frozen=True):
    """`[agent]`: the paths are as this process sees them."""

    plugin_dir: Path = Path("/var/lib/kubelet/device-plugins")
    """Where `kubelet.sock` lies, whatever the kubelet's --root-dir says (kubelet contract: A1)."""
    kubelet_root: Path = Path("/var/lib/kubelet")
    """The kubelet's --root-dir; its podresources socket lies below (kubelet contract: A5)."""
    state_dir: Path = Path("/var/lib/fairlead")
    """What must outlive a restart."""
    admin_socket: Path = Path("/run/fairlead/admin.sock")
    """Where the commands reach the daemon; root only."""
    uevents: Literal["kernel", "udev", "off"] = "kernel"
    """Who tells of hot-plug."""
    resync: Seconds = _FIVE_MINUTES
    """Between two full looks at sysfs, in case an event was lost."""
    probe: Seconds = _HALF_A_MINUTE
    """Between two looks at a device's health without an event."""
    boot_wait: Seconds = _HALF_A_MINUTE
    """At most, before there is a kubelet, for devices that pods had before the boot; then it is told that we are ready."""
    nfd_features: PathOrOff = _NO_FILE
    """What Node Feature Discovery makes labels of, in its directory `features.d`."""

    @property
    def pod_resources(self) -> Path:
        """The kubelet's podresources socket (kubelet contract: A5)."""
        return self.kubelet_root / "pod-resources" / "kubelet.sock"


class HttpConfig(Struct, frozen=True):
    """`[http]`."""

    listen: Listen = _OFF
    """Where metrics, probes and the live page are served."""
    hosts: tuple[str, ...] = ()
    """Names of this node in requests, beside its own, its addresses and localhost."""

    @property
    def is_on(self) -> bool:
        """Whether HTTP is served."""
        return self.listen != _OFF


class KubernetesConfig(Struct, frozen=True):
    """`[kubernetes]`: what Kubernetes' API server is told and asked; nothing by default."""

    events: bool = False
    """Whether a device that fails, recovers or is not offered becomes an Event on the Node, and on pods that hold it."""
    condition: bool = False
    """Whether the Node has the condition FairleadDevicesHealthy."""
    drain_annotation: bool = False
    """Whether the Node's annotation fairlead.dev/drain drains the devices that it names."""
    kubeconfig: PathOrNone = _NO_KUBECONFIG
    """The file that says where the API server is and who we are; without one, the pod's service account does."""

    @property
    def is_on(self) -> bool:
        """Whether the API server is asked or told anything."""
        return self.events or self.condition or self.drain_annotation


class DraConfig(Struct, frozen=True):
    """`[dra]`: how resources with serve = "dra" are offered; without one nothing of it is loaded."""

    driver: DriverName = _DRIVER
    """The driver's name, which DeviceClasses select by; the same on all nodes of a cluster."""
    node: str = ""
    """The Node's name; without one, what the variable NODE_NAME says, or the machine's own."""
    kubeconfig: PathOrNone = _NO_KUBECONFIG
    """The file that says where the API server is and who we are; without one, the pod's service account does."""
    no_execute: tuple[str, ...] = ()
    """Resources of which an unhealthy device has its pods evicted (NoExecute); of all others pods keep what they have."""
    no_execute_after: Seconds = _FIVE_MINUTES
    """How long such a device must be unhealthy before its pods are evicted."""
    no_execute_most: Annotated[int, msgspec.Meta(ge=1)] = 1
    """Of how many such devices at a time pods are evicted on this node."""


class Config(Struct, frozen=True):
    """Everything that is configured, checked."""

    agent: AgentConfig = AgentConfig()
    host: Host = Host()
    resources: tuple[Resource[Any], ...] = ()
    """In the file's order: a device joins the first that takes it."""
    source: Path | None = None
    """The file it came from; None is the built-in set."""
    http: HttpConfig = HttpConfig()
    kubernetes: KubernetesConfig = KubernetesConfig()
    dra: DraConfig = DraConfig()
    read_at: float = 0.0
    """When it was read, in seconds since 1970; 0 if it was not: it cannot be read again."""
    is_empty: bool = False
    """Whether the file had not a byte when it was read, as a full disk or an editor leaves one for a moment."""

    @property
    def uses_dra(self) -> bool:
        """Whether any resource is served by dynamic resource allocation."""
        return any(it.spec.serve == "dra" for it in self.resources)


TABLES: Final[Mapping[str, type]] = {
    "agent": AgentConfig,
    "host": Host,
    "http": HttpConfig,
    "kubernetes": KubernetesConfig,
    "dra": DraConfig,
}
"""The tables beside `[[resource]]`, and what they are read into."""


# --- what differs between two ---


APPLIED_AT_ONCE: Final = frozenset({"resync", "probe"})
"""The settings of `[agent]` that a running daemon takes over."""


class Difference(Struct, frozen=True):
    """From the configuration in force to another."""

    config: Config
    """The other, without what only a restart can apply: that stays as it is."""
    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    """Resources that are made otherwise, or stand at another place in the order."""
    kinds: frozenset[str] = frozenset()
    """The backends whose resources are others, or in another order; of some there may be none left."""
    settings: tuple[str, ...] = ()
    """Settings with another value, as in `agent.probe`."""
    needs_restart: tuple[str, ...] = ()
    """Settings of which the other value must wait for a restart."""

    @property
    def new(self) -> frozenset[str]:
        """The resources that are not as they were."""
        return frozenset((*self.added, *self.changed))

    def __bool__(self) -> bool:
        """Whether there is anything to apply."""
        return bool(self.added or self.removed or self.changed or self.settings)


def compare(before: Config, after: Config) -> Difference:
    """What has changed from the configuration in force to another."""
    old = {resource.name: resource for resource in before.resources}
    new = {resource.name: resource for resource in after.resources}
    ranks = zip((name for name in old if name in new), (name for name in new if name in old), strict=True)
    moved = {after for before, after in ranks if before != after}
    kinds = {resource.spec.backend for resource in (*before.resources, *after.resources)}
    settings = [it for table in TABLES for it in _differing(table, before, after)]
    live = {
        it for it in settings if it.startswith(("kubernetes.", "dra.")) or it.removeprefix("agent.") in APPLIED_AT_ONCE
    }
    agent = replace(before.agent, **{name: getattr(after.agent, name) for name in APPLIED_AT_ONCE})
    return Difference(
        replace(after, agent=agent, host=before.host, http=before.http),
        added=tuple(name for name in new if name not in old),
        removed=tuple(name for name in old if name not in new),
        changed=tuple(name for name in new if name in old and (new[name] != old[name] or name in moved)),
        kinds=frozenset(kind for kind in kinds if _of(kind, before) != _of(kind, after)),
        settings=tuple(it for it in settings if it in live),
        needs_restart=tuple(it for it in settings if it not in live),
    )


def _differing(table: str, before: Config, after: Config) -> Iterator[str]:
    """The settings of a table that are not alike, as in `agent.probe`."""
    one, other = getattr(before, table), getattr(after, table)
    return (f"{table}.{it.name}" for it in fields(one) if getattr(one, it.name) != getattr(other, it.name))


def _of(kind: str, config: Config) -> list[Resource[Any]]:
    return [resource for resource in config.resources if resource.spec.backend == kind]


# --- reading it ---


def load(path: Path | None = None, registry: Registry = installed, default: Path = DEFAULT_PATH) -> Config:
    """The configuration in `path`; without one, that in `default`; where there is none either, KubeVirt's devices.

    Raises:
        ConfigError: the file cannot be read, or with every mistake in it.
    """
    now = time.time()  # before reading: what is written later is another one
    try:
        data = files.read(path or default, MOST_BYTES)
    except FileNotFoundError as error:
        if path is None:
            return replace(read_tables(_DEFAULTS, Problems(default, ""), registry, source=None), read_at=now)
        raise _unreadable(path, error) from error
    except OSError as error:
        raise _unreadable(path or default, error) from error
    return replace(_read(path or default, data, registry), read_at=now, is_empty=not data)


def read_tables(tables: Mapping[str, Any], problems: Problems, registry: Registry, source: Path | None) -> Config:
    """The configuration that a document's tables mean.

    Raises:
        ConfigError: with every mistake.
    """
    for name in tables:
        if name not in (*TABLES, "resource"):
            problems.add((name,), unknown("table", name, (*TABLES, "resource")))
    sections: dict[str, Any] = {}
    for name, wanted in TABLES.items():
        sections[name], mistakes = typed.convert(tables.get(name, {}), wanted)
        for path, sentence in mistakes:
            problems.add((name, *path), sentence)
    if (agent := sections["agent"]) is not None and (problem := plugin_directory_problem(agent.plugin_dir)):
        problems.add(("agent", "plugin_dir"), problem)
    resources = read_resources(tables.get("resource", []), registry, problems)
    _check_dra(sections["dra"], resources, problems)
    problems.raise_any()
    return Config(**sections, resources=resources, source=source)


def _check_dra(dra: DraConfig | None, resources: Sequence[Resource[Any]], problems: Problems) -> None:
    """Add names in `dra.no_execute` that are no resource served by DRA: a typing mistake would evict no pod."""
    served = [it.name for it in resources if it.spec.serve == "dra"]
    for number, name in enumerate(dra.no_execute if dra else ()):
        if name not in served:
            problems.add(("dra", "no_execute", number), unknown("resource with serve = 'dra'", name, served))


def _read(file: Path, data: bytes, registry: Registry) -> Config:
    try:
        document = data.decode("utf-8-sig")
        found = syntax.parsed(document, shlex.quote(str(file)))
        if isinstance(found, list):
            raise ConfigError(
                tuple(ConfigProblem(file, it.line, "", f"this is no TOML: {it.sentence}") for it in found)
            )
        return read_tables(found, Problems(file, document), registry, source=file)
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        by = " (it is UTF-16, as some editors of Windows write)" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else ""
        raise _failure(file, line, f"the file is not written in UTF-8, as TOML has to be{by}") from error
    except RecursionError as error:
        raise _failure(file, None, "the file has lists or tables that are nested too deeply") from error


def _unreadable(file: Path, error: OSError) -> ConfigError:
    return _failure(file, None, f"the file cannot be read: {error.strerror}")


def _failure(file: Path, line: int | None, sentence: str) -> ConfigError:
    return ConfigError((ConfigProblem(file, line, "", sentence),))


# --- what is offered where there is no configuration file: the devices that KubeVirt's virtual machines ask for ---

_DEFAULT_TOKENS: Final = 1000  # as many as KubeVirt's own plugin offers of each

_DEFAULT_NODES: Final = {
    "kvm": "/dev/kvm",
    "tun": "/dev/net/tun",
    "vhost-net": "/dev/vhost-net",
    "vhost-vsock": "/dev/vhost-vsock",
    "sev": "/dev/sev",
}

_DEFAULTS: Final[dict[str, Any]] = {
    "resource": [
        {
            "name": f"devices.kubevirt.io/{name}",
            "backend": "chardev",
            "paths": [{"path": path}],
            "count": _DEFAULT_TOKENS,
        }
        for name, path in _DEFAULT_NODES.items()
    ]
}
"""The set as TOML would give it."""
