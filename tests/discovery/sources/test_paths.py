from __future__ import annotations

import asyncio
import errno
import os
import random
import shutil
import socket
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest
import structlog

from agent.discovery.paths import Change, DirectoryWatch, Inotify, PathSource
from agent.discovery.sources import Emitted
from backends.base import Host, HostPath, PathChange
from tests.e2e import hermetic
from tests.wait import limit, until

CREATED, REMOVED, CHANGED = Change.CREATED, Change.REMOVED, Change.CHANGED


class Seen:
    """A running watch and what it told of, in order."""

    def __init__(self, scratch: Path) -> None:
        self.changes: list[tuple[Path, Change]] = []
        self.overflows = 0
        self.watch = DirectoryWatch(self._take, self._overflow)
        self._scratch = scratch
        self._wanted: frozenset[Path] = frozenset()
        self._sentinels = 0
        self._sentinel_seen = asyncio.Event()

    def _take(self, path: Path, change: Change) -> None:
        if path.parent == self._scratch:
            self._sentinel_seen.set()
        elif path != self._scratch:
            self.changes.append((path, change))

    def _overflow(self) -> None:
        self.overflows += 1

    def want(self, *directories: Path) -> None:
        self._wanted = frozenset(directories)
        self.watch.watch(self._wanted | {self._scratch})

    async def so_far(self) -> list[tuple[Path, Change]]:
        """All that was told since the last question; inotify keeps the order, so one last change ends it."""
        self._sentinel_seen.clear()
        self._sentinels += 1
        (self._scratch / str(self._sentinels)).mkdir()
        async with limit("the sentinel is seen", lambda: self.changes):
            await self._sentinel_seen.wait()
        changes, self.changes = self.changes, []
        return changes


@asynccontextmanager
async def watching(tmp_path: Path, *directories: Path) -> AsyncIterator[Seen]:
    scratch = tmp_path / "sentinels"
    scratch.mkdir()
    seen = Seen(scratch)
    seen.want(*directories)
    async with anyio.create_task_group() as tasks:
        await tasks.start(seen.watch.run)
        yield seen
        tasks.cancel_scope.cancel()


async def test_entries_that_come_change_and_go_are_told(tmp_path: Path) -> None:
    plugins = tmp_path / "plugins"
    plugins.mkdir()
    async with watching(tmp_path, plugins) as seen:
        assert await seen.so_far() == [(plugins, CREATED)]
        node = plugins / "kubelet.sock"
        node.touch()
        node.chmod(0o600)
        node.rename(plugins / "other")
        (plugins / "other").unlink()
        other = plugins / "other"
        assert await seen.so_far() == [
            (node, CREATED),
            (node, CHANGED),  # touch closes it after writing
            (node, CHANGED),
            (node, REMOVED),
            (other, CREATED),
            (other, REMOVED),
        ]


async def test_a_socket_bound_or_renamed_into_place_is_created(tmp_path: Path) -> None:
    async with watching(tmp_path, tmp_path) as seen:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(tmp_path / "a.sock"))
        (tmp_path / "a.sock").rename(tmp_path / "b.sock")
        told = await seen.so_far()
        assert (tmp_path / "a.sock", CREATED) in told
        assert (tmp_path / "b.sock", CREATED) in told


async def test_what_exists_when_it_is_first_wanted_is_told_as_one_change(tmp_path: Path) -> None:
    (tmp_path / "first").mkdir()
    (tmp_path / "second").mkdir()
    (tmp_path / "second" / "entry").touch()
    async with watching(tmp_path, tmp_path / "first") as seen:
        await seen.so_far()
        seen.want(tmp_path / "first", tmp_path / "second")
        assert await seen.so_far() == [(tmp_path / "second", CREATED)]


async def test_a_directory_that_appears_is_told_with_its_entries(tmp_path: Path) -> None:
    deep = tmp_path / "a" / "b" / "c"
    async with watching(tmp_path, deep) as seen:
        deep.mkdir(parents=True)
        (deep / "one").touch()
        told = await seen.so_far()
        assert told[:2] == [(deep, CREATED), (deep / "one", CREATED)]
        (deep / "two").touch()
        assert (deep / "two", CREATED) in await seen.so_far()


async def test_entries_on_the_way_are_not_told(tmp_path: Path) -> None:
    async with watching(tmp_path, tmp_path / "a" / "b") as seen:
        (tmp_path / "else").touch()
        (tmp_path / "a").mkdir()
        (tmp_path / "a" / "else").touch()
        (tmp_path / "a" / "b").touch()  # no directory
        assert await seen.so_far() == []
        (tmp_path / "a" / "b").unlink()
        (tmp_path / "a" / "b").mkdir()
        assert await seen.so_far() == [(tmp_path / "a" / "b", CREATED)]


