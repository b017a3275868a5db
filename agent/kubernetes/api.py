"""Defines how the API server is called, what its refusals are, and how long to wait after one."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any, Final, Protocol, TypeVar

import msgspec

from agent.runtime.errors import FairleadError
from agent.runtime.pacing import Backoff
from backends.interface.decoding import decoded

T = TypeVar("T")

STRATEGIC: Final = "application/strategic-merge-patch+json"
"""The kind of patch in which conditions of other types stay as they are."""

WATCH: Final = 300
"""Seconds after which the API server is to end a watch, and we begin another (client-go's shortest: 5 minutes)."""

_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0  # seconds before the next try


class ApiError(FairleadError):
    """The API server did not do what it was asked."""

    def __init__(self, sentence: str, status: int = 0) -> None:
        """`status` is HTTP's; 0 where there was no answer."""
        super().__init__(sentence)
        self.status = status

    @property
    def is_final(self) -> bool:
        """Whether the same request would be refused again."""
        return 400 <= self.status < 500 and self.status not in (
            HTTPStatus.REQUEST_TIMEOUT,
            HTTPStatus.TOO_MANY_REQUESTS,
            HTTPStatus.UNAUTHORIZED,
        )


class Api(Protocol):
    """A connection to an API server, for one request at a time."""

    async def call(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, content: str = "application/json"
    ) -> bytes:
        """The answer to a request.

        Raises:
            ApiError: there is none in time, it is a refusal, or no JSON object, as a proxy's login page.
        """

    async def watch(self, path: str, accept: str, told: Callable[[bytes], None]) -> None:
        """Hand on each line of a watch, until it ends.

        Raises:
            ApiError: it cannot be begun, or what it says is too long.
        """


def read(data: bytes, kind: type[T], status: int = HTTPStatus.OK) -> T:
    """What an answer with this status says.

    Raises:
        ApiError: it makes no sense; not the API server may have said it, but what stands before it.
    """
    try:
        return decoded(data, kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:  # one nests as deep as the stack allows
        raise ApiError(f"what answers for the API server makes no sense ({status}): {error}", status) from error


def backoff(most: float = _LONGEST_PAUSE) -> Backoff:
    """How long to wait after failures: else the nodes of a cluster would all come back to their API server at the same moment."""
    return Backoff(_FIRST_PAUSE, most, random.random)
