"""`make simulate`: runs in which one seed decides everything that happens, and in which order; see CONTRIBUTING.md."""

from __future__ import annotations

from tests.deterministic import machine  # isort: skip  # before all of the agent: see there

import argparse
import gc
import math
import os
import random
import select
import sys
from collections.abc import Sequence
from typing import Final

import msgspec

from tests.deterministic.run import STEPS, Case, Child, Result, Step, known_cases, shortest, steps_of, try_out
from tests.deterministic.sabotage import SABOTAGES

_EVENTS: Final = 60


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.deterministic", description=__doc__)
    parser.add_argument("--seed", type=int, help="run this one alone, and show what happened if it fails")
    parser.add_argument("--steps", type=int, default=STEPS, help="of each run (%(default)s)")
    parser.add_argument("--seconds", type=float, default=60.0, help="for how long to run fresh seeds (%(default)g)")
    parser.add_argument("--runs", type=int, help="how many fresh seeds to run, however long that takes")
    parser.add_argument("--from", dest="first", type=int, help="the first fresh seed; by default another each time")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="runs side by side (%(default)s)")
    parser.add_argument("--whole", action="store_true", help="do not look for the shortest sequence that fails")
    parser.add_argument("--trace", action="store_true", help="with --seed: show all that happened, also if all is well")
    parser.add_argument("--sabotage", choices=sorted(SABOTAGES), help="put this fault into the agent, to see it found")
    given = parser.parse_args()
    gc.collect()
    gc.freeze()
    gc.disable()
    if given.sabotage:
        SABOTAGES[given.sabotage]()
    if given.seed is not None:
        if given.trace:
            os.environ["FULL"] = "1"
        steps = steps_of(given.seed, given.steps)
        result = try_out(given.seed, steps)
        if given.trace:
            print("\n".join(result.trace))
        print(
            f"seed {given.seed}: {result.steps} steps, {result.seconds:.0f} s simulated, {result.turns} turns, in the order {result.order:08x}"
        )
        return 0 if not result.violations else _tell(given.seed, steps, given, result)
    return _many(given)


def _tell(seed: int, steps: Sequence[Step], given: argparse.Namespace, result: Result) -> int:
    if not given.whole:
        steps, result = shortest(seed, steps, lambda text: print(f"  {text}", file=sys.stderr))
        print("the shortest sequence that still fails:")
        for step in steps:
            print(f"  after {step.wait:.6f} s: {step.fault}, for {step.lasts:.6f} s")
        print("for cases.jsonl:", msgspec.json.encode(Case(seed, result.violations[0], steps)).decode())
    print("\n".join(result.trace[-_EVENTS:]))
    for what in result.violations:
        print(f"VIOLATION {what}")
    print(f"again: make simulate ARGS='--seed {seed}'")
    return 1


def _many(given: argparse.Namespace) -> int:
    """Fresh seeds until the time is over, after those that ever failed."""
    first = given.first if given.first is not None else random.SystemRandom().randrange(1 << 32)
    known = [it for it in known_cases() if given.sabotage in (None, it.sabotage)]
    print(f"simulate: {len(known)} cases that once failed, then fresh seeds from {first}", file=sys.stderr)
    children: dict[int, Child] = {}
    failed: list[tuple[Child, Result]] = []
    began, total, simulated, runs, cpu = machine.REAL_TIME(), 0, 0.0, 0, 0.0
    waiting, fresh = list(known), iter(range(first, 1 << 62 if given.runs is None else first + given.runs))
    given.seconds = given.seconds if given.runs is None else math.inf
    while True:
        while len(children) < given.jobs:
            running = {it.seed for it in children.values()}  # one seed has one directory
            if case := next((it for it in waiting if it.seed not in running), None):
                waiting.remove(case)
                child = Child(case.seed, case.steps)
            elif (
                not waiting
                and machine.REAL_TIME() - began < given.seconds
                and (seed := next((it for it in fresh if it not in running), None)) is not None
            ):
                child = Child(seed, steps_of(seed, given.steps))
            else:
                break
            children[child.reading] = child
        if not children:
            break
        for fd in select.select(list(children), [], [])[0]:
            if not children[fd].read():
                child = children.pop(fd)
                result = child.result()
                total, simulated, runs, cpu = (
                    total + result.steps,
                    simulated + result.seconds,
                    runs + 1,
                    cpu + result.cpu,
                )
                if result.violations:
                    failed.append((child, result))
                    print(f"run {runs}, seed {child.seed} FAILS: {result.violations[0][:300]}", flush=True)
                    given.seconds = 0.0 if given.sabotage else given.seconds
    took = machine.REAL_TIME() - began
    print(
        f"{runs} runs, {total} steps in {took:.0f} s: {total / took:.0f} steps/s, {total / max(cpu, 0.001):.0f} per second of CPU; "
        f"{simulated / 3600:.1f} node-hours, {simulated / took:.0f} times as fast as the clock"
    )
    if failed and not given.whole:
        _tell(failed[0][0].seed, failed[0][0].steps, given, failed[0][1])
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
