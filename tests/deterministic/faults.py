"""All that happens in a run, one small generator for each: before `yield` it begins, after `yield` it ends.

What the kubelet must show meanwhile, each tells the model. `touches` names what it has to itself while it lasts.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from functools import partial
from typing import Final, get_args

from msgspec import Struct

from agent.console.control import Client
from agent.daemon.control import AgentControl
from agent.kubelet.witnesses import FILE_NAME
from agent.runtime.errors import FairleadError
from agent.simulation.model import Phase, Version
from agent.simulation.registration import Handler
from tests.deterministic.claims import CLAIMED
from tests.deterministic.world import (
    CLAIMS_END,
    KUBELETS,
    LATE,
    RIVALS,
    SHARED,
    STUB,
    WIDGET,
    AgentProcess,
    UnfitError,
    World,
)
from tests.simulation.plugin import ToyPlugin, devices

Body = Callable[[World, random.Random], AsyncIterator[None]]

_DISK: Final = ("disk-full", "read-only", "io-error", "disk-slow")


class Fault(Struct, frozen=True):
    """One row of the table."""

    name: str
    weight: int
    """How often it happens, compared with others."""
    touches: frozenset[str]
    happen: Callable[[World, random.Random], AbstractAsyncContextManager[None]]
    of_claims: bool = False
    """Whether it takes dynamic resource allocation."""


FAULTS: Final[dict[str, Fault]] = {}


def fault(weight: int, *touches: str, of_claims: bool = False) -> Callable[[Body], Body]:
    """Add a row."""

    def add(body: Body) -> Body:
        name = body.__name__.replace("_", " ")
        FAULTS[name] = Fault(name, weight, frozenset(touches), asynccontextmanager(body), of_claims)
        return body

    return add


# --- pods ---


@fault(14)
async def a_pod_comes(w: World, rng: random.Random) -> AsyncIterator[None]:
    w.pod_comes(rng)
    yield


@fault(10)
async def a_pod_ends(w: World, rng: random.Random) -> AsyncIterator[None]:
    w.pod_goes(rng)
    yield


@fault(2)
async def a_container_restarts(w: World, rng: random.Random) -> AsyncIterator[None]:
    if pods := sorted((it.pod for it in w.running() if it.phase is Phase.RUNNING), key=lambda it: it.name):
        chosen = rng.choice(pods)
        w.admitting(lambda: w.kubelet.restart_container(chosen, "main"))
    yield


# --- claims ---


@fault(14, of_claims=True)
async def a_claim_comes(w: World, rng: random.Random) -> AsyncIterator[None]:
    w.claims.come()
    yield


@fault(10, of_claims=True)
async def a_claim_ends(w: World, rng: random.Random) -> AsyncIterator[None]:
    w.claims.go(rng)
    yield


@fault(6, "device directory", "claimed nodes", of_claims=True)
async def claimed_nodes_are_unplugged(w: World, rng: random.Random) -> AsyncIterator[None]:
    units = rng.sample(sorted(w.claims.model.hardware[CLAIMED]), rng.choice([1, 1, 3]))
    w.node.unlink(*units)
    with w.claims.model.without(CLAIMED, *units):
        w.disturb()
        yield
    w.node.mknod(*units)


@fault(3, "claimed nodes", of_claims=True)
async def claimed_nodes_come_and_go_in_a_burst(w: World, rng: random.Random) -> AsyncIterator[None]:
    units = rng.sample(sorted(w.claims.model.hardware[CLAIMED]), rng.choice([1, 3]))
    for _ in range(rng.randint(2, 30)):
        w.disturb()
        w.node.unlink(*units)
        await asyncio.sleep(rng.choice([0, 0.001, 0.3]))
        w.node.mknod(*units)
        await asyncio.sleep(rng.choice([0, 0.001, 0.3]))
        w.disturb()
    yield


@fault(3, of_claims=True)
async def somebody_deletes_the_slices(w: World, rng: random.Random) -> AsyncIterator[None]:
    w.claims.delete_slices()
    yield


@fault(3, "API server", of_claims=True)
async def the_api_server_is_away(w: World, rng: random.Random) -> AsyncIterator[None]:
    """What does not answer is asked again after ten seconds at most."""
    with w.claims.model.unseen():
        w.claims.api.is_away = True
        yield
        w.claims.api.is_away = False
        await asyncio.sleep(12.0)
    w.disturb()


@fault(3, "configuration", "agent", "API server", "claimed nodes", "kubelet", "checkpoint", of_claims=True)
async def a_resource_is_switched_to_device_plugins_and_back(w: World, rng: random.Random) -> AsyncIterator[None]:
    """What claims have stays theirs, and so does what pods have from before: what is free is offered by one API at a time."""
    claims, hardware = w.claims, w.model.hardware
    with claims.model.unseen(), w.model.unsure(CLAIMED, *claims.model.hardware[CLAIMED]):
        claims.is_switched = True
        w.configure()
        hardware[CLAIMED] = {unit: (unit,) for unit in claims.model.hardware[CLAIMED]}
        for _ in range(3):
            await asyncio.sleep(2.0 * rng.random())
            w.pod_asks(CLAIMED, 1)
        yield
        claims.is_switched = False
        w.configure()
        for _ in range(3):
            await asyncio.sleep(2.0 * rng.random())
            claims.come()
        for status in w.running():
            if CLAIMED in status.pod.containers[0].resources:
                w.end_pod(status)
        await asyncio.sleep(CLAIMS_END)  # until both witnesses know that
        del hardware[CLAIMED]
    w.disturb()


@fault(2, of_claims=True)
async def watches_are_too_old(w: World, rng: random.Random) -> AsyncIterator[None]:
    w.claims.objects.forget()
    yield


# --- hardware ---


@fault(8, "device directory")
async def nodes_are_unplugged(w: World, rng: random.Random) -> AsyncIterator[None]:
    with w.some(rng, resource := rng.choice([WIDGET, SHARED])) as units:
        w.node.unlink(*units)
        with w.model.without(resource, *units):
            w.disturb()
            yield
        w.node.mknod(*units)


@fault(3)
async def nodes_come_and_go_in_a_burst(w: World, rng: random.Random) -> AsyncIterator[None]:
    with w.some(rng, WIDGET) as units:
        for _ in range(rng.randint(2, 30)):
            w.disturb()
            w.node.unlink(*units)
            await asyncio.sleep(rng.choice([0, 0.001, 0.02]))
            w.node.mknod(*units)
            await asyncio.sleep(rng.choice([0, 0.001]))
            w.disturb()
        yield


@fault(8)
async def devices_fail(w: World, rng: random.Random) -> AsyncIterator[None]:
    """A file that is replaced, of which inotify tells, says so; half of them are gone."""
    with w.some(rng, STUB) as units:
        w.states |= {unit: rng.choice(["unhealthy", "gone"]) for unit in units}
        w.say_states()
        with w.model.without(STUB, *units):
            w.disturb()
            yield
        for unit in units:
            del w.states[unit]
        w.say_states()
        w.disturb()


@fault(3, "reads")
async def a_read_hangs(w: World, rng: random.Random) -> AsyncIterator[None]:
    """A thread of a backend does not come back; its unit's devices count as Unhealthy after some seconds."""
    unit = rng.choice([STUB, "/dev/w0", "/dev/w3", "/dev/s1"])
    resource = STUB if unit == STUB else WIDGET if unit.startswith("/dev/w") else SHARED
    units = [] if unit == STUB else [unit.removeprefix("/dev/")]
    with w.model.unsure(resource, *units):
        w.hanging.add(unit)
        yield
        w.hanging.discard(unit)
        w.let_go()
        w.disturb()
        await asyncio.sleep(1.0)


