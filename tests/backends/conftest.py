"""Checks in every test here that devices have the attributes that their backend says they have."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from backends import registry
from backends.attributes import mistake
from backends.base import Backend, Discovery


@pytest.fixture(autouse=True, scope="session")
def attributes_as_declared() -> Iterator[None]:
    """A selector of what a device has must never be refused as a mistake."""
    with pytest.MonkeyPatch.context() as patch:
        for kind in ("cex", "chardev", "gpu", "infiniband", "mdev", "solarflare", "sriov", "vfio"):
            backend = registry.load(kind)
            patch.setattr(backend, "discover", _checked(backend))
        yield


def _checked(backend: type[Backend[Any]]) -> Any:
    discover, known = backend.discover, backend.attributes
    assert known

    def checked(self: Backend[Any], unit: str) -> Discovery:
        found = discover(self, unit)
        for device in (*found.devices, *found.beside):
            for name, values in device.attributes.items():
                assert [
                    mistake(name, value, known[name]) for value in values if mistake(name, value, known[name])
                ] == []
        return found

    return checked
