"""HTTP in the daemon: what it serves is what the daemon is at; without it, nothing of it is loaded."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, MutableMapping
from contextlib import asynccontextmanager
from typing import Any

import pytest
import structlog
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families

from agent.config.file import HttpConfig
from agent.config.typed import Listen
from agent.console.http import app
from agent.daemon.event_log import Events
from agent.daemon.supervisor import Agent
from agent.discovery.backend_answers import make_backends
from agent.kubelet import pod_claims
from agent.runtime.pacing import Clock
from agent.runtime.watchdog import Notifier
from tests.console.fakes import FakeDaemon
from tests.console.http.serving import Answer, Served
from tests.daemon.node import NEVER, TOY, Node, ended, pod, toys
from tests.wait import limit, until


@pytest.fixture
def node(node_alone: Node) -> Node:
    """Its kubelet is started by the tests."""
    return node_alone


@asynccontextmanager
async def running(node: Node) -> AsyncIterator[Served]:
    path = node.root / "http.sock"
    config = replace(node.config(toys()), http=HttpConfig(Listen(f"unix:{path}")))
    backends, events = make_backends(node.host, config.resources), Events()

    def note(_logger: object, _method: str, line: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        events.note(dict(line))
        return line

    structlog.configure(processors=[note, *structlog.get_config()["processors"]])
    agent = Agent(config, backends, Notifier(None), events, clock=Clock(node.clock, node.wall))
    task = asyncio.ensure_future(agent.run())
    face = Served(path, FakeDaemon())
    try:
        await until(path.exists)
        yield face
    finally:
        for writer in face.writers:
            writer.close()
        await ended(task)
        assert not path.exists()


async def shows(face: Served, path: str, text: str) -> None:
    """Wait until this is in what is served there."""
    seen: list[Answer] = []
    async with limit(f"{text!r} is in {path}", lambda: seen[-1]):
        while not seen or text not in seen[-1].body:
            seen.append(await face.get(path))


async def test_it_is_ready_once_the_kubelet_has_everything(node: Node) -> None:
    async with running(node) as face:
        assert (await face.get("/healthz")).body == "ok\n"
        answer = await face.get("/readyz")
        assert answer.status == 503
        assert answer.body.startswith(f"{TOY} is not registered: ")
        await node.kubelet.start()
        await shows(face, "/readyz", "ready\n")
        assert (await face.get("/readyz")).status == 200


async def test_what_a_pod_holds_is_in_metrics_and_on_the_page(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pod_claims, "_AFTER_ALLOCATE", 0.0)
    await node.kubelet.start()
    async with running(node) as face:
        await node.has(TOY, healthy=3)
        await node.kubelet.admit(pod())
        await shows(face, "/metrics", 'pod="')
        text = (await face.get("/metrics")).body
        found = {family.name: family for family in text_string_to_metric_families(text)}
        (holder,) = found["fairlead_device_assigned"].samples
        assert (holder.labels["resource_name"], holder.value) == (TOY, 1)
        granted = [it.value for it in found["fairlead_allocations"].samples if it.labels["result"] == "granted"]
        assert granted == [1]
        assert f"in use by </span>{holder.labels['pod']}</span>" in (await face.get("/")).body


async def test_the_page_hears_of_a_device_that_fails(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "_POLL", NEVER)  # an event tells of it
    monkeypatch.setattr(app, "_COALESCE", 0.0)
    await node.kubelet.start()
    async with running(node) as face:
        await node.has(TOY, healthy=3)
        reader, writer = await face.connect()
        writer.write(b"GET /events HTTP/1.1\r\nHost: node\r\n\r\n")
        await reader.readuntil(b"event: hello\n")
        node.say("stub-0 unhealthy It is on fire.")
        async with limit("the page hears of it"):
            await reader.readuntil(b"It is on fire.")


def test_without_it_nothing_of_it_is_loaded_nor_of_cdi_nor_the_client_of_the_api_server() -> None:
    code = "import sys, agent.cli.commands, agent.daemon.supervisor; print(*{'uvicorn', 'starlette', 'h11', 'prometheus_client', 'agent.cdi.spec', 'agent.kubernetes.client', 'agent.dra.driver', 'hashlib'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "\n"
