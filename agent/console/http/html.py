"""Makes HTML out of elements: text in it is escaped unless it is HTML already."""

from __future__ import annotations

import html
from collections.abc import Iterable
from datetime import UTC, datetime

_VOID = frozenset(("br", "hr", "img", "input", "link", "meta"))


class Html(str):
    """Text that is HTML."""

    __slots__ = ()


Content = str | Iterable[str] | None
"""What an element may hold: text, HTML, several of them, or nothing."""


def h(tag: str, *children: Content, **attributes: str | int | bool | None) -> Html:
    """An element; of attributes `class_` is class, `aria_label` aria-label, True only its name, None and False none."""
    start = tag + "".join([_attribute(name, value) for name, value in attributes.items()])
    if tag in _VOID:
        return Html(f"<{start}>")
    return Html(f"<{start}>{join(*children)}</{tag}>")


def join(*children: Content) -> Html:
    """One after the other."""
    return Html("".join([_rendered(child) for child in children]))


def _rendered(child: Content) -> str:
    if child is None or isinstance(child, Html):
        return child or ""
    if isinstance(child, str):
        return html.escape(child)
    return "".join([_rendered(inner) for inner in child])


def _attribute(name: str, value: str | int | bool | None) -> str:
    if value is None or value is False:
        return ""
    name = name.rstrip("_").replace("_", "-")
    return f" {name}" if value is True else f' {name}="{html.escape(str(value))}"'


def moment(seconds: float) -> Html:
    """A time since 1970, in UTC as the log has it; the page's script adds how long ago that is."""
    when = datetime.fromtimestamp(seconds, UTC)
    return h("time", when.strftime("%Y-%m-%d %H:%M:%S UTC"), datetime=when.strftime("%Y-%m-%dT%H:%M:%SZ"))


def many(number: int, what: str) -> str:
    """A number with its noun: "1 device", "1,000 devices"."""
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"
