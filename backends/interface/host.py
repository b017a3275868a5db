"""The host's paths, and where this process sees them; the only place that spells `/sys`, `/dev`, `/proc`, `/run`."""

from __future__ import annotations

from pathlib import Path

from msgspec import Struct


class HostPath(Struct, frozen=True, order=True, gc=False):
    """An absolute path as the host and the kubelet see it.

    It is deliberately no `os.PathLike`: to open it, ask `Host.local` where this process sees it.
    """

    text: str
    """Starts with `/`, which is checked where a backend hands it on."""

    def __str__(self) -> str:
        return self.text

    def __truediv__(self, below: str) -> HostPath:
        return HostPath(f"{self.text.rstrip('/')}/{below}")

    @property
    def name(self) -> str:
        """The last component."""
        return self.text.rstrip("/").rpartition("/")[2]

    @property
    def parent(self) -> HostPath:
        """The directory it lies in; `/` is its own parent."""
        return HostPath(self.text.rstrip("/").rpartition("/")[0] or "/")


class Host(Struct, frozen=True):
    """Where this process sees the host's trees."""

    root: Path = Path("/")
    """Where everything is seen that is in none of the trees below."""
    sys: Path = Path("/sys")
    """Where the host's /sys is seen."""
    dev: Path = Path("/dev")
    """Where the host's /dev is seen."""
    proc: Path = Path("/proc")
    """Where the host's /proc is seen."""
    run: Path = Path("/run")
    """Where the host's /run is seen: udev's database, sockets."""

    @classmethod
    def below(cls, root: Path) -> Host:
        """A host all of whose trees lie below one directory: a pretend one, or another's root."""
        return cls(root, root / "sys", root / "dev", root / "proc", root / "run")

    def _trees(self) -> tuple[tuple[str, Path], ...]:
        return (("/sys", self.sys), ("/dev", self.dev), ("/proc", self.proc), ("/run", self.run))

    def local(self, path: HostPath) -> Path:
        """Where this process sees `path`."""
        return Path(self.spell(path))

    def spell(self, path: HostPath) -> str:
        """The same as text, where thousands are asked for: it takes a tenth of the time."""
        for prefix, tree in self._trees():
            if path.text == prefix or path.text.startswith(prefix + "/"):
                return f"{tree}{path.text[len(prefix) :]}"
        return f"{str(self.root).rstrip('/')}/{path.text.lstrip('/')}"

    def host(self, path: Path) -> HostPath:
        """The host's name for what this process sees as `path`.

        Raises:
            ValueError: `path` is in none of the host's trees.
        """
        for prefix, tree in self._trees():
            if path.is_relative_to(tree):
                below = path.relative_to(tree).as_posix()
                return HostPath(prefix if below == "." else f"{prefix}/{below}")
        return HostPath("/" + path.relative_to(self.root).as_posix())
