"""What is wrong on the node, the worst first, like things told together. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from msgspec import Struct

from agent.console.http.page.topology import Tile, badness
from agent.console.views import Problem, Resource, Status, Template


class Trouble(Struct, frozen=True):
    """Something that needs attention."""

    state: str
    """How bad it is, as devices are: Unhealthy, Degraded; Drained, which is no failure."""
    title: str
    cause: str
    """Tells it from others as long as it lasts, whatever devices it comes to be about."""
    sentences: tuple[str, ...] = ()
    """Nothing where each of the devices says something else."""
    since: float = 0.0
    tiles: tuple[Tile, ...] = ()
    reason: str = ""
    """What the next step follows from; empty: the tiles' own, if there are any."""


def troubles(status: Status, tiles: Sequence[Tile]) -> list[Trouble]:
    """Everything that is wrong, the worst first; what has one cause is one trouble: devices with one reason, complaints of one kind."""
    found = [
        *_kubelet(status), *_devices(tiles), *_complaints(status), *_configuration(status), *_problems(status),
    ]  # fmt: skip
    return sorted(found, key=lambda trouble: -badness(trouble.state))


def _kubelet(status: Status) -> Iterator[Trouble]:
    if not status.kubelet.present:
        why = f"Nothing is registered until {status.kubelet.socket} is there."
        yield Trouble("Unhealthy", "The kubelet is not there", "kubelet", (why,))
    elif missing := status.unready():
        title = "A resource is not served" if len(missing) == 1 else f"{len(missing):,} resources are not served"
        reason = "overtaken" if any(resource.overtaken for resource in status.resources) else ""
        yield Trouble("Unhealthy", title, "resources", tuple(missing), reason=reason)


def _devices(tiles: Sequence[Tile]) -> Iterator[Trouble]:
    groups: dict[tuple[str, ...], list[Tile]] = {}
    for tile in tiles:
        if (it := tile.worst).condition != "Healthy":
            groups.setdefault((it.condition, it.reason, it.besides, it.until), []).append(tile)
    for (state, reason, *drain), alike in groups.items():
        title = f"{_counted(tile.resource for tile in alike)}: {reason or state.lower()}"
        since = min(tile.worst.since for tile in alike)
        bad = "Degraded" if alike[0].missing else state
        told = {tile.worst.message for tile in alike}
        same = tuple(filter(None, told)) if len(told) == 1 else ()
        yield Trouble(bad, title, " ".join(filter(None, (state, reason, *drain))), same, since, tuple(alike))


def _counted(names: Iterable[str]) -> str:
    """Each name once, with how often it is there: `8 × nvidia.com/gpu, rdma/hca`."""
    return ", ".join(f"{number:,} × {name}" if number > 1 else name for name, number in Counter(names).items())


def _complaints(status: Status) -> Iterator[Trouble]:
    """What is wrong with resources that are served all the same."""
    named: dict[str, list[str]] = {}
    served: list[Resource | Template] = [one for one in status.resources if one.served]
    for it in [*served, *status.templates]:
        if it.complaint:
            named.setdefault(it.complaint, []).append(it.name)
    for complaint, names in named.items():
        yield Trouble("Degraded", ", ".join(names), complaint, (complaint,))


def _configuration(status: Status) -> Iterator[Trouble]:
    if mistakes := status.configuration.mistakes:
        title = f"{status.configuration.file} has mistakes and was not reloaded"
        yield Trouble("Degraded", title, "mistakes", tuple(mistakes))
    if changed := status.configuration.needs_restart:
        yield Trouble("Degraded", "A restart is needed", "restart", (f"The file has changed {', '.join(changed)}.",))


def _problems(status: Status) -> Iterator[Trouble]:
    """Those of a backend together, those of a part of Fairlead together."""
    parts: dict[tuple[str, str], list[Problem]] = {}
    for problem in status.problems:
        parts.setdefault((problem.backend, "" if problem.backend else problem.subject), []).append(problem)
    for (backend, part), alike in parts.items():
        subjects = tuple(dict.fromkeys(it.subject for it in alike))
        about = f"{backend} · {subjects[0]}" if len(subjects) == 1 else f"{len(subjects):,} × {backend}"
        title = backend if subjects == (backend,) else about if backend else f"Fairlead itself: {part}"
        yield Trouble("Degraded", title, f"problem {backend} {part}", tuple(it.message for it in alike))
