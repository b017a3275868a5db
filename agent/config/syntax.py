"""Says what is wrong with a document that is no TOML, in words, with the line and the likely mend; writes TOML for people.

A mend is tried before it is named: with it, `tomllib` must get further than without. So one mistake does not hide the next.
"""

from __future__ import annotations

import re
import textwrap
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from backends.errors import printable

MOST: Final = 5
"""Mistakes that are told at once; a file in another language has one in each line."""

_LONGEST: Final = 256 << 10
"""Characters of a document for which mends are tried, each with a reading of the whole."""

_PLACE: Final = re.compile(r" \(at (?:line (?P<line>\d+), column (?P<column>\d+)|end of document)\)$")
_QUOTES: Final = str.maketrans(dict.fromkeys("“”„‟″«»", '"') | dict.fromkeys("‘’‚‛′`´", "'"))
_INVISIBLE: Final = {
    "\u00a0": "a no-break space", "\u202f": "a narrow no-break space", "\u2007": "a figure space", "\u3000": "a wide space",
    "\u200b": "an invisible space", "\u200c": "an invisible joiner", "\u200d": "an invisible joiner",
    "\u2060": "an invisible joiner", "\ufeff": "an invisible mark (BOM)", "\x0c": "a form feed", "\x0b": "a vertical tab",
}  # fmt: skip
WORDS: Final = {
    "true": "true", "yes": "true", "on": "true", "enabled": "true", "false": "false", "no": "false", "off": "false",
    "disabled": "false",
}  # fmt: skip
"""What is written for yes and no → as TOML has it."""
_NOTHING: Final = frozenset({"none", "null", "nil", "undefined", "~"})
_PAIR: Final = re.compile(
    r"""^(?P<head>\s*(?P<key>(?:[A-Za-z0-9_.-]|"[^"]*"|'[^']*')+)\s*=\s*)(?P<value>.*?)(?P<tail>\s*(?:\#.*)?)$"""
)
_YAML: Final = re.compile(r"^\s*(?:- )?\s*(?P<key>[A-Za-z_][\w./-]*)\s*:(?:\s+(?P<value>.*?))?\s*$|^\s*- |^---\s*$")
_CONFIG_MAP: Final = re.compile(r"""["']?\bkind["']?\s*:\s*["']?ConfigMap\b""")
_INSIDE: Final = re.compile(r"""(?:^|[\s{,])["']?(?P<key>[\w.-]+\.toml)["']?\s*:""")
_VALUES: Final = re.compile(r"config(?:Text)?\s*:")
"""What the values of our chart have at their top."""
_KEY: Final = re.compile(r"^\s*(?P<key>[^=#\[\]{}]*?)\s*=(?!=)")
_HEADER: Final = re.compile(r"^\s*(?P<open>\[+)\s*(?P<name>[^\[\]#]*?)\s*(?P<close>\]*)\s*(?P<rest>(?:#.*)?)$")
_OPENS: Final = re.compile(r"=\s*[\[{]")

Value = str | int | float | bool | Sequence["Value"] | Mapping[str, "Value"]
"""What our TOML can say."""

_WIDTH: Final = 118
_BARE: Final = re.compile(r"[A-Za-z0-9_-]+")
_ESCAPES: Final = {'"': '\\"', "\\": "\\\\", "\b": "\\b", "\t": "\\t", "\n": "\\n", "\f": "\\f", "\r": "\\r"}


# --- what is no TOML, in words ---


class Mistake(NamedTuple):
    """One of them: its line, from 1, None where it is about the whole; and a sentence."""

    line: int | None
    sentence: str


class _Mend(NamedTuple):
    """Lines that would be put in the place of others."""

    first: int
    """Index of the first line that goes."""
    end: int
    why: str
    lines: Sequence[str]


