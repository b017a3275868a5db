"""A node for an agent: a directory with device nodes, a simulated kubelet, and what the kubelet was told."""

from __future__ import annotations

import asyncio
import shutil
import textwrap
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from agent.simulation.clock import Clock
from agent.simulation.kubelet import Kubelet
from agent.simulation.model import Change, Container, Kind, Pod, PodStatus, Version
from tests.e2e.process import AgentProcess
from tests.nodes import make_node
from tests.wait import PATIENCE, limit, until

WIDGET: Final = "fl.test/widget"
_MAJOR: Final = 240  # for local use (Documentation/admin-guide/devices.txt): no driver is behind it
_NEVER: Final = "24h"
"""So that what a test waits for comes by an event, unless it says otherwise."""

UNHURRIED: Final = """
from agent.daemon import reload
from agent.daemon import state_file
from agent.discovery import runner
runner.SETTLE = state_file._WRITE_PATIENCE = 15.0
reload.READ_DEADLINE = reload.DECISION_DEADLINE = 3600.0
reload._CLOCK_TICK = 0.0
"""
"""A prelude: a first list is whole, and what was answered is in the state file, also where a busy machine takes more for
that than the 2 s and the 0.1 s that it may; a reload may take its time while a test lets time pass. And a file that was written just before the start is not read again."""


def chardev(path: str = "/dev/w*", name: str = WIDGET, count: int = 1) -> str:
    """A resource of device nodes."""
    return f'[[resource]]\nname = "{name}"\nbackend = "chardev"\npaths = [{{ path = "{path}" }}]\ncount = {count}\n'


def pod(name: str = "pod", resource: str = WIDGET, count: int = 1) -> Pod:
    return Pod(name, (Container("main", {resource: count}),))


