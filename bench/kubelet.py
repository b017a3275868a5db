"""A lean kubelet on grpcio's C core: it registers plugins, keeps their streams, and notes when what arrived.

Lists are noted as bytes at the moment when the whole message is there; nothing is parsed while a clock runs.
"""

from __future__ import annotations

import queue
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, NamedTuple

import grpc

from bench import messages

_OPTIONS: Final = [
    ("grpc.use_local_subchannel_pool", 1),  # the default pool backs off from a socket that was gone
    ("grpc.default_authority", "localhost"),  # what a kubelet sends; gRPC's C core would send each socket's own path
]
_PLUGIN: Final = "/v1beta1.DevicePlugin/"


class Arrival(NamedTuple):
    """A whole list, and the `time.perf_counter()` at which it was here."""

    at: float
    data: bytes


class Registered(NamedTuple):
    """A resource whose stream was opened, and when."""

    at: float
    resource: str


class Kubelet:
    """The kubelet's end of one plugin directory; each `start` is a new process of it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.lists: queue.SimpleQueue[Arrival] = queue.SimpleQueue()
        """Of all resources, in the order of their arrival."""
        self.registered: queue.SimpleQueue[Registered] = queue.SimpleQueue()
        self._request = messages.load().RegisterRequest
        self._server: Any = None
        self._channels: dict[str, Any] = {}
        self._streams: list[Any] = []
        self._handlers = ThreadPoolExecutor(16)

    @property
    def socket(self) -> Path:
        return self.directory / "kubelet.sock"

    def start(self) -> float:
        """Create the socket and serve; the moment before the socket was created."""
        register = grpc.unary_unary_rpc_method_handler(self._register, self._request.FromString, None)
        handler = grpc.method_handlers_generic_handler("v1beta1.Registration", {"Register": register})
        server = grpc.server(self._handlers, handlers=[handler])
        before = time.perf_counter()
        server.add_insecure_port(f"unix:{self.socket}")
        server.start()
        self._server = server
        return before

    def stop(self) -> None:
        """End the process; as a real one's, its socket is gone before the next start."""
        self._server.stop(None).wait()
        for stream in self._streams:
            stream.cancel()
        for channel in self._channels.values():
            channel.close()
        self._streams, self._channels = [], {}
        self.socket.unlink(missing_ok=True)

    def channel(self, resource: str) -> Any:
        """The connection to the plugin of a registered resource."""
        return self._channels[resource]

    def await_registered(self, resources: int, timeout: float = 10.0) -> float:
        """When the last of so many resources was registered."""
        return max(self.registered.get(timeout=timeout).at for _ in range(resources))

    def _register(self, request: Any, _context: Any) -> bytes:
        channel = grpc.insecure_channel(f"unix:{self.directory / request.endpoint}", options=_OPTIONS)
        channel.unary_unary(_PLUGIN + "GetDevicePluginOptions")(b"")
        stream = channel.unary_stream(_PLUGIN + "ListAndWatch", response_deserializer=self._arrived)(b"")
        self._channels[request.resource_name] = channel
        self._streams.append(stream)
        threading.Thread(target=_drain, args=(stream,), daemon=True).start()
        self.registered.put(Registered(time.perf_counter(), request.resource_name))
        return b""

    def _arrived(self, data: bytes) -> bytes:
        self.lists.put(Arrival(time.perf_counter(), data))
        return data


def _drain(stream: Any) -> None:
    """Ask for the next message as soon as one is here."""
    try:
        for _ in stream:
            pass
    except grpc.RpcError:
        pass  # the stream has ended, by us or by the plugin
