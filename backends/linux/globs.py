"""Globs over the host's /dev, or all its files: which paths a glob takes, and which exist now.

As in a shell, `*`, `?` and `[…]` never take a `/`, nor a dot at the start of a name. Names that cannot be printed
are passed over: they could not be an ID.
"""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Callable, Iterator

from backends.base import Host, HostPath
from backends.errors import not_short, reason_of
from backends.interface.patterns import pattern as compiled
from backends.linux.nodes import NoNodeError, directory

_WILD = re.compile(r"[*?\[]")


def is_glob(path: str) -> bool:
    """Whether the path has a wildcard."""
    return _WILD.search(path) is not None


class Glob:
    """One pattern, an absolute path with wildcards in some of its components.

    It matches what lies below /dev; with `files`, files and directories anywhere on the host; with `pattern`, only paths in
    which the regular expression finds something, below /dev.

    Raises:
        PatternError: the regular expression is none, or needs more than `backends.interface.patterns` has.
    """

    __slots__ = ("_files", "_parts", "_pattern", "deep", "fixed", "prefix", "text")

    def __init__(self, text: str, *, files: bool = False, pattern: str | None = None) -> None:
        self.text = text
        self._files = files
        self._pattern = compiled(pattern) if pattern is not None else None
        parts = text.split("/")
        first = next(n for n, part in enumerate(parts) if is_glob(part))
        self.fixed = HostPath("/".join(parts[:first]) or "/")
        """The deepest directory without a wildcard."""
        self.deep = first < len(parts) - 1
        """Whether there are wildcards in its directories."""
        self.prefix = _WILD.split(text, maxsplit=1)[0]
        """All before the first wildcard: every path that it takes starts with that."""
        self._parts = tuple(_component(part) for part in parts)

    def takes(self, path: str) -> bool:
        """Whether the glob matches this path."""
        return (
            path.startswith(self.prefix)
            and path.isprintable()
            and len(parts := path.split("/")) == len(self._parts)
            and all(fits(part) for fits, part in zip(self._parts, parts, strict=True))
            and self._chooses(path)
        )

    def leads_through(self, path: str) -> bool:
        """Whether this path could be a directory on the way to a match."""
        if not (path.startswith(self.prefix) or self.prefix.startswith(path)) or not path.isprintable():
            return False
        parts = path.rstrip("/").split("/")
        return len(parts) < len(self._parts) and all(fits(part) for fits, part in zip(self._parts, parts, strict=False))

    def matches(self, host: Host, pass_over: Callable[[str], None] = lambda _: None) -> Iterator[str]:
        """The paths that match now, in order, directories among them; `pass_over` is told of those that cannot be printed.

        It also yields directories on the way that match a wildcard or cannot be listed; `takes` tells them apart.
        """
        parts = self._parts[len(self.fixed.text.rstrip("/").split("/")) :]
        yield from self._below(host, self.fixed, parts, pass_over, wild=False)

    def cannot_list(self, host: Host, path: HostPath) -> str | None:
        """Why what lies on the way cannot be listed; None if it can, or is no directory."""
        try:
            _names(host, path, anywhere=self._files)
        except NoNodeError as error:
            return error.sentence
        except OSError as error:
            return f"{path} cannot be listed: {reason_of(error)}"
        return None

    def _below(
        self,
        host: Host,
        path: HostPath,
        parts: tuple[Callable[[str], bool], ...],
        pass_over: Callable[[str], None],
        *,
        wild: bool,
    ) -> Iterator[str]:
        try:
            names = _names(host, path, anywhere=self._files)
        except (NoNodeError, OSError):
            yield path.text
            return
        if names is None:
            return
        if wild:
            yield path.text
        fits, *rest = parts
        for name in sorted(filter(fits, names)):
            text = (path / name).text
            if not rest and not self._chooses(text):
                continue
            if not name.isprintable():
                pass_over(text)
            elif rest:
                yield from self._below(host, path / name, tuple(rest), pass_over, wild=True)
            else:
                yield text

    def _chooses(self, path: str) -> bool:
        return self._pattern is None or self._pattern.is_in(path.removeprefix("/dev/"))


def _component(part: str) -> Callable[[str], bool]:
    if not is_glob(part):
        return part.__eq__
    match = re.compile(fnmatch.translate(part)).match
    hidden = part.startswith(".")
    return lambda name: match(name) is not None and (hidden or not name.startswith("."))


def _names(host: Host, path: HostPath, *, anywhere: bool) -> list[str] | None:
    """The names in a directory; None if there is no such directory."""
    if (real := directory(host, path, anywhere=anywhere)) is None:
        return None
    try:
        return os.listdir(host.local(real))  # noqa: PTH208  # names are all we want
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise not_short(error) from None