# --- the kubelet ---


@fault(5, "kubelet")
async def the_kubelet_restarts(w: World, rng: random.Random) -> AsyncIterator[None]:
    styles: tuple[Version, ...] = ("1.32", "1.36")
    with w.model.unseen():
        for _ in range(rng.choice([1, 1, 3])):
            w.kubelet.version, w.kubelet.handler = rng.choice(KUBELETS), rng.choice(get_args(Handler))
            style, kill = rng.choice(styles), rng.random() < 0.5
            await w.on_kubelet(lambda style=style, kill=kill: w.kubelet.restart(style, kill=kill))  # type: ignore[misc]
    yield


@fault(3, "kubelet")
async def the_kubelet_is_down(w: World, rng: random.Random) -> AsyncIterator[None]:
    kill = rng.random() < 0.5
    with w.model.unseen():
        await w.on_kubelet(lambda: w.kubelet.stop(kill=kill))
        yield
        await w.on_kubelet(w.kubelet.start)


@fault(3, "kubelet")
async def the_kubelet_hangs(w: World, rng: random.Random) -> AsyncIterator[None]:
    with w.model.unseen():
        w.kubelet_process.is_stopped = True
        yield
        w.kubelet_process.is_stopped = False
        await asyncio.sleep(6.0)  # what it did not answer is tried again after 5 s


