"""A node in a guest: the real agent, the kubelet that it serves, and what a test says of both."""

from __future__ import annotations

import asyncio
import json
import shlex
import signal
import sys
import textwrap
import tomllib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Final

from tests.e2e.forkserver import REPOSITORY
from tests.e2e.process import MAIN
from tests.guest.guest import SLOWER, Guest, Process
from tests.wait import limit

CONFIG: Final = Path("/etc/fairlead/config.toml")
KUBELET_ROOT: Final = Path("/var/lib/kubelet")
_SOON: Final = """
from tests.e2e import passing
passing.install()
from agent.claims import ledger
from agent.kubelet import pod_claims
ledger.REWRITE_AFTER = 0.1
pod_claims._AFTER_ALLOCATE, pod_claims._WHILE_ENDING, pod_claims.IDLE = 0.2, 0.2, 1.0
"""
"""A prelude for the agent: a claim ends soon after its pod, once a minute has passed on the agent's clock."""
_NO_POLLS: Final = """
[agent]
probe = "24h"
resync = "24h"
"""
"""So that a list follows the kernel's word."""

Line = dict[str, Any]


class Log:
    """The JSON lines of a command in the guest."""

    def __init__(self, process: Process) -> None:
        self.lines: list[Line] = []
        self._process = process
        self._news = asyncio.Condition()

    async def read(self, note: Callable[[Line], None] = lambda _: None) -> None:
        """Read until the command's end, and call `note` with every line."""
        async for text in self._process.lines():
            try:
                line = json.loads(text)
            except ValueError:
                line = {"event": "no-json", "text": text}
            async with self._news:
                self.lines.append(line)
                note(line)
                self._news.notify_all()

    def said(self, since: int = 0, /, **fields: object) -> list[Line]:
        """The lines with these fields, from the line of this number on."""
        return [line for line in self.lines[since:] if fields.items() <= line.items()]

    async def says(self, since: int = 0, /, **fields: object) -> Line:
        """The first of these lines, waited for."""
        await self.until(lambda: bool(self.said(since, **fields)), lambda: f"{fields} among {self.lines[since:]}")
        return self.said(since, **fields)[0]

    async def signal(self, number: int) -> None:
        """Send a signal to the command."""
        await self._process.signal(number)

    async def until(self, holds: Callable[[], bool], what: Callable[[], str]) -> None:
        """Wait until it holds; it is asked again after each line. `what` says in an error what was wanted."""
        async with limit(seen=what, slower=SLOWER), self._news:
            await self._news.wait_for(holds)