def mistakes(document: str, error: ValueError, file: str) -> list[Mistake]:
    """What keeps this document from being TOML, of which `tomllib` has raised this error; one at least."""
    lines = document.split("\n")
    if (other := _of_kubernetes(document, lines, file) or _other_language(lines, file)) is not None:
        return [other]
    found: list[Mistake] = []
    failure: ValueError | None = error
    removed = 0  # lines that mends have taken out so far
    while failure is not None and len(found) < MOST:
        at = _place(failure, lines)
        mend, following = _tried(lines, at, failure)
        if mend is None:
            found.append(Mistake(None if at is None else at[0] + 1 + removed, _PLACE.sub("", str(failure))))
            break
        shown = "  and below it  ".join(line.strip() for line in mend.lines)
        if shown == f"# {lines[mend.first].strip()}":  # it is to be left out
            shown = ""
        found.append(Mistake(mend.first + 1 + removed, mend.why + (f"; write: {shown}" if shown else "")))
        lines[mend.first : mend.end] = mend.lines
        removed += mend.end - mend.first - len(mend.lines)
        failure = following
    return found


def _tried(lines: list[str], at: tuple[int, int] | None, failure: ValueError) -> tuple[_Mend | None, ValueError | None]:
    """The mend with which reading gets furthest, the first of several; and what is wrong then."""
    best: tuple[_Mend | None, ValueError | None] = None, failure
    if at is None or sum(map(len, lines)) > _LONGEST:  # without a place: Python's own, of a number with 5,000 digits
        return best
    furthest = (-1, 0) if _is_end(failure) else at  # what begins somewhere and has no end hides what comes after it
    for mend in _mends(lines, at[0], str(failure)):
        tried = [*lines[: mend.first], *mend.lines, *lines[mend.end :]]
        following = _failure("\n".join(tried))
        if following is None:
            return mend, None
        fewer = mend.end - mend.first - len(mend.lines)
        if (then := _place(following, tried)) is None or (
            _is_end(failure) and (_is_end(following) or then[0] + fewer < mend.end)
        ):
            continue
        if (place := (then[0] + fewer, then[1])) > furthest:
            best, furthest = (mend, following), place
    return best


def _is_end(error: ValueError) -> bool:
    return str(error).endswith("(at end of document)")


def _failure(document: str) -> ValueError | None:
    try:
        tomllib.loads(document)
    except ValueError as error:
        return error
    return None


def _place(error: ValueError, lines: Sequence[str]) -> tuple[int, int] | None:
    """Index of the line and of the column where reading ended."""
    if (found := _PLACE.search(str(error))) is None:
        return None
    return (int(found["line"]) - 1, int(found["column"])) if found["line"] else (len(lines) - 1, len(lines[-1]) + 1)


def _of_kubernetes(document: str, lines: Sequence[str], file: str) -> Mistake | None:
    """A ConfigMap that has the TOML inside, or what our Helm chart makes one of; with the command that takes it out."""
    inside = _INSIDE.search(document)
    if _CONFIG_MAP.search(document) is None or inside is None:
        if not any(map(_VALUES.match, lines)) or not _is_yaml(lines):
            return None
        what, chart = "these are values of a Helm chart", f"helm template CHART --values={file}"
    elif "{{" in document:
        what, chart = "this is a Helm chart's template of a ConfigMap", "helm template CHART"
    else:
        what, chart = "this is a ConfigMap, with Fairlead's configuration inside", ""
    line = next((n for n, it in enumerate(lines, 1) if inside and inside["key"] in it), 1)
    key = (inside["key"] if inside else "config.toml").replace(".", r"\.")
    made = f"{chart} --show-only=templates/config-map.yaml | " if chart else ""
    command = f"{made}kubectl create --dry-run=client --filename={'-' if chart else file} --output=jsonpath='{{.data.{key}}}' > config.toml"
    return Mistake(line, f"{what}, and Fairlead reads the TOML alone; `{command}` takes it out")


def _is_yaml(lines: Sequence[str]) -> bool:
    """Whether no line is TOML and most are YAML. TOML may have a colon in any line, and YAML any text in indented ones."""
    told = [line for line in lines if line.strip() and not line.lstrip().startswith("#")]
    least = min((len(line) - len(line.lstrip()) for line in told), default=0)
    outer = [line[least:] for line in told if not line[least].isspace()]
    is_toml = any(_PAIR.match(line) or ((it := _HEADER.match(line)) and it["close"]) for line in outer)
    return not is_toml and sum(map(bool, map(_YAML.match, outer))) * 2 > len(outer)


