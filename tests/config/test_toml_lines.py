from __future__ import annotations

import tomllib
from collections.abc import Iterator

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agent.config.problems import KeyPath, key_lines, line_of

_EXAMPLE = """\
# a comment with [brackets] and 'quotes'
title = "x"   # 2

[agent]
uevents = "off"
host.sys = '''
[not.a.table]
key = 1'''

[[resource]]
name = "a/b"
paths = [
  { path = "/dev/kvm", permissions = "rw" }, # {
  # [
  { path = \"\"\"]
\"\"\", permissions = "r" },
]
[resource.options]
"quoted key".'x.y' = 1979-05-27 07:32:00

[[resource]]
[resource.options.deep]
a = [[1], [], [2,
  3]]
"""


def test_every_kind_of_key_is_found_on_its_line() -> None:
    assert key_lines(_EXAMPLE) == {
        ("title",): 2,
        ("agent",): 4,
        ("agent", "uevents"): 5,
        ("agent", "host"): 6,
        ("agent", "host", "sys"): 6,
        ("resource",): 10,
        ("resource", 0): 10,
        ("resource", 0, "name"): 11,
        ("resource", 0, "paths"): 12,
        ("resource", 0, "paths", 0): 13,
        ("resource", 0, "paths", 0, "path"): 13,
        ("resource", 0, "paths", 0, "permissions"): 13,
        ("resource", 0, "paths", 1): 15,
        ("resource", 0, "paths", 1, "path"): 15,
        ("resource", 0, "paths", 1, "permissions"): 16,
        ("resource", 0, "options"): 18,
        ("resource", 0, "options", "quoted key"): 19,
        ("resource", 0, "options", "quoted key", "x.y"): 19,
        ("resource", 1): 21,
        ("resource", 1, "options"): 22,
        ("resource", 1, "options", "deep"): 22,
        ("resource", 1, "options", "deep", "a"): 23,
        ("resource", 1, "options", "deep", "a", 0): 23,
        ("resource", 1, "options", "deep", "a", 0, 0): 23,
        ("resource", 1, "options", "deep", "a", 1): 23,
        ("resource", 1, "options", "deep", "a", 2): 23,
        ("resource", 1, "options", "deep", "a", 2, 0): 23,
        ("resource", 1, "options", "deep", "a", 2, 1): 24,
    }


def test_a_document_with_carriage_returns_has_the_same_lines() -> None:
    assert key_lines(_EXAMPLE.replace("\n", "\r\n")) == key_lines(_EXAMPLE)


def test_a_table_is_on_the_line_of_its_own_header() -> None:
    assert key_lines("[a.b]\n[a]\n")[("a",)] == 2


def test_a_key_that_is_not_written_is_told_at_what_is_around_it() -> None:
    lines = key_lines("[[resource]]\nname = 'x'\n")
    assert line_of(lines, ("resource", 0, "backend")) == 1
    assert line_of(lines, ("http",)) is None


