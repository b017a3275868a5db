"""Makes names of devices, pods and kernel objects, which others choose, safe to print on a terminal."""

from __future__ import annotations


def printable(text: str) -> str:
    """The text; what cannot be printed, or reverses a line, is escaped as in Python."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def printable_lines(text: str) -> str:
    """The same for a text that has lines."""
    return "\n".join(map(printable, text.split("\n")))
