"""Keeps notes of what to undo to hardware after a pod: one file for each piece, in a directory below /run.

A reboot ends the notes and what they are about.
"""

from __future__ import annotations

from typing import Final

from backends.base import Host, HostPath
from backends.linux import files

_MOST: Final = 8192  # bytes; a path has 4,096 at most (PATH_MAX)


class Notes:
    """The notes in one directory."""

    def __init__(self, host: Host, directory: HostPath) -> None:
        self._host, self._directory = host, directory

    def read(self, name: str) -> bytes | None:
        """The note about a piece of hardware; None if there is none.

        Raises:
            OSError: it cannot be read.
        """
        try:
            return files.read(self._host.local(self._directory / name), _MOST, follow=False)
        except FileNotFoundError:
            return None

    def write(self, name: str, data: bytes) -> None:
        """Write the note about a piece of hardware, in place of an earlier one.

        Raises:
            OSError: what was noted before is noted still.
        """
        self._host.local(self._directory).mkdir(mode=0o755, parents=True, exist_ok=True)
        files.replace(self._host.local(self._directory / name), data)

    def drop(self, name: str) -> None:
        """Remove the note about a piece of hardware.

        Raises:
            OSError: the note is there still.
        """
        self._host.local(self._directory / name).unlink(missing_ok=True)
