"""`make soak`: a random walk of faults against the real daemon beside a simulated kubelet; see CONTRIBUTING.md."""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import tempfile
import traceback
from pathlib import Path

from tests.soak.report import report
from tests.soak.walk import Walk
from tests.soak.world import LostError, World


async def soak(minutes: float, seed: int, root: Path) -> tuple[World, Walk]:
    world = World(root, random.Random(seed))
    async with world:
        walk = Walk(world)
        try:
            await walk.go(minutes * 60)
        except LostError:
            print("soak: the walk ends here: nothing more can be learned", file=sys.stderr)
        except Exception as error:  # noqa: BLE001  # what was found so far is shown
            world.violate(f"the soak itself failed: {''.join(traceback.format_exception(error))}")
    return world, walk


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0, help="how long (%(default)g)")
    parser.add_argument("--seed", type=int, help="of the walk's choices; by default another each time")
    arguments = parser.parse_args()
    seed = arguments.seed if arguments.seed is not None else random.SystemRandom().randrange(1 << 32)
    print(f"soak: {arguments.minutes:g} min, seed {seed}", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(prefix="soak") as root:
        world, walk = asyncio.run(soak(arguments.minutes, seed, Path(root)))
    text, ok = report(world.found, walk.counts, f"--minutes {arguments.minutes:g} --seed {seed}", world.step)
    print(text)
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs", file=sys.stderr)
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