def _other_language(lines: Sequence[str], file: str) -> Mistake | None:
    """YAML, JSON, or what an editor or a merge left, told once."""
    told = [(n, line) for n, line in enumerate(lines) if line.strip() and not line.lstrip().startswith("#")]
    if not told:
        return None
    number, first = told[0]
    if first.lstrip().startswith("{"):
        return Mistake(number + 1, f"this is JSON, and Fairlead reads TOML; {_TOML}")
    for n, line in told:
        if line.startswith(("<<<<<<<", ">>>>>>>")):
            return Mistake(
                n + 1, "a merge has left its marks here; keep one side, and delete the lines with <<<, === and >>>"
            )
        if line.strip().startswith("```"):
            return Mistake(n + 1, "this line is Markdown's, not TOML; delete it")
    if _is_yaml(lines):
        imports = f"`fairlead import {file}` turns another plugin's YAML into it"
        return Mistake(number + 1, f"this is YAML, and Fairlead reads TOML; {_TOML}; {imports}")
    return None


_TOML: Final = (
    'a key and its value have = between them, text stands in "quotes", and a resource begins with [[resource]]'
)


def _mends(lines: list[str], number: int, said: str) -> Iterator[_Mend]:
    """What might be meant, the likeliest first."""
    line = lines[number]

    def here(why: str, text: str) -> _Mend:
        return _Mend(number, number + 1, why, text.split("\n"))

    for mark, name in _INVISIBLE.items():
        if mark in line:
            yield here(f"{name} stands in this line, in column {line.index(mark) + 1}", line.replace(mark, " "))
    if (straight := line.translate(_QUOTES)) != line:
        yield here("curly quotes, as an office program makes them; TOML has straight ones", straight)
    stripped = line.strip()
    if stripped.startswith(("//", ";", "/*", "*", "--", "%", "!")) and not _YAML.match(line):
        yield here("a comment begins with #", f"# {stripped.lstrip('/;*-%! ')}")
    yield from _twice(lines, number)
    yield from (here(*it) for it in _headers(line))
    yield from (here(*it) for it in _pairs(line))
    yield from _over_lines(lines, number, said)


def _twice(lines: Sequence[str], number: int) -> Iterator[_Mend]:
    """The key or table of this line, if it has been there before."""
    places: dict[tuple[str, str], int] = {}
    table = ""
    for n, line in enumerate(lines[: number + 1]):
        header, pair = _HEADER.match(line), _PAIR.match(line)
        if header is not None and header["close"]:
            name, double = header["name"], len(header["open"]) == 2  # brackets
            table = f"{name} {n}" if double else name
            at = places.setdefault(("", name), n)
            if n == number and at != n and not double:
                if lines[at].lstrip().startswith("[[") or name == "resource":
                    text = f"[[{name}]]"
                    yield _Mend(
                        n, n + 1, f"each {name} has two brackets around its name, as there may be several", [text]
                    )
                yield _Mend(
                    n, n + 1, f"the table [{name}] is here twice, first in line {at + 1}; put both together", []
                )
        elif pair is not None:
            at = places.setdefault((table, pair["key"]), n)
            if n == number and at != n:
                yield _Mend(n, n + 1, f"the key {pair['key']} is here twice, first in line {at + 1}; keep one", [])


def _headers(line: str) -> Iterator[tuple[str, str]]:
    """A table's name between brackets that do not fit."""
    if (beside := re.match(r"^\s*(\[+[^\[\]]+\]+)\s*([A-Za-z_].*)$", line)) is not None:
        yield "the name of a table has a line of its own", f"{beside[1]}\n{beside[2]}"
    if (found := _HEADER.match(line)) is None:
        return
    name, rest = found["name"].rstrip(":= "), f"  {found['rest']}" if found["rest"] else ""
    wanted = 2 if name == "resource" or len(found["open"]) > 1 else 1
    quoted = name if re.fullmatch(r"[A-Za-z0-9_.\"'-]+", name) else f'"{name}"'
    yield "the brackets around a table's name do not fit", f"{'[' * wanted}{quoted}{']' * wanted}{rest}"


