"""Reads the configuration of smarter-device-manager: regular expressions over /dev, and how many pods may share a node.

It makes a resource of every node that matches, down to the tenth directory below /dev.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from agent.importing.fields import Fields, Settings
from agent.importing.model import Draft, DraftGroup, ImportRefusedError, Part, Remark, Sketch, Value
from agent.importing.yaml_tree import Items, Table, Tree
from backends.interface.patterns import complaint

_PREFIX: Final = "smarter-devices/"
_TEMPLATE: Final = f"{_PREFIX}{{devname}}"
"""A resource for each node, named after its path below /dev."""

_NVIDIA: Final = "nvidia-gpu"
"""No pattern to it, but the GPU of a Jetson board: /sys/devices/gpu.0, which it tells to NVIDIA's runtime by number."""
_UNNAMEABLE: Final = re.compile(r"[^A-Za-z0-9_-]")
_SOURCE: Final = (
    "From smarter-device-manager's configuration. The IDs of the devices are other ones; no pod names them. A resource "
    "that is named by itself is there on every node, with no devices where there is no such node in /dev."
)


def is_it(document: Tree) -> bool:
    """Whether the document is a list of patterns."""
    return isinstance(document, Items) and any(
        isinstance(item, Table) and "devicematch" in item.values for item in document.items
    )


def read(document: Tree | None, _settings: Settings) -> Sketch:
    """The resources that a configuration means.

    Raises:
        ImportRefusedError: it is no list.
    """
    if not isinstance(document, Items):
        raise ImportRefusedError("smarter-device-manager's configuration is a list of devicematch and nummaxdevices", 1)
    parts = [part for item in document.items for part in _entry(item)]
    return Sketch(_SOURCE, tuple(_one_template(parts)))


def _one_template(parts: Iterable[Part]) -> Iterator[Part]:
    """The parts; the groups that name resources after nodes are all of one template, for no two may give one name."""
    parts = list(parts)
    every = [part for part in parts if part.draft and part.draft.name == _TEMPLATE]
    if not every:
        yield from parts
        return
    remarks = tuple(remark for part in every for remark in part.remarks)
    drafts = [part.draft for part in every if part.draft]
    groups = tuple(group for draft in drafts for group in draft.groups)
    yield from (part for part in parts if part not in every)
    yield Part(remarks, replace(drafts[0], groups=groups))


def _entry(item: Tree) -> Iterator[Part]:
    if not isinstance(item, Table):
        yield Part((Remark(item.line, "this should be a table with devicematch and nummaxdevices; it is left out"),))
        return
    fields = Fields.named(item, "devicematch", "a device")
    expression = fields.text("devicematch")
    count = fields.whole("nummaxdevices")
    fields.end()
    line = fields.line("devicematch")
    if not fields.sound:
        pass
    elif expression is None:
        fields.lost("devicematch", "it has no devicematch and is left out")
    elif not count:
        fields.note("nummaxdevices", "nummaxdevices is 0 or missing, and so none was offered")
    elif expression == _NVIDIA:
        yield fields.part(_jetson(line, count))
        return
    else:
        yield from _resources(expression, line, count, fields.remarks)
        return
    yield fields.part()


def _resources(expression: str, line: int, count: int, remarks: list[Remark]) -> Iterator[Part]:
    if every := names(expression):
        yield from (Part(tuple(remarks) if not n else (), _named(name, line, count)) for n, name in enumerate(every))
    elif not is_understood(expression):
        sentence = f"{expression}: this regular expression is not one that Fairlead and Go read alike; it is left out"
        yield Part((*remarks, Remark(line, sentence)))
    else:
        found = globs(expression)
        if len(found) > 1:
            sentence = f"{expression}: nodes are looked for in {_DEEPEST - 1} directories below /dev, as deep as udev makes any, not in ten"
            remarks.append(Remark(line, sentence, lost=False))
        groups = tuple(_group(f"/dev/{glob}", line, count, pattern=expression) for glob in found)
        yield Part(tuple(remarks), Draft(_TEMPLATE, groups, line))


def _jetson(line: int, count: int) -> Draft:
    options: dict[str, Value] = {
        "select": {"vendor": "10de", "platform": "tegra"},
        "device_id_strategy": "index",
        **({"replicas": count} if count > 1 else {}),
    }
    return Draft.of(f"{_PREFIX}{_NVIDIA}0", options, line, "gpu")


def _named(path: str, line: int, count: int) -> Draft:
    name = _UNNAMEABLE.sub("_", path).strip("_-") or "devices"
    return Draft(_PREFIX + name, (_group(f"/dev/{path}", line, count),), line)


def _group(path: str, line: int, count: int, **how: str) -> DraftGroup:
    options: dict[str, Value] = {"paths": [{"path": path, **how, "permissions": "rw"}]}
    if count > 1:
        options["count"] = count
    return DraftGroup(options, line)


# --- regular expressions over the paths below /dev, as names or as globs that take all that they might ---
#
# Only what people write is understood: characters, classes, `.`, quantifiers and anchors. What is not is still carried
# over where a `pattern` of ours and Go read it alike.

_MOST_NAMES: Final = 16
"""A pattern that means no more names than this is written out."""

