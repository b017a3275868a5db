"""Preparing ResourceClaims for the kubelet, with an API server that answers at once: `prepare`."""

from __future__ import annotations

import asyncio
import math
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from agent.kubelet.api import dra as api
from agent.kubelet.client import Channel
from agent.kubelet.wire import Encoded
from agent.kubernetes.client import ApiClient
from agent.kubernetes.identity import Identity
from agent.runtime.problems import Problems
from agent.runtime.workers import Workers
from agent.simulation.api_server import GROUP
from bench import messages
from bench.figures import Figure, figure
from bench.names import device_names
from bench.processes import OnNodes
from tests.apiserver import NODE, TOKEN, ApiServer

AT_ONCE: Final = 64
_DRIVER: Final = "fairlead.dev"
_RESOURCE: Final = "bench.example/device"
_WARM_UP: Final = 10  # claims that are not counted
_PAUSE: Final = 0.005  # seconds between calls
_DEADLINE: Final = 45.0  # seconds, the kubelet's
_ONE: Final = (
    "round trip of NodePrepareResources for one claim of one device node: its GET, the ledger, the CDI file; baseline: the GET "
    "alone, by the same client in the process that has the API server"
)
_MANY: Final = f"from the first of {AT_ONCE} calls at once to the last answer; baseline: as many GETs"


class _Agent(OnNodes):
    """`fairlead run` with one resource that is served by dynamic resource allocation."""

    def __init__(self, home: Path, kubeconfig: Path) -> None:
        config = home / "config.toml"
        command = [str(Path(sys.executable).with_name("fairlead")), "run", "--config", str(config)]
        super().__init__(home, command, {"PYTHONPATH": str(messages.ROOT)})
        self.sockets = home / "kubelet" / "plugins" / _DRIVER
        (home / "kubelet" / "plugins_registry").mkdir()
        config.write_text(
            f'[agent]\nplugin_dir = "{self.plugin_dir}"\nkubelet_root = "{home}/kubelet"\nstate_dir = "{home}/state"\n'
            f'admin_socket = "{home}/admin.sock"\n[host]\ndev = "{home}/dev"\nsys = "{home}/sys"\nproc = "{home}/proc"\n'
            f'run = "{home}/run"\n[dra]\ndriver = "{_DRIVER}"\nnode = "{NODE}"\nkubeconfig = "{kubeconfig}"\n'
            f'[[resource]]\nname = "{_RESOURCE}"\nbackend = "chardev"\npaths = [{{ path = "/dev/bench*" }}]\nserve = "dra"\n'
        )
        for minor, name in enumerate(device_names(AT_ONCE)):
            self.make_node(name, minor)


def prepare(claims: int) -> Iterator[Figure]:
    """One after the other, and many at once, so many times."""
    one, get, many, gets = asyncio.run(_measured(claims))
    yield figure("prepare", "1", "ms", one, get, _ONE)
    yield figure("prepare", f"{AT_ONCE}", "ms", many, gets, _MANY)


async def _measured(claims: int) -> tuple[list[float], list[float], list[float], list[float]]:
    one, get, many, gets = list[float](), list[float](), list[float](), list[float]()
    async with _serving() as (server, channel):
        devices = [str(it["name"]) for it in server.objects.pool(f"{NODE}/{_RESOURCE}")]
        away = Problems().trouble("bench", "the API server is away", "kubernetes-away")
        http = ApiClient(lambda: Identity(server.url, token=TOKEN), Workers("bench"), away)
        try:
            for n in range(_WARM_UP + claims):
                (claim,) = _allocated(server, f"one-{n}", devices[:1])
                taken, alone = await _timed(_prepare(channel, claim)), await _timed(_get(http, claim))
                await _call(channel, "NodeUnprepareResources", claim)
                if n >= _WARM_UP:
                    one.append(taken)
                    get.append(alone)
                await asyncio.sleep(_PAUSE)
            for n in range(max(1, claims // 10)):
                those = _allocated(server, f"many-{n}", devices)
                many.append(await _timed(*(_prepare(channel, it) for it in those)))
                gets.append(await _timed(*(_get(http, it) for it in those)))
                for it in those:
                    await _call(channel, "NodeUnprepareResources", it)
        finally:
            await http.close()
    return one, get, many, gets


@asynccontextmanager
async def _serving() -> AsyncIterator[tuple[ApiServer, Channel]]:
    """An API server, and a connection to an agent that offers its devices there."""
    with tempfile.TemporaryDirectory() as directory:
        home = Path(directory)
        async with ApiServer().running() as server:
            agent = _Agent(home, server.kubeconfig(home / "kubeconfig"))
            agent.start()
            try:
                await _offered(server, agent)
                channel = Channel(str(next(agent.sockets.glob("dra-*.sock"))), math.inf, math.inf)
                yield server, channel
                channel.close()
            finally:
                agent.stop()
        await asyncio.sleep(_PAUSE)  # the server's connections end


async def _offered(server: ApiServer, agent: _Agent) -> None:
    """Wait until claims can be prepared."""
    while not (len(server.objects.pool(f"{NODE}/{_RESOURCE}")) == AT_ONCE and list(agent.sockets.glob("dra-*"))):  # noqa: ASYNC110
        await asyncio.sleep(0.05)


def _allocated(server: ApiServer, name: str, devices: Sequence[str]) -> list[api.Claim]:
    """A claim for each of these devices."""
    claims = list[api.Claim]()
    for device in devices:
        result = {"request": "it", "driver": _DRIVER, "pool": f"{NODE}/{_RESOURCE}", "device": device}
        called = f"{name}-{len(claims)}"
        made = server.objects.put(
            f"namespaces/default/resourceclaims/{called}",
            {
                "metadata": {"name": called, "namespace": "default"},
                "status": {
                    "allocation": {"devices": {"results": [result]}},
                    "reservedFor": [{"resource": "pods", "name": called, "uid": called}],
                },
            },
        )
        claims.append(api.Claim("default", made["metadata"]["uid"], called))
    return claims


async def _prepare(channel: Channel, claim: api.Claim) -> None:
    answer = api.PreparedClaims.FromString(await _call(channel, "NodePrepareResources", claim))
    if error := answer.claims[claim.uid].error:
        raise RuntimeError(error)


async def _call(channel: Channel, method: str, claim: api.Claim) -> bytes:
    path = f"/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/{method}"
    return await channel.call(path, Encoded(bytes(api.Claims([claim]))), Encoded, _DEADLINE)


async def _get(http: ApiClient, claim: api.Claim) -> None:
    await http.call("GET", f"{GROUP}/namespaces/default/resourceclaims/{claim.name}")


async def _timed(*calls: Awaitable[None]) -> float:
    """Milliseconds until all have ended."""
    before = time.perf_counter()
    await asyncio.gather(*calls)
    return (time.perf_counter() - before) * 1000
