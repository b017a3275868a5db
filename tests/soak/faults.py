"""Everything that can go wrong, one small context for each: before `yield` it breaks, after `yield` it is mended.

What the kubelet must show meanwhile, each fault tells the model. `touches` names what it has to itself while it lasts.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import struct
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from typing import Final

from grpclib.client import Channel
from grpclib.exceptions import GRPCError, StreamTerminatedError

from agent.kubelet.api.v1beta1 import (
    AllocateRequest,
    ContainerAllocateRequest,
    DevicePluginStub,
)
from agent.simulation.model import Version
from tests.e2e.kmsg import USER
from tests.nodes import make_node
from tests.soak.world import GPU, GPUS, KUBELETS, SHARED, STUB, TROUBLED, WIDGET, World

Body = Callable[[World], AsyncIterator[None]]


class UnfitError(Exception):
    """It cannot be done as the world is now."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One row of the table."""

    name: str
    weight: int
    """How often it happens, compared with others."""
    number: str
    """The issue's point that it is about."""
    touches: frozenset[str]
    sighted: bool
    """Begins and ends only while the daemon can answer and see; the kubelet admits no pod while another waits for it."""
    happen: Callable[[World], AbstractAsyncContextManager[None]]


FAULTS: Final[dict[str, Fault]] = {}


def fault(weight: int, number: str, *touches: str, sighted: bool = False) -> Callable[[Body], Body]:
    """Add a row."""

    def add(body: Body) -> Body:
        name = body.__name__.replace("_", " ")
        happen = asynccontextmanager(body)
        FAULTS[name] = Fault(name, weight, number, frozenset(touches), sighted, happen)
        return body

    return add


@contextmanager
def some(w: World, resource: str, most: int = 3) -> Iterator[list[str]]:
    """Some units of a resource that no other fault has."""
    free = w.free_units(resource)
    if not free:
        raise UnfitError
    units = w.rng.sample(free, w.rng.randint(1, min(most, len(free))))
    keys = {f"{resource} {unit}" for unit in units}
    w.touched |= keys
    try:
        yield units
    finally:
        w.touched -= keys


# --- hardware ---


@fault(6, "A0", "device directory")
async def nodes_are_unplugged(w: World) -> AsyncIterator[None]:
    with some(w, resource := w.rng.choice([WIDGET, SHARED])) as units:
        w.node.unlink(*units)
        with w.model.without(resource, *units):
            yield
        w.node.mknod(*units)


@fault(2, "B12")
async def nodes_come_and_go_in_a_burst(w: World) -> AsyncIterator[None]:
    with some(w, WIDGET) as units:
        for _ in range(w.rng.randint(2, 30)):
            w.node.unlink(*units)
            await asyncio.sleep(0)
            w.node.mknod(*units)
        yield


@fault(6, "A0")
async def devices_fail(w: World) -> AsyncIterator[None]:
    """A file that is replaced, of which inotify tells, says so; half of them are gone."""
    with some(w, STUB) as units:
        w.states |= {unit: w.rng.choice(["unhealthy", "gone"]) for unit in units}
        w.say_states()
        with w.model.without(STUB, *units):
            yield
        for unit in units:
            del w.states[unit]
        w.say_states()


@fault(3, "C16", sighted=True)
async def a_gpu_falls_off_the_bus(w: World) -> AsyncIterator[None]:
    """XID 79; its driver is bound anew afterwards, which ends what was seen before, and not what nobody could see yet."""
    with some(w, GPU, 1) as (unit,):
        number = list(w.model.hardware[GPU]).index(unit)
        w.kmsg.say(f"NVRM: Xid (PCI:{GPUS[number]}): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.")
        with w.model.without(GPU, unit):
            yield
        link = next((w.root / "sys/bus/pci/devices").glob(f"{GPUS[number]}.0")) / "driver"
        target = link.readlink()
        fresh = link.with_name(".driver")
        fresh.symlink_to(target)
        fresh.rename(link)
        (node := w.node.dev / f"nvidia{number}").unlink()
        make_node(node, "c", 195, number)


@fault(2, "C16")
async def users_forge_lines_of_the_kernels_log(w: World) -> AsyncIterator[None]:
    xid = f"NVRM: Xid (PCI:{GPUS[0]}): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
    w.kmsg.say(xid, facility=USER)
    w.kmsg.say(f"tmpfs: Unknown parameter '{xid}'")
    for _ in range(100):
        w.kmsg.say(xid.replace(GPUS[0], f"{w.rng.randrange(1 << 16):04x}:{w.rng.randrange(256):02x}:00"))
    yield


# --- the kubelet ---


@fault(5, "B15", "kubelet")
async def the_kubelet_restarts(w: World) -> AsyncIterator[None]:
    styles: tuple[Version, ...] = ("1.32", "1.36")
    with w.model.unseen():
        for _ in range(w.rng.choice([1, 1, 3])):
            w.node.kubelet.version = w.rng.choice(KUBELETS)
            await w.node.kubelet.restart(w.rng.choice(styles), kill=w.rng.random() < 0.5)
    yield


@fault(3, "B15", "kubelet")
async def the_kubelet_is_down(w: World) -> AsyncIterator[None]:
    with w.model.unseen():
        await w.node.kubelet.stop(kill=w.rng.random() < 0.5)
        yield
        await w.node.kubelet.start()


# --- another plugin ---


# --- the daemon's process ---


