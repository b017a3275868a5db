"""Restarts of the kubelet: it forgets all plugins, and each has to come back by itself."""

from __future__ import annotations

import signal
from typing import Final

import anyio

from agent.simulation.conformance.checks.registration import begun, comes
from agent.simulation.conformance.stage import Stage
from agent.simulation.conformance.suite import check
from agent.simulation.conformance.timeline import Asked, NotApplicable, Skipped, Timeline, first, named
from agent.simulation.model import Kind

_IN_TIME: Final = 1.5  # seconds: a real kubelet admits its first pod after 1 s (A6), and this machine may be busy
_LOAD: Final = 20  # calls under way when the kubelet dies
_UNDER_WAY: Final = 0.01  # seconds after which the calls have been sent
_TRIES: Final = 16  # to get the same inode number again
RESTART: Final = "restart"


async def restarting(stage: Stage) -> None:
    """The kubelet is stopped and started again, as `systemctl restart kubelet` does."""
    await stage.begin()
    await stage.kubelet.stop()
    stage.did(RESTART)
    await stage.kubelet.start()
    await begun(stage)
    await stage.rest()


@check(restarting, "A6")
def restart_registers(t: Timeline) -> str:
    """A kubelet that starts knows no plugin, and removes the sockets that lie in its plugin directory (not those
    in a directory below): listen at a fresh socket and register, each time `kubelet.sock` is made.
    """
    return comes(t)


def lists_after(t: Timeline) -> list[dict[str, str]]:
    """The lists of the subject after the restart: ID → health.

    Raises:
        Skipped: none came.
    """
    if not (found := t.since(RESTART).health()):
        raise Skipped("no list came after the restart: see restart-registers")
    return found


@check(restarting, "A6")
def restart_in_time(t: Timeline) -> str:
    """Pods that a kubelet admits before you have registered fail for good, whatever their restart policy; the
    first are admitted about 1 s after its socket appears: use inotify, do not poll.
    """
    after = t.since(RESTART)
    if restart_registers(t):
        raise Skipped("it did not register: see restart-registers")
    began = after.changes(Kind.STARTED)[0].at
    last = max(it.at for resource in after.resources if (it := after.registered(resource)))
    return f"it took {last - began:.1f} s" if last - began > _IN_TIME else ""


@check(restarting, "A2")
def restart_once(t: Timeline) -> str:
    """One Register for each start of a kubelet, of which both its new socket and your old stream's end tell: of two
    streams the kubelet forgets one when the other ends. Remember which `kubelet.sock` you are registered at: its
    inode and time of last change (ctime) together tell it from the next, or the event of its creation.
    """
    after, seen = t.since(RESTART), set()
    for it in after.changes(Kind.REGISTERED):
        if it.resource in seen:
            return f"{it.resource} was registered more than once"
        seen.add(it.resource)
    if restart_registers(t):
        raise Skipped("it did not register: see restart-registers")
    return ""


@check(restarting, "A7")
def restart_same_devices(t: Timeline) -> str:
    """Pods go on running while the kubelet restarts, and its checkpoint has their IDs: the same device has the
    same ID after it.
    """
    before, after = t.until(RESTART).health(), lists_after(t)
    lost = before[-1].keys() - after[-1].keys()
    return f"lost from {t.subject}: {named(lost)}" if lost else ""


async def wiping(stage: Stage) -> None:
    """A kubelet of 1.32 starts, which removes every file but its checkpoint."""
    await stage.begin()
    await stage.kubelet.stop()
    stage.did(RESTART)
    await stage.kubelet.start("1.32")
    await begun(stage)


@check(wiping, "A6", follows="restart-registers")
def restart_wipes_files(t: Timeline) -> str:
    """Kubelets until 1.32 remove every file in the plugin directory when they start, not sockets alone: keep
    locks and state elsewhere, or in a directory below.
    """
    return comes(t)


async def same_inode(stage: Stage) -> None:
    """The new kubelet's socket has the inode number of the old one."""
    await stage.begin()
    for _ in range(_TRIES):  # on a busy machine another process may take the number meanwhile
        number = stage.kubelet.socket.stat().st_ino
        await stage.kubelet.stop()
        stage.did(RESTART)
        await stage.kubelet.start()
        is_same = stage.kubelet.socket.stat().st_ino == number
        await begun(stage)
        if is_same or not stage.healthy():
            return
    raise Skipped("this file system gives each new file another inode number")


