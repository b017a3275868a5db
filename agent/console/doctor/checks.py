"""Runs all checks in the order in which a person would look; one that fails does not end the others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from agent.console.doctor import daemon, host, kubelet, process_rights
from agent.console.doctor.findings import Check, Finding, Patient, named, warning

CHECKS: Final[Mapping[str, Check]] = {
    "plugin-directory": kubelet.plugin_directory,
    "kubelet-socket": kubelet.kubelet_socket,
    "agent": kubelet.agent,
    "podresources": kubelet.podresources,
    "checkpoint": kubelet.checkpoint,
    "other-plugins": kubelet.other_plugins,
    "state-directory": host.state_directory,
    "sysfs": host.sysfs,
    "dev": host.dev,
    "modules": host.modules,
    "kernel-log": host.kernel_log,
    "events": process_rights.events,
    "network": process_rights.network,
    "inotify": process_rights.inotify,
    "boot": process_rights.boot,
    "capabilities": process_rights.capabilities,
    "selinux": process_rights.selinux,
    "cdi": host.cdi,
    "http": daemon.http,
}


def examine(patient: Patient) -> Iterator[Finding]:
    """Run every check; one that fails itself is a warning."""
    for name, check in CHECKS.items():
        try:
            yield from list(named(name, check(patient)))
        except Exception as error:  # noqa: BLE001  # a strange node must not keep the other checks from running
            yield warning(f"This could not be checked: {error!r}.", "Please report it, with the whole output.", name)
