"""`fairlead demo`: the agent against a simulated kubelet, with devices that come and go, and how long each took."""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import shutil
import signal
import socket
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Set
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, Final

import anyio
import click
import msgspec
from msgspec.structs import asdict

from agent.cli import commands, output
from agent.config import Config, load
from agent.daemon.supervisor import Agent
from agent.discovery.backend_answers import make_backends
from agent.dra.names import class_name, classes, pool_name
from agent.runtime import logs
from agent.runtime.errors import FairleadError
from agent.runtime.watchdog import Notifier
from agent.simulation import scheduler
from agent.simulation.api_server import ApiServer
from agent.simulation.demo_stage import LoopDevice, Outcome, Stage, write_stub_file
from agent.simulation.dra import ClaimError, ClaimKey
from agent.simulation.kubelet import Kubelet
from agent.simulation.model import GONE, Container, Pod

LOOP: Final = "demo.fairlead/loop"
STUB: Final = "demo.fairlead/stub"

PAUSE: Final = 1.0
"""Seconds between two acts; each round has four at least."""

NODE: Final = "demo"
DRIVER: Final = "fairlead.dev"

STUBS: Final = 8
TURNS: Final = 5
"""Each stub device fails in one of five turns, and goes away in the others: it would be left out as flapping otherwise."""

_START: Final = 10.0  # seconds for the resources to be registered
_BUSY: Final = 5.0  # ms without a CPU, or over what the kernel usually takes, from which on the machine is called busy
_KERNEL: Final = 10.0  # ms that the kernel takes at most to tell of a change, on a machine that is not busy
_REMOVING: Final = 60.0  # of a loop device that is taken away, which takes 30 ms

_ROW: Final = "{:<22}  {:<8} {}  {:>7}  {:>8}  {:>6}  {:>8}"  # 79 columns
_STATE: Final = "{:<9}"
_NEXT: Final = (
    ("discover", "what this machine has, and what pods would be offered"),
    ("suggest", "a whole configuration for it, with a comment on every choice"),
    ("doctor", "what is wrong with it as a node, and how to mend that"),
)

_CONFIG: Final = """\
[agent]
plugin_dir = "{root}/device-plugins"
kubelet_root = "{root}"
state_dir = "{root}/state"
admin_socket = "{root}/admin.sock"

[http]
listen = "{page}"

[[resource]]
name = "devices.kubevirt.io/kvm"
backend = "chardev"
paths = [{{ path = "/dev/kvm" }}]
count = 1000

[[resource]]
name = "demo.fairlead/loop"
backend = "chardev"
paths = [{{ path = "/dev/loop[0-9]*" }}]

[[resource]]
name = "demo.fairlead/stub"
backend = "stub"
devices = {stubs}
file = "{root}/hardware/stub"
"""
_BY_DRA: Final = """\
serve = "dra"

[dra]
node = "demo"
kubeconfig = "{kubeconfig}"

[host]
run = "{root}/run"
"""


@click.command(epilog="Exit codes: 0 done, 1 the agent did not register or a change never reached the kubelet.")
@click.option("--seconds", type=click.FloatRange(min=0), help="End after so long; by default with Ctrl-C.")
@click.option("--dra", "by_dra", is_flag=True, help="The stub by dynamic resource allocation, with an API server.")
@commands.as_json
def demo(seconds: float | None, by_dra: bool, as_json: bool) -> None:
    """Run against a simulated kubelet and watch devices come and go.

    It works in a temporary directory; for root it also makes a loop device, and removes it again. With --dra the stub's devices are
    in ResourceSlices of a simulated API server, and a pod gets one by a ResourceClaim.

    With --json it prints {"resources": [{"name", "capacity", "allocatable"}], "changes": [{"resource", "device",
    "health", "latency_ms", "kernel_ms", "waited_ms", "fairlead_ms"}], "median": {"latency_ms", ...}} at the end, after
    10 seconds if --seconds does not say otherwise. `latency_ms` is from before the system call that caused a change
    until the kubelet had it. Of these, `kernel_ms` went by before the kernel told of it, `waited_ms` without a CPU on a
    busy machine, and `fairlead_ms` is what is left.
    """
    logs.set_up("error")
    if as_json and seconds is None:
        seconds = 10.0
    with TemporaryDirectory(prefix="fairlead-") as directory:
        play = (ClaimPlay if by_dra else Play)(Path(directory), quiet=as_json)
        try:
            anyio.run(play.run, seconds)
            play.sum_up()
        except ExceptionGroup as failures:
            if failures.split(BrokenPipeError)[1] is not None:
                raise
            raise BrokenPipeError(errno.EPIPE, "nobody reads the output") from None  # click ends quietly then
    if as_json:
        click.echo(msgspec.json.encode(play.document()))
    if play.missed:
        raise FairleadError(f"{play.missed} changes did not reach the kubelet; run `fairlead run` to see the log")


