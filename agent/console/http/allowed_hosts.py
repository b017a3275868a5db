"""Decides which Host headers are answered: names and addresses of this node alone, against DNS rebinding.

A page in a browser on the node may have its own name lead to 127.0.0.1 (DNS rebinding) and then read what we say; its
requests bear that name. An address in the header is no name that could be led elsewhere. A unix socket no browser reaches.
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
from collections.abc import Iterable

from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

_PORT = re.compile(r":[0-9]*\Z")


class Hosts:
    """The Host headers that are answered."""

    def __init__(self, names: Iterable[str]) -> None:
        """Take these names; `localhost` and every address come by themselves."""
        self._names = frozenset(_folded(name) for name in names) - {""}

    def include(self, header: str) -> bool:
        """Is this Host header one of ours?"""
        name = _folded(_PORT.sub("", header))
        return name == "localhost" or name.endswith(".localhost") or name in self._names or _is_address(name)


def own_names(listen: str, configured: Iterable[str] = ()) -> list[str]:
    """What this node is called: by the configuration, by its kernel, by the Downward API."""
    return [*configured, listen.rpartition(":")[0], socket.gethostname(), os.environ.get("NODE_NAME", "")]


def _folded(name: str) -> str:
    return name.lower().removesuffix(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True


class OnlyFor:
    """The application, for requests to these hosts alone."""

    def __init__(self, app: ASGIApp, hosts: Hosts) -> None:
        self._app, self._hosts = app, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or refuse."""
        is_tcp = (scope.get("server") or ("", None))[1] is not None
        said = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        if is_tcp and not all(map(self._hosts.include, said)):
            why = "this node does not go by that name; if it should, add the name to hosts in [http]\n"
            await PlainTextResponse(why, 421, {"connection": "close", "cache-control": "no-store"})(
                scope, receive, send
            )
        else:
            await self._app(scope, receive, send)
