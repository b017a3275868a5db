"""HTTP in the daemon: what it serves is what the daemon is at; without it, nothing of it is loaded."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import anyio
import pytest
from prometheus_client.parser import text_string_to_metric_families

from agent.devices.making import make_backends
from agent.notify import Notifier
from agent.supervisor import Agent
from tests.console.fakes import FakeDaemon
from tests.console.http.serving import Served
from tests.kubelet.plugins import until
from tests.test_supervisor import TOY, Node, pod, toys


@pytest.fixture
async def node(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Node]:
    node = Node(tmp_path_factory.mktemp("n"))
    yield node
    await node.kubelet.stop()
    node.notified.close()


@asynccontextmanager
async def running(node: Node) -> AsyncIterator[Served]:
    path = node.root / "http.sock"
    config = replace(node.config(toys()), http_listen=f"unix:{path}")
    agent = Agent(config, make_backends(node.host, config.resources), Notifier(None))
    task = asyncio.ensure_future(agent.run())
    face = Served(path, FakeDaemon())
    try:
        await until(path.exists)
        yield face
    finally:
        for writer in face.writers:
            writer.close()
        task.cancel()
        await asyncio.wait([task])
        assert not path.exists()


async def test_it_is_ready_once_the_kubelet_has_everything(node: Node) -> None:
    async with running(node) as face:
        assert (await face.get("/healthz")).body == "ok\n"
        answer = await face.get("/readyz")
        assert answer.status == 503
        assert answer.body.startswith(f"{TOY} is not registered: ")
        await node.kubelet.start()
        with anyio.fail_after(20):
            while (await face.get("/readyz")).status != 200:
                await anyio.sleep(0.01)


async def test_what_a_pod_holds_is_in_metrics_and_on_the_page(node: Node) -> None:
    await node.kubelet.start()
    async with running(node) as face:
        await node.has(TOY, healthy=3)
        await node.kubelet.admit(pod())
        with anyio.fail_after(20):
            while 'pod="' not in (await face.get("/metrics")).body:
                await anyio.sleep(0.01)
        text = (await face.get("/metrics")).body
        found = {family.name: family for family in text_string_to_metric_families(text)}
        (holder,) = found["fairlead_device_assigned"].samples
        assert (holder.labels["resource_name"], holder.value) == (TOY, 1)
        granted = [it.value for it in found["fairlead_allocations"].samples if it.labels["result"] == "granted"]
        assert granted == [1]
        assert f"in use by {holder.labels['pod']}" in (await face.get("/")).body


async def test_the_page_hears_of_a_device_that_fails(node: Node) -> None:
    await node.kubelet.start()
    async with running(node) as face:
        await node.has(TOY, healthy=3)
        reader, writer = await face.connect()
        writer.write(b"GET /events HTTP/1.1\r\nHost: node\r\n\r\n")
        await reader.readuntil(b"event: hello\n")
        node.say("stub-0 unhealthy It is on fire.")
        with anyio.fail_after(20):
            await reader.readuntil(b"It is on fire.")


def test_without_it_nothing_of_it_is_loaded() -> None:
    code = (
        "import sys, agent.cli.run; print(*{'uvicorn', 'starlette', 'h11', 'prometheus_client'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "\n"