_DEEPEST: Final = 4
"""So far below /dev nodes are looked for: none that the kernel or udev makes is deeper than /dev/bus/usb/001/002."""

_ATOM: Final = re.compile(
    r"(?P<any>\.)|(?P<escaped>\\[^A-Za-z0-9])|\\(?P<digit>d)|(?P<literal>[^\\.\[\](){}*+?|^$])"
    r"|\[(?P<negated>\^)?(?P<members>(?:[^\[\]\\^])+)\]"
)
_TIMES: Final = re.compile(r"(?P<sign>[*+?])|\{(?P<low>\d{1,3})(?P<more>,(?P<high>\d{1,3})?)?\}|")
_SIGNS: Final[dict[str, tuple[int, int | None]]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
_UNLIKE: Final = re.compile(r"\\[pPQECzZ0-9]|\[[^\]]*(\[|--|&&|~~|\|\|)|\(\?[^:]|[*+?}]\+")
"""What one of Go and Python does not have, or takes for something else."""


class _Piece(Struct, frozen=True):
    """Some characters, so many times."""

    members: frozenset[str]
    negated: bool
    low: int
    high: int | None
    """None is any number."""


def names(expression: str) -> tuple[str, ...] | None:
    """Every path below /dev that an expression finds, if these are few and nothing else is found."""
    pieces = _anchored(expression)
    choices = [_choices(piece) for piece in pieces or ()]
    known = [choice for choice in choices if choice is not None]
    if not pieces or len(known) < len(choices) or math.prod(map(len, known)) > _MOST_NAMES:
        return None
    return tuple("".join(name) for name in itertools.product(*known))


def globs(expression: str) -> tuple[str, ...]:
    """Globs below /dev that together take all that an expression may find, down to `_DEEPEST`."""
    pieces = _anchored(expression)
    prefix = "".join(itertools.chain.from_iterable(p.members for p in itertools.takewhile(_is_literal, pieces or ())))
    glob = re.sub(r"([*?\[])", r"[\1]", prefix) + "*"
    rest = (pieces or ())[len(prefix) :]
    if pieces is not None and not any(_may_take_slash(piece) for piece in rest if not _is_literal(piece)):
        return (glob + "/*" * sum("/" in piece.members and not piece.negated for piece in rest),)
    depth = glob.count("/") + 1
    return tuple(glob + "/*" * below for below in range(max(1, _DEEPEST + 1 - depth)))


def is_understood(expression: str) -> bool:
    """Whether Go and our own `pattern` read the expression alike."""
    return _UNLIKE.search(expression) is None and complaint(expression) is None


def _anchored(expression: str) -> tuple[_Piece, ...] | None:
    """The pieces of an expression that is held to both ends of a path; None where it is not, or has more to it."""
    if not expression.startswith("^") or not expression.endswith("$") or expression.endswith("\\$"):
        return None
    pieces: list[_Piece] = []
    at, end = 1, len(expression) - 1
    while at < end:
        atom = _ATOM.match(expression, at, end)
        times = atom and _TIMES.match(expression, atom.end(), end)
        if not atom or not times or (piece := _piece(atom, times)) is None:
            return None
        pieces.append(piece)
        at = times.end()
    return tuple(pieces)


def _is_literal(piece: _Piece) -> bool:
    return not piece.negated and len(piece.members) == 1 and piece.low == piece.high == 1


def _may_take_slash(piece: _Piece) -> bool:
    return ("/" in piece.members) is not piece.negated


def _piece(atom: re.Match[str], times: re.Match[str]) -> _Piece | None:
    members, negated = _members(atom)
    if members is None:
        return None
    if times["sign"]:
        return _Piece(members, negated, *_SIGNS[times["sign"]])
    if times["low"] is None:
        return _Piece(members, negated, 1, 1)
    low = int(times["low"])
    high = low if times["more"] is None else None if times["high"] is None else int(times["high"])
    return None if high is not None and high < low else _Piece(members, negated, low, high)


def _members(atom: re.Match[str]) -> tuple[frozenset[str] | None, bool]:
    if atom["any"]:
        return frozenset("\n"), True
    if atom["digit"]:
        return frozenset("0123456789"), False
    if atom["members"]:
        return _class(atom["members"]), bool(atom["negated"])
    return frozenset((atom["escaped"] or atom["literal"])[-1]), False


def _class(text: str) -> frozenset[str] | None:
    """The characters of `a-z_`; None where a range is upside down."""
    found: set[str] = set()
    for part in re.finditer(r"(.)-(.)|.", text, re.DOTALL):
        first, last = part[1] or part[0], part[2] or part[0]
        if first > last or ord(last) - ord(first) > 0xFF:
            return None
        found |= {chr(code) for code in range(ord(first), ord(last) + 1)}
    return frozenset(found)


def _choices(piece: _Piece) -> list[str] | None:
    """Every text that a piece takes, if these are few."""
    if piece.negated or piece.high is None:
        return None
    if sum(len(piece.members) ** times for times in range(piece.low, piece.high + 1)) > _MOST_NAMES:
        return None
    repeated = (itertools.product(sorted(piece.members), repeat=n) for n in range(piece.low, piece.high + 1))
    return ["".join(name) for names in repeated for name in names]
