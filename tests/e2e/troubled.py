"""A third party's backend for nodes in one directory, which hangs, fails and talks nonsense when told to.

It is told by files in `orders`, named as the calls are (`undo` is `release`): `hang` (until somebody opens the FIFO
`release` there), `raise`, `exit` or `nonsense`, or a Python expression after `odd `; a device is ill while there is a file `ill-<unit>`. Of all that no event tells.
What it was asked is written to the file `calls`. A claim makes another node, and its release removes that.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from backends.base import (
    ALL,
    All,
    Backend,
    ContainerEdits,
    Device,
    Discovery,
    Grant,
    Hint,
    HostPath,
    Node,
    Released,
    Resource,
    Signal,
    Verdict,
    Watches,
)
from backends.interface.values import Known


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    nodes: str
    """The host's directory of its nodes."""
    orders: str
    """This process's directory of what it is told."""


def _made(unit: str) -> HostPath:
    return HostPath(f"/dev/made-{unit}")


class Troubled(Backend[Options]):
    options_type: ClassVar = Options

    def __init__(self, host: Any, resources: Sequence[Resource[Options]]) -> None:
        super().__init__(host, resources)
        self._nodes = HostPath(resources[0].spec.options.nodes)
        self._orders = Path(resources[0].spec.options.orders)
        self._obey("start")

    def _obey(self, call: str) -> Any:
        """Do what the file says; nonsense to return, if that is what it says."""
        try:
            order = (self._orders / call).read_text()
        except FileNotFoundError:
            order = ""
        with (self._orders / "calls").open("a") as calls:  # not before: who reads of the call may change the order
            calls.write(f"{call}\n")
        if order == "hang":
            (self._orders / "release").read_text()
        if order == "raise":
            raise RuntimeError(f"{call} was told to fail")
        if order == "exit":
            raise SystemExit(f"{call} was told to end the process")
        if order.startswith("odd "):
            return eval(order.removeprefix("odd "))
        return ["nonsense", 7] if order == "nonsense" else None

    def units(self) -> Iterable[str]:
        return self._obey("units") or sorted(path.name for path in self.host.local(self._nodes).iterdir())

    def discover(self, unit: str) -> Discovery:
        if nonsense := self._obey("discover") or self._obey(f"discover-{unit}"):
            return nonsense  # type: ignore[no-any-return]
        path = self._nodes / unit
        if not self.host.local(path).exists():
            return Discovery()
        nodes = [node for node in (path, _made(unit)) if self.host.local(node).exists()]
        hardware = frozenset({f"troubled:{unit}"})
        return Discovery((Device(unit, unit, hardware, nodes=tuple(Node(n, str(n), "rw") for n in nodes)),))

    def probe(self, device: Device) -> Iterable[Signal]:
        if (self._orders / f"ill-{device.unit}").exists():
            yield Signal(min(device.hardware), "ill", Verdict.NOW, "It was told to be ill.")
        yield from self._obey("probe") or ()

    def watches(self, known: Known) -> Watches:
        if nonsense := self._obey("watches"):
            return nonsense  # type: ignore[no-any-return]
        return Watches(directories=frozenset({self._nodes, self._nodes.parent}))

    def affects(self, hint: Hint, known: Known) -> Iterable[str] | All:
        return self._obey("affects") or ALL

    def needs_claim(self, resource: Resource[Options]) -> bool:
        self._obey("needs_claim")
        return super().needs_claim(resource)

    def claim(self, resource: Resource[Options], grants: Sequence[Grant]) -> None:
        self._obey("claim")
        for grant in grants:
            self.host.local(_made(grant.device.unit)).touch()

    def prepare(self, resource: Resource[Options], grants: Sequence[Grant]) -> Iterable[str]:
        self._obey("prepare")
        for grant in grants:
            yield from grant.device.hardware

    def release(self, ended: Sequence[Released], idle: frozenset[str]) -> None:
        self._obey("undo")
        for hardware in idle:
            self.host.local(_made(hardware.removeprefix("troubled:"))).unlink(missing_ok=True)

    def edits(self, resource: Resource[Options], grants: Sequence[Grant]) -> ContainerEdits:
        return self._obey("edits") or ContainerEdits.of(grants)