@check(same_inode, "A6", follows="restart-registers")
def restart_same_inode(t: Timeline) -> str:
    """A new `kubelet.sock` often has the inode number of the old one: that number alone shows no restart. Watch the
    directory for the name's creation, or compare inode and time of last change (ctime) together.
    """
    return comes(t)


async def hanging(stage: Stage) -> None:
    """The old kubelet hangs with its streams open; another one starts."""
    await stage.begin()
    await stage.kubelet.stand_still()
    stage.did(RESTART)
    await stage.kubelet.start()
    await begun(stage)


@check(hanging, "A2", follows="restart-registers")
def restart_half_open(t: Timeline) -> str:
    """A kubelet that hangs in the kernel keeps its streams open while the next one runs: a new `kubelet.sock`
    means register, even if no stream has ended.
    """
    return comes(t)


async def twice(stage: Stage) -> None:
    """The kubelet restarts, and again while the plugin registers."""
    await stage.begin()
    await stage.kubelet.stop()
    came = len(stage.timeline().of(Asked))
    await stage.kubelet.start()
    await stage.until(lambda: len(stage.timeline().of(Asked)) > came)
    await stage.kubelet.stop(kill=True)
    stage.did(RESTART)
    await stage.kubelet.start()
    await begun(stage)
    await stage.rest()


@check(twice, "A6", follows="restart-registers")
def restart_twice(t: Timeline) -> str:
    """A kubelet may restart while you register with it, more than once: what counts is the newest one."""
    return comes(t)


async def away(stage: Stage) -> None:
    """The kubelet is away for a while."""
    await stage.begin()
    await stage.kubelet.stop()
    stage.did("away")
    stage.use("before")
    await stage.rest(4)
    stage.use("after")
    stage.did(RESTART)
    await stage.kubelet.start()
    await begun(stage)


@check(away, "A6", follows="restart-registers")
def restart_after_a_while(t: Timeline) -> str:
    """An upgrade takes the kubelet away for minutes: wait until its socket is back, however long that takes."""
    return comes(t)


async def dropped(stage: Stage) -> None:
    """The kubelet closes the plugin's stream, and goes on."""
    if stage.kubelet.version != "1.36":
        return
    await stage.begin()
    resource = stage.subject
    stage.tell(stage.plugin, signal.SIGKILL)
    await stage.ended(stage.plugin, stage.terms.patience)
    # a rival that registers before it is gone would be the one whose client is closed
    await stage.until(lambda: bool(stage.timeline().since("SIGKILL").changes(Kind.DISCONNECTED, resource=resource)))
    async with stage.rival(resource):
        stage.did("rival")
        stage.plugin = await stage.launch()
        await stage.until(lambda: any(it.resource == resource for it in stage.timeline().since("rival").of(Asked)))
        await stage.rest()
        stage.did("drop")
    await stage.until(lambda: bool(stage.timeline().since("drop").changes(Kind.DISCONNECTED)))
    await begun(stage)


@check(dropped, "A2")
def stream_ended(t: Timeline) -> str:
    """A kubelet until 1.36 closes your stream without a restart when an older stream of your resource ends, as
    that of the instance before you: a `ListAndWatch` that ends while you mean to live means register again.
    """
    if not t.events:
        raise NotApplicable("a kubelet from 1.37 on does not do that")
    if not t.since("drop").changes(Kind.DISCONNECTED, resource=t.subject):
        raise Skipped("no stream was closed" + (": see killed-returns" if not t.since("rival").of(Asked) else ""))
    return comes(t)


async def loaded(stage: Stage) -> None:
    """The kubelet is killed while many calls are under way."""
    await stage.begin()
    ids = stage.healthy()
    async with anyio.create_task_group() as tasks:
        for number in range(_LOAD):
            tasks.start_soon(stage.allocate, f"load {number}", ids[number % len(ids)])
        tasks.start_soon(stage.admit, stage.pod(1))
        await anyio.sleep(_UNDER_WAY)
        await stage.kubelet.stop(kill=True)
        stage.did(RESTART)
        await stage.kubelet.start()
    await begun(stage)
    if stage.healthy():
        await stage.allocate("then", stage.healthy()[0])


@check(loaded, "A6", follows="restart-registers")
def restart_under_load(t: Timeline) -> str:
    """A kubelet may be killed while calls of it are under way: they end with an error on your side, and you go
    on.
    """
    return comes(t) or first(it.error for it in t.calls("then"))
