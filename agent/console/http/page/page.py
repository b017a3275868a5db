"""The page: one document with its style and script in it, which nothing else may be added to, and which works without.

Its policy allows exactly that style and that script, by their hashes, and a connection back to us.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from agent.console.http.page import sections
from agent.console.http.page.html import Html, h
from agent.console.http.page.page_parts import Picture
from agent.console.http.page.tiles import name
from agent.console.node_name import node_name

_STYLE: Final = Html(Path(__file__).with_name("page.css").read_text())
_SCRIPT: Final = Html(Path(__file__).with_name("page.js").read_text())
_ICON: Final = (
    "data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 16 16'%3E"
    "%3Crect width='16' height='16' rx='3' fill='%23456'/%3E"
    "%3Cpath d='M4 13V3h8M4 8h6' fill='none' stroke='%23fff' stroke-width='2'/%3E%3C/svg%3E"
)
_SECTIONS: Final = (
    ("attention", "Attention", "Needs attention"),
    ("devices", "Devices", "Devices in their place"),
    ("resources", "Resources", "Resources"),
    ("events", "Events", "Recent events"),
    ("unclaimed", "Others", "Found, and meant for no resource"),
)


def _hash(text: str) -> str:
    return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"


POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        f"style-src {_hash(_STYLE)}",
        f"script-src {_hash(_SCRIPT)}",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
"""Content-Security-Policy."""

ASSETS: Final = hashlib.sha256((_STYLE + _SCRIPT).encode()).hexdigest()[:12]
"""Names the style and script; after an update, an open page notices that it is an old one."""


def document(picture: Picture) -> Iterator[str]:
    """The page as it is now, in pieces; it may be drawn again before the last of them is asked for."""
    parts, tiles, seen = picture.parts, picture.tiles, f"{picture.run}-{picture.version}"
    yield f'<!doctype html>\n<html lang="en">{_head()}'
    yield f'<body data-assets="{ASSETS}" data-seen="{seen}">{_top()}'
    yield f'<main id="main">{h("div", Html(parts["verdict"].html), id="verdict", aria_live="polite")}'
    for part, _, title in _SECTIONS:
        yield f'<section class="{part}" aria-labelledby="{part}-title"><h2 id="{part}-title" tabindex="-1">{title}</h2>'
        yield f'<div id="{part}">'
        if part == "devices":
            yield from sections.devices(tiles, lambda tile: Html(parts[name(tile)].html))
        else:
            yield parts[part].html
        yield "</div></section>"
    yield f'</main><footer><div id="about">{parts["about"].html}</div>{_links()}</footer></body></html>\n'


def _head() -> Html:
    return h(
        "head",
        h("meta", charset="utf-8"),
        h("meta", name="viewport", content="width=device-width, initial-scale=1"),
        h("meta", name="color-scheme", content="light dark"),
        h("title", "Fairlead"),
        h("link", rel="icon", href=_ICON),
        h("style", _STYLE),
        h("noscript", h("meta", http_equiv="refresh", content="30")),
        h("script", _SCRIPT, type="module"),
    )


def _top() -> Html:
    return h(
        "header",
        h("a", "Skip to what needs attention", href="#attention-title", class_="skip"),
        h("h1", "Fairlead", h("span", node_name(), id="host")),
        h("p", "Not live: that takes JavaScript. It loads itself again every 30 s.", id="live", role="status"),
        h("nav", [h("a", short, href=f"#{name}-title") for name, short, _ in _SECTIONS], aria_label="Sections"),
    )


def _links() -> Html:
    paths = ("metrics", "status.json", "healthz", "readyz")
    return h("p", [h("a", f"/{path}", href=path) for path in paths], class_="links")