def _pairs(line: str) -> Iterator[tuple[str, str]]:
    """A key and its value, or what is meant for that."""
    yaml = _YAML.match(line)
    if yaml is not None and yaml["key"] and "=" not in line.partition(":")[0]:
        value = yaml["value"] or '""'
        for text in (value, _quoted(value)):
            yield "TOML has = between a key and its value, and no colon", f"{yaml['key']} = {text}"
    if (wrong := re.match(r"^(\s*[\w.-]+\s*)(?::=|==|=>|=:|\+=)\s*(.*)$", line)) is not None:
        yield "between a key and its value stands one =", f"{wrong[1].rstrip()} = {wrong[2]}"
    if (word := re.match(r"^\s*(?:export|set|let|var|const)\s+(.*)$", line)) is not None:
        yield "a line begins with its key", word[1]
    if "=" not in line and (bare := re.match(r"^\s*([A-Za-z_][\w-]*)\s+(\S.*?)\s*$", line)) is not None:
        for text in (bare[2], _quoted(bare[2])):
            yield "there is no = between the key and its value", f"{bare[1]} = {text}"
    if "=" not in line and re.fullmatch(r"\s*[A-Za-z_][\w.-]*\s*", line):
        yield "a key stands here without a value", f"# {line.strip()}"
    if (key := _KEY.match(line)) is not None and key["key"] and not _PAIR.match(line):
        yield (
            "a key has no blanks or signs, unless it stands in quotes",
            f'"{key["key"].strip(chr(34))}"{line[key.end("key") :]}',
        )
    if (pair := _PAIR.match(line)) is not None:
        for why, value in _values(pair["value"]):
            if value:
                yield why, f"{pair['head'].rstrip()} {value}{pair['tail']}"
            else:
                yield why, f"# {line.strip()}"
        if pair["tail"].strip():  # the # may be a part of a value whose quotes are missing
            for why, value in _values(pair["value"] + pair["tail"].rstrip()):
                yield why, f"{pair['head'].rstrip()} {value}"


def _values(value: str) -> Iterator[tuple[str, str]]:
    """What may be meant by a value that is none."""
    word = value.strip("\"'").rstrip(",;").lower()
    if not value:
        yield "the key has no value", '""'
    if word in WORDS and not value.startswith(('"', "'")):
        yield "yes and no are written true and false in TOML, in small letters", WORDS[word]
    if word in _NOTHING:
        yield "TOML has no word for nothing; leave the line out", ""
    if re.fullmatch(r"[+-]?0\d+", value):
        yield "a number has no zero before it; a mode or an ID is text, in quotes", f'"{value}"'
    if re.fullmatch(r"\d{1,3}(,\d{3})+", value):
        yield "a large number has no commas", value.replace(",", "")
    if re.fullmatch(r"[+-]?(\.\d+|\d+\.)", value):
        yield (
            "a number has digits on both sides of its point",
            f"{value}0" if value.endswith(".") else value.replace(".", "0."),
        )
    if value.endswith((",", ";")):
        yield "a line ends with its value, without a comma", value[:-1].rstrip()
        yield from _values(value[:-1].rstrip())
    if value[:1] + value[-1:] in ("\"'", "'\""):
        yield "a text ends with the quote that it begins with", f'"{value[1:-1]}"'
    for quote in ("'", '"'):
        if value.startswith(quote) and value.count(quote) == 1:
            yield "the quote at the end is missing", f"{value.rstrip(',')}{quote}"
            if (ending := re.match(r"^(.\S*?)([,\]}]+)$", value)) is not None:
                yield "the quote at the end is missing", f"{ending[1]}{quote}{ending[2]}"
        if value.endswith(quote) and value.count(quote) == 1:
            yield "the quote at the beginning is missing", f"{quote}{value}"
    if value.startswith('"') and "\\" in value and "'" not in value:
        yield "in double quotes a backslash begins an escape; in single quotes it is itself", value.replace('"', "'")
    if value.startswith(("[", "{")):
        yield from _collections(value)
    elif (two := re.match(r"""^("[^"]*"|'[^']*'|\S+)\s+([A-Za-z_][\w-]*\s*=.*)$""", value)) is not None:
        yield "each key begins a line of its own", f"{two[1]}\n{two[2]}"
    elif not value.startswith(('"', "'")) and value:
        yield "text stands in quotes", _quoted(value)
    elif (more := re.match(r"""^("[^"]*"|'[^']*')\s*(?:\+|\.|,)?\s*\S.*$""", value)) is not None:
        yield "nothing but a comment may follow a value", more[1]


