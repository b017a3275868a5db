"""Reads a configuration file into a `Config`, or raises everything that is wrong with it at once."""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from msgspec.structs import replace

from agent.config import syntax, typed
from agent.config.model import AgentConfig, Config, DraConfig, HttpConfig, KubernetesConfig
from agent.config.problems import ConfigError, ConfigProblem, Problems
from agent.config.resources import Registry, read_resources
from agent.runtime.errors import unknown
from agent.runtime.limits import plugin_directory_problem
from backends import registry as installed
from backends.base import Host, Resource
from backends.linux import files

MOST_BYTES: Final = 4 << 20
"""Of a configuration: a ConfigMap has 1 MiB at most."""

DEFAULT_PATH: Final = Path("/etc/fairlead/config.toml")

TABLES: Final[Mapping[str, type]] = {
    "agent": AgentConfig,
    "host": Host,
    "http": HttpConfig,
    "kubernetes": KubernetesConfig,
    "dra": DraConfig,
}
"""The tables beside `[[resource]]`, and what they are read into."""


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
    return replace(_read(path or default, data, registry), read_at=now)


def read_tables(tables: Mapping[str, Any], problems: Problems, registry: Registry, source: Path | None) -> Config:
    """The configuration that a document's tables mean.

    Raises:
        ConfigError: with every mistake.
    """
    for name in tables:
        if name not in (*TABLES, "resource"):
            problems.add((name,), unknown("table", name, (*TABLES, "resource")))
    sections = {name: _section(tables, name, wanted, problems) for name, wanted in TABLES.items()}
    if (agent := sections["agent"]) is not None and (problem := plugin_directory_problem(agent.plugin_dir)):
        problems.add(("agent", "plugin_dir"), problem)
    resources = read_resources(tables.get("resource", []), registry, problems)
    _check_dra(sections["dra"], resources, problems)
    problems.raise_any()
    return Config(**sections, resources=resources, source=source)


def _check_dra(dra: DraConfig | None, resources: Sequence[Resource[Any]], problems: Problems) -> None:
    """Add names in `dra.no_execute` that no resource has which is served so: a typing mistake would evict nobody."""
    served = [it.name for it in resources if it.spec.serve == "dra"]
    for number, name in enumerate(dra.no_execute if dra else ()):
        if name not in served:
            problems.add(("dra", "no_execute", number), unknown("resource with serve = 'dra'", name, served))


def _section(tables: Mapping[str, Any], name: str, wanted: type, problems: Problems) -> Any:
    section, mistakes = typed.convert(tables.get(name, {}), wanted)
    for path, sentence in mistakes:
        problems.add((name, *path), sentence)
    return section


def _read(file: Path, data: bytes, registry: Registry) -> Config:
    try:
        document = data.decode("utf-8-sig")
        return read_tables(_parse(file, document), Problems(file, document), registry, source=file)
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        by = " (it is UTF-16, as some editors of Windows write)" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else ""
        raise _failure(file, line, f"the file is not written in UTF-8, as TOML has to be{by}") from error
    except RecursionError as error:
        raise _failure(file, None, "the file has lists or tables that are nested too deeply") from error


def _parse(file: Path, document: str) -> dict[str, Any]:
    found = syntax.parsed(document, shlex.quote(str(file)))
    if isinstance(found, list):
        raise ConfigError(tuple(ConfigProblem(file, it.line, "", f"this is no TOML: {it.sentence}") for it in found))
    return found


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
