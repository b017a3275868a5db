"""Parts and their versions, work in slices, and what is made once for many."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Sequence

import anyio
import pytest
from msgspec.structs import replace

from agent.console.advice import of_device, told
from agent.console.http import app as viewers_module
from agent.console.http import page
from agent.console.http.app import SharedAnswer, Viewers
from agent.console.http.html import h
from agent.console.http.page import Picture
from agent.console.http.tiles import drawn, name
from agent.console.http.topology import tiles
from agent.console.views import Event, Histories, History, Period, Status
from agent.runtime import workers
from agent.runtime.workers import in_slices
from tests.console.fakes import GPU, FakeDaemon
from tests.console.http import nodes
from tests.wait import limit, pass_time, settled


class Eyes:
    """What a picture is drawn from."""

    def __init__(self, shown: Status) -> None:
        self.shown = shown
        self.happened: list[Event] = []
        self.known = Histories()

    async def look(self) -> Status:
        return self.shown

    async def recall(self) -> Sequence[Event]:
        return self.happened

    async def remember(self) -> Histories:
        return self.known

    def picture(self) -> Picture:
        return Picture(self.look, self.recall, self.remember)


async def test_only_what_changed_is_newer() -> None:
    eyes = Eyes(nodes.node(nodes.gpus()))
    picture = eyes.picture()
    await picture.refresh()
    assert picture.version == 1
    assert set(picture.since(0)) == set(picture.parts)
    await picture.refresh()
    assert (picture.version, picture.since(1)) == (1, {})
    eyes.shown = nodes.node(nodes.gpus(**nodes.FALLEN))
    await picture.refresh()
    fallen = next(name(tile) for tile in picture.tiles if tile.key == nodes.gpu(3).key)
    assert set(picture.since(1)) == {"verdict", "attention", "resources", fallen}


async def test_how_devices_were_makes_a_tile_another_only_when_one_changes_or_a_quarter_of_an_hour_has_passed() -> None:
    eyes = Eyes(nodes.node(nodes.gpus()))
    gpu = nodes.gpu(3).key
    eyes.known = Histories(nodes.UNCHANGED, (History(gpu, "nvidia.com/gpu", nodes.PAST),))
    picture = eyes.picture()
    await picture.refresh()
    (tile,) = (name(it) for it in picture.tiles if it.key == gpu)
    for later, changed in ((1, set[str]()), (100, set()), (101, {tile})):  # 100 s make a quarter full
        eyes.shown = replace(eyes.shown, now=nodes.NOW + later)
        longer = replace(nodes.PAST[-1], ends=nodes.NOW + later)
        eyes.known = Histories(nodes.UNCHANGED, (History(gpu, "nvidia.com/gpu", (*nodes.PAST[:-1], longer)),))
        version = picture.version
        await picture.refresh()
        assert set(picture.since(version)) == changed


def test_a_device_that_changed_all_the_time_has_a_strip_of_what_can_be_seen_of_it() -> None:
    (tile,) = tiles("a.b/c", (GPU,))
    begins = [nodes.NOW - 1800 + 18 * n for n in range(100)]
    states = [("Unhealthy" if n % 2 else "Healthy", ("a/b",) * (n % 3 == 0)) for n in range(100)]
    often = tuple(Period(it, it + 18, state, holders=by) for it, (state, by) in zip(begins, states, strict=True))
    html = str(drawn(tile, (Period(nodes.NOW - 86400, begins[0], "Healthy"), *often)))
    bars = re.findall(r'<a href="#(.*?)" tabindex="-1"><title>(\w+) from', html)
    assert 8 < len(bars) < 32
    assert (f"{name(tile)}-h-{int(begins[-1])}", "Unhealthy") in bars  # leads to the newest
    assert html.count("<li") == 20
    assert "and 81 changes before" in html


async def test_a_page_that_is_drawn_again_while_it_is_sent_is_whole() -> None:
    eyes = Eyes(nodes.node(nodes.gpus()))
    picture = eyes.picture()
    await picture.refresh()
    whole, pieces = "".join(page.document(picture)), page.document(picture)
    sent = next(pieces)
    eyes.shown = nodes.node()
    await picture.refresh()
    assert sent + "".join(pieces) == whole


async def test_a_tile_that_is_gone_is_no_part_any_more() -> None:
    eyes = Eyes(nodes.node(nodes.gpus()))
    picture = eyes.picture()
    await picture.refresh()
    eyes.shown = nodes.node()
    await picture.refresh()
    assert [part for part in picture.parts if part.startswith("d-")] == []
    assert "No device is offered" in picture.parts["devices"].html


async def test_a_section_comes_before_the_tiles_in_it() -> None:
    picture = Eyes(nodes.busy()).picture()
    await picture.refresh()
    parts = list(picture.parts)
    assert parts.index("devices") < min(n for n, part in enumerate(parts) if part.startswith("d-"))


# --- viewers ---


async def test_many_parts_come_in_several_messages_and_the_last_confirms_them() -> None:
    picture = Eyes(nodes.many(1000)).picture()
    await picture.refresh()
    viewers = Viewers(FakeDaemon(), picture, "assets")
    messages = viewers.messages("")
    assert (await anext(messages)).startswith(b"retry: 1000\nevent: hello\n")
    sent = [await anext(messages)]
    while not sent[-1].startswith(b"id: "):
        sent.append(await anext(messages))
    assert len(sent) > 10
    assert max(map(len, sent)) < 100_000
    assert sent[-1].startswith(f"id: {picture.run}-1\n".encode())
    await messages.aclose()
    assert viewers.number == 0


@pytest.mark.parametrize("seen", ["", "nonsense", "0-1", "{run}-x", "{run}--1", "\udcff-1"])
async def test_who_says_nonsense_of_what_it_has_is_sent_everything(seen: str) -> None:
    picture = Eyes(nodes.node(nodes.gpus())).picture()
    await picture.refresh()
    messages = Viewers(FakeDaemon(), picture, "assets").messages(seen.replace("{run}", picture.run))
    assert [(await anext(messages))[:6] for _ in range(2)] == [b"retry:", b"id: " + picture.run[:2].encode()]
    await messages.aclose()


async def test_what_is_drawn_for_who_loads_the_page_is_news_for_who_has_it_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for time, seconds in (("_COALESCE", 0.0), ("_POLL", 0.001), ("PING", 3600.0)):
        monkeypatch.setattr(viewers_module, time, seconds)
    eyes = Eyes(nodes.node(nodes.gpus()))
    picture = eyes.picture()
    viewers = Viewers(FakeDaemon(), picture, "assets")
    messages = viewers.messages("")
    await anext(messages)  # hello
    await viewers._look()
    assert b"-1\n" in await anext(messages)
    eyes.shown = nodes.node(nodes.gpus(**nodes.FALLEN))
    news = asyncio.create_task(anext(messages))
    await asyncio.sleep(0)
    await picture.refresh()
    await viewers._look()
    async with limit("the news comes"):
        assert b"-2\n" in await news
    await messages.aclose()


async def test_a_viewer_hears_from_us_though_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(viewers_module, "PING", 7200.0)
    picture = Eyes(nodes.node()).picture()
    await picture.refresh()
    messages = Viewers(FakeDaemon(), picture, "assets").messages("")
    await anext(messages), await anext(messages)  # hello, and all that there is
    ping = asyncio.create_task(anext(messages))
    for _ in range(2):
        await settled()
        assert not ping.done()
        pass_time(3600.0)
    async with limit("it comes"):
        assert (await ping).startswith(b"event: ping\n")
    await messages.aclose()


async def test_nothing_is_drawn_while_nobody_looks() -> None:
    daemon = FakeDaemon(shown=nodes.busy())
    eyes = Eyes(daemon.shown)
    picture = eyes.picture()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(Viewers(daemon, picture, "assets").run)
        await settled()
        assert picture.version == 0
        tasks.cancel_scope.cancel()


# --- slices ---


async def test_others_have_their_turn_during_long_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "SLICE", 0.0)
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    def pieces() -> Iterator[int]:
        yield from range(10)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(other)
        assert await in_slices(pieces()) == list(range(10))
        tasks.cancel_scope.cancel()
    assert turns == 10


# --- made once ---


async def test_who_asks_within_ten_times_what_it_took_shares_it() -> None:
    now, spent, made = 0.0, 0.0, 0

    async def make() -> int:
        nonlocal spent, made
        spent += 0.5
        made += 1
        return made

    fresh = SharedAnswer(make, clock=lambda: now, spent=lambda: spent)
    assert await fresh.get() == 1
    now += 4.9
    assert await fresh.get() == 1
    now += 0.1
    assert await fresh.get() == 2


async def test_what_was_made_while_the_process_stood_still_is_not_kept_for_ten_times_that() -> None:
    now, made = 0.0, 0

    async def make() -> int:
        nonlocal now, made
        now += 30.0
        made += 1
        return made

    fresh = SharedAnswer(make, clock=lambda: now, spent=lambda: 7.0)
    assert [await fresh.get(), await fresh.get()] == [1, 2]


async def test_who_asks_at_the_same_time_waits_for_the_same() -> None:
    made, go_on = 0, asyncio.Event()

    async def make() -> int:
        nonlocal made
        made += 1
        await go_on.wait()
        return made

    fresh = SharedAnswer(make, spent=lambda: 0.0)  # and it is not kept
    asking = [asyncio.create_task(fresh.get()) for _ in range(5)]
    await settled()
    go_on.set()
    assert await asyncio.gather(*asking) == [1] * 5


async def test_a_failure_is_not_kept() -> None:
    made = 0

    async def make() -> int:
        nonlocal made
        made += 1
        if made == 1:
            raise RuntimeError("not now")
        return made

    fresh = SharedAnswer(make)
    with pytest.raises(RuntimeError):
        await fresh.get()
    assert await fresh.get() == 2


def test_a_drained_tile_says_so_once() -> None:
    (drained,) = tiles("a.b/c", (replace(GPU, state="Unhealthy", reason="drained"),))
    (fallen,) = tiles("a.b/c", (replace(GPU, state="Unhealthy", reason="off-bus"),))
    assert ['class="reason"' in str(drawn(it)) for it in (drained, fallen)] == [False, True]


def test_an_opened_device_says_what_to_do_in_the_words_of_explain() -> None:
    for reason in ("xid-79", "drained", "port-down"):
        sick = replace(GPU, state="Unhealthy", reason=reason, message="So it is.", name="nvidia3")
        (tile,) = tiles("a.b/c", (sick,))
        advice = of_device(sick, "nvidia3")
        assert advice is not None
        for _, text in told(advice):
            assert h("i", text)[3:-4] in str(drawn(tile))


async def test_an_event_of_several_devices_calls_each_what_its_tile_does() -> None:
    eyes = Eyes(nodes.node(nodes.gpus()))
    picture = eyes.picture()
    await picture.refresh()
    one, two = [tile for tile in picture.tiles if tile.title != tile.key][:2]
    eyes.happened = [Event(1, nodes.NOW, "allocated", "nvidia.com/gpu", f"{one.key}, {two.key}", "", "", "", "")]
    await picture.refresh()
    assert f"{one.title}, {two.title}" in picture.parts["events"].html