def _collections(value: str) -> Iterator[tuple[str, str]]:
    """A list or table on one line."""
    closed = value
    for opening, closing in ("[]", "{}"):
        missing = _outside(value).count(opening) - _outside(value).count(closing)
        if missing > 0:
            closed += closing * missing
        elif missing < 0 and value.endswith(closing * -missing):
            yield f"there is one {closing} too many", value[:missing]
    if closed != value:
        yield f"the {closed[len(value) :]} at the end is missing", closed
        if value.startswith("[{") or "{" in value[1:]:
            inner = value.rstrip("] ")
            yield "the } at the end is missing", f"{inner} }}]"
    if (fewer := re.sub(r",(\s*,)+", ",", re.sub(r"([\[{])\s*,", r"\1", value))) != value:
        yield "there is a comma too many", fewer
    if (spaced := re.sub(r"""(["'\]}])\s+(["'\[{])""", r"\1, \2", value)) != value:
        yield "a comma is missing between two values", spaced
    if (spaced := re.sub(r"""(["'\]}\w])\s+([A-Za-z_]\w*\s*=)""", r"\1, \2", value)) != value:
        yield "a comma is missing between two keys", spaced
    if (pairs := re.sub(r"""["']?([A-Za-z_]\w*)["']?\s*:\s*""", r"\1 = ", value)) != value:
        yield "a table has = between a key and its value", pairs
    if (ended := re.sub(r",\s*}", " }", value)) != value:
        yield "a table in { } has no comma at its end", ended
    words = re.sub(
        r"(?<=[\[,=:{])(\s*)([^\s\"'\[\]{},=][^\"'\[\]{},=]*?)(?=\s*[,\]}])", lambda it: it[1] + _value(it[2]), value
    )
    if words != value:
        yield "text stands in quotes, and yes and no are true and false", words
    for quote in "\"'":
        if _outside(value).count(quote):
            yield (
                "a quote is missing",
                re.sub(rf"{quote}([^\s{quote},\[\]{{}}]+)(?=\s*[,\]}}])", rf"{quote}\1{quote}", value),
            )


def _value(text: str) -> str:
    if text.lower() in WORDS:
        return WORDS[text.lower()]
    return text if re.fullmatch(r"[+-]?\d[\d_]*(\.\d+)?", text) else _quoted(text)


def _outside(value: str) -> str:
    """The value without its texts in quotes."""
    return re.sub(r""""(?:\\.|[^"\\])*"|'[^']*'""", "", value)


def _quoted(text: str) -> str:
    plain = text.strip().strip("\"'")
    return f"'{plain}'" if "\\" in plain or '"' in plain else f'"{plain}"'


