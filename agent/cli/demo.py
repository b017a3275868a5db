"""`fairlead demo`: the agent against a simulated kubelet, with devices that come and go, and how long each took."""

from __future__ import annotations

import asyncio
import errno
import itertools
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import anyio
import click
import msgspec
from msgspec.structs import asdict

from agent.cli import options
from agent.config import load
from agent.daemon.supervisor import Agent
from agent.discovery.backend_factory import make_backends
from agent.runtime import logs
from agent.runtime.errors import FairleadError
from agent.runtime.supervision.notify import Notifier
from agent.simulation.demo_stage import Stage, view
from agent.simulation.hardware import LoopDevice, write_stub_file
from agent.simulation.kubelet import Kubelet
from agent.simulation.pods import Container, Pod

LOOP: Final = "demo.fairlead/loop"
STUB: Final = "demo.fairlead/stub"

PAUSE: Final = 1.0
"""Seconds between two acts; each round has four at least."""

STUBS: Final = 8
TURNS: Final = 5
"""Each stub device fails in one of five turns, and goes away in the others: it would be left out as flapping otherwise."""

_START: Final = 10.0  # seconds for the resources to be registered

_CONFIG: Final = """\
[agent]
plugin_dir = "{root}/device-plugins"
kubelet_root = "{root}"
state_dir = "{root}/state"
admin_socket = "{root}/admin.sock"

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


@click.command(epilog="Exit codes: 0 done, 1 the agent did not register or a change never reached the kubelet.")
@click.option("--seconds", type=click.FloatRange(min=0), help="End after so long; by default with Ctrl-C.")
@options.as_json
def demo(seconds: float | None, as_json: bool) -> None:
    """Run against a simulated kubelet and watch devices come and go.

    It works in a temporary directory; for root it also makes a loop device, and removes it again.

    With --json it prints {"resources": [{"name", "capacity", "allocatable"}], "changes": [{"resource", "device",
    "health", "latency_ms", "kernel_ms"}]} at the end, after 10 seconds if --seconds does not say otherwise.
    """
    logs.set_up("error")
    if as_json and seconds is None:
        seconds = 10.0
    with TemporaryDirectory(prefix="fairlead-") as directory:
        play = Play(Path(directory), quiet=as_json)
        try:
            anyio.run(play.run, seconds)
        except ExceptionGroup as failures:
            if failures.split(BrokenPipeError)[1] is not None:
                raise
            raise BrokenPipeError(errno.EPIPE, "nobody reads the output") from None  # click ends quietly then
    if as_json:
        click.echo(msgspec.json.encode(play.document()))
    if play.missed:
        raise FairleadError(f"{play.missed} changes did not reach the kubelet; run `fairlead run` to see the log")


class Play:
    """The acts in their order, and what the viewer sees of them."""

    def __init__(self, root: Path, *, quiet: bool) -> None:
        self.missed = 0
        self._quiet = quiet
        self._stub_file = root / "hardware" / "stub"
        self._stub_file.parent.mkdir()
        self._config = root / "config.toml"
        self._config.write_text(_CONFIG.format(root=root, stubs=STUBS))
        self._kubelet = Kubelet(root)
        self._stage = Stage(self._kubelet, frozenset({Path("/dev"), self._stub_file.parent}))
        self._loop: LoopDevice | None = None
        self._seen: list[tuple[str, int, int]] = []

    async def run(self, seconds: float | None) -> None:
        """Play until the time is up or a signal comes, or for ever."""
        with anyio.CancelScope() as scope:
            for number in (signal.SIGTERM, signal.SIGINT):
                asyncio.get_running_loop().add_signal_handler(number, scope.cancel)
            await self._play(seconds)

    async def _play(self, seconds: float | None) -> None:
        config = load(self._config)
        self._loop = await anyio.to_thread.run_sync(LoopDevice.free)
        async with self._kubelet, anyio.create_task_group() as tasks:
            tasks.start_soon(Agent(config, make_backends(config.host, config.resources), Notifier(None)).run)
            tasks.start_soon(self._stage.run)
            try:
                if await self._wait_for({resource.name for resource in config.resources}):
                    with anyio.move_on_after(seconds):
                        await self._acts()
            finally:
                self._seen = view(self._kubelet.resources)
            tasks.cancel_scope.cancel()

    async def _wait_for(self, names: set[str]) -> bool:
        """Wait until the agent has registered everything; False if it does not."""
        began = time.perf_counter()
        try:
            await self._kubelet.wait_for(
                lambda k: all(name in k.resources and k.streams(name) for name in names), _START
            )
        except TimeoutError as error:
            self.missed += 1
            self._say(f"the agent did not register all of its resources: {error}", error=True)
            return False
        self._say(f"{len(names)} resources registered {1000 * (time.perf_counter() - began):.0f} ms after the start")
        self._show_resources()
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
                    await self._act("the loop device goes", LOOP, loop.name, loop.remove)
                await self._stub(number)
                await self._pod()
                await self._restart()
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

    async def _act(self, title: str, resource: str, device: str, effect: Callable[[], None]) -> None:
        entry = self._stub_file.name if resource == STUB else device
        outcome = await self._stage.act(resource, device, entry, effect)
        if outcome is None:
            self.missed += 1
            self._say(f"{title}: {resource} never changed at the kubelet", error=True)
        else:
            ours = outcome.latency_ms - outcome.kernel_ms
            self._say(
                f"{title:<24} {outcome.device:<8} {outcome.health.lower():<10} at the kubelet after {outcome.latency_ms:5.1f} ms "
                f"(kernel {outcome.kernel_ms:.1f}, Fairlead {ours:.1f}); {self._count(resource)}"
            )
        await anyio.sleep(PAUSE)

    async def _pod(self) -> None:
        pod = Pod("demo", (Container("main", {STUB: 1}),))
        status = await self._kubelet.admit(pod)
        ids = ", ".join(sorted(self._kubelet.held(pod, "main").get(STUB, ())))
        self._say(f"a pod asks for a device  {status.phase}, it got {ids or status.message}")
        self._kubelet.end(pod)
        await anyio.sleep(PAUSE)

    async def _restart(self) -> None:
        try:
            took = await self._stage.restart_kubelet()
        except TimeoutError:
            self.missed += 1
            self._say("the kubelet restarted, and not everything registered again", error=True)
        else:
            self._say(f"the kubelet restarts     everything registered again {took:.1f} ms after its socket was there")
        await anyio.sleep(PAUSE)

    # --- what is shown ---

    def _count(self, resource: str) -> str:
        found = self._kubelet.resources[resource]
        return f"{resource} {found.allocatable}/{found.capacity}"

    def _show_resources(self) -> None:
        self._say("What the kubelet sees (allocatable/capacity):")
        for name, capacity, allocatable in view(self._kubelet.resources):
            self._say(f"  {name:<28} {allocatable}/{capacity}")

    def _say(self, line: str, *, error: bool = False) -> None:
        if not self._quiet or error:
            click.echo(f"{time.strftime('%H:%M:%S')}  {line}", err=error)

    def document(self) -> dict[str, Any]:
        """What --json prints."""
        return {
            "resources": [
                {"name": name, "capacity": capacity, "allocatable": allocatable}
                for name, capacity, allocatable in self._seen
            ],
            "changes": [asdict(outcome) for outcome in self._stage.outcomes],
        }
