"""Finds the hardware that a person means, for every face: by any name that a device has, or had.

Its key, ID, node or attribute, the hardware's own name, what it was called while it was offered, the beginning of its ID. And
what people call it: its model in short, and the name that its driver gave it.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Final, NamedTuple

from agent.model import Held
from agent.runtime.errors import FairleadError, candidates, unknown
from agent.runtime.workers import BATCH, in_slices
from backends.base import Device

if TYPE_CHECKING:
    from agent.inventory.selection import Found  # with all of the configuration, which commands need not import

_PCI: Final = re.compile(
    r"(pci:)?((?P<domain>[0-9a-f]{4,8}):)?(?P<bus>[0-9a-f]{2}):(?P<device>[01][0-9a-f])(\.(?P<function>[0-7]))?"
)
"""`3b:00.0` (lspci), `00000000:3b:00.0` (nvidia-smi, in capitals), `pci:0000:3b:00` (an XID, in capitals)."""
_NUMBER: Final = re.compile(r"(0x)?[0-9a-f]+", re.IGNORECASE)
_NAMED: Final = 8  # devices in one sentence
_BEGINNING: Final = (
    4  # characters of an ID that may stand for it; of one that is all digits, as many as a UUID's first group
)
_DIGITS: Final = 8


class Place(NamedTuple):
    """Where hardware can be found by name; a named tuple, since 10,000 are made for each question."""

    hardware: frozenset[str]
    """Of the device."""
    key: str = ""
    """The device's; empty where it is gone and a pod still holds it."""
    resource: str = ""
    """That offers it; empty if none does."""
    ids: tuple[str, ...] = ()
    depends: frozenset[str] = frozenset()
    device: Device | None = None
    """As it is, or was seen last; None where nothing is known of it."""


class AmbiguousError(FairleadError):
    """A name that several devices have."""


def places_of(devices: Iterable[Found], tombstones: Iterable[Held]) -> Iterator[Place]:
    """Where these devices are, and what pods hold that is not there."""
    for found in devices:
        device, placed = found.device, found.placed
        resource, ids = (placed.resource, placed.ids) if placed else ("", ())
        yield Place(device.hardware, device.key, resource, ids, device.depends, device)
    for claim in tombstones:
        if claim.hardware:
            yield Place(claim.hardware, "", claim.resource, (claim.id,))


def unselected(selectable: Iterable[tuple[str, Device]]) -> Iterator[Place]:
    """Where devices of backends are that no resource need have."""
    return (Place(it.hardware, it.key, device=it, depends=it.depends) for _, it in selectable)


async def find(name: str, *groups: Iterable[Place]) -> frozenset[str]:
    """The hardware that this name stands for, in short steps: of a name that none of 10,000 devices has it takes 80 ms.

    Args:
        name: a device's key, an ID, or `nvidia.com/gpu/` and an ID: all that the device owns. `pci:0000:3b:00.0`: that
            piece of hardware alone. `0000:3b:00.0`: that PCI function, and what else its device owns if it is named so;
            also as lspci, nvidia-smi and the kernel's log write it. Where nothing has such a name: `/dev/nvidia0`,
            `nvidia0` or `mlx5_0`, the device that has this node, or any such attribute (`hca`, `ifname`, `serial`);
            `serial=1650522003820`, the device with that very attribute, also where it is a number. What nothing has whole
            may be the beginning of one ID or key, as a face that cuts them shows it.
        groups: where to look; what one group knows goes before what the next one does. Each is read in one step.

    Raises:
        FairleadError: nothing is called that; with the nearest name.
        AmbiguousError: several devices are, with what tells them apart; or it is a part of one.
    """
    found = frozenset[str]()

    def pieces() -> Iterator[None]:
        nonlocal found
        found = yield from _search(name, *groups)

    await in_slices(pieces())
    return found


