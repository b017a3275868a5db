"""GetPreferredAllocation and PreStartContainer: calls that a plugin may have, where its options say so."""

from __future__ import annotations

from typing import Final

from agent.simulation.conformance.stage import PRE_START, PREFERRED, Stage
from agent.simulation.conformance.suite import check
from agent.simulation.conformance.timeline import Called, NotApplicable, Skipped, Timeline, first, named

_IN_TIME: Final = 1.0  # seconds; the kubelet admits no other pod meanwhile
_LABELS: Final = ("one of all", "all", "with the last")
_STRANGER: Final = "no-such-device"


async def choosing(stage: Stage) -> None:
    """The kubelet asks which devices a container should get, and says that it is about to start."""
    await stage.begin()
    options = (await stage.options()).chosen
    ids = stage.healthy()
    if PREFERRED in options:
        await stage.prefer("one of all", ids, (), 1)
        await stage.prefer("all", ids, (), min(len(ids), 2))
        await stage.prefer("with the last", ids, ids[-1:], min(len(ids), 2))
        await stage.prefer("with a stranger", (_STRANGER, *ids), (), 1)
    if PRE_START in options:
        await stage.allocate("allocate", ids[0])
        await stage.pre_start("start", ids[0])
        await stage.pre_start("start again", ids[0])


def _need(t: Timeline, option: str) -> None:
    """Raise unless the plugin's options have this one."""
    options = t.call("options")
    if options.error:
        raise Skipped("GetDevicePluginOptions failed: see registration-options")
    if option not in options.chosen:
        raise NotApplicable(f"its options do not have {option}")


def _preferred(t: Timeline, *, answered: bool = True) -> list[Called]:
    """What it was asked.

    Raises:
        NotApplicable: it has not said that it can be asked.
        Skipped: it answered with an error.
    """
    _need(t, PREFERRED)
    found = [t.call(label) for label in _LABELS]
    if answered and not (found := [it for it in found if not it.error]):
        raise Skipped("GetPreferredAllocation failed: see preferred-answers")
    return found


@check(choosing, "A4")
def preferred_answers(t: Timeline) -> str:
    """An error of GetPreferredAllocation fails the pod for good: rather answer with any devices, or none."""
    return first(it.error for it in _preferred(t, answered=False))


@check(choosing, "A4")
def preferred_available(t: Timeline) -> str:
    """Choose among the IDs in `available`: the kubelet ignores any others, and takes what comes first in their
    place.
    """
    for it in _preferred(t):
        if strangers := set(it.chosen) - set(it.ids):
            return f"it chose {named(strangers)}, which was not available"
    return ""


@check(choosing, "A4")
def preferred_must_include(t: Timeline) -> str:
    """The IDs in `must_include` are those that the pod's init containers had: they are part of the answer."""
    for it in _preferred(t):
        if it.chosen and (left := set(it.must) - set(it.chosen)):
            return f"it did not choose {named(left)}, which had to be included"
    return ""


@check(choosing, "A4")
def preferred_size(t: Timeline) -> str:
    """Choose as many as `allocation_size` says, each once; the kubelet fills up what is missing with whatever is
    free.
    """
    return first(
        f"it chose {len(it.chosen)} devices, {len(set(it.chosen))} of them different, where {it.size} were asked for"
        for it in _preferred(t)
        if it.chosen and (len(it.chosen) != it.size or len(set(it.chosen)) != it.size)
    )


@check(choosing, "A4")
def preferred_in_time(t: Timeline) -> str:
    """GetPreferredAllocation runs in the kubelet's only loop for pods, as Allocate does."""
    return first(f"it took {it.seconds:.1f} s" for it in _preferred(t) if it.seconds > _IN_TIME)


@check(choosing, "A4")
def preferred_stranger(t: Timeline) -> str:
    """`available` may have an ID that has just left your list: leave it out, an error would fail the pod."""
    _preferred(t)
    called = t.call("with a stranger")
    if _STRANGER in called.chosen:
        return f"it chose {_STRANGER!r}, which was never listed"
    return called.error


def _started(t: Timeline) -> None:
    """Raise unless it wants to be told of starts, and has given a device."""
    _need(t, PRE_START)
    if t.call("allocate").error:
        raise Skipped("Allocate failed: see allocate-answers")


@check(choosing, "A4")
def prestart_answers(t: Timeline) -> str:
    """With `pre_start_required` the kubelet calls PreStartContainer before a container starts; an error, or 30 s,
    and it does not start (CreateContainerConfigError).
    """
    _started(t)
    return t.call("start").error


@check(choosing, "A4")
def prestart_again(t: Timeline) -> str:
    """PreStartContainer comes before *every* start: a container that crashed starts again with the devices that
    it has.
    """
    _started(t)
    if t.call("start").error:
        raise Skipped("PreStartContainer failed: see prestart-answers")
    return t.call("start again").error
