"""A read that fails since this process has no descriptor left says nothing of the hardware, for every kind of it."""

from __future__ import annotations

import builtins
import errno
import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from backends.base import Backend, Device, Problem, Resource, ResourceSpec, Signal
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
from tests.backends.infiniband import test_backend as test_infiniband
from tests.backends.infiniband.test_garbage import TREE
from tests.backends.linux.sticks import CONTROLLER, stick
from tests.backends.mdev import mdev_trees, test_mdev
from tests.backends.sriov import test_backend as test_sriov
from tests.backends.sriov.sriov_trees import CONNECTX
from tests.backends.trees import planted_host
from tests.backends.vfio import test_vgpu as test_vfio_vgpu
from tests.backends.vfio import vfio_node
from tests.backends.vfio.test_vgpu import VF_ID

Seen = tuple[tuple[Device, ...], tuple[Problem, ...], tuple[Signal, ...]]


def gpus(root: Path, tree: str) -> Backend[Any]:
    return Gpu(planted_host(root, tree), [gpu_resource()])


def stub(root: Path) -> Backend[Any]:
    host = planted_host(root, "etc/states = stub-0 unhealthy")
    return Stub(host, [Resource("fl.test/stub", ResourceSpec("stub", StubOptions(2, "/etc/states")))])


def divided(root: Path) -> Backend[Any]:
    return gpus(root, machines.CONTROLS + machines.nvidia_gpu("0000:3b:00.0", 0) + machines.mig(0, [(1, 0)]))


NODES: dict[str, Callable[[Path], Backend[Any]]] = {
    "stub": stub,
    "nvidia": divided,
    "amd": lambda root: gpus(root, machines.mi300x_cpx(2)),
    "intel": lambda root: gpus(root, machines.flex_server()),
    "infiniband": lambda root: InfiniBand(
        planted_host(root, TREE), [test_infiniband.resource("rdma/shared", shared=2)]
    ),
    "vfio": lambda root: vfio_node.backend(root, vfio_node.gpu() + vfio_node.sound(), vfio_node.resource()),
    "vgpu": lambda root: vfio_node.backend(root, test_vfio_vgpu.a40("558", "0"), vfio_node.resource("a.com/v", VF_ID)),
    "mdev": lambda root: mdev_trees.backend(
        root, mdev_trees.t4() + test_mdev.VGPU + mdev_trees.mtty(), mdev_trees.resource(create=True)
    ),
    "cex": lambda root: cex_trees.backend(
        root, cex_trees.machine(), cex_trees.resource("a.com/s", Apqn(1, 6, cex_trees.MACHINE))
    )[0],
    "solarflare": lambda root: Solarflare(planted_host(root, test_solarflare.x2522()), [test_solarflare.resource()]),
    "sriov": lambda root: test_sriov.backend(root, replace(CONNECTX, virtual=2).tree(), test_sriov.resource(rdma=True)),
    "usb": lambda root: chardev(root, CONTROLLER + stick("1-1", 1), configured(usb=FTDI)),
    "paths": lambda root: chardev(root, "dev/a/x c 1:3\ndev/b/x c 1:5", configured(paths=[{"path": "/dev/*/x"}])),
}


def everything(backend: Backend[Any]) -> Seen:
    """All that a scan asks."""
    looks = [backend.discover(unit) for unit in sorted(backend.units())]
    devices = tuple(device for look in looks for device in look.devices)
    signals = tuple(signal for device in devices for signal in backend.probe(device))
    return devices, tuple(problem for look in looks for problem in look.problems), signals


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
