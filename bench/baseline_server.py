"""The baseline: what a plain plugin on grpcio's asyncio server does with a change that it is handed in memory.

Run as `python -m bench.baseline_server DIRECTORY RESOURCES DEVICES CHANGE`. Each byte on its standard input is
an order: `c` makes the change to the first resource, or undoes it, `r` registers all resources again. CHANGE is
`one` (a device goes and comes back), `all` (all devices do), or `numa` (a device moves to another NUMA node).
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any, Final

import grpc

from bench import messages
from bench.names import device_names, resource_names

_pb: Final = messages.load()

ALLOCATE_NODES: Final = 4
ALLOCATE_ENVS: Final = 2


def _fixed_reply() -> Any:
    nodes = [
        _pb.DeviceSpec(container_path=f"/dev/bench/node{n}", host_path=f"/dev/bench/node{n}", permissions="rw")
        for n in range(ALLOCATE_NODES)
    ]
    envs = {f"BENCH_{n}": "the value of a variable" for n in range(ALLOCATE_ENVS)}
    return _pb.AllocateResponse(container_responses=[_pb.ContainerAllocateResponse(envs=envs, devices=nodes)])


class _Plugin:
    """One resource: its list, and the service."""

    def __init__(self, resource: str, devices: int) -> None:
        self.resource = resource
        self.devices = {name: _pb.Device(id=name, health="Healthy") for name in device_names(devices)}
        self._all = self.devices.copy()
        self._changed = asyncio.Event()
        self._reply = _fixed_reply()

    def change(self, what: str) -> None:
        """Make the change, or undo it."""
        last = next(reversed(self._all))
        if what == "numa":
            moved = not self.devices[last].HasField("topology")
            topology = _pb.TopologyInfo(nodes=[_pb.NumaNode(id=1)]) if moved else None
            self.devices[last] = _pb.Device(id=last, health="Healthy", topology=topology)
        elif len(self.devices) < len(self._all):
            self.devices = self._all.copy()
        elif what == "all":
            self.devices = {}
        else:
            del self.devices[last]
        self._changed.set()

    def handlers(self) -> Any:
        unary, stream = grpc.unary_unary_rpc_method_handler, grpc.unary_stream_rpc_method_handler
        empty = _pb.Empty.FromString
        return grpc.method_handlers_generic_handler(
            "v1beta1.DevicePlugin",
            {
                "GetDevicePluginOptions": unary(self._options, empty, _pb.DevicePluginOptions.SerializeToString),
                "ListAndWatch": stream(self._list_and_watch, empty, _pb.ListAndWatchResponse.SerializeToString),
                "Allocate": unary(
                    self._allocate, _pb.AllocateRequest.FromString, _pb.AllocateResponse.SerializeToString
                ),
            },
        )

    async def _options(self, _request: Any, _context: Any) -> Any:
        return _pb.DevicePluginOptions()

    async def _list_and_watch(self, _request: Any, _context: Any) -> Any:
        while True:
            self._changed.clear()
            yield _pb.ListAndWatchResponse(devices=self.devices.values())
            await self._changed.wait()

    async def _allocate(self, _request: Any, _context: Any) -> Any:
        return self._reply


async def _serve(plugin: _Plugin, endpoint: Path) -> Any:
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((plugin.handlers(),))
    server.add_insecure_port(f"unix:{endpoint}")
    await server.start()
    return server


async def _register(directory: Path, plugins: list[_Plugin]) -> None:
    async with grpc.aio.insecure_channel(
        f"unix:{directory}/kubelet.sock", options=[("grpc.use_local_subchannel_pool", 1)]
    ) as channel:
        register = channel.unary_unary(
            "/v1beta1.Registration/Register", _pb.RegisterRequest.SerializeToString, _pb.Empty.FromString
        )
        requests = [
            _pb.RegisterRequest(version="v1beta1", endpoint=f"{n}.sock", resource_name=plugin.resource)
            for n, plugin in enumerate(plugins)
        ]
        await asyncio.gather(*(register(request, wait_for_ready=True) for request in requests))


async def _main(directory: Path, resources: int, devices: int, change: str) -> None:
    plugins = [_Plugin(name, devices) for name in resource_names(resources)]
    servers = [await _serve(plugin, directory / f"{n}.sock") for n, plugin in enumerate(plugins)]
    tasks: set[asyncio.Task[None]] = set()
    over = asyncio.Event()  # whoever started us is gone

    def register() -> None:
        task = asyncio.create_task(_register(directory, plugins))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    def obey() -> None:
        orders = os.read(sys.stdin.fileno(), 64)
        for order in orders:
            register() if order == ord("r") else plugins[0].change(change)
        if not orders:
            over.set()

    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), obey)
    register()
    await over.wait()
    for server in servers:
        await server.stop(None)


if __name__ == "__main__":
    asyncio.run(_main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]))
