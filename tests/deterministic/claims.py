"""The part of a world that dynamic resource allocation is: an API server, claims that come and go, and what must always hold of them."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from agent.daemon.dra import Dra
from agent.dra import driver, publisher  # noqa: F401  # a run would load them itself, each time
from agent.dra.names import class_name, classes, device_name, pool_name
from agent.kubernetes import client, identity  # noqa: F401
from agent.simulation import scheduler
from agent.simulation.api_server import Objects
from agent.simulation.dra import ClaimError, ClaimKey
from agent.simulation.model import ResourceView
from agent.simulation.pod_workers import KubeletStoppedError
from agent.simulation.scheduler import UnschedulableError
from tests.deterministic.model import Model
from tests.objects import CalledObjects

if TYPE_CHECKING:
    from tests.deterministic.world import World

CLAIMED: Final = "fl.test/claimed"
NODE, DRIVER = "n", "fairlead.dev"

_SPACED: Final = 5.0  # seconds between two updates of a slice where it changes for long (agent.dra.publisher)
_AGAIN: Final = 2.0  # seconds until the kubelet tries again
_ENDS: Final = 60.0  # seconds in which a claim can be prepared, and ended, where nothing is in its way


class Claims:
    """The API server of a world, and the claims in it."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.objects = Objects(NODE)
        self.api = CalledObjects(self.objects)
        self.model = Model({CLAIMED: {f"c{n}": (device_name(f"/dev/c{n}"),) for n in range(4)}})
        self.coming: dict[str, ClaimKey] = {}
        """Those that are not prepared yet, by their names."""
        self.running: dict[str, ClaimKey] = {}
        self.is_switched = False
        """Whether the resource is served by device plugin now."""
        for it in classes([CLAIMED], DRIVER):
            self.objects.put(f"deviceclasses/{it['metadata']['name']}", it)
        world.kubelet.wipe_slices = self._wipe
        Dra._connect = lambda *_: self.api  # type: ignore[method-assign]

    @property
    def tables(self) -> list[str]:
        """Of the configuration."""
        return [
            (
                f'[[resource]]\nname = "{CLAIMED}"\nbackend = "chardev"\npaths = [{{ path = "/dev/c*" }}]\n'
                f'serve = "{"device-plugin" if self.is_switched else "dra"}"\n'
            ),
            f'[dra]\nnode = "{NODE}"\nkubeconfig = "/nobody/asks"\n',
        ]

    async def _wipe(self, _driver: str | None) -> None:
        self.delete_slices()

    def delete_slices(self) -> None:
        """As a kubelet does at its start."""
        self._world.note("all slices are deleted")
        self.objects.wipe()
        self._world.disturb()

    # --- what must hold ---

    def patience(self) -> float:
        """Seconds in which the slices are as the hardware is."""
        return self._world.model.patience() + self.model.patience() - Model({}).patience() + _SPACED

    def differences(self) -> list[str]:
        """In what the slices differ from the hardware."""
        if self._world.model.blind:
            return []
        pool = self.objects.pool(pool_name(NODE, CLAIMED))
        fit = {it["name"] for it in pool if all(one["effect"] == "None" for one in it.get("taints", ()))}
        return self.model.differences({CLAIMED: ResourceView(CLAIMED, healthy=frozenset(fit))})

    def one_pod_each(self) -> None:
        """No device is of two claims, nor of a claim and of a pod by device plugin."""
        users = Counter({device_name(f"/dev/{it}"): 1 for it in self._world.held(CLAIMED)})
        with suppress(KubeletStoppedError):
            users.update(one.device for it in self._world.kubelet.drivers._claims.values() for one in it.devices)
        for device, number in users.items():
            if number > 1:
                self._world.violate(f"{number} pods have {device} of {CLAIMED}")

    def _files(self) -> list[str]:
        return sorted(path.name for path in (self._world.root / "cdi").glob("*.json"))

    # --- claims ---

    def come(self) -> str:
        """A pod with a claim comes, if anything is free; its name."""
        name = f"claim{next(self._world.numbers)}"
        path = f"namespaces/default/resourceclaims/{name}"
        asked = [{"name": "it", "exactly": {"deviceClassName": class_name(CLAIMED)}}]
        it = {"metadata": {"name": name, "namespace": "default"}, "spec": {"devices": {"requests": asked}}}
        made = self.objects.put(path, it)
        try:
            scheduler.allocate(self.objects, "default", name, name)
        except UnschedulableError:
            self.objects.remove(path)
            return ""
        self.coming[name] = ClaimKey(DRIVER, made["metadata"]["uid"], name)
        self._world.admitting(lambda: self._admit(name))
        return name

    async def _admit(self, name: str) -> None:
        while (key := self.coming.get(name)) is not None:
            try:
                await self._world.kubelet.drivers.admit(name, [key])
            except (ClaimError, KubeletStoppedError) as error:
                self._world.note(f"{name} waits: {error}")
                await asyncio.sleep(_AGAIN)
                continue
            if self.coming.pop(name, None) is None:
                return  # it has ended meanwhile, and is unprepared
            self.running[name] = key
            self._world.note(f"{name} runs")
            if not any(key.uid in it for it in self._files()):
                self._world.violate(f"{name} is prepared, and there is no CDI specification of it: {self._files()}")
            self.one_pod_each()

    def go(self, rng: random.Random) -> None:
        """One of the claims ends, perhaps before it could be prepared."""
        if names := sorted(self.coming | self.running):
            self.end(rng.choice(names))

    def end(self, name: str) -> None:
        """This one ends."""
        key = self.coming.pop(name, None) or self.running.pop(name)
        self._world.admitting(lambda: self._end(name, key))

    async def _end(self, name: str, key: ClaimKey) -> None:
        while True:
            try:
                await self._world.kubelet.drivers.end(name, [key])
                break
            except (ClaimError, KubeletStoppedError) as error:
                self._world.note(f"{name} cannot end: {error}")
                await asyncio.sleep(_AGAIN)
        self._world.note(f"{name} has ended")
        self.objects.remove(f"namespaces/default/resourceclaims/{name}")

    async def at_rest(self) -> None:
        """Without any fault all claims end, nothing is left of them, and another can have a device."""
        for _ in range(2):
            for name in sorted(self.coming | self.running):
                self.end(name)
            await asyncio.sleep(_ENDS)
            left: Any = sorted(self._world.kubelet.drivers.prepared) or self._files()
            if left := left or [it for it in self.objects.kept if "/resourceclaims/" in it]:
                self._world.violate(f"without any fault, this is left of claims that have ended: {left}")
            name = self.come()
            await asyncio.sleep(_ENDS)
            if name not in self.running:
                self._world.violate("without any fault, a claim gets no device")
