from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from backends.base import Grant, Host, HostPath, PathChange, Resource, ResourceSpec, Uevent, Verdict
from backends.interface.values import Known
from backends.stub import Stub, StubDevice, StubOptions, StubResource
from tests.backends.trees import planted_host
from tests.work import growth

FILE = "/etc/stub/health"


def resource(
    devices: int | list[StubDevice] = 3, file: str | None = FILE, name: str = "example.com/stub"
) -> StubResource:
    return Resource(name, ResourceSpec("stub", StubOptions(devices, file)))


def host(tmp_path: Path, health: str | None = None) -> Host:
    found = planted_host(tmp_path)
    if health is not None:
        (tmp_path / "etc/stub").mkdir(parents=True)
        (tmp_path / "etc/stub/health").write_text(health)
    return found


def states(backend: Stub, unit: str = "example.com/stub") -> dict[str, list[tuple[Verdict, str]]]:
    devices = backend.discover(unit).devices
    return {device.key: [(s.verdict, s.message) for s in backend.probe(device)] for device in devices}


def problems(backend: Stub) -> list[str]:
    return [problem.sentence for problem in backend.discover("example.com/stub").problems]


def test_devices_by_number_are_healthy_without_a_file(tmp_path: Path) -> None:
    backend = Stub(host(tmp_path), [resource()])
    assert list(backend.units()) == ["example.com/stub"]
    assert states(backend) == {"stub-0": [], "stub-1": [], "stub-2": []}
    assert problems(backend) == []


def test_devices_of_several_kinds_are_numbered_through(tmp_path: Path) -> None:
    kinds = [StubDevice(2, numa_node=0, attributes={"model": "one"}), StubDevice(numa_node=1)]
    devices = Stub(host(tmp_path), [resource(kinds)]).discover("example.com/stub").devices
    assert [(d.key, d.numa_node, dict(d.attributes)) for d in devices] == [
        ("stub-0", 0, {"model": ("one",)}),
        ("stub-1", 0, {"model": ("one",)}),
        ("stub-2", 1, {}),
    ]
    assert devices[0].hardware == {"stub:example.com/stub/stub-0"}


def test_the_file_says_how_each_device_is(tmp_path: Path) -> None:
    health = "# a comment\n\nstub-0 unhealthy It is on fire, #1.\nstub-1 gone\nstub-2 degraded\nstub-3 healthy\n"
    backend = Stub(host(tmp_path, health), [resource(4)])
    assert states(backend) == {
        "stub-0": [(Verdict.NOW, "It is on fire, #1.")],
        "stub-2": [(Verdict.DEGRADED, "the stub's file says degraded")],
        "stub-3": [],
    }
    assert problems(backend) == []


def test_a_star_is_every_device_and_the_last_word_counts(tmp_path: Path) -> None:
    backend = Stub(host(tmp_path, "stub-0 gone\n* unhealthy All of them.\nstub-1 healthy\n"), [resource()])
    assert states(backend) == {
        "stub-0": [(Verdict.NOW, "All of them.")],
        "stub-1": [],
        "stub-2": [(Verdict.NOW, "All of them.")],
    }


def test_what_the_file_says_wrongly_is_a_problem_with_its_line(tmp_path: Path) -> None:
    backend = Stub(host(tmp_path, "stub-0 sick\nstub-1\nstub-9 gone\nstub-2 unhealthy\n"), [resource()])
    assert problems(backend) == [
        f"{FILE}: line 1: 'sick' is not one of healthy, unhealthy, degraded, gone",
        f"{FILE}: line 2: '' is not one of healthy, unhealthy, degraded, gone",
        f"{FILE}: there is no device stub-9",
    ]
    assert [key for key, signals in states(backend).items() if signals] == ["stub-2"]


def test_a_file_that_cannot_be_read_is_a_problem_and_its_devices_stay(tmp_path: Path) -> None:
    backend = Stub(host(tmp_path), [resource(1)])
    (tmp_path / "etc/stub/health").mkdir(parents=True)
    assert problems(backend) == [f"{FILE}: it cannot be read: is a directory"]
    assert states(backend) == {"stub-0": []}


def test_bytes_that_are_no_text_do_no_harm(tmp_path: Path) -> None:
    backend = Stub(host(tmp_path, ""), [resource(1)])
    (tmp_path / "etc/stub/health").write_bytes(b"\xff\xfe stub\n\x00 gone\n")
    assert len(problems(backend)) == 2
    assert states(backend) == {"stub-0": []}


def test_options_are_read_from_the_config() -> None:
    assert msgspec.convert({"devices": 2, "file": FILE}, StubOptions) == StubOptions(2, FILE)
    table = {"devices": [{"count": 2, "numa_node": 1, "attributes": {"model": "x"}}]}
    assert msgspec.convert(table, StubOptions) == StubOptions([StubDevice(2, 1, {"model": "x"})])
    Stub.check(resource(0))
    with pytest.raises(msgspec.ValidationError, match="devises"):
        msgspec.convert({"devices": 1, "devises": 2}, StubOptions)


@pytest.mark.parametrize("replicas", [1, 3])
def test_the_fixed_ids_are_those_of_the_devices(tmp_path: Path, replicas: int) -> None:
    found: StubResource = Resource("example.com/stub", ResourceSpec("stub", StubOptions(3), replicas=replicas))
    backend = Stub(host(tmp_path), [found])
    devices = backend.discover("example.com/stub").devices
    ids = [device_id for device in devices for device_id in backend.ids(found, device)]
    assert list(Stub.fixed_ids(found)) == ids
    assert len(set(ids)) == 3 * replicas


def test_a_pod_sees_what_it_got(tmp_path: Path) -> None:
    found = resource(2, name="example.com/my-stub.v2")
    backend = Stub(host(tmp_path), [found])
    grants = [Grant(d.key, d) for d in backend.discover(found.name).devices]
    assert backend.edits(found, grants).env == {"FAIRLEAD_STUB_EXAMPLE_COM_MY_STUB_V2": "stub-0,stub-1"}


def test_only_changes_of_its_file_affect_a_resource(tmp_path: Path) -> None:
    one, other, none = (
        resource(name="a/one"),
        resource(file="/run/other", name="a/other"),
        resource(file=None, name="a/0"),
    )
    backend = Stub(host(tmp_path), [one, other, none])
    known = Known()
    assert backend.watches(known).directories == {HostPath("/etc/stub"), HostPath("/run")}

    def affected(path: str) -> Any:
        return backend.affects(PathChange(HostPath(path)), known)

    assert affected(FILE) == ["a/one"]
    assert affected("/etc/stub") == ["a/one"]
    assert affected("/etc/stub/..data") == ["a/one"]
    assert affected("/run/other") == ["a/other"]
    assert affected("/etc/stub/neighbour") == []
    assert backend.affects(Uevent("add", "misc", "/devices/x", HostPath("/dev/kvm")), known) == ()


def test_a_flip_costs_each_of_many_devices_the_same_however_many_there_are(tmp_path: Path) -> None:
    def flipped(count: int) -> Callable[[], object]:
        lines = "".join(f"stub-{n} healthy\n" for n in range(count))
        backend = Stub(host(tmp_path / f"{count}", lines), [resource(count)])
        states(backend)
        (tmp_path / f"{count}/etc/stub/health").write_text(lines + "stub-7 unhealthy\n")
        return lambda: states(backend)

    assert growth(flipped, 100) < 5, "the file is parsed once for all of them"