def _search(name: str, *groups: Iterable[Place]) -> Generator[None, None, frozenset[str]]:
    """What is found is returned; a moment when other tasks may run is yielded for each place."""
    every = list[tuple[Place, ...]]()
    for group in groups:
        every.append(tuple(group))
        yield
        if found := (yield from _exactly(name, every[-1])):
            return found
    return (yield from _by_its_beginning(name, tuple(chain.from_iterable(every))))


def _exactly(name: str, places: Sequence[Place]) -> Generator[None, None, frozenset[str]]:
    """The hardware of this very name; none if there is none.

    Raises:
        AmbiguousError: as `find`.
    """
    found, alone = list[Place](), set[str]()
    for place in places:
        yield
        if name in place.hardware or name in place.depends:
            return frozenset({name})
        for hardware in (*place.hardware, *place.depends):
            if hardware.endswith(name) and hardware.partition(":")[2] == name:
                alone.add(hardware)
        if name == place.key or name in place.ids or _is_id(name, place):
            found.append(place)
    if (function := f"pci:{name}") in alone:
        return frozenset({function}).union(*(place.hardware for place in found if function in place.hardware))
    found += [Place(frozenset({it})) for it in sorted(alone) if not any(it in place.hardware for place in found)]
    if not found:
        if (address := _written_out(name)) != name and (written := (yield from _exactly(address, places))):
            return written
        is_number = _NUMBER.fullmatch(name) is not None
        for place in places:
            yield
            if place.device is not None and _is_called(name, place.device, is_number=is_number):
                found.append(place)
    meant = {place.hardware for place in found}
    if len(meant) > 1:
        described = sorted(map(_describe, found))
        more = f" or {len(described) - _NAMED} more" if len(described) > _NAMED else ""
        raise AmbiguousError(f"{name!r} may be {' or '.join(described[:_NAMED])}{more}; name the one you mean")
    return meant.pop() if meant else frozenset()


def _by_its_beginning(name: str, places: Sequence[Place]) -> Generator[None, None, frozenset[str]]:
    """The hardware of the one device with a key or ID that begins so.

    Raises:
        FairleadError: there is none, with the nearest name.
        AmbiguousError: several begin so.
    """
    begins = name.rstrip("\u2026.").lower()  # as the page and a terminal cut it
    least = _DIGITS if _NUMBER.fullmatch(begins) else _BEGINNING
    found = dict[str, frozenset[str]]()
    for place in places:
        yield
        for whole in (place.key, *place.ids):
            if whole.lower().startswith(begins) or whole.partition("-")[2].lower().startswith(begins):
                found[whole] = place.hardware
    if len(begins) < least or not found:
        known, others = set[str](), set[str]()
        for first in range(0, len(places), BATCH):
            called, beside = set[str](), set[str]()
            for place in places[first : first + BATCH]:
                called.add(place.key or place.ids[0])
                beside.update(place.ids, () if place.device is None else _paths_and_names(place.device))
                for hardware in (*place.hardware, *place.depends):
                    beside.update((hardware, hardware.partition(":")[2]))
            known |= called
            others |= candidates(name, beside)
            yield
        elsewhere = "`fairlead devices` lists what there is"
        raise FairleadError(unknown("device", name, known, others - known, elsewhere))
    if len({*found.values()}) > 1:
        some = " and ".join(sorted(found)[:2])
        raise AmbiguousError(f"{name!r} begins {len(found)} names, such as {some}; write more of the one you mean")
    return next(iter(found.values()))


def _paths_and_names(device: Device) -> Iterator[str]:
    if name := name_of(device.attributes):
        yield name
    for node in device.nodes:
        yield from (node.path.text, node.path.name)


