"""What holds of every kind of hardware: one machine of each is looked at while files are missing or garbage, or cannot be opened."""

from __future__ import annotations

import builtins
import errno
import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends import registry
from backends.base import AllocationRefused, Backend, Device, Grant, Problem, Resource, ResourceSpec, Signal
from backends.cex import Apqn
from backends.errors import ShortageError, is_short
from backends.gpu import Gpu
from backends.infiniband import InfiniBand
from backends.solarflare import Solarflare
from backends.stub import Stub, StubOptions
from tests.backends import machines, test_solarflare
from tests.backends.cex import cex_trees
from tests.backends.chardev.chardevs import FTDI, chardev, configured
from tests.backends.gpu.gpus import resource as gpu_resource
from tests.backends.infiniband import test_garbage
from tests.backends.linux.sticks import CONTROLLER, stick
from tests.backends.mdev import mdev_trees, test_mdev
from tests.backends.pci_trees import function
from tests.backends.rdma_trees import RDMA_CM, exclusive
from tests.backends.sriov import test_backend as test_sriov
from tests.backends.sriov.sriov_trees import CONNECTX, E810, ROUTES, small, vdpa_device, vfio_function
from tests.backends.trees import entries, planted_host, spoilt
from tests.backends.vfio import test_backend as test_vfio
from tests.backends.vfio import test_vgpu, vfio_node
from tests.backends.vfio.test_vgpu import VF_ID

Seen = tuple[tuple[Device, ...], tuple[Problem, ...], tuple[Signal, ...]]


def gpus(root: Path, tree: str) -> Backend[Any]:
    return Gpu(planted_host(root, tree), [gpu_resource(pass_device_specs=True)])


def stub(root: Path) -> Backend[Any]:
    host = planted_host(root, "etc/states = stub-0 unhealthy")
    return Stub(host, [Resource("fl.test/stub", ResourceSpec("stub", StubOptions(2, "/etc/states")))])


def divided(root: Path) -> Backend[Any]:
    whole, parts = machines.nvidia_gpu("0000:5e:00.0", 1), machines.nvidia_gpu("0000:3b:00.0", 0)
    return gpus(root, machines.CONTROLS + whole + parts + machines.mig(0, [(1, 0)]))


def infiniband(root: Path, *, is_exclusive: bool = False) -> Backend[Any]:
    tree = test_garbage.TREE + test_garbage.ALONE + exclusive(is_exclusive)
    return InfiniBand(planted_host(root, tree), [test_garbage.APART, test_garbage.SHARED])


def vfio(root: Path) -> Backend[Any]:
    tree = vfio_node.gpu() + vfio_node.sound("snd_hda_intel") + test_vfio.NEW
    tree += function(test_vfio.OTHER, "10de:1eb8", driver="nvidia", drm=["card0"], group=13)
    never = vfio_node.resource("b/never", {"vendor": ("10de",)})
    return vfio_node.backend(root, tree, vfio_node.resource(bind="allocate"), never)


def mdev(root: Path) -> Backend[Any]:
    tree = mdev_trees.t4() + mdev_trees.i915() + mdev_trees.mtty() + test_mdev.VGPU
    tree += mdev_trees.made(mdev_trees.MTTY_PATH, mdev_trees.SECOND, "mtty-1", 5)
    return mdev_trees.backend(root, tree, mdev_trees.resource(create=True))


def cex(root: Path) -> Backend[Any]:
    queues = [Apqn(1, 6, cex_trees.MACHINE), Apqn(2, 6)]
    return cex_trees.backend(root, cex_trees.machine(), cex_trees.resource("a.com/s", *queues))[0]


def sriov(root: Path) -> Backend[Any]:
    card = small(E810, 2)
    tree = ROUTES + RDMA_CM + test_sriov.VHOST + card.tree(bare=[1]) + vfio_function(E810, 1, 71)
    tree += small(CONNECTX, 2).tree() + vdpa_device(CONNECTX, 0, "vdpa5", "vhost_vdpa", "vhost-vdpa-3")
    every: list[dict[str, Any]] = [{}, {"rdma": True}, {"vhost_net": True}, {"vdpa": "vhost"}]
    return test_sriov.backend(root, tree, *(test_sriov.resource(name=f"a.b/{n}", **it) for n, it in enumerate(every)))


