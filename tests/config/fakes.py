"""Small backends for tests of the configuration, so that these follow from no real one's options."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, ClassVar

import msgspec

from backends.base import Backend, ContainerEdits, Discovery, Grant, OptionsError, Resource
from backends.registry import BrokenBackendError, UnknownBackendError


class PathOption(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    path: str
    permissions: str | None = None
    mount_path: str | None = None


class CharDevOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    paths: list[PathOption]
    count: int = 1


class Mode(enum.Enum):
    FAST = "fast"
    SLOW = "slow"


class Part(msgspec.Struct, frozen=True, rename="kebab"):
    part_name: str
    sizes: tuple[int, ...] = ()


class StubOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    devices: int | list[Part] = 1
    file: str | None = None


class OddOptions(msgspec.Struct, frozen=True):
    """Every shape of option there is."""

    name: str = ""
    mode: Mode = Mode.FAST
    ratio: float = 1.0
    parts: Annotated[list[Part], msgspec.Meta(max_length=2)] | None = None
    limits: dict[str, int] = {}


class _Fake(Backend[Any]):
    def units(self) -> Iterable[str]:
        return ()

    def discover(self, unit: str) -> Discovery:
        return Discovery()

    def edits(self, resource: Resource[Any], grants: Sequence[Grant]) -> ContainerEdits:
        return ContainerEdits()


class CharDev(_Fake):
    options_type: ClassVar = CharDevOptions

    @classmethod
    def check(cls, resource: Resource[Any]) -> None:
        for index, option in enumerate(resource.spec.options.paths):
            if not option.path.startswith("/dev/"):
                raise OptionsError(("paths", index, "path"), "lies outside /dev")

    @classmethod
    def fixed_ids(cls, resource: Resource[Any]) -> Iterable[str]:
        return (f"token{n}" for n in range(resource.spec.options.count))


class Stub(_Fake):
    options_type: ClassVar = StubOptions


class Odd(_Fake):
    """The one that can reset its hardware."""

    options_type: ClassVar = OddOptions

    def prepare(self, resource: Resource[Any], grants: Sequence[Grant]) -> Iterable[str]:
        return ()


class Failing(_Fake):
    options_type: ClassVar = StubOptions

    @classmethod
    def check(cls, resource: Resource[Any]) -> None:
        raise RuntimeError("oh no")


class FakeRegistry:
    """As `backends.registry`, with the backends above."""

    _BACKENDS: ClassVar[dict[str, type[Backend[Any]]]] = {
        "chardev": CharDev,
        "stub": Stub,
        "odd": Odd,
        "failing": Failing,
    }

    def names(self) -> list[str]:
        return [*self._BACKENDS, "broken"]

    def load(self, name: str) -> type[Backend[Any]]:
        if name == "broken":
            raise BrokenBackendError("backend 'broken' cannot be imported: no libbroken.so")
        try:
            return self._BACKENDS[name]
        except KeyError:
            raise UnknownBackendError(name) from None
