from __future__ import annotations

import socket

from agent.console.sockets import node_name


def test_a_node_is_called_what_kubernetes_calls_it_else_what_it_calls_itself() -> None:
    assert node_name({"NODE_NAME": "worker-7"}) == "worker-7"
    assert node_name({}) == socket.gethostname()