def _free_address() -> str:
    """An address on this machine at which nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        return "{}:{}".format(*found.getsockname())


def _program() -> str:
    """This program as it was called, so that a line with it can be copied."""
    called = sys.argv[0]
    return called if os.access(called, os.X_OK) and shutil.which("fairlead") != called else "fairlead"


def busy(it: Outcome, usually: float) -> str:
    """Says that the machine was, and who took how long; nothing where the kernel took about `usually` ms, as ever."""
    if it.kernel_ms < usually + _BUSY and it.waited_ms < _BUSY:
        return ""
    waited = f", waiting for a CPU {it.waited_ms:.0f}" if it.waited_ms >= 1 else ""
    return f"the machine is busy: the kernel took {it.kernel_ms:.0f} ms, Fairlead {it.fairlead_ms:.0f}{waited}"


class Play:
    """The acts in their order, and what the viewer sees of them."""

    pools: ClassVar[Mapping[str, str]] = {}
    """The resources that are served by dynamic resource allocation → their pools."""

    def __init__(self, root: Path, *, quiet: bool) -> None:
        self.missed = 0
        self._quiet = quiet
        self._stub_file = root / "hardware" / "stub"
        self._stub_file.parent.mkdir()
        self._config = root / "config.toml"
        self._page = _free_address()
        self._config.write_text(_CONFIG.format(root=root, stubs=STUBS, page=self._page))
        self._kubelet = Kubelet(root)
        self._server = ApiServer(NODE)
        directories = Path("/dev"), self._stub_file.parent
        self._stage = Stage(self._kubelet, directories, self._server.objects, self.pools)
        self._loop: LoopDevice | None = None
        self._seen: list[tuple[str, int, int]] = []

    async def run(self, seconds: float | None) -> None:
        """Play until the time is up or a signal comes, or for ever."""
        with anyio.CancelScope() as scope:
            for number in (signal.SIGTERM, signal.SIGINT):
                asyncio.get_running_loop().add_signal_handler(number, scope.cancel)
            await self._play(seconds)

    async def _play(self, seconds: float | None) -> None:
        config = await self._configured()
        self._loop = await anyio.to_thread.run_sync(LoopDevice.free)
        async with self._kubelet, anyio.create_task_group() as tasks:
            tasks.start_soon(Agent(config, make_backends(config.host, config.resources), Notifier(None)).run)
            try:
                if await self._wait_for({resource.name for resource in config.resources}):
                    with anyio.move_on_after(seconds):
                        await self._acts()
            finally:
                self._seen = self._stage.view()
            tasks.cancel_scope.cancel()

    async def _configured(self) -> Config:
        return load(self._config)

    async def _until_offered(self, names: Set[str]) -> None:
        """Wait until a pod could get of each of these.

        Raises:
            TimeoutError: that takes too long.
        """
        await self._kubelet.wait_for(lambda k: all(it in k.resources and k.streams(it) for it in names), _START)

    async def _wait_for(self, names: set[str]) -> bool:
        """Wait until the agent has registered everything; False if it does not."""
        began = time.perf_counter()
        try:
            await self._until_offered(names)
        except TimeoutError as error:
            self.missed += 1
            self._say(f"the agent did not register all of its resources: {error}", error=True)
            return False
        self._introduce(1000 * (time.perf_counter() - began))
        await anyio.sleep(PAUSE)
        return True

    async def _acts(self) -> None:
        loop = self._loop
        if loop is None:
            self._say("Loop devices cannot be made here (it takes root and the loop driver); the stub plays alone.")
        try:
            for number in itertools.count():
                if loop is not None:
                    await self._act("a loop device appears", LOOP, loop.name, loop.add)
                    await self._act("the loop device goes", LOOP, loop.name, loop.remove, _REMOVING)
                await self._stub(number)
                end = await self._pod()
                await self._restart()
                await end()  # not before: the next record might lack it, as that of a kubelet that lost its own
        finally:
            if loop is not None:
                loop.remove()

    async def _stub(self, number: int) -> None:
        turn, which = divmod(number, STUBS)
        stub = f"stub-{which}"
        if turn % TURNS == 0:
            await self._act("a stub device fails", STUB, stub, partial(self._write, f"{stub} unhealthy it was told to"))
            await self._act("and recovers", STUB, stub, partial(self._write, ""))
        else:
            await self._act("a stub device goes", STUB, stub, partial(self._write, f"{stub} gone"))
            await self._act("and comes back", STUB, stub, partial(self._write, ""))

    def _write(self, line: str) -> None:
        write_stub_file(self._stub_file, f"{line}\n")

    async def _act(
        self, title: str, resource: str, device: str, effect: Callable[[], None], usually: float = _KERNEL
    ) -> None:
        entry = self._stub_file.name if resource == STUB else device
        outcome = await self._stage.act(resource, device, entry, effect)
        if outcome is None:
            self.missed += 1
            self._say(f"{title}: {resource} never changed at the kubelet", error=True)
        else:
            self._show(title, outcome, usually)
        await anyio.sleep(PAUSE)

    async def _pod(self) -> Callable[[], Awaitable[None]]:
        """Run a pod with a stub device; what ends it."""

        async def end() -> None:
            self._kubelet.end(pod)

        pod = Pod("demo", (Container("main", {STUB: 1}),))
        status = await self._kubelet.admit(pod)
        ids = ", ".join(sorted(self._kubelet.held(pod, "main").get(STUB, ())))
        self._say(f"{'a pod asks for one':<22}  {ids or '':<8} {status.phase} {status.message}".rstrip())
        await anyio.sleep(PAUSE)
        return end

    async def _restart(self) -> None:
        number = len(self._kubelet.resources)
        try:
            took = await self._stage.restart_kubelet()
        except TimeoutError:
            self.missed += 1
            self._say("the kubelet restarted, and not everything registered again", error=True)
        else:
            again = f"all {number} registered again"
            self._say(f"{'the kubelet restarts':<22}  {again:<27}  {took:>8.1f}")
        await anyio.sleep(PAUSE)

    # --- what is shown ---

    def _introduce(self, took: float) -> None:
        self._say(f"Fairlead runs beside a simulated kubelet. It took {took:.0f} ms to register with it,")
        self._say("and the kubelet can give out of what it has:")
        for name, capacity, allocatable in self._stage.view():
            self._say(f"  {name:<24} {allocatable} of {capacity}")
        self._say(f"The live page: http://{self._page}/")
        self._say("In another terminal, while this runs:")
        self._say(f"  {_program()} status --config {self._config}")
        self._say("Ctrl-C ends it.\n")
        heads = ("WHAT HAPPENS", "DEVICE", _STATE.format("STATE"), "OFFERED", "AFTER ms", "KERNEL", "FAIRLEAD")
        self._say(output.bold(_ROW.format(*heads)))

    def _show(self, title: str, it: Outcome, usually: float) -> None:
        """One change: how long the kubelet took to learn of it, and who took that long."""
        (capacity, allocatable) = {name: numbers for name, *numbers in self._stage.view()}[it.resource]
        state = output.state("Degraded" if it.health == GONE else it.health, _STATE.format(it.health.lower()))
        offered = f"{allocatable} of {capacity}"
        times = (f"{ms:.1f}" for ms in (it.latency_ms, it.kernel_ms, it.fairlead_ms))
        self._say(_ROW.format(title, it.device, state, offered, *times))
        if note := busy(it, usually):
            self._say(output.state("Degraded", output.wrapped(note, 2)))

    def sum_up(self) -> None:
        """Say how long changes took, and what to try next."""
        if median := self._median():
            count = len(self._stage.outcomes)
            took = "{latency_ms:.1f} ms or less (kernel {kernel_ms:.1f}, Fairlead {fairlead_ms:.1f})".format(**median)
            self._say(f"\nHalf of {count} changes took {took}.")
        self._say(output.bold("\nTo try next:"))
        for command, what in _NEXT:
            self._say(f"  {_program()} {command}\n      {what}")

    def _say(self, line: str, *, error: bool = False) -> None:
        if error:
            output.note(line)
        elif not self._quiet:
            output.echo(line)

    def _median(self) -> dict[str, float]:
        """The median of each part of what changes took; nothing where there were none."""
        outcomes = self._stage.outcomes
        names = ("latency_ms", "kernel_ms", "waited_ms", "fairlead_ms")
        return {name: round(statistics.median(getattr(it, name) for it in outcomes), 2) for name in names if outcomes}

    def document(self) -> dict[str, Any]:
        """What --json prints."""
        return {
            "resources": [
                {"name": name, "capacity": capacity, "allocatable": allocatable}
                for name, capacity, allocatable in self._seen
            ],
            "changes": [asdict(it) | {"fairlead_ms": it.fairlead_ms} for it in self._stage.outcomes],
            "median": self._median(),
        }


class ClaimPlay(Play):
    """The same, with the stub by dynamic resource allocation: slices, claims, a scheduler, a kubelet that deletes slices."""

    pools: ClassVar = {STUB: pool_name(NODE, STUB)}

    def __init__(self, root: Path, *, quiet: bool) -> None:
        super().__init__(root, quiet=quiet)
        self._kubelet.serves_dra = True
        self._kubelet.wipe_slices = self._wipe
        self._objects = self._server.objects
        self._objects.subscribe(self._note)
        self._wiped = 0.0  # `time.perf_counter()`; 0: this kubelet has not yet
        self._back, self._took = asyncio.Event(), 0.0  # ms from then until they were there again

    async def _wipe(self, _driver: str | None) -> None:
        """Delete all slices of the node, as a kubelet that starts does."""
        self._objects.wipe()
        self._wiped = time.perf_counter()

    def _note(self) -> None:
        if self._wiped and not self._back.is_set() and len(self._stage.pool_health(self.pools[STUB])) == STUBS:
            self._took = 1000 * (time.perf_counter() - self._wiped)
            self._back.set()

    async def _play(self, seconds: float | None) -> None:
        async with self._server.running():
            await super()._play(seconds)

    async def _configured(self) -> Config:
        root = self._config.parent
        kubeconfig = self._server.kubeconfig(root / "kubeconfig")
        with self._config.open("a") as file:
            file.write(_BY_DRA.format(root=root, kubeconfig=kubeconfig))
        for it in classes([STUB], DRIVER):
            self._objects.put(f"deviceclasses/{it['metadata']['name']}", it)
        return load(self._config)

    async def _until_offered(self, names: Set[str]) -> None:
        await super()._until_offered(names - self.pools.keys())
        with anyio.fail_after(_START):
            await self._back.wait()  # the kubelet knows the driver then, and has deleted the slices

    async def _pod(self) -> Callable[[], Awaitable[None]]:
        path, name = "namespaces/default/resourceclaims/demo", class_name(STUB)
        asked = {"requests": [{"name": "device", "exactly": {"deviceClassName": name, "count": 1}}]}
        self._objects.put(path, {"metadata": {"name": "demo", "namespace": "default"}, "spec": {"devices": asked}})
        claim = scheduler.allocate(self._objects, "default", "demo", "demo")
        (given,) = claim["status"]["allocation"]["devices"]["results"]
        key = ClaimKey(DRIVER, claim["metadata"]["uid"], "demo")
        try:
            await self._kubelet.drivers.admit("demo", [key])
            said = "Running " + " ".join(self._kubelet.drivers.cdi_devices("demo"))
        except ClaimError as error:
            said = f"Pending {error}"
            self.missed += 1
        self._say(f"{'a pod with a claim':<22}  {given['device']:<8} {said}")
        await anyio.sleep(PAUSE)

        async def end() -> None:
            await self._kubelet.drivers.end("demo", [key])
            self._objects.remove(path)

        return end

    async def _restart(self) -> None:
        self._wiped = 0.0
        self._back.clear()
        await super()._restart()
        try:
            await self._until_offered(frozenset())
        except TimeoutError:
            self.missed += 1
            self._say("the kubelet deleted the ResourceSlices, and they are not there again", error=True)
        else:
            again = f"{STUBS} devices there again"
            self._say(f"{'it deletes the slices':<22}  {again:<27}  {self._took:>8.1f}")
        await anyio.sleep(PAUSE)

    def _show(self, title: str, it: Outcome, usually: float) -> None:
        super()._show(title, it, usually)
        for device in self._objects.pool(self.pools.get(it.resource, "")):
            for taint in device.get("taints", ()) if device["name"] == it.device else ():
                self._say(f"  taint {taint['key']}={taint['value']}:{taint['effect']}")
