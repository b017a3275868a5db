"""Writes docs/licences.md: the licence of everything that requirements/run.txt installs, from what is installed here.

`make generated` runs it; a test compares the page with what it would write.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Final

_REPOSITORY: Final = Path(__file__).resolve().parents[1]
PAGE: Final = _REPOSITORY / "docs/licences.md"
_PINNED: Final = re.compile(r"^([\w.-]+)==(\S+)", re.MULTILINE)
_ASKED: Final = re.compile(r"^([\w.-]+)", re.MULTILINE)
_CLASSIFIER: Final = "License :: OSI Approved :: "
_LONGEST: Final = 40  # characters of a licence's name; what is longer is its text
_INTRODUCTION: Final = """\
# Licences

<!-- Written by `make generated` from the metadata of what is installed; do not edit. -->

Fairlead is under the Apache License 2.0. At run time it needs what `requirements/run.txt` pins, and Python itself (PSF).
Nothing of it is copied into Fairlead's sources. pyudev, under the LGPL, is a Python package of its own, which may be
replaced in any installation; it loads libudev, under the LGPL too, from the system. The image adds the Debian or Ubuntu
packages of its base.

| distribution | version | licence | imported by Fairlead |
| --- | --- | --- | --- |
"""


def page() -> str:
    """The whole page.

    Raises:
        importlib.metadata.PackageNotFoundError: if something that is pinned is not installed here.
    """
    asked = set(_ASKED.findall((_REPOSITORY / "requirements/run.in").read_text()))
    rows = (
        f"| {name} | {version} | {licence(name)} | {'yes' if asked & {name, name.replace('-', '_')} else 'no'} |\n"
        for name, version in pinned()
    )
    return _INTRODUCTION + "".join(rows)


def pinned() -> Iterator[tuple[str, str]]:
    """Every distribution that running needs, with its version."""
    for found in _PINNED.finditer((_REPOSITORY / "requirements/run.txt").read_text()):
        yield found[1], found[2]


def licence(name: str) -> str:
    """What a distribution says of its licence: the SPDX expression, else the classifiers, else the field."""
    said = metadata.metadata(name)
    classifiers = [str(it) for it in said.get_all("Classifier") or []]
    classified = [it.removeprefix(_CLASSIFIER) for it in classifiers if it.startswith(_CLASSIFIER)]
    short = [str(it) for it in said.get_all("License") or [] if len(str(it)) <= _LONGEST]
    expressions = [str(it) for it in said.get_all("License-Expression") or []]
    return " or ".join(expressions or classified or short) or "unknown"


if __name__ == "__main__":
    PAGE.write_text(page())