async def test_a_directory_that_vanishes_is_told_once_and_found_again(tmp_path: Path) -> None:
    wanted = tmp_path / "a" / "b"
    wanted.mkdir(parents=True)
    (wanted / "one").touch()
    async with watching(tmp_path, wanted) as seen:
        await seen.so_far()
        shutil.rmtree(tmp_path / "a")
        told = await seen.so_far()
        assert [change for path, change in told if path == wanted] == [REMOVED]
        wanted.mkdir(parents=True)
        assert await seen.so_far() == [(wanted, CREATED)]


async def test_a_whole_tree_renamed_into_place_is_told(tmp_path: Path) -> None:
    made = tmp_path / "made"
    (made / "b").mkdir(parents=True)
    (made / "b" / "one").touch()
    wanted = tmp_path / "a" / "b"
    async with watching(tmp_path, wanted) as seen:
        made.rename(tmp_path / "a")
        assert await seen.so_far() == [(wanted, CREATED), (wanted / "one", CREATED)]


async def test_renaming_an_ancestor_takes_the_directory_away(tmp_path: Path) -> None:
    wanted = tmp_path / "a" / "b"
    wanted.mkdir(parents=True)
    async with watching(tmp_path, wanted) as seen:
        await seen.so_far()
        (tmp_path / "a").rename(tmp_path / "x")
        assert await seen.so_far() == [(wanted, REMOVED)]
        (tmp_path / "x" / "b" / "unseen").touch()
        assert await seen.so_far() == []
        (tmp_path / "x").rename(tmp_path / "a")
        assert await seen.so_far() == [(wanted, CREATED), (wanted / "unseen", CREATED)]


def replaced(wanted: Path) -> None:
    shutil.rmtree(wanted)
    (wanted / "one").mkdir(parents=True)


def away_for_a_while(wanted: Path) -> None:
    wanted.rename(wanted.with_name("b")).rename(wanted)


@pytest.mark.parametrize("happens", [replaced, away_for_a_while])
async def test_a_directory_that_was_not_there_all_the_time_between_two_looks_is_told_as_another(
    tmp_path: Path, happens: Callable[[Path], None]
) -> None:
    wanted = tmp_path / "a"
    (wanted / "one").mkdir(parents=True)
    async with watching(tmp_path, wanted) as seen:
        await seen.so_far()
        happens(wanted)
        told = [(path, change) for path, change in await seen.so_far() if (path, change) != (wanted / "one", REMOVED)]
        assert told == [(wanted, REMOVED), (wanted, CREATED), (wanted / "one", CREATED)]


async def test_a_directory_made_while_its_watch_is_being_made_is_not_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / "a" / "b"
    add_watch = Inotify.add_watch

    def make_first(self: Inotify, path: str, mask: int) -> int:
        if path == str(tmp_path):
            deep.mkdir(parents=True, exist_ok=True)
        return add_watch(self, path, mask)

    monkeypatch.setattr(Inotify, "add_watch", make_first)
    async with watching(tmp_path, deep) as seen:
        assert await seen.so_far() == [(deep, CREATED)]


async def test_a_symbolic_link_is_followed_wherever_it_comes_to_lead(tmp_path: Path) -> None:
    link, one, two = tmp_path / "link", tmp_path / "one", tmp_path / "deep" / "two"
    link.symlink_to("one")
    async with watching(tmp_path, link) as seen:
        assert await seen.so_far() == []
        one.mkdir()
        assert await seen.so_far() == [(link, CREATED)]
        (one / "entry").mkdir()
        assert await seen.so_far() == [(link / "entry", CREATED)]
        (tmp_path / "new").symlink_to(two)
        (tmp_path / "new").rename(link)
        assert await seen.so_far() == [(link, REMOVED)]
        two.mkdir(parents=True)
        (two / "entry").mkdir()
        assert (await seen.so_far())[:2] == [(link, CREATED), (link / "entry", CREATED)]


async def test_a_link_to_itself_is_a_directory_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("link")
    async with watching(tmp_path, tmp_path / "link") as seen:
        (tmp_path / "link").unlink()
        (tmp_path / "link").mkdir()
        assert await seen.so_far() == [(tmp_path / "link", CREATED)]


