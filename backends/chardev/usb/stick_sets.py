"""Several USB sticks as one device: all that a group selects, or one for each of its selectors.

A unit is a group, `usb-set:<resource>`. Of sets of one stick each (KubeVirt's), the sticks of each selector are sorted
by ID and paired by their order, and a set's ID is that of its first selector's stick, which only it has. All sticks
together (generic-device-plugin's) are one device, whose ID says what selects them. If other sticks join or leave a
set, its identity changes: a pod that holds the ID keeps it, as one whose device was replaced.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import ClassVar

from backends.base import Device, Discovery, Hint, Host, Problem, Watches
from backends.chardev.finder import Finder, Group
from backends.chardev.paths import tokens
from backends.chardev.usb import sticks
from backends.chardev.usb.sticks import NotOfferedError, Selectors, Stick
from backends.interface.values import Known
from backends.linux import usb


class StickSets(Finder):
    """Finds the sticks that groups hand out together."""

    prefix: ClassVar = "usb-set:"

    def __init__(self, host: Host, groups: Sequence[Group]) -> None:
        super().__init__(host, groups)
        self._groups = {f"{self.prefix}{group.name}": (group, Selectors(group.options)) for group in groups}

    def units(self) -> Iterable[str]:
        """The groups."""
        return self._groups

    def discover(self, unit: str) -> Discovery:
        """The group's sets, and why there are no more."""
        if unit not in self._groups:
            return Discovery()
        if why := sticks.unlistable(self.host):
            return Discovery(problems=(Problem(unit, why),))
        group, selectors = self._groups[unit]
        problems: list[Problem] = []
        found: list[list[Stick]] = [[] for _ in selectors.names]
        for index, stick in self._sticks(unit, problems):
            found[index].append(stick)
        ordered = [sorted(each, key=lambda stick: stick.id) for each in found]
        if group.options.together == "all":
            every = [stick for each in ordered for stick in each]
            devices = [sticks.device(group, unit, "+".join(selectors.names), every)] if every else []
        else:
            devices = [sticks.device(group, unit, held[0].id, held) for held in zip(*ordered, strict=False)]
            problems += [Problem(unit, why) for why in _shortage(group, selectors.names, ordered)]
        return Discovery(tuple(devices), problems=tuple(problems))

    def _sticks(self, unit: str, problems: list[Problem]) -> Iterator[tuple[int, Stick]]:
        """Yield the sticks that the group's selectors take, each with the index of its selector; no ID comes twice."""
        group, selectors = self._groups[unit]
        seen: dict[str, str] = {}
        for port in usb.ports(self.host):
            if not selectors.alike(*usb.ids(self.host, port)) or (found := usb.read(self.host, port)) is None:
                continue
            try:
                if (index := selectors.first(found)) is None:
                    continue
                stick = sticks.stick(self.host, group.options, found)
                if (other := seen.setdefault(stick.id, port)) != port:
                    raise NotOfferedError(f'its serial is also that of the one at {other}; say id = "port"')
                yield index, stick
            except NotOfferedError as error:
                problems += filter(None, (sticks.problem(unit, found, group, error),))

    def ids(self, group: Group, device: Device) -> Sequence[str]:
        """The tokens of the set (see the module)."""
        return tokens(device.key, group.options.count)

    def watches(self, known: Known) -> Watches:  # noqa: ARG002  # an interface's
        """The events of USB and of the kinds of nodes that are handed out."""
        return Watches(sticks.subsystems(group for group, _ in self._groups.values()))

    def affects(self, hint: Hint, known: Known) -> Iterable[str]:  # noqa: ARG002  # an interface's
        """All groups, as soon as any stick comes or goes."""
        return tuple(self._groups) if sticks.port_of(hint) else ()


def _shortage(group: Group, names: Sequence[str], found: Sequence[Sequence[Stick]]) -> Iterator[str]:
    """Why some of the sticks are in no set."""
    scarce, least = min(zip(names, found, strict=True), key=lambda one: len(one[1]))
    for name, each in zip(names, found, strict=True):
        if len(each) > len(least):
            yield (
                f"{group.resource}: {len(each)} of {name} and {len(least)} of {scarce} are plugged in: what is left over is "
                "in no set"
            )