def _is_called(name: str, device: Device, *, is_number: bool) -> bool:
    """Whether that is a node or an attribute of it. A number is no name: `nvidia-smi` counts GPUs in its own order.

    Raises:
        AmbiguousError: it is, and the device has several parts, of which that may be one.
    """
    for node in device.nodes:
        if node.path.text in (name, f"/dev/{name}") or node.path.name == name:
            break
    else:
        attribute, equals, value = name.partition("=")
        values = () if is_number else (name_of(device.attributes), *chain.from_iterable(device.attributes.values()))
        if name not in values and not (equals and value in device.attributes.get(attribute, ())):
            return False
    if device.parts:
        parts = ", ".join(sorted(frozenset[str]().union(*device.parts)))
        raise AmbiguousError(f"{name!r} is a part of {device.key!r}, which is {parts}; name the one you mean")
    return True


def _written_out(name: str) -> str:
    """A PCI address as sysfs has it; anything else as it is."""
    if (address := _PCI.fullmatch(name.lower())) is None:
        return name
    domain, function = int(address["domain"] or "0", 16), address["function"] or "0"
    return f"{domain:04x}:{address['bus']}:{address['device']}.{function}"


def _is_id(name: str, place: Place) -> bool:
    return (
        bool(place.resource) and name.startswith(f"{place.resource}/") and name[len(place.resource) + 1 :] in place.ids
    )


def _describe(place: Place) -> str:
    return f"{', '.join(sorted(place.hardware))}{f' of {place.resource}' if place.resource else ''}"


# --- what people call a device ---


_VENDORS: Final = re.compile("^((NVIDIA|Tesla|AMD|Instinct) )+")
_FORMS: Final = re.compile(r"[ -](PCIe|SXM|HBM|[0-9]+GB).*$")
"""How a GPU is mounted and what memory it has, which its makers write behind the model's name."""

_ADAPTERS: Final = {
    "1013": "ConnectX-4", "1014": "ConnectX-4 VF", "1015": "ConnectX-4 Lx", "1016": "ConnectX-4 Lx VF",
    "1017": "ConnectX-5", "1018": "ConnectX-5 VF", "1019": "ConnectX-5 Ex", "101a": "ConnectX-5 Ex VF",
    "101b": "ConnectX-6", "101c": "ConnectX-6 VF", "101d": "ConnectX-6 Dx", "101e": "ConnectX VF",
    "101f": "ConnectX-6 Lx", "1021": "ConnectX-7", "1023": "ConnectX-8",
    "a2d2": "BlueField", "a2d3": "BlueField VF", "a2d6": "BlueField-2", "a2dc": "BlueField-3",
}  # fmt: skip
"""PCI device → model, of NVIDIA's adapters (15b3).

Source: `mlx5_core_pci_table` in Linux's drivers/net/ethernet/mellanox/mlx5/core/main.c.
"""

_CALLED: Final = 2  # of several nodes or adapters


def model_of(attributes: Mapping[str, Sequence[str]]) -> str:
    """The model: `H100`, `H100 1g.10gb` of a MIG device, `ConnectX-7`; empty if it is not known.

    What cannot be shortened is whole.
    """
    whole = next(iter(attributes.get("model", ())), "")
    short = _FORMS.sub("", _VENDORS.sub("", whole)) or whole
    if not short and tuple(attributes.get("vendor", ())) == ("15b3",):
        short = next((_ADAPTERS.get(device, "") for device in attributes.get("device", ())), "")
    return " ".join(filter(None, (short, *attributes.get("profile", ()))))


def name_of(attributes: Mapping[str, Sequence[str]]) -> str:
    """What its driver calls it: `nvidia3`, `nvidia3/gi1/ci0`, `mlx5_0`, `kvm`; of more than two, how many; or empty."""
    if numbers := attributes.get("minor") if tuple(attributes.get("vendor", ())) == ("10de",) else None:
        parts = (f"{kind}{number}" for kind in ("gi", "ci") for number in attributes.get(kind, ()))
        return "/".join((f"nvidia{numbers[0]}", *parts))
    called = attributes.get("hca") or attributes.get("ifname") or attributes.get("name") or ()
    more = f" and {len(called) - _CALLED:,} more" if len(called) > _CALLED else ""
    return ", ".join(called[:_CALLED]) + more
