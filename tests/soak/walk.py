"""A random walk through the faults: one begins, one ends, pods come and go; after each step all must be well in time."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import AsyncExitStack
from typing import Final

from tests.soak.faults import FAULTS, Fault, UnfitError
from tests.soak.world import END, LostError, World

_AT_ONCE: Final = 3  # faults that last side by side
_UNTIL_REST: Final = 25  # steps between two moments without any fault


class Walk:
    """A walk in a world; its choices follow from the world's random numbers alone, as far as the world allows."""

    def __init__(self, world: World, pace: float = 0.4) -> None:
        """`pace`: seconds between two steps, at most."""
        self.counts: Counter[str] = Counter()
        self._world = world
        self._pace = pace
        self._lasting: dict[str, AsyncExitStack] = {}

    async def go(self, seconds: float, steps: int = 0) -> None:
        """Walk until the time is over, or for so many steps; in the end nothing lasts any more.

        Args:
            seconds: of walking.
            steps: end after so many; 0: do not count.

        Raises:
            LostError: the world is not what it was any more.
        """
        world, end = self._world, self._world.now + seconds
        last = world.step + steps if steps else 1 << 60
        try:
            while world.now < end and world.step < last:
                world.step += 1
                await self._step()
                await asyncio.sleep(world.rng.uniform(0, self._pace))
                if world.step % _UNTIL_REST == 0:
                    await self.rest()
            await self.rest()
        except LostError:
            for stack in self._lasting.values():
                stack.pop_all()
            raise

    async def _step(self) -> None:
        rng, world = self._world.rng, self._world
        kind = rng.choices(["fault", "end", "pod", "pod ends"], [4, 3, 3, 2])[0]
        if kind == "pod":
            world.pod_comes()
        elif kind == "pod ends":
            world.pod_goes()
        elif kind == "end" and self._lasting:
            name = rng.choice(sorted(self._lasting))
            if not (FAULTS[name].sighted and world.model.blind):
                await self._end(name)
        elif kind == "fault" and len(self._lasting) < _AT_ONCE:
            fits = [fault for fault in FAULTS.values() if self._fits(fault)]
            await self._begin(rng.choices(fits, [fault.weight for fault in fits])[0])

    def _fits(self, fault: Fault) -> bool:
        """Whether it can begin now."""
        if fault.name in self._lasting or fault.touches & self._world.touched:
            return False
        return not (fault.sighted and self._world.model.blind)

    async def _begin(self, fault: Fault) -> None:
        world, stack = self._world, AsyncExitStack()
        world.note(f"BEGINS {fault.name}, beside {', '.join(self._lasting) or 'none'}")
        world.touched |= fault.touches
        stack.callback(world.touched.difference_update, fault.touches)
        try:
            await stack.enter_async_context(fault.happen(world))
        except UnfitError:
            await stack.aclose()
            return
        self.counts[fault.name] += 1
        self._lasting[fault.name] = stack
        await world.well(fault.name)

    async def _end(self, name: str) -> None:
        self._world.note(f"ENDS {name}")
        await self._lasting.pop(name).aclose()
        await self._world.well(END + name)

    async def rest(self) -> None:
        """End all that lasts; all is well then, in every face."""
        while self._lasting:
            await self._end(min(self._lasting, key=lambda name: (FAULTS[name].sighted, name)))
        self._world.note("RESTS")
        await self._world.at_rest()
        await self._world.sample()
