"""Checks in every test here that devices have the attributes that their backend says they have, and that a container gets
the same by CDI as from the kubelet."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from agent.cdi import spec
from agent.cdi.specifications import named
from backends import registry
from backends.base import Backend, ContainerEdits, Discovery, Grant, Resource
from backends.interface.written import mistake
from tests.backends.gpu import fake_nvml
from tests.backends.gpu.fake_nvml import Install
from tests.cdi.runtime import container


@pytest.fixture(
    autouse=True, scope="module"
)  # not for the session: in a random order, tests of other folders come next
def checked_backends() -> Iterator[None]:
    """A selector of what a device has must never be refused as a mistake; a runtime makes what a kubelet would."""
    with pytest.MonkeyPatch.context() as patch:
        for backend in map(registry.load, registry.names()):
            if backend.attributes is not None:
                patch.setattr(backend, "discover", _checked(backend))
                patch.setattr(backend, "edits", _by_cdi_too(backend))
        yield


@functools.cache
def _checked(backend: type[Backend[Any]]) -> Any:
    discover, known = backend.discover, backend.attributes or {}

    def checked(self: Backend[Any], unit: str) -> Discovery:
        found = discover(self, unit)
        for device in (*found.devices, *found.beside):
            for name, values in device.attributes.items():
                assert not any(mistake(name, value, known[name]) for value in values)
        return found

    return checked


@functools.cache
def _by_cdi_too(backend: type[Backend[Any]]) -> Any:
    edits = backend.edits
    compared = set[str]()

    def both(self: Backend[Any], resource: Resource[Any], grants: Sequence[Grant]) -> ContainerEdits:
        inline = edits(self, resource, grants)
        if (what := f"{resource.name} {[grant.id for grant in grants]} {inline}") not in compared:
            compared.add(what)
            _compare(self, replace(resource, spec=replace(resource.spec, edits="cdi")), grants, inline)
        return inline

    return both


def _compare(backend: Backend[Any], resource: Resource[Any], grants: Sequence[Grant], inline: ContainerEdits) -> None:
    found = named(backend, resource, grants, inline)
    if found is None:
        assert (inline.nodes, inline.mounts) == ((), ())  # all that is built in can go by CDI
        return
    assert (found.edits.env, found.edits.nodes, found.edits.mounts) == (inline.env, (), ())
    written = spec.encode(spec.kind(resource.name), {name: spec.edits(it) for name, it in found.devices.items()})
    ours = [name for name in found.edits.cdi_devices if name not in inline.cdi_devices]
    assert found.edits.annotations == {**inline.annotations, spec.annotation(resource.name): ",".join(ours)}
    nodes, mounts = container([written], ours)
    assert nodes == {it.container_path: (it.path.text, it.permissions) for it in inline.nodes}
    assert mounts == {it.container_path: (it.path.text, it.read_only) for it in inline.mounts}


@pytest.fixture
def install_nvml(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Puts NVIDIA's library in place for one test."""
    return functools.partial(fake_nvml.install, monkeypatch)


@pytest.fixture
def no_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the package is not installed, whether it is here or not."""
    fake_nvml.forget(monkeypatch)
