"""Texts that others chose, for a terminal: devices, pods and kernels say what they are called."""

from __future__ import annotations


def printable(text: str) -> str:
    """The text, with what cannot be printed, or turns a line around, as Python escapes it."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def printable_lines(text: str) -> str:
    """The same of a text with line breaks of ours."""
    return "\n".join(map(printable, text.split("\n")))