class Node:
    """Everything lies below one directory; the agent sees its `dev` as /dev."""

    def __init__(self, root: Path, clock: Clock | None = None, version: Version = "1.36") -> None:
        """`clock` and `version` are the kubelet's."""
        self.root = root
        self.dev = root / "dev"
        self.state = root / "state"
        self.admin = root / "admin.sock"
        self.plugin_dir = root / "device-plugins"
        self.sockets = self.plugin_dir / "fairlead"
        self.http = root / "http.sock"
        self.dev.mkdir()
        self.kubelet = Kubelet(root, clock=clock, version=version)
        self.lists: list[Change] = []
        self._listed: set[str] = set()  # resources whose stream has brought a list
        self.kubelet.subscribe(self._note)

    def _note(self, change: Change) -> None:
        if change.kind is Kind.LIST:
            self.lists.append(change)
            self._listed.add(change.resource)
        elif change.kind is Kind.STREAM_OPENED:
            self._listed.discard(change.resource)

    # --- hardware ---

    def mknod(self, *names: str) -> None:
        """Make device nodes whose numbers follow from their names: the same name is the same hardware."""
        for name in names:
            make_node(
                self.dev / name, "c", _MAJOR, sum(256**n * c for n, c in enumerate(name.encode()[::-1])) % (1 << 20)
            )

    def unlink(self, *names: str) -> None:
        for name in names:
            (self.dev / name).unlink()

    # --- the agent ---

    def config(self, *resources: str, **settings: str) -> Path:
        """A configuration file; `settings` are of [agent]; `dev`, `sys`, `proc` and `run` where the agent sees those."""
        host = {"dev": str(self.dev)} | {
            name: settings.pop(name) for name in ("dev", "sys", "proc", "run") if name in settings
        }
        agent = {
            "plugin_dir": str(self.plugin_dir),
            "kubelet_root": str(self.root),
            "state_dir": str(self.state),
            "admin_socket": str(self.admin),
            "uevents": "off",
            "probe": _NEVER,
            "resync": _NEVER,
        } | settings
        lines = [
            line
            for table, keys in (("agent", agent), ("host", host))
            for line in (f"[{table}]", *(f'{key} = "{value}"' for key, value in keys.items()))
        ]
        file = self.root / "config.toml"
        file.write_text("\n".join([*lines, *map(textwrap.dedent, resources)]) + "\n")
        return file

    @asynccontextmanager
    async def agent(
        self, *resources: str, prelude: str = "", environment: Mapping[str, str] | None = None, **settings: str
    ) -> AsyncIterator[AgentProcess]:
        """An agent with this configuration, once the kubelet has all its resources."""
        config = self.config(*(resources or (chardev(),)), **settings)
        async with AgentProcess(config, UNHURRIED + prelude, environment) as agent:
            await agent.says("ready")
            await self.registered(*agent.said("ready")[0]["resources"])
            yield agent

    @property
    def serving(self) -> str:
        """For a configuration: HTTP is served."""
        return f'[http]\nlisten = "unix:{self.http}"\n'

    async def get(self, path: str, *, slower: float = 1.0) -> str:
        """What is answered over HTTP; `slower` as in `limit`."""
        reader, writer = await asyncio.open_unix_connection(str(self.http))
        writer.write(f"GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n".encode())
        async with limit(f"the answer to {path}", slower=slower):
            answer = await reader.read()
        writer.close()
        return answer.decode()

    # --- the kubelet ---

    async def registered(self, *names: str) -> None:
        """Wait until the kubelet has exactly one stream of each, with its first list."""
        wanted = set(names or (WIDGET,))
        await self.kubelet.wait_for(
            lambda k: all(k.streams(name) == 1 for name in wanted) and wanted <= self._listed, PATIENCE
        )

    async def healthy(self, *ids: str, resource: str = WIDGET) -> None:
        """Wait until exactly these are healthy."""
        await self.shows(lambda k: k.resources[resource].healthy == frozenset(ids), resource)

    async def shows(self, holds: Callable[[Kubelet], bool], resource: str = WIDGET) -> None:
        await self.kubelet.wait_for(lambda k: resource in k.resources and holds(k), PATIENCE)

    async def keeps(self, text: str) -> None:
        """Wait until the agent's state file has this text; no file is there before the first write."""
        file = self.state / "state.json"
        await until(lambda: file.exists() and text in file.read_text(), f"{text} in {file}")

    def listed(self, resource: str = WIDGET) -> frozenset[str]:
        """Every ID of the resource, healthy or not."""
        view = self.kubelet.resources[resource]
        return view.healthy | view.unhealthy

    async def admit(self, wanted: Pod) -> PodStatus:
        async with limit(f"the admission of {wanted.name}"):
            return await self.kubelet.admit(wanted)

    def held(self, owner: Pod, container: str = "main", resource: str = WIDGET) -> frozenset[str]:
        return self.kubelet.held(owner, container)[resource]

    def lists_without(self, device_id: str, since: int = 0, resource: str = WIDGET) -> list[Change]:
        """The lists of the resource, from number `since` on, that lack an ID."""
        return [c for c in self.lists[since:] if c.resource == resource and c.after and not _has(c, device_id)]

    async def lists_come(self, number: int, resource: str = WIDGET) -> None:
        """Wait until so many more lists of the resource have come."""
        goal = self._count(resource) + number
        await self.kubelet.wait_for(lambda _: self._count(resource) >= goal, PATIENCE)

    def _count(self, resource: str) -> int:
        return sum(change.resource == resource for change in self.lists)

    # --- files ---

    def leftovers(self) -> set[str]:
        """What lies in our directory beside the lock."""
        return {path.name for path in self.sockets.iterdir()} - {"lock"} if self.sockets.exists() else set()

    def served(self) -> set[str]:
        """The sockets of resources that lie in our directory, without the digits that make each another."""
        return {name.split("-", 1)[-1] for name in self.leftovers() if name.endswith(".sock")}

    def lose_state(self) -> None:
        self.remove(self.state)

    def remove(self, directory: Path) -> None:
        """Remove a directory that an agent still writes to: what it makes or removes meanwhile is in nobody's way."""
        shutil.rmtree(directory.rename(self.root / "removed"))


def _has(change: Change, device_id: str) -> bool:
    assert change.after is not None
    return device_id in change.after.healthy or device_id in change.after.unhealthy