NODES: dict[str, Callable[[Path], Backend[Any]]] = {
    "stub": stub,
    "nvidia": divided,
    "amd": lambda root: gpus(root, machines.mi300x_cpx(2)),
    "intel": lambda root: gpus(root, machines.flex_server()),
    "infiniband": infiniband,
    "infiniband of namespaces": lambda root: infiniband(root, is_exclusive=True),
    "vfio": vfio,
    "vgpu": lambda root: vfio_node.backend(root, test_vgpu.a40("558", "0"), vfio_node.resource("a.com/v", VF_ID)),
    "mdev": mdev,
    "cex": cex,
    "solarflare": lambda root: Solarflare(planted_host(root, test_solarflare.x2522()), [test_solarflare.resource()]),
    "sriov": sriov,
    "usb": lambda root: chardev(root, CONTROLLER + stick("1-1", 1) + stick("1-2", 2), configured(usb=FTDI)),
    "paths": lambda root: chardev(root, "dev/a/x c 1:3\ndev/b/x c 1:5", configured(paths=[{"path": "/dev/*/x"}])),
}


def everything(backend: Backend[Any]) -> Seen:
    """All that a scan asks, and what a container would get of each device; a refusal is an answer."""
    looks = [backend.discover(unit) for unit in sorted(backend.units())]
    devices = tuple(device for look in looks for device in look.devices)
    problems = tuple(problem for look in looks for problem in look.problems)
    signals = tuple(signal for device in devices for signal in backend.probe(device))
    for device, resource in product(devices, backend.resources):
        if device.unusable or device.resource not in (None, resource.name):
            continue
        with suppress(AllocationRefused):
            backend.edits(resource, [Grant(device_id, device) for device_id in backend.ids(resource, device)[:1]])
    return devices, problems, signals


def test_every_kind_of_hardware_is_held_to_this(tmp_path: Path) -> None:
    made = {type(make(tmp_path / str(number))) for number, make in enumerate(NODES.values())}
    assert {registry.load(name) for name in registry.names()} == made, "add a machine of it to NODES"


@pytest.mark.parametrize("kind", NODES)
def test_whatever_is_missing_or_garbage_nothing_is_raised_and_once_it_is_back_all_is_as_before(
    tmp_path: Path, kind: str
) -> None:
    root = tmp_path / "node"
    backend = NODES[kind](root)
    expected = everything(backend)
    files = entries(root)

    @settings(max_examples=25, deadline=None)
    @given(st.integers(0, 2**32), st.sampled_from([0.02, 0.1, 0.3, 0.8]))
    def check(seed: int, share: float) -> None:
        with spoilt(root, files, seed, share):
            devices, _, _ = everything(backend)
            for device in devices:
                assert all(it.hardware in device.hardware | device.depends for it in backend.probe(device))
        assert everything(backend) == expected

    check()


def _names(device: Device) -> set[str]:
    """What a path that belongs to the device, or to hardware that it hangs on, has among its parts."""
    return {device.key, device.unit, *(it.partition(":")[2] for it in device.hardware | device.depends)}


@pytest.mark.parametrize("kind", NODES)
def test_no_device_suffers_for_files_of_another(tmp_path: Path, kind: str) -> None:
    """A bug of the Crypto Express and Intel plugins: one that cannot be read ends the look at all of them."""
    root = tmp_path / "node"
    backend = NODES[kind](root)
    before, _, _ = everything(backend)
    for names in {frozenset(_names(victim)) for victim in before}:
        others = [it for it in before if not _names(it) & names]
        files = [path for path in entries(root) if names & set(path.relative_to(root).parts)]
        for seed in range(8 if others else 0):
            with spoilt(root, files, seed, 0.5):
                after, problems, _ = everything(backend)
            assert [it for it in others if it not in after] == [], f"spoilt: {names}, seed {seed}"
            assert not {it.key for it in others} & {problem.subject for problem in problems}


@contextmanager
def failing(at: int) -> Iterator[list[str]]:
    """Let the call of that number that opens something find no descriptor left; what was opened."""
    calls: list[str] = []

    def refusing(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *args: Any, **named: Any) -> Any:
            if isinstance(path, int):  # open already
                return real(path, *args, **named)
            calls.append(str(path))
            if len(calls) == at:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))
            return real(path, *args, **named)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for place, name in ((os, "open"), (os, "listdir"), (os, "scandir"), (io, "open"), (builtins, "open")):
            patch.setattr(place, name, refusing(getattr(place, name)))
        yield calls


@pytest.mark.parametrize("kind", NODES)
def test_what_could_not_be_read_for_want_of_a_descriptor_is_never_taken_for_how_the_hardware_is(
    tmp_path: Path, kind: str
) -> None:
    backend = NODES[kind](tmp_path)
    expected = everything(backend)
    assert expected[0]
    with failing(at=0) as calls:
        assert everything(backend) == expected
    assert calls
    believed = []
    for at in range(1, len(calls) + 1):
        with failing(at) as opened:
            try:
                seen = everything(backend)
            except ShortageError:
                continue
            except OSError as error:
                if not is_short(error):
                    raise
                continue
        if seen != expected:
            believed.append(opened[at - 1])
    assert believed == []