@fault(2, "A8, B15", "daemon", "kubelet", "configuration", "admin socket")
async def no_descriptors_are_left(w: World) -> AsyncIterator[None]:
    with w.model.stale(w.node.kubelet.resources):
        w.daemon.starve()
        yield
        w.daemon.feed()


@fault(1, "A10", "daemon", "log")
async def nobody_reads_the_log(w: World) -> AsyncIterator[None]:
    await w.daemon.order("block_log()")
    w.excused.add("log")
    yield
    await w.daemon.order("unblock_log()")


@fault(1, "A10", "daemon", "log")
async def a_line_of_the_log_cannot_be_made(w: World) -> AsyncIterator[None]:
    await w.daemon.order("break_('log')")
    yield
    await w.daemon.order("mend('log')")


# --- third parties' backends ---

_BLOCKING: Final = ("units", "discover", "probe", "claim", "undo")
_CALLS: Final = (*_BLOCKING, "watches", "affects", "edits")
"""The others run on the event loop (`backends.base.Backend`): one that hangs there stops the daemon."""
_NONSENSE: Final = (
    "nonsense",
    "exit",
    "odd 7",
    "odd {1: 2}",
    'odd Watches(directories=frozenset({"/dev/w"}))',
    "odd Watches(poll=-1.0)",
    'odd [Signal(7, "ill", Verdict.NOW, "It is ill.")]',
)


async def _trouble(w: World, number: int, call: str, order: str) -> AsyncIterator[None]:
    """A backend does so; nothing is known of its own devices, and all others are as they are."""
    with w.model.unsure(TROUBLED[number]):
        w.trouble.order(call, order, number)
        w.hanging[number] += order == "hang"
        w.make_event(number)
        yield
        w.trouble.forget(call, number)
        w.hanging[number] -= order == "hang"
        w.make_event(number)


@fault(2, "A7", "backend 0")
async def a_backend_hangs(w: World) -> AsyncIterator[None]:
    async for _ in _trouble(w, 0, w.rng.choice(_BLOCKING), "hang"):
        yield


@fault(2, "A9, A11", "backend 1")
async def a_backend_fails(w: World) -> AsyncIterator[None]:
    async for _ in _trouble(w, 1, w.rng.choice(_CALLS), "raise"):
        yield


@fault(2, "A9", "backend 1")
async def a_backend_talks_nonsense(w: World) -> AsyncIterator[None]:
    async for _ in _trouble(w, 1, w.rng.choice(_CALLS), w.rng.choice(_NONSENSE)):
        yield


# --- operators and clients ---


@fault(2, "A5", "configuration")
async def it_is_reloaded(w: World) -> AsyncIterator[None]:
    if w.rng.random() < 0.5:
        w.daemon.signal(signal.SIGHUP)
    else:
        w.configure()
    yield


@fault(3, "B14")
async def http_clients_hang_up(w: World) -> AsyncIterator[None]:
    """Some in the middle of an answer, some after half a request; some stay until the end."""
    async with AsyncExitStack() as stack:
        for path in w.rng.choices(["/", "/metrics", "/status.json", "/events", "/healthz", "/readyz", "/no"], k=10):
            with suppress(OSError):
                _, writer = await asyncio.open_unix_connection(w.http)
                host = w.rng.choice(["localhost", "evil.example"])
                request = f"GET {path} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode()
                writer.write(request[: w.rng.choice([5, len(request)])])
                if w.rng.random() < 0.5:
                    stack.callback(writer.close)
                else:
                    await asyncio.sleep(w.rng.choice([0, 0.01]))
                    writer.transport.abort()
        yield


@fault(2, "B14")
async def commands_are_ended_at_once(w: World) -> AsyncIterator[None]:
    for _ in range(5):
        async with w.asking() as client:
            task = asyncio.ensure_future(client.explain("w1") if w.rng.random() < 0.5 else client.status())
            await asyncio.sleep(w.rng.choice([0, 0.005]))
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
    yield


@fault(2, "B14")
async def somebody_floods_a_plugins_socket(w: World) -> AsyncIterator[None]:
    """Pings without an end, frames of no known type, a megabyte of ID."""
    sockets = sorted(w.node.sockets.glob("*.sock")) if w.node.sockets.exists() else []
    if not sockets:
        raise UnfitError
    path = w.rng.choice(sockets)
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
    frame = w.rng.choice([bytes([0, 0, 8, 6, 0, 0, 0, 0, 0]) + bytes(8), bytes([0, 0, 0, 99, 0, 0, 0, 0, 0])])
    with suppress(OSError), socket.socket(socket.AF_UNIX) as sock:
        sock.setblocking(False)
        sock.connect(str(path))
        for part in [preface, *[frame * 500] * 40]:
            sock.send(part)
            await asyncio.sleep(0)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    channel = Channel(path=str(path))
    request = AllocateRequest([ContainerAllocateRequest(["x" * (1 << 20)])])
    call = asyncio.ensure_future(DevicePluginStub(channel).allocate(request))
    await asyncio.wait({call}, timeout=2.0)
    call.cancel()
    (refused,) = await asyncio.gather(call, return_exceptions=True)
    if not isinstance(refused, GRPCError | StreamTerminatedError | OSError | AttributeError | asyncio.CancelledError):
        w.violate(f"an Allocate of a megabyte of ID ended so: {refused!r}"[:400])
    channel.close()
    yield