def _over_lines(lines: list[str], number: int, said: str) -> Iterator[_Mend]:
    """What began in an earlier line and has no end, or has one that TOML does not allow."""
    if "nterminated" in said or "Expected" in said or "end of document" in said:
        for n in range(min(number, len(lines) - 1), -1, -1):
            for quote in ('"""', "'''"):
                if lines[n].count(quote) == 1:
                    yield _Mend(n, n + 1, f"the text that begins with {quote} has no end", [lines[n] + quote])
    item = re.compile(r"^\s*- +(.*?)\s*$")
    if (listed := item.match(lines[number])) or (number + 1 < len(lines) and (listed := item.match(lines[number + 1]))):
        first = number if item.match(lines[number]) is None else number - 1
        end = next((n for n in range(first + 1, len(lines)) if item.match(lines[n]) is None), len(lines))
        key = re.match(r"^\s*([\w-]+)\s*[:=]\s*$", lines[first])
        if key is not None and listed is not None:
            values = ", ".join(_value(found[1]) for line in lines[first + 1 : end] if (found := item.match(line)))
            yield _Mend(first, end, "a list of TOML stands in brackets", [f"{key[1]} = [{values}]"])
    start = next((n for n in range(min(number, len(lines) - 1), -1, -1) if _OPENS.search(_outside(lines[n]))), None)
    if start is None:
        return
    for n in range(number, start, -1):
        before = lines[n - 1].rstrip()
        if before and not before.endswith((",", "[", "{")):
            why = "a comma is missing between two values"
            yield _Mend(n - 1, n, why, [f"{before},"])
        for why, text in _collections(f"[{lines[n].strip()}]"):
            yield _Mend(n, n + 1, why, [text[1:-1]])
    for end in range(number, min(number + 50, len(lines))):
        inner = [line.split("#")[0].strip() for line in lines[start : end + 1]]
        one = re.sub(
            r",\s*}",
            " }",
            " ".join(it if n == 0 or it.endswith(("{", ",", "[")) or not it else f"{it}" for n, it in enumerate(inner)),
        )
        if _outside(one).count("{") == _outside(one).count("}") and "{" in _outside(lines[start]):
            yield _Mend(start, end + 1, "a table in { } stands on one line, without a comma at its end", [one])
            break
    closing = "".join({"[": "]", "{": "}"}[it] for it in reversed(_open(lines[start:number])))
    last = next((n for n in range(min(number, len(lines)) - 1, start - 1, -1) if lines[n].strip()), start)
    if closing:
        yield _Mend(last, last + 1, f"what begins in line {start + 1} has no end", [f"{lines[last].rstrip()}{closing}"])


def _open(lines: Sequence[str]) -> list[str]:
    """Brackets that are open at the end of these lines."""
    found: list[str] = []
    for mark in re.findall(r"[\[\]{}]", _outside("\n".join(line.split("#")[0] for line in lines))):
        if mark in "[{":
            found.append(mark)
        elif found:
            found.pop()
    return found


def parsed(document: str, file: str = "FILE") -> dict[str, Any] | list[Mistake]:
    """The tables of a document, or what keeps it from being TOML; `file` is what commands about it have."""
    try:
        return tomllib.loads(document)
    except ValueError as error:  # tomllib's own, and Python's for a number of 5,000 digits
        return mistakes(document, error, file)


# --- TOML that we write ---


def comment(text: str) -> Iterator[str]:
    """A sentence as lines of a comment."""
    wrapped = textwrap.wrap(printable(text), _WIDTH, break_long_words=False, break_on_hyphens=False)
    return (f"# {line}" for line in wrapped)


def pair(key: str, value: Value) -> Iterator[str]:
    """`key = value`; a list of tables has one on each line if there are several."""
    if isinstance(value, Sequence) and len(value) > 1 and not isinstance(value, str) and isinstance(value[0], Mapping):
        yield f"{_key(key)} = ["
        for item in value:
            yield f"    {written(item)},"
        yield "]"
    else:
        yield f"{_key(key)} = {written(value)}"


def written(value: Value) -> str:
    """A value, on one line."""
    match value:
        case bool():
            return "true" if value else "false"
        case int() | float():
            return str(value)
        case str():
            return _text(value)
        case Mapping():
            inner = ", ".join(f"{_key(key)} = {written(item)}" for key, item in value.items())
            return f"{{ {inner} }}" if inner else "{}"
        case _:
            return f"[{', '.join(map(written, value))}]"


def _key(key: str) -> str:
    return key if _BARE.fullmatch(key) else _text(key)


def _text(text: str) -> str:
    return f'"{"".join(map(_character, text))}"'


def _character(character: str) -> str:
    if escaped := _ESCAPES.get(character):
        return escaped
    if character.isprintable():
        return character
    code = ord(character)
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"