async def test_a_link_up_and_over_is_followed(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    (tmp_path / "a" / "link").symlink_to("../b/.")
    async with watching(tmp_path, tmp_path / "a" / "link") as seen:
        await seen.so_far()
        (tmp_path / "b" / "entry").mkdir()
        assert await seen.so_far() == [(tmp_path / "a" / "link" / "entry", CREATED)]


async def test_two_names_of_one_directory_are_both_told(tmp_path: Path) -> None:
    real, link = tmp_path / "real", tmp_path / "link"
    real.mkdir()
    link.symlink_to(real)
    async with watching(tmp_path, real, link) as seen:
        await seen.so_far()
        (real / "entry").mkdir()
        assert sorted(await seen.so_far(), key=str) == [(link / "entry", CREATED), (real / "entry", CREATED)]


async def test_what_is_no_longer_wanted_is_no_longer_told(tmp_path: Path) -> None:
    wanted, other = tmp_path / "a", tmp_path / "b"
    wanted.mkdir()
    other.mkdir()
    async with watching(tmp_path, wanted, other) as seen:
        await seen.so_far()
        seen.want(other)
        (wanted / "entry").mkdir()
        wanted.rename(tmp_path / "gone")
        (other / "entry").mkdir()
        assert await seen.so_far() == [(other / "entry", CREATED)]
        seen.want(wanted, other)
        assert await seen.so_far() == []


async def test_an_overflow_is_told_and_directories_that_came_meanwhile_are_found(tmp_path: Path) -> None:
    many, late = tmp_path / "many", tmp_path / "late"
    many.mkdir()
    one, other = many / "one", many / "other"
    one.touch()
    other.touch()
    limit = int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())
    async with watching(tmp_path, many, late) as seen:
        await seen.so_far()
        for number in range(limit + 1):  # the loop does not run meanwhile: nothing is read
            (one, other)[number % 2].chmod(0o600)  # in turns: the kernel joins equal events
        late.mkdir()
        (late / "entry").mkdir()
        await until(lambda: seen.overflows)
        told = await seen.so_far()
        assert [it for it in told if it[0].is_relative_to(late)] == [(late, CREATED), (late / "entry", CREATED)]
        assert seen.overflows == 1


async def test_random_changes_end_with_every_existing_entry_told(tmp_path: Path) -> None:
    """Follows a model: the entries it was told of are those that are there."""
    rng = random.Random(7)
    wanted = [tmp_path / "a" / "b", tmp_path / "x", tmp_path / "link" / "b"]
    entries: dict[Path, set[str]] = {directory: set() for directory in wanted}

    def believe(changes: Iterable[tuple[Path, Change]]) -> None:
        for path, change in changes:
            if change is CHANGED:
                continue
            if path in entries:
                entries[path].clear()
            if path.parent in entries:
                names = entries[path.parent]
                (names.add if change is CREATED else names.discard)(path.name)

    def act() -> None:
        somewhere = [tmp_path / name for name in ("a", "a/b", "x", "x/b", "link", "a/b/e", "x/b/f", "a/g")]
        one, other = rng.sample(somewhere, 2)
        kind = rng.randrange(5)
        try:
            if kind == 0:
                one.mkdir()
            elif kind == 1:
                one.rename(other)
            elif kind == 2:
                one.unlink() if one.is_symlink() or not one.is_dir() else shutil.rmtree(one)
            elif kind == 3:
                one.touch(exist_ok=False)
            else:
                (tmp_path / "link").symlink_to(rng.choice(["a", "x", "/nowhere"]))
        except OSError:
            pass  # this change was not possible now

    async with watching(tmp_path, *wanted) as seen:
        for _ in range(300):
            for _ in range(rng.randrange(1, 6)):
                act()
            believe(await seen.so_far())
            for directory, names in entries.items():
                assert names == ({e.name for e in directory.iterdir()} if directory.is_dir() else set())


async def test_a_directory_that_cannot_be_watched_is_told_once_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad, good = tmp_path / "bad", tmp_path / "good"
    bad.mkdir()
    good.mkdir()
    add_watch = Inotify.add_watch

    def refuse(self: Inotify, path: str, mask: int) -> int:
        if path == str(bad):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return add_watch(self, path, mask)

    monkeypatch.setattr(Inotify, "add_watch", refuse)
    with structlog.testing.capture_logs() as logs:
        async with watching(tmp_path, bad, good) as seen:
            seen.want(good, bad, tmp_path / "else")
            (good / "entry").mkdir()
            assert await seen.so_far() == [(good, CREATED), (good / "entry", CREATED)]
    assert logs == [
        {
            "event": "directory-unwatched",
            "log_level": "warning",
            "directory": str(bad),
            "reason": "No space left on device",
            "then": "it is looked at every 5 s; raise fs.inotify.max_user_watches",
        }
    ]


def test_an_unmounted_directory_is_told_as_another(tmp_path: Path) -> None:
    assert hermetic.call("tests.discovery.sources.paths_in_child:unmount", str(tmp_path)) == [
        [".", "created"],
        [".", "removed"],
        [".", "created"],
        ["below", "created"],
    ]


async def test_the_source_speaks_of_the_hosts_paths(tmp_path: Path) -> None:
    host = Host(root=tmp_path / "root", dev=tmp_path / "devices")
    (tmp_path / "devices" / "vfio").mkdir(parents=True)
    hints: asyncio.Queue[Emitted] = asyncio.Queue()
    source = PathSource(hints.put_nowait, host)
    source.watch(frozenset({HostPath("/dev/vfio"), HostPath("/opt/x")}))
    async with anyio.create_task_group() as tasks:
        await tasks.start(source.run)
        assert hints.get_nowait() == PathChange(HostPath("/dev/vfio"))
        async with limit("its hints"):
            (tmp_path / "devices" / "vfio" / "12").mkdir()
            assert await hints.get() == PathChange(HostPath("/dev/vfio/12"))
            (tmp_path / "root" / "opt" / "x").mkdir(parents=True)
            assert await hints.get() == PathChange(HostPath("/opt/x"))
        tasks.cancel_scope.cancel()
