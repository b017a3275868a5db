"""Everything that can go wrong, one small context for each: before `yield` it breaks, after `yield` it is mended.

What the kubelet must show meanwhile, each fault tells the model. `touches` names what it has to itself while it lasts.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import struct
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from grpclib.client import Channel
from grpclib.exceptions import GRPCError, StreamTerminatedError

from agent.daemon.discovery_runner import SETTLE
from agent.kubelet.api.v1beta1 import (
    AllocateRequest,
    AllocateResponse,
    ContainerAllocateRequest,
    ContainerAllocateResponse,
    DevicePluginStub,
    DeviceSpec,
)
from agent.kubelet.pods.checkpoint import FILE_NAME
from agent.kubelet.transport.client import listens
from agent.runtime.errors import FairleadError
from agent.simulation.pods import Container, Phase, Pod
from agent.simulation.sockets import Version
from tests.e2e.kmsg import USER
from tests.nodes import make_node
from tests.simulation.plugin import ToyPlugin, devices
from tests.soak.world import GPU, GPUS, KUBELETS, LATE, SHARED, STUB, TROUBLED, WIDGET, World

Body = Callable[[World], AsyncIterator[None]]
_HUNG: Final = 5.0  # seconds after which a read counts as one that hangs (agent.discovery.discoverer.UNIT_DEADLINE)
_POLL: Final = 5.0  # seconds between two looks where no event tells (agent.discovery.sources.paths.POLL)
_ENDED: Final = 20.0  # seconds in which the kubelet and both witnesses know that a pod has ended


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
    ends_daemon: bool
    sighted: bool
    """Begins and ends only while the daemon can answer and see; the kubelet admits no pod while another waits for it."""
    happen: Callable[[World], AbstractAsyncContextManager[None]]


FAULTS: Final[dict[str, Fault]] = {}


def fault(
    weight: int, number: str, *touches: str, ends_daemon: bool = False, sighted: bool = False
) -> Callable[[Body], Body]:
    """Add a row."""

    def add(body: Body) -> Body:
        name = body.__name__.replace("_", " ")
        happen = asynccontextmanager(body)
        FAULTS[name] = Fault(name, weight, number, frozenset(touches), ends_daemon, sighted, happen)
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


@fault(2, "A4", "kubelet", "plugin directory")
async def the_plugin_directory_is_made_again(w: World) -> AsyncIterator[None]:
    with w.model.unseen():
        await w.node.kubelet.stop()
        kept = (w.node.plugin_dir / FILE_NAME).read_bytes()
        w.node.remove(w.node.plugin_dir)
        yield
        w.node.plugin_dir.mkdir()
        (w.node.plugin_dir / FILE_NAME).write_bytes(kept)
        await w.node.kubelet.start()


@fault(1, "A1", "kubelet", "plugin directory", "device directory", "inotify", "daemon")
async def inotify_has_no_watches_left(w: World) -> AsyncIterator[None]:
    """And the device directory is another one, which is not watched then."""
    await w.daemon.order("break_('inotify')")
    with w.model.slower(2 * _POLL):
        w.node.dev.rename(aside := w.root / "dev.before")
        shutil.copytree(aside, w.node.dev, symlinks=True, copy_function=_move)
        shutil.rmtree(aside)
        yield
        await w.daemon.order("mend('inotify')")
        await w.well("polls")
        await asyncio.sleep(_POLL)  # until a look finds that it can be watched


def _move(source: str, target: str) -> None:
    Path(source).rename(target)


@fault(2, "B14", "kubelet", "checkpoint")
async def the_checkpoint_is_none(w: World) -> AsyncIterator[None]:
    path = w.node.plugin_dir / FILE_NAME
    kept, aside = path.read_bytes(), path.with_name(".odd")
    match w.rng.choice(["FIFO", "link", "zeros", "half"]):
        case "FIFO":
            os.mkfifo(aside)
        case "link":
            aside.symlink_to("/dev/zero")
        case "zeros":
            aside.write_bytes(bytes(4096))
        case _:
            aside.write_bytes(kept[: len(kept) // 2])
    odd, written = aside.lstat().st_ino, path.stat()
    aside.rename(path)
    yield
    if path.lstat().st_ino == odd:  # the kubelet has not written it since
        aside.write_bytes(kept)
        os.utime(aside, ns=(written.st_atime_ns, written.st_mtime_ns))
        aside.rename(path)


# --- another plugin ---


async def _other_plugin(w: World, resource: str, nodes: list[str], numa_node: int | None = None) -> ToyPlugin:
    listed = devices("theirs-0", "theirs-1", numa_node=numa_node)
    plugin = ToyPlugin(w.node.plugin_dir, resource, listed, "rival.sock")

    async def give(_: object) -> AllocateResponse:
        return AllocateResponse(
            [ContainerAllocateResponse(devices=[DeviceSpec(f"/dev/x{n}", it, "rw") for n, it in enumerate(nodes)])]
        )

    plugin.on_allocate = give
    await plugin.__aenter__()
    await plugin.register()
    return plugin


@fault(2, "A0, A2", "kubelet", sighted=True)
async def another_plugin_overtakes_us(w: World) -> AsyncIterator[None]:
    """Its pod has one of our devices, which is not ours to give until that pod ends; no ID of it leaves a list."""
    with some(w, WIDGET, 1) as (unit,):
        if unit in w.held(WIDGET) or w.admitting:  # its list would take away what is being allocated
            raise UnfitError
        with w.model.unsure(WIDGET, unit), w.model.rival(WIDGET, "theirs-0", "theirs-1"):
            plugin = await _other_plugin(w, WIDGET, [f"/dev/{unit}"])
            # not "theirs-0" alone: our own list has that ID as long as a pod of such a plugin lives
            await w.is_so(lambda: _healthy(w, WIDGET) == {"theirs-0", "theirs-1"}, 5.0, "served by another plugin")
            await _foreign_pod(w, WIDGET, (WIDGET, unit))
            yield
            await plugin.__aexit__(None, None, None)
            with w.model.unseen():  # until the kubelet has seen its end
                await w.is_so(lambda: "theirs-0" not in _healthy(w, WIDGET), 5.0, "rid of another plugin")
        if pods := w.strangers(WIDGET):
            with w.model.without(WIDGET, unit):
                await w.well("another plugin's end")
        for pod in pods:
            w.node.kubelet.end(pod)
        w.model.doubt(WIDGET, unit, w.now + _ENDED)  # others that had it from that plugin may have ended a moment ago
        await w.well("another plugin's end")


def _healthy(w: World, resource: str) -> frozenset[str]:
    return w.node.kubelet.resources[resource].healthy


async def _foreign_pod(w: World, resource: str, device: tuple[str, str]) -> Pod | None:
    """A pod that another plugin has given our device."""
    holder = Pod(f"theirs{next(w.numbers)}", (Container("main", {resource: 1}),))
    w.foreign |= {f"theirs-{n}": device for n in range(2)}
    status = await w.node.kubelet.admit(holder)
    return holder if status.phase is Phase.RUNNING else None


@fault(2, "A0, A5", "kubelet", "configuration", sighted=True)
async def a_reload_brings_what_another_plugin_served(w: World) -> AsyncIterator[None]:
    """Its pod's ID is in our first list, or a kubelet that restarts with NUMA devices panics for ever."""
    plugin = await _other_plugin(w, LATE, [], numa_node=0)
    await w.is_so(lambda: LATE in w.node.kubelet.resources and _healthy(w, LATE), 5.0, "served by another plugin")
    holder = await _foreign_pod(w, LATE, (LATE, "theirs-0"))
    await plugin.__aexit__(None, None, None)
    w.extra.append(f'[[resource]]\nname = "{LATE}"\nbackend = "stub"\ndevices = [{{ count = 2, numa_node = 0 }}]\n')
    w.configure()
    w.model.hardware[LATE] = {f"stub-{n}": (f"stub-{n}",) for n in range(2)}
    with w.model.slower(SETTLE if w.hanging.total() else 0.0):  # it tries anew what hangs
        await w.well("a reload that brings a resource")
    with w.model.unseen():
        await w.node.kubelet.restart()
    await w.well("a kubelet's restart after a reload")
    yield
    if holder:
        w.node.kubelet.end(holder)
    for status in w.running():
        if LATE in status.pod.containers[0].resources:
            w.node.kubelet.end(status.pod)
    del w.model.hardware[LATE]
    w.extra.clear()
    w.configure()
    await w.is_so(lambda: not w.node.kubelet.streams(LATE), 30.0, "rid of a resource")