class _Writer:
    """Writes TOML and notes where each key went, independently of the scanner."""

    def __init__(self, draw: st.DrawFn) -> None:
        self._draw = draw
        self.text = ""
        self.lines: dict[KeyPath, int] = {}

    def put(self, text: str) -> None:
        self.text += text

    def note(self, path: KeyPath) -> None:
        self.lines.setdefault(path, self.text.count("\n") + 1)

    def blank(self, *choices: str) -> None:
        self.put(self._draw(st.sampled_from(choices)))

    def keys(self) -> list[str]:
        return self._draw(st.lists(_KEYS, max_size=2, unique=True))

    def pairs(self, path: KeyPath, depth: int) -> None:
        for key in self.keys():
            self.blank("", "\n", "  # = [ { \"'\n", " \t")
            self.pair((*path, key), depth)
            self.blank("\n", ' # """ ]\n')

    def pair(self, path: KeyPath, depth: int) -> None:
        self.note(path)
        self.put(_quoted(str(path[-1]), self._draw(st.integers(0, 2))))
        if self._draw(st.integers(0, 4)) == 0:  # dotted
            self.blank(".", " . ")
            self.pair((*path, self._draw(_KEYS)), depth)
            return
        self.blank("=", " = ")
        self.value(path, depth)

    def value(self, path: KeyPath, depth: int) -> None:
        kind = self._draw(st.integers(0, 3)) if depth else 0
        if kind == 1:
            self.list(path, depth - 1)
        elif kind == 2:
            self.inline_table(path, depth - 1)
        else:
            self.put(self._draw(_SCALARS))

    def list(self, path: KeyPath, depth: int) -> None:
        self.put("[")
        for index in range(self._draw(st.integers(0, 3))):
            self.blank("", " ", "\n", " # ,]\n")
            self.note((*path, index))
            self.value((*path, index), depth)
            self.blank(",", " ,", "\n,", " # ,\n ,\n")
        self.blank("", "\n", "#[\n ")
        self.put("]")

    def inline_table(self, path: KeyPath, depth: int) -> None:
        self.put("{ ")
        for position, key in enumerate(self.keys()):
            self.put(", " if position else "")
            self.pair((*path, key), depth)
        self.put(" }")

    def header(self, path: KeyPath, opening: str, closing: str) -> None:
        self.blank("", "\n", "# [x]\n")
        for outer in (path[:-1], path):
            if outer:
                self.note(outer)
        self.put(opening)
        self.put(".".join(_quoted(key, self._draw(st.integers(0, 2))) for key in path if isinstance(key, str)))
        self.put(closing + "\n")

    def tables(self) -> None:
        for key in self._draw(st.lists(st.sampled_from(["T", "U V", "W.X"]), max_size=2, unique=True)):
            if self._draw(st.booleans()):
                self.header((key,), "[ ", " ]")
                self.pairs((key,), depth=1)
            else:
                for index in range(self._draw(st.integers(1, 2))):
                    self.array_table((key, index))

    def array_table(self, path: KeyPath) -> None:
        self.header(path, "[[", "]]")
        self.pairs(path, depth=1)
        if self._draw(st.booleans()):
            self.header((*path, "sub"), "[", "]")
            self.pairs((*path, "sub"), depth=1)


def _quoted(key: str, style: int) -> str:
    if style == 0 and key.replace("-", "").isalnum() and key.isascii():
        return key
    return f"'{key}'" if style == 1 and "'" not in key else '"' + key.replace('"', '\\"').replace("é", "\\u00e9") + '"'


_KEYS = st.sampled_from(["a", "b-1", "7", "é", "x y", "p.q", 'say "hi"', "it's", "="])
_SCALARS = st.sampled_from(
    [
        "1",
        "0x1f",
        "true",
        "1979-05-27 07:32:00Z",
        "6.626e-34",
        '"a # \\" ] } b"',
        "'C:\\'",
        '""',
        "''",
        '"""\nkey = 1\n[t]\n\\""" \\\n  end"""',
        "'''\n''it's\n[x]'''''",
        '"""two quotes""""" ',
        '""""""',
    ]
)


@st.composite
def _documents(draw: st.DrawFn) -> tuple[str, dict[KeyPath, int]]:
    writer = _Writer(draw)
    writer.pairs((), depth=2)
    writer.tables()
    return writer.text, writer.lines


def _paths(value: object, path: KeyPath = ()) -> Iterator[KeyPath]:
    if path:
        yield path
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _paths(inner, (*path, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _paths(inner, (*path, index))


# A document takes up to hundreds of draws, and an empty one two: hypothesis gives its first documents five times as many, and
# would call a run in which twenty of these need more a failure.
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(_documents())
def test_every_key_of_any_document_is_found_on_its_line(document: tuple[str, dict[KeyPath, int]]) -> None:
    text, expected = document
    found = key_lines(text)
    assert set(found) == set(_paths(tomllib.loads(text)))
    assert found == expected