class Node:
    """The kubelet's view, as its lists have built it up, and what acts on it."""

    def __init__(self, guest: Guest, observer: Process) -> None:
        self.guest = guest
        self.log = Log(observer)
        """What the kernel and the kubelet say: the lines of `observer`."""
        self.resources: dict[str, dict[str, str]] = {}
        """Resource → ID → `Healthy` or `Unhealthy`."""
        self._observer = observer
        self._agent: Log | None = None
        self._ended_with_it = AsyncExitStack()  # entered for the agent that runs
        self._pods = 0
        self._started = 0  # the number of the line with which the agent began
        self._told: list[Line] = []

    async def follow(self) -> None:
        """Read what the observer says until its end."""
        await self.log.read(self._note)

    def _note(self, line: Line) -> None:
        if "change" in line and "resource" in line:
            devices = self.resources.setdefault(line["resource"], {})
            devices |= line.get("devices", {})
            for gone in [name for name, health in devices.items() if health == "gone"]:
                del devices[gone]

    # --- the agent ---

    @asynccontextmanager
    async def agent(self, resources: str) -> AsyncIterator[Log]:
        """`fairlead run` with these `[[resource]]` tables, once the kubelet has a first list of each.

        Its log, from now on. One process serves all tests, with one configuration after the other: emulated, its start
        takes many seconds.
        """
        names = [table["name"] for table in tomllib.loads(resources)["resource"]]
        since = self._started = len(self.log.lines)
        log = await self._configured(resources)
        await self.log.until(
            lambda: all(self.log.said(since, change="list", resource=name) for name in names),
            lambda: f"a list of each of {names}; the agent's log: {log.lines}",
        )
        yield log
        await self._configured("")
        assert not log.said(level="error"), log.said(level="error")

    async def _configured(self, resources: str) -> Log:
        """The log of the agent, which has this configuration now; it is started if it does not run."""
        if self._agent is None:
            await self._write(resources)
            process = await self._ended_with_it.enter_async_context(
                await self.guest.start(_fairlead("run", prelude=_SOON))
            )
            self._agent = Log(process)
            await self._ended_with_it.enter_async_context(self._running(self._agent))
        else:
            if resources:
                self._agent.lines.clear()
            since = len(self._agent.lines)
            await self._write(resources)
            await self._agent.says(since, event="config-reloaded")
        return self._agent

    @asynccontextmanager
    async def _running(self, log: Log) -> AsyncIterator[None]:
        """Read its log, and end it with SIGTERM."""
        reader = asyncio.create_task(log.read())
        try:
            yield
        finally:
            await log.signal(signal.SIGTERM)
            async with limit("the agent's end", lambda: log.lines[-9:], slower=SLOWER):
                await reader

    async def end_agent(self) -> None:
        """End it, if it runs."""
        await self._ended_with_it.aclose()
        self._agent = None

    async def _write(self, resources: str) -> None:
        """Write the agent's configuration at once, so that it never reads half of it."""
        fresh = CONFIG.with_suffix(".new")
        await self.guest.write(fresh, f"{_NO_POLLS}{textwrap.dedent(resources)}")
        await self.guest.run(f"mv {fresh} {CONFIG}")

    async def discover(self) -> Line:
        """What `fairlead discover --json` says to the configuration written last."""
        found: Line = json.loads(await self.guest.run(_fairlead("discover", "--json")))
        return found

    # --- the kubelet ---

    async def shows(self, resource: str, *healthy: str, unhealthy: Sequence[str] = ()) -> None:
        """Wait until the resource has exactly these devices."""
        wanted = dict.fromkeys(healthy, "Healthy") | dict.fromkeys(unhealthy, "Unhealthy")
        await self.holds(resource, lambda shown: shown == wanted, str(wanted))

    async def holds(self, resource: str, holds: Callable[[Mapping[str, str]], bool], what: str) -> None:
        """Wait until something holds of a resource's devices."""
        await self.log.until(
            lambda: resource in self.resources and holds(self.resources[resource]),
            lambda: (
                f"{resource} with {what}; there is {self.resources.get(resource)}; the agent says {self._last_said()}"
            ),
        )

    def _last_said(self) -> list[Line]:
        """The agent's last lines."""
        return self._agent.lines[-9:] if self._agent else []

    @asynccontextmanager
    async def pod(self, wants: Mapping[str, int], phase: str = "Running") -> AsyncIterator[Line]:
        """A pod that wants so many of each resource and comes to this phase; it ends with its context.

        A minute passes for the agent then: it lets no claim end before. Yields its `phase`, `message`, and what it `gets` of each: `ids`, `envs` and `nodes`.
        """
        since, self._pods = len(self.log.lines), self._pods + 1
        name = f"pod{self._pods}"
        await self._order({"admit": name, "wants": dict(wants)})
        told = await self.log.says(since, pod=name)
        try:
            assert told["phase"] == phase, f"{told}; the agent says {self._last_said()}"
            yield told
        finally:
            await self._order({"end": name})
            if self._agent is not None:
                await self._agent.signal(signal.SIGUSR2)

    async def _order(self, order: Line) -> None:
        await self._observer.write(json.dumps(order).encode() + b"\n")

    # --- what the kernel said before ---

    async def told(self, action: str, **uevent: str) -> None:
        """Wait for a kernel event since the agent's start, one that nobody has waited for yet."""

        def fresh() -> Line | None:
            lines = self.log.said(self._started, uevent=action, **uevent)
            return next((line for line in lines if line not in self._told), None)

        await self.log.until(lambda: fresh() is not None, lambda: f"{action} {uevent}")
        line = fresh()
        assert line is not None
        self._told.append(line)


def _fairlead(*arguments: str, prelude: str = "") -> str:
    """The command as a shell's."""
    command = [sys.executable, "-c", f"{prelude}\n{MAIN}", *arguments, "--config", str(CONFIG)]
    return f"cd {REPOSITORY} && exec {shlex.join(command)}"


@asynccontextmanager
async def node(guest: Guest) -> AsyncIterator[Node]:
    """A kubelet in this guest, and whatever the kernel says there."""
    command = [sys.executable, "-m", "tests.guest.observer", str(KUBELET_ROOT)]
    async with await guest.start(f"cd {REPOSITORY} && exec {shlex.join(command)}") as observer:
        node = Node(guest, observer)
        follower = asyncio.create_task(node.follow())
        try:
            await node.log.says(change="started")
            yield node
        finally:
            await node.end_agent()
            await observer.write(None)
            async with limit("the observer's end", slower=SLOWER):
                await follower
