"""HTTP's modules, 60 ms of work, are loaded beside the event loop: the kubelet is served meanwhile."""

from __future__ import annotations

from tests.e2e.node import Node, chardev

SAYS_WHERE = """
import sys, threading
from importlib.abc import MetaPathFinder
for name in [name for name in sys.modules if name.startswith(("agent.console.http", "uvicorn", "starlette"))]:
    del sys.modules[name]
class Finder(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "agent.console.http.serving":
            import structlog
            structlog.get_logger().info("http-loaded", main=threading.current_thread() is threading.main_thread())
sys.meta_path.insert(0, Finder())
"""


async def test_http_is_loaded_by_another_thread_than_the_event_loops(node: Node) -> None:
    node.mknod("w1")
    async with node.agent(chardev(), node.serving, prelude=SAYS_WHERE) as agent:
        assert (await agent.says("http-loaded"))["main"] is False
        await agent.says("http-served")