# --- the daemon's process ---


@fault(3, "A3", "kubelet", "daemon", "configuration", ends_daemon=True)
async def the_daemon_restarts(w: World) -> AsyncIterator[None]:
    with w.model.unseen():
        await w.end(w.rng.choice([signal.SIGTERM, signal.SIGKILL]))
        yield
        await w.start()


@fault(1, "A3", "kubelet", "daemon", "configuration", ends_daemon=True)
async def the_state_is_damaged(w: World) -> AsyncIterator[None]:
    """Drains outlive it."""
    with w.model.unseen():
        await w.end(signal.SIGKILL)
        (w.node.state / "state.json").write_text(w.rng.choice(["\0" * 100, '{"version": 99}\n', "wrong line\n"]))
        yield
        await w.start()
    w.excused.add("state")


@fault(1, "A4", "kubelet", "daemon", "configuration", ends_daemon=True)
async def a_second_daemon_takes_over(w: World) -> AsyncIterator[None]:
    second = await w.make_daemon()
    yield
    with w.model.unseen():
        await w.end(w.rng.choice([signal.SIGTERM, signal.SIGKILL]))
        w.daemon, w.ended_on_purpose = second, False
        w.excused.clear()
        await w.is_so(lambda: listens(w.node.admin), 5.0, "a second daemon answers commands")