@fault(2, "kubelet", "agent")
async def the_plugin_directory_is_made_again(w: World, rng: random.Random) -> AsyncIterator[None]:
    with w.model.unseen():
        await w.on_kubelet(w.kubelet.stop)
        kept = (w.node.plugin_dir / FILE_NAME).read_bytes()
        shutil.rmtree(w.node.plugin_dir.rename(w.root / "removed"))
        yield
        w.node.plugin_dir.mkdir()
        (w.node.plugin_dir / FILE_NAME).write_bytes(kept)
        await w.on_kubelet(w.kubelet.start)
        await asyncio.sleep(6.0)


@fault(2, "kubelet", "checkpoint", "agent")
async def the_checkpoint_is_damaged(w: World, rng: random.Random) -> AsyncIterator[None]:
    """An agent that is started meanwhile keeps back what it cannot tell whether the kubelet has forgotten."""
    path = w.node.plugin_dir / FILE_NAME
    kept, aside = path.read_bytes(), path.with_name(".odd")
    match rng.choice(["FIFO", "link", "zeros", "half"]):
        case "FIFO":
            os.mkfifo(aside)
        case "link":
            aside.symlink_to("/dev/zero")
        case "zeros":
            aside.write_bytes(bytes(4096))
        case _:
            aside.write_bytes(kept[: len(kept) // 2])
    odd, written = aside.lstat().st_ino, path.stat().st_mtime_ns
    aside.rename(path)
    yield
    if path.lstat().st_ino == odd:  # the kubelet has not written it since
        aside.write_bytes(kept)
        os.utime(aside, ns=(written, written))
        aside.rename(path)


@fault(2, "kubelet", "checkpoint")
async def the_checkpoint_is_touched(w: World, rng: random.Random) -> AsyncIterator[None]:
    """Its time is another, and what it says is what it was."""
    path = w.node.plugin_dir / FILE_NAME
    for _ in range(rng.choice([1, 3])):
        os.utime(path)
        await asyncio.sleep(rng.choice([0.0, 0.5]))
    yield


@fault(3, "checkpoint")
async def records_are_written_late_or_in_the_wrong_order(w: World, rng: random.Random) -> AsyncIterator[None]:
    """The kubelet takes its snapshot under a lock and writes after it."""
    w.record_delays = rng.choice([(0.0, 0.02), (0.0, 1.5), (0.5, 0.5)])
    # it may have so many lists to write down, one after the other; and until 1.36, each end that it sees so late drops a later
    # client, whose end it sees late, too (A2), until our pause before the next try is the longer one
    with w.model.slower(10.0 * w.record_delays[1]):
        yield
        w.record_delays = None
        await asyncio.sleep(5.0)


@fault(2, "kubelet", "checkpoint")
async def the_kubelets_disk_is_slow(w: World, rng: random.Random) -> AsyncIterator[None]:
    """It waits for the checkpoint at each list and each pod; until 1.36, ends of streams that it sees late drop later clients (A2)."""
    with w.model.unseen():
        w.kubelet_process.faults.add("disk-slow")
        yield
        w.kubelet_process.faults.discard("disk-slow")
        await asyncio.sleep(8.0)


# --- the agent's process ---


@fault(3, "agent")
async def the_agent_restarts(w: World, rng: random.Random) -> AsyncIterator[None]:
    with w.model.unseen():
        for agent in list(w.agents):
            await agent.end(rng.choice([signal.SIGTERM, signal.SIGKILL]))
        yield
        await w.start_agent().is_ready()


@fault(3, "agent")
async def the_agent_is_killed_and_started_at_once(w: World, rng: random.Random) -> AsyncIterator[None]:
    """At any moment of its start, several times."""
    with w.model.unseen():
        for _ in range(rng.choice([1, 2, 5])):
            for agent in list(w.agents):
                agent.get(signal.SIGKILL)
            w.start_agent()
            await asyncio.sleep(rng.choice([0.0, 0.001, 0.05, 1.0]) * rng.random())
        await w.agent.is_ready()
    yield


@fault(2, "agent")
async def the_state_is_damaged(w: World, rng: random.Random) -> AsyncIterator[None]:
    with w.model.unseen():
        for agent in list(w.agents):
            agent.get(signal.SIGKILL)
        state = w.node.state / "state.json"
        with suppress(FileNotFoundError):
            kept = state.read_bytes()
            last = kept.splitlines(keepends=True)[-1]
            torn = kept + last[: rng.randrange(len(last))]  # what was told to be kept is synced, and whole
            state.write_bytes(
                rng.choice([torn, torn, b"\0" * 100, b'{"version": 99}\n', b"wrong line\n", kept + bytes(64)])
            )
        yield
        await w.start_agent().is_ready()


@fault(3, "agent")
async def the_agent_stands_still(w: World, rng: random.Random) -> AsyncIterator[None]:
    """No kubelet restarts meanwhile: an Allocate that it gave up counts as forgotten when the agent reads it afterwards."""
    with w.model.unseen():
        w.agent.get(signal.SIGSTOP)
        yield
        w.agent.get(signal.SIGCONT)
        await asyncio.sleep(6.0)


@fault(4, "agent", "kubelet", "checkpoint", "disk")
async def the_node_is_handed_over(w: World, rng: random.Random) -> AsyncIterator[None]:
    """Nothing of it shows in the kubelet: the model goes on as if nothing were."""
    second = w.start_agent()
    await second.is_ready()
    await asyncio.sleep(1.0 + rng.random())
    yield
    await w.agent.end()
    await asyncio.sleep(2.0)


@fault(4, "agent", "kubelet", "checkpoint")
async def a_hand_over_goes_wrong(w: World, rng: random.Random) -> AsyncIterator[None]:
    """Either agent is killed, stopped or slow at any moment of it."""
    first, second = w.agent, w.start_agent()
    await asyncio.sleep(rng.choice([0.01, 1.0, 4.0]) * rng.random())
    with w.model.unseen():
        ending = asyncio.create_task(first.end())
        await asyncio.sleep(rng.choice([0.001, 0.01, 0.1, 1.0]) * rng.random())
        victim = rng.choice([first, second])
        match rng.choice(["killed", "stopped", "slow"]):
            case "killed":
                if victim in w.agents:
                    victim.get(signal.SIGKILL)
            case "stopped":
                victim.process.is_stopped = True
                await asyncio.sleep(rng.choice([0.3, 4.0, 15.0]))
                victim.process.is_stopped = False
            case _:
                victim.process.faults.add("disk-slow")
        yield
        victim.process.faults.discard("disk-slow")
        await _end_hand_over(w, first, ending)


@fault(3, "agent", "kubelet", "checkpoint")
async def an_agent_dies_at_some_turn_of_a_hand_over(w: World, rng: random.Random) -> AsyncIterator[None]:
    """Either of both: what takes no time has many turns."""
    first, second = w.agent, w.start_agent()
    await second.is_ready()
    with w.model.unseen():
        ending = asyncio.create_task(first.end())
        await asyncio.sleep(rng.choice([0.0, 0.0, 0.05, 0.5]) * rng.random())
        for _ in range(rng.randrange(rng.choice([10, 30, 100, 300]))):
            await asyncio.sleep(0)
        if (victim := rng.choice([first, second])) in w.agents:
            victim.get(signal.SIGKILL)
        yield
        await _end_hand_over(w, first, ending)


async def _end_hand_over(w: World, first: AgentProcess, ending: asyncio.Task[None]) -> None:
    if not first.process.is_dead:
        await asyncio.wait([ending])
    ending.cancel()
    if not w.agents:
        await w.start_agent().is_ready()
    await asyncio.sleep(12.0)


@fault(4, "disk")
async def the_agents_disk_fails(w: World, rng: random.Random) -> AsyncIterator[None]:
    """Nothing that the kubelet shows depends on it."""
    agent, what = w.agent, rng.choice(_DISK)
    agent.process.faults.add(what)
    w.note(f"the disk of {agent.process} is now: {what}")
    yield
    agent.process.faults.discard(what)


@fault(2, "disk", "agent", "kubelet", "checkpoint")
async def the_plugin_directory_cannot_be_written(w: World, rng: random.Random) -> AsyncIterator[None]:
    """A kubelet that restarts meanwhile is registered with once it can; that it cannot is said once."""
    process, what = w.agent.process, rng.choice(["disk-full", "read-only"])
    with w.model.unseen():
        process.disk = str(w.root)
        process.faults.add(what)
        await w.on_kubelet(w.kubelet.restart)
        yield
        process.faults.discard(what)
        process.disk = str(w.node.state)


@fault(1, "clock")
async def the_wall_clock_jumps(w: World, rng: random.Random) -> AsyncIterator[None]:
    w.machine.wall_offset += rng.choice([-1.0, 1.0]) * rng.choice([0.5, 60.0, 86400.0])
    yield


# --- operators ---


@fault(3, "disk", "agent")
async def an_operator_drains(w: World, rng: random.Random) -> AsyncIterator[None]:
    with w.some(rng, WIDGET, 1) as units:
        for unit in units:
            with w.model.unsure(WIDGET, unit):
                try:
                    await w.agent.ask(
                        partial(AgentControl.drain, device=f"/dev/{unit}", reason="simulated", until=None)
                    )
                except (FairleadError, LookupError) as error:
                    w.note(f"the drain failed: {error}")
                    raise UnfitError from None
        with w.model.without(WIDGET, *units):
            w.disturb()
            yield
        for unit in units:
            await w.agent.ask(partial(AgentControl.undrain, device=f"/dev/{unit}"))


@fault(2, "configuration", "agent")
async def the_configuration_is_wrong(w: World, rng: random.Random) -> AsyncIterator[None]:
    w.configure(rng.choice(["[agent", "", "\0" * 1000, '[[resource]]\nname = "a.b/c"\nbackend = "none"\n']))
    yield
    w.configure()


@fault(2, "configuration", "agent")
async def a_reload_brings_a_resource(w: World, rng: random.Random) -> AsyncIterator[None]:
    with w.model.slower(3.0):
        w.extra.append(f'[[resource]]\nname = "{LATE}"\nbackend = "stub"\ndevices = [{{ count = 2, numa_node = 0 }}]\n')
        w.configure()
        w.model.hardware[LATE] = {f"stub-{n}": (f"stub-{n}",) for n in range(2)}
        w.disturb()
        yield
        for status in w.running():
            if LATE in status.pod.containers[0].resources:
                w.end_pod(status)
        del w.model.hardware[LATE]
        w.extra.clear()
        w.configure()
        w.disturb()
        await asyncio.sleep(3.0)


@fault(1, "configuration", "agent")
async def it_is_reloaded(w: World, rng: random.Random) -> AsyncIterator[None]:
    if signal.SIGHUP in w.agent.process.signals:
        w.agent.get(signal.SIGHUP)
    yield


# --- others on the node ---


@fault(2, "kubelet", "agent", "checkpoint")
async def another_plugin_overtakes_us(w: World, rng: random.Random) -> AsyncIterator[None]:
    """Its name is ours, and so the kubelet asks it alone; once it has ended, ours is registered again."""
    plugin = ToyPlugin(w.node.plugin_dir, WIDGET, devices(*RIVALS), "rival.sock")
    with w.model.unseen():
        await w.in_process("rival", plugin.__aenter__)
        await w.in_process("rival", plugin.register)
        yield
        await w.in_process("rival", lambda: plugin.__aexit__(None, None, None))
        await asyncio.sleep(8.0)


@fault(1)
async def links_lie_in_the_plugin_directory(w: World, rng: random.Random) -> AsyncIterator[None]:
    """Where our sockets are, one that we do not know."""
    link = w.node.sockets / "evil.sock"
    with suppress(OSError):
        link.symlink_to("/etc/passwd")
    yield
    link.unlink(missing_ok=True)


@fault(1)
async def somebody_floods_a_plugins_socket(w: World, rng: random.Random) -> AsyncIterator[None]:
    """Pings without an end, and frames of no known type."""
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
    frame = rng.choice([bytes([0, 0, 8, 6, 0, 0, 0, 0, 0]) + bytes(8), bytes([0, 0, 0, 99, 0, 0, 0, 0, 0])])
    sockets = sorted(w.node.sockets.glob("*.sock"))
    for path in rng.sample(sockets, min(1, len(sockets))):
        with suppress(OSError), socket.socket(socket.AF_UNIX) as sock:
            sock.setblocking(False)
            sock.connect(str(path))
            for part in [preface, *[frame * 500] * 40]:
                sock.send(part)
                await asyncio.sleep(0)
    yield


@fault(1, "agent", "device directory")
async def inotify_has_no_watches_left(w: World, rng: random.Random) -> AsyncIterator[None]:
    """What changes then is found by a look each 5 s."""
    with w.model.slower(11.0):
        w.agent.process.faults.add("no-watches")
        w.node.dev.rename(aside := w.root / "dev.before")
        w.node.dev.mkdir()
        for path in sorted(aside.iterdir()):
            path.rename(w.node.dev / path.name)
        aside.rmdir()
        w.disturb()
        yield
        w.agent.process.faults.discard("no-watches")
        await asyncio.sleep(12.0)


@fault(1, "agent")
async def no_threads_are_left(w: World, rng: random.Random) -> AsyncIterator[None]:
    """Those that are there go on; what needs another one waits, and says so."""
    with w.model.unseen():
        w.agent.process.faults.add("no-threads")
        yield
        w.agent.process.faults.discard("no-threads")
        await asyncio.sleep(6.0)


@fault(2)
async def a_command_is_ended_at_once(w: World, rng: random.Random) -> AsyncIterator[None]:
    client = Client(w.node.admin)
    task = asyncio.ensure_future(client.explain("w1") if rng.random() < 0.5 else client.status())
    await asyncio.sleep(rng.choice([0.0, 0.001, 1.0]))
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    client.close()
    yield
