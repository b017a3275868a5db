"""A file and its links, really changed, and what inotify tells of it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from agent.discovery.paths import FileWatch
from tests.wait import limit, settled


class Told:
    """How often something was told, and what was told by now."""

    def __init__(self, file: Path, sentinel: Path) -> None:
        self._news = asyncio.Event()
        self._sentinel_seen = asyncio.Event()
        self.watch = FileWatch(file, self._news.set)
        self.sentinel = FileWatch(sentinel, self._sentinel_seen.set)
        self._path = sentinel

    async def changed(self) -> bool:
        """Whether anything was told since the last call. Another watch's event tells that the kernel has said all."""
        self._sentinel_seen.clear()
        self._path.touch()
        self._path.unlink()
        async with limit("the sentinel is seen"):
            await self._sentinel_seen.wait()
        await settled()  # each watch has a queue of its own
        if told := self._news.is_set():
            self._news.clear()
            self.watch.follow()
        return told


@asynccontextmanager
async def watched(file: Path, tmp_path: Path) -> AsyncIterator[Told]:
    told = Told(file, tmp_path / "sentinel")
    async with anyio.create_task_group() as tasks:
        await tasks.start(told.watch.run)
        await tasks.start(told.sentinel.run)
        await told.changed()  # the directories that are there
        yield told
        tasks.cancel_scope.cancel()


def replace_it(file: Path) -> None:
    fresh = file.with_name("fresh")
    fresh.write_text("more")
    fresh.rename(file)


@pytest.mark.parametrize(
    "change",
    [lambda f: f.write_text("other"), replace_it, Path.unlink, lambda f: f.rename(f.with_name("aside"))],
    ids=["written", "renamed over", "removed", "renamed"],
)
async def test_whatever_becomes_of_a_file_is_told(tmp_path: Path, change: Callable[[Path], None]) -> None:
    file = tmp_path / "etc" / "file"
    file.parent.mkdir()
    file.write_text("text")
    async with watched(file, tmp_path) as told:
        assert not await told.changed()
        change(file)
        assert await told.changed()
        (file.parent / "another").write_text("text")
        assert not await told.changed()


async def test_a_file_that_is_not_there_nor_its_directory_is_told_when_it_comes(tmp_path: Path) -> None:
    file = tmp_path / "a" / "b" / "file"
    async with watched(file, tmp_path) as told:
        (tmp_path / "a" / "b").mkdir(parents=True)
        await told.changed()
        file.write_text("text")
        assert await told.changed()
        (tmp_path / "a").rename(tmp_path / "aside")
        assert await told.changed()
        (tmp_path / "aside").rename(tmp_path / "a")
        assert await told.changed()


async def test_links_on_the_way_are_followed_wherever_they_lead_then(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    (tmp_path / "mount").mkdir()
    link, file = tmp_path / "mount" / "data", tmp_path / "mount" / "file"
    link.symlink_to("../one")
    file.symlink_to("data/file")
    async with watched(file, tmp_path) as told:
        (tmp_path / "two" / "file").write_text("two again")
        assert not await told.changed()
        fresh = link.with_name("data_tmp")
        fresh.symlink_to("../two")
        fresh.rename(link)
        assert await told.changed()
        (tmp_path / "two" / "file").write_text("two once more")
        assert await told.changed()
        (tmp_path / "one" / "file").write_text("one again")
        assert not await told.changed()


def test_what_is_older_than_a_time_has_not_changed_since(tmp_path: Path) -> None:
    target, file = tmp_path / "target", tmp_path / "file"
    watch = FileWatch(file, lambda: None)
    assert not watch.changed_since(0.0)
    target.write_text("text")
    written = target.stat().st_ctime
    assert not FileWatch(target, lambda: None).changed_since(written)
    while os.stat(tmp_path).st_ctime <= written:  # noqa: PTH116  # until the file system's clock has ticked
        (tmp_path / "tick").touch()
        (tmp_path / "tick").unlink()
    file.symlink_to(target)
    assert watch.changed_since(written)
    assert not watch.changed_since(file.lstat().st_ctime)