@fault(2, "A6", "daemon")
async def the_daemon_stands_still(w: World) -> AsyncIterator[None]:
    with w.model.unseen():
        w.daemon.signal(signal.SIGSTOP)
        yield
        w.daemon.signal(signal.SIGCONT)


@fault(2, "A6", "daemon")
async def a_minute_passes_at_once(w: World) -> AsyncIterator[None]:
    await w.daemon.order("pass_time(60.0)")
    yield


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


@fault(2, "A3", "daemon", "state")
async def the_disk_fails(w: World) -> AsyncIterator[None]:
    await w.daemon.order("break_('disk')")
    yield
    await w.daemon.order("mend('disk')")


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


@fault(4, "A3", "state", "admin socket", sighted=True)
async def an_operator_drains(w: World) -> AsyncIterator[None]:
    with some(w, WIDGET, 1) as (unit,):
        async with w.asking() as client:
            try:
                await client.drain(unit, "soak", None)
            except FairleadError as error:
                w.note(f"the drain failed: {error}")
                raise UnfitError from None
        with w.model.without(WIDGET, unit):
            yield
        async with w.asking() as client:
            await client.undrain(unit)


@fault(3, "A5, B13", "configuration")
async def the_configuration_is_wrong(w: World) -> AsyncIterator[None]:
    stub = f'[[resource]]\nname = "{LATE}"\nbackend = "stub"\ndevices = 1\n'
    wrong = w.rng.choice(["[agent", "", f"{stub}replicas = 3000000\n", f"{stub}colour = 7\n", "\0" * 1000])
    if "replicas" in wrong or "colour" in wrong:
        wrong = (w.root / "config.toml").read_text() + wrong
    w.configure(wrong)
    yield
    w.configure()


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


@fault(2, "C17")
async def links_lie_in_the_plugin_directory(w: World) -> AsyncIterator[None]:
    """Where our sockets are, one that we do not know."""
    link = w.node.sockets / "evil.sock"
    with suppress(OSError):
        link.symlink_to("/etc/passwd")
    yield
    with suppress(OSError):
        link.unlink()
