"""The keys of an `infiniband` resource, and what is wrong with impossible values."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final, Literal

import msgspec

from backends.base import OptionsError, Resource, Seconds

MOST_TOKENS: Final = 100_000
"""With IDs of five digits, this many fill a third of the longest message that a kubelet reads (kubelet contract: A1)."""

UNSEEN_WHEN_AWAY: Final = ("link_layer", "state", "rate", "node_guid", "board_id", "fw_ver", "hca_type", "ifname")
"""Attributes that cannot be read while the adapter is in another network namespace."""

FROM_FIRMWARE: Final = ("state", "rate")
"""Attributes that only the firmware knows; it may hang."""

COUNTERS: Final = (
    "symbol_error",
    "link_error_recovery",
    "link_downed",
    "port_rcv_errors",
    "local_link_integrity_errors",
)
"""The counters that rise with a bad cable or a bad port."""

_COUNTER: Final = re.compile(r"[A-Za-z0-9_]+")
_HIGHEST_PORT: Final = 254  # 255 is no port (InfiniBand Architecture Specification, 14.2.5.6)

_DOWN, _UP, _POLL, _GRACE = Seconds(10), Seconds(5), Seconds(2), Seconds(30)


class InfiniBandOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Says which adapters are healthy, and how containers get them."""

    shared: int | None = None
    """The number of tokens, each of which gives all adapters of the resource; None: each adapter is a device."""
    overlap: bool = False
    """With `shared`: whether other pools that have this option, too, may have the same adapters."""
    topology: bool = True
    """With `shared`: whether the kubelet is told the NUMA node, if all adapters are on one."""
    umad: bool = True
    """Whether the nodes for management datagrams are handed out, of every port."""
    issm: bool = True
    """Whether the nodes that a subnet manager needs are handed out, of every port."""
    permissions: str | None = None
    """The permissions of the nodes; by default as in the plugins that this replaces: "rw", or "rwm" with `shared`."""
    ports: Literal["any", "all"] | list[int] = "any"
    """Which ports must be up: any one, all, or those with these numbers; the others do not matter then."""
    virtual_ports: bool = False
    """Whether the ports of virtual functions and subfunctions count, too. They may be down on purpose."""
    poll: Seconds = _POLL
    """The time between two readings of the ports, for which the kernel sends no event."""
    down_after: Seconds = _DOWN
    """How long ports must be down before the adapter is unhealthy."""
    up_after: Seconds = _UP
    """How long they must be up before it is healthy again."""
    subnet_manager_grace: Seconds = _GRACE
    """How long an InfiniBand port may wait for its subnet manager."""
    counters: tuple[str, ...] = COUNTERS
    """Files in the `counters` directory of a port: while one rises, the adapter is degraded."""


InfiniBandResource = Resource[InfiniBandOptions]


def complaints(resource: InfiniBandResource) -> Iterator[OptionsError]:
    """What is wrong with a resource, key by key."""
    options = resource.spec.options
    if (text := options.permissions) is not None and (not text or set(text) - set("rwm") or len(set(text)) < len(text)):
        yield OptionsError(("permissions",), f'is {text!r}; it must be made of "r", "w" and "m", each once')
    yield from _port_complaints(options.ports)
    for index, name in enumerate(options.counters):
        if not _COUNTER.fullmatch(name):
            yield OptionsError(("counters", index), f"{name!r} is no counter; they are files such as symbol_error")
    if unseen := [name for name in resource.named_by if name in UNSEEN_WHEN_AWAY]:
        sentence = "which may change, or be out of sight while a pod has the adapter; hca and device are not"
        yield OptionsError(("name",), f"asks for {unseen[0]}, {sentence}")
    if options.shared is not None:
        yield from _pool_complaints(resource, options.shared)
        return
    if options.overlap:
        yield OptionsError(("overlap",), "is for resources with shared; an adapter of its own is one resource's")
    if not options.topology:
        yield OptionsError(("topology",), "is for resources with shared; a pod is to have an adapter near its CPUs")


def _port_complaints(ports: str | list[int]) -> Iterator[OptionsError]:
    if isinstance(ports, str):
        return
    if not ports:
        yield OptionsError(("ports",), 'names no port; say "any" where it does not matter which')
    for index, number in enumerate(ports):
        if not 1 <= number <= _HIGHEST_PORT:
            yield OptionsError(("ports", index), f"is {number}; ports are numbered from 1 to {_HIGHEST_PORT}")


def _pool_complaints(resource: InfiniBandResource, tokens: int) -> Iterator[OptionsError]:
    if resource.is_template:
        yield OptionsError(
            ("shared",), "puts all adapters behind the same tokens; the name cannot tell them apart then"
        )
    if not 1 <= tokens <= MOST_TOKENS:
        yield OptionsError(("shared",), f"is {tokens}; it must be from 1 to {MOST_TOKENS}")
    if resource.spec.replicas != 1:
        yield OptionsError(("replicas",), "is beside shared, which says how many tokens there are")
    for key, tables in (("select", resource.spec.select), ("exclude", resource.spec.exclude)):
        for name in sorted({name for table in tables for name in table if name in FROM_FIRMWARE}):
            yield OptionsError(
                (key,), f"chooses by {name}, which only an adapter's firmware knows and may not tell; not with shared"
            )
