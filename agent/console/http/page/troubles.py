"""What is wrong on the node, the worst first, like things told together. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec import Struct

from agent.console.http.page.topology import Tile, badness
from agent.console.views import Status


class Trouble(Struct, frozen=True):
    """Something that needs attention."""

    state: str
    """How bad it is, as devices are: Unhealthy, Degraded; Drained, which is no failure."""
    title: str
    sentences: tuple[str, ...] = ()
    """Nothing where each of the devices says something else."""
    since: float = 0.0
    tiles: tuple[Tile, ...] = ()
    reason: str = ""
    """What the next step follows from; empty: the tiles' own, if there are any."""


def troubles(status: Status, tiles: Sequence[Tile]) -> list[Trouble]:
    """Everything that is wrong, the worst first; devices of a resource with one reason are one trouble."""
    found = [
        *_kubelet(status), *_devices(tiles), *_complaints(status), *_configuration(status), *_problems(status),
    ]  # fmt: skip
    return sorted(found, key=lambda trouble: -badness(trouble.state))


def _kubelet(status: Status) -> Iterator[Trouble]:
    if not status.kubelet.present:
        why = f"Nothing is registered until {status.kubelet.socket} is there."
        yield Trouble("Unhealthy", "The kubelet is not there", (why,))
    elif missing := status.unready():
        title = "A resource is not served" if len(missing) == 1 else f"{len(missing):,} resources are not served"
        reason = "overtaken" if any(resource.overtaken for resource in status.resources) else ""
        yield Trouble("Unhealthy", title, tuple(missing), reason=reason)


def _devices(tiles: Sequence[Tile]) -> Iterator[Trouble]:
    groups: dict[tuple[str, str, str], list[Tile]] = {}
    for tile in tiles:
        if tile.worst.condition != "Healthy":
            groups.setdefault((tile.worst.condition, tile.worst.reason, tile.resource), []).append(tile)
    for (state, reason, resource), alike in groups.items():
        number = "" if len(alike) == 1 else f"{len(alike):,} × "
        since = min(tile.worst.since for tile in alike)
        bad = "Degraded" if alike[0].missing else state
        told = {tile.worst.message for tile in alike}
        same = tuple(filter(None, told)) if len(told) == 1 else ()
        yield Trouble(bad, f"{number}{resource}: {reason or state.lower()}", same, since, tuple(alike))


def _complaints(status: Status) -> Iterator[Trouble]:
    """What is wrong with resources that are served all the same."""
    for resource in status.resources:
        if resource.complaint and resource.served:
            yield Trouble("Degraded", resource.name, (resource.complaint,))
    for template in status.templates:
        if template.complaint:
            yield Trouble("Degraded", template.name, (template.complaint,))


def _configuration(status: Status) -> Iterator[Trouble]:
    if mistakes := status.configuration.mistakes:
        title = f"{status.configuration.file} has mistakes and was not reloaded"
        yield Trouble("Degraded", title, tuple(mistakes))
    if changed := status.configuration.needs_restart:
        yield Trouble("Degraded", "A restart is needed", (f"The file has changed {', '.join(changed)}.",))


def _problems(status: Status) -> Iterator[Trouble]:
    for problem in status.problems:
        title = " · ".join(dict.fromkeys(filter(None, (problem.backend, problem.subject))))
        yield Trouble("Degraded", title or "A problem", (problem.message,))
