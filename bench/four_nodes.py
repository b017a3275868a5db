"""A backend for the benchmark: 128 devices of four nodes and two variables each, as a large accelerator has.

It is no built-in: `bench.processes` installs it by its entry point, in a directory of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar, Final

import msgspec

from backends.base import Backend, ContainerEdits, Device, Discovery, Grant, HostPath, Node, Resource, Signal

DEVICES: Final = 128


class FourNodesOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """It has none."""


class FourNodes(Backend[FourNodesOptions]):
    """Devices that are always there."""

    options_type: ClassVar = FourNodesOptions

    def units(self) -> Iterable[str]:
        return ["all"]

    def discover(self, unit: str) -> Discovery:
        return Discovery(tuple(_device(unit, n) for n in range(DEVICES)))

    def probe(self, device: Device) -> Iterable[Signal]:  # noqa: ARG002
        return ()

    def edits(self, resource: Resource[FourNodesOptions], grants: Sequence[Grant]) -> ContainerEdits:  # noqa: ARG002
        nodes = tuple(node for grant in grants for node in grant.device.nodes)
        ids = ",".join(grant.id for grant in grants)
        return ContainerEdits(nodes=nodes, env={"BENCH_VISIBLE_DEVICES": ids, "BENCH_MODE": "exclusive"})


def _device(unit: str, number: int) -> Device:
    key = f"bench{number}"
    nodes = tuple(Node(HostPath(f"/dev/bench/{key}/{part}"), f"/dev/bench/{key}/{part}", "rw") for part in "abcd")
    return Device(key=key, unit=unit, hardware=frozenset({f"bench:{key}"}), identity=key, nodes=nodes)
