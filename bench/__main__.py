"""Measures everything, prints a table and writes `build/bench.json`; see `--help`."""

from __future__ import annotations

import argparse
import os
import platform
import sys
import sysconfig
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, Final

os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # before grpcio is imported: it tells of every connection's end

from bench import messages, processes
from bench.figures import Figure, document, growth, table
from bench.measures.allocate import allocate, allocate_concurrent, allocate_held
from bench.measures.bursts import second_event, storms
from bench.measures.flip import flip
from bench.measures.health import unhealthy_to_list, xid_to_list
from bench.measures.idle import each_device, everything, idle, whole
from bench.measures.lists import event_to_list, tokens_to_list, uevent_to_list
from bench.measures.metrics import metrics
from bench.measures.prefer import prefer_16, prefer_1000
from bench.measures.prepare import prepare
from bench.measures.registration import (
    cold_to_registered,
    exec_to_registered,
    kubelet_to_registered,
    whole_node_to_registered,
)
from bench.measures.restart import exec_to_whole
from bench.measures.steps import loop_step_max


def _event_to_list(quick: bool) -> Iterable[Figure]:
    yield uevent_to_list(8, 20 if quick else 200)
    sizes = (8, 1_000, 5_000, 10_000)
    found = {it / 1_000: event_to_list(it, (10 if it == 10_000 else 20) * (1 if quick else 10)) for it in sizes}
    yield from found.values()
    yield growth("event_to_list", "1,000 devices more", "ms", found)


def _second_event(quick: bool) -> Iterable[Figure]:
    for milliseconds in (5, 30):
        yield second_event(milliseconds, 10 if quick else 100)


def _storms(quick: bool) -> Iterable[Figure]:
    found = {it: storms(it, 1.0 if quick else 10.0 if it == 8 else 3.0) for it in (8, 100, 1_000)}
    yield from chain.from_iterable(found.values())
    yield growth("steady_cpu", "1,000 devices more", "%", {it / 1_000: figures[0] for it, figures in found.items()})


def _unhealthy_to_list(quick: bool) -> Iterable[Figure]:
    yield unhealthy_to_list(1_000, 20 if quick else 200)


def _xid_to_list(quick: bool) -> Iterable[Figure]:
    yield xid_to_list(1_000, 20 if quick else 100)


def _tokens_to_list(quick: bool) -> Iterable[Figure]:
    yield tokens_to_list(1_000, 20 if quick else 200)


def _flip(quick: bool) -> Iterable[Figure]:
    rounds = 50 if quick else 400
    yield flip("/dev/bench*", devices=10_000, tokens=1, size="1 of 10,000", rounds=rounds)
    yield flip("/dev/bench", devices=1, tokens=1_000, size="1,000 tokens", rounds=rounds)


def _allocate(quick: bool) -> Iterable[Figure]:
    yield allocate(1 if quick else 5)
    yield from allocate_held(20 if quick else 100)


def _allocate_concurrent(quick: bool) -> Iterable[Figure]:
    yield allocate_concurrent(1 if quick else 5)


def _prepare(quick: bool) -> Iterable[Figure]:
    yield from prepare(20 if quick else 200)


def _prefer(quick: bool) -> Iterable[Figure]:
    yield prefer_16(3 if quick else 50)
    yield prefer_1000(3 if quick else 20)


def _exec_to_registered(quick: bool) -> Iterable[Figure]:
    found = {it: exec_to_registered(it, 3 if quick else starts) for it, starts in ((1, 20), (16, 20), (100, 10))}
    yield from found.values()
    yield growth("exec_to_registered", "a resource more", "ms", {float(it): one for it, one in found.items()})
    yield cold_to_registered(3 if quick else 10)
    yield whole_node_to_registered(3 if quick else 20)


def _exec_to_whole(quick: bool) -> Iterable[Figure]:
    yield exec_to_whole(16, 3 if quick else 20)


def _kubelet_to_registered(quick: bool) -> Iterable[Figure]:
    sizes = ((1, 30), (16, 30), (100, 40))
    found = {it: list(kubelet_to_registered(it, 5 if quick else restarts)) for it, restarts in sizes}
    yield from chain.from_iterable(found.values())
    for number, (name, unit) in enumerate((("kubelet_to_registered", "ms"), ("rss_after_restarts", "MB"))):
        yield growth(name, "a resource more", unit, {it: figures[number] for it, figures in found.items()})


def _idle(quick: bool) -> Iterable[Figure]:
    seconds = 5.0 if quick else 60.0
    yield from idle(seconds)
    yield each_device()
    yield everything(seconds)
    yield whole(seconds)


def _metrics(quick: bool) -> Iterable[Figure]:
    yield from metrics(3 if quick else 50)


def _loop_step_max(quick: bool) -> Iterable[Figure]:
    yield from loop_step_max(1 if quick else 3)


_MEASURES: Final[Mapping[str, Callable[[bool], Iterable[Figure]]]] = {
    "event_to_list": _event_to_list,
    "second_event": _second_event,
    "storms": _storms,
    "tokens_to_list": _tokens_to_list,
    "unhealthy_to_list": _unhealthy_to_list,
    "xid_to_list": _xid_to_list,
    "flip": _flip,
    "allocate": _allocate,
    "allocate_concurrent": _allocate_concurrent,
    "prepare": _prepare,
    "prefer": _prefer,
    "exec_to_registered": _exec_to_registered,
    "exec_to_whole": _exec_to_whole,
    "kubelet_to_registered": _kubelet_to_registered,
    "idle": _idle,
    "metrics": _metrics,
    "loop_step_max": _loop_step_max,
}


def _machine() -> dict[str, Any]:
    return {
        "python": f"{platform.python_implementation()} {platform.python_version()}, {platform.python_compiler()}",
        "optimised": "--enable-optimizations" in (sysconfig.get_config_var("CONFIG_ARGS") or ""),
        "kernel": platform.release(),
        "cpus": os.cpu_count(),
        "load_average": os.getloadavg()[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=_MEASURES, metavar="NAME", help=f"of {', '.join(_MEASURES)}")
    parser.add_argument("--quick", action="store_true", help="few samples: to see that it works, not to know")
    parser.add_argument("--output", type=Path, default=messages.BUILD / "bench.json", help="where the JSON goes")
    arguments = parser.parse_args()
    if os.geteuid() != 0:
        sys.exit("bench: it makes device nodes and a network namespace, so it must be run as root")
    processes.set_up()
    machine, figures, failed, began = _machine(), list[Figure](), list[str](), time.monotonic()
    for name in arguments.only or _MEASURES:
        print(f"measuring {name} ...", file=sys.stderr, flush=True)
        try:
            figures += _MEASURES[name](arguments.quick)
        except Exception:  # noqa: BLE001  # the others took minutes
            traceback.print_exc()
            failed.append(name)
    print(", ".join(f"{key}: {value}" for key, value in machine.items()))
    print(table(figures))
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(document(figures, machine))
    print(f"{time.monotonic() - began:.0f} s; written to {arguments.output}", file=sys.stderr)
    if failed:
        sys.exit(f"bench: could not be measured: {', '.join(failed)}")
    if grown := [it.name for it in figures if it.name.endswith("_growth") and it.met is False]:
        sys.exit(f"bench: what must not grow with a node grows: {', '.join(grown)}")


if __name__ == "__main__":
    main()
