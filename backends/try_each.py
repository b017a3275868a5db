"""Does one thing to each of several; one that fails does not keep the others from being done."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")


def each(
    act: Callable[[T], object],
    things: Iterable[T],
    failing: type[Exception] | tuple[type[Exception], ...],
    failed: str,
) -> None:
    """Act on all of them, in their order.

    Raises:
        ExceptionGroup: `failed` in the way that is expected; anything else ends it at once.
    """
    failures: list[Exception] = []
    for thing in things:
        try:
            act(thing)
        except failing as error:
            failures.append(error)
    if failures:
        raise ExceptionGroup(failed, failures)
