"""What is served, over a real socket."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families
from structlog.testing import capture_logs

from agent.console.http import page
from agent.console.views import Resource, Status
from tests.console.fakes import FakeDaemon
from tests.console.http import nodes
from tests.console.http.serving import Answer, Served, served
from tests.wait import limit

_HANDLERS = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}  # before any is served


@pytest.fixture
async def face(tmp_path: Path) -> AsyncIterator[Served]:
    async with served(tmp_path, FakeDaemon(shown=nodes.busy(), events=list(nodes.EVENTS))) as it:
        yield it


async def test_metrics_are_in_prometheus_text_format(face: Served) -> None:
    answer = await face.get("/metrics")
    assert (answer.status, answer.headers["content-type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
    names = {family.name for family in text_string_to_metric_families(answer.body)}
    assert {"fairlead_build_info", "fairlead_devices", "fairlead_allocations"} <= names


async def test_the_status_is_the_same_document_as_the_commands_print(face: Served) -> None:
    answer = await face.get("/status.json")
    assert answer.headers["content-type"] == "application/json"
    assert answer.body == msgspec.json.encode(nodes.busy()).decode()


async def test_a_name_that_is_no_text_spoils_no_status(face: Served) -> None:
    face.daemon.shown = nodes.node(Resource("a.b/c", "chardev", False, False, "cannot read '/dev/\udcff'"))
    assert json.loads((await face.get("/status.json")).body)["resources"][0]["complaint"] == "cannot read '/dev/\udcff'"
    assert (await face.get("/metrics")).status == (await face.get("/")).status == 200


async def test_healthz_says_what_the_watchdog_says(face: Served) -> None:
    assert ((await face.get("/healthz")).status, (await face.get("/healthz")).body) == (200, "ok\n")
    face.health.problem = "uevents has shown no sign of life for 40 s"
    answer = await face.get("/healthz")
    assert (answer.status, answer.body) == (503, "uevents has shown no sign of life for 40 s\n")


async def test_readyz_names_what_is_not_served_and_why(face: Served) -> None:
    answer = await face.get("/readyz")
    assert answer.status == 503
    assert answer.body == "example.com/camera is not registered: the kubelet refused: Unimplemented\n"


async def test_a_sick_device_makes_nothing_unready_or_unhealthy(tmp_path: Path) -> None:
    async with served(tmp_path, FakeDaemon(shown=nodes.node(nodes.gpus(**nodes.FALLEN)))) as face:
        assert [(await face.get(path)).status for path in ("/readyz", "/healthz")] == [200, 200]


async def test_a_resource_that_retires_is_not_missed(tmp_path: Path) -> None:
    retiring = replace(nodes.kvm(), backend="", registered=False, streaming=False)
    async with served(tmp_path, FakeDaemon(shown=nodes.node(retiring))) as face:
        assert (await face.get("/readyz")).body == "ready\n"


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT"])
async def test_it_only_reads(face: Served, method: str) -> None:
    answer = await face.get("/metrics", method)
    assert answer.status == 405
    assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize("path", ["/", "/metrics", "/status.json", "/healthz", "/readyz", "/events"])
async def test_head_has_no_body_and_nothing_may_embed_or_keep_an_answer(face: Served, path: str) -> None:
    answer = await face.get(path, "HEAD")
    assert answer.body == ""
    assert answer.headers["cache-control"] == "no-store"
    assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert "server" not in answer.headers


@pytest.mark.parametrize("path", ["/etc/passwd", "/../../etc/passwd", "/%2e%2e/proc/self/environ", "/metrics/"])
async def test_there_is_nothing_else(face: Served, path: str) -> None:
    assert (await face.get(path)).status == 404


async def test_nothing_of_the_environment_is_told(face: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_OF_OURS", "tell-nobody")
    for path in ("/", "/metrics", "/status.json", "/healthz", "/readyz", "/nothing"):
        assert "tell-nobody" not in str(await face.get(path))


async def test_the_page_is_whole_without_a_script(face: Served) -> None:
    answer = await face.get("/")
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    for text in ("1 of 137 devices is unhealthy", "xid-79", "NUMA node 1", "notebook-7d9f", "37 of 1,000 in use"):
        assert text in answer.body


async def test_the_policy_allows_this_style_and_this_script_and_nothing_inline(face: Served) -> None:
    answer = await face.get("/")
    assert answer.headers["content-security-policy"] == page.POLICY
    assert "unsafe" not in page.POLICY
    assert not re.search(r"<[^>]*\s(on\w+|style)=", answer.body.partition("<body")[2])
    assert not re.search(r"(src|href)=\"?(https?:)?//", answer.body)


async def test_what_a_device_is_called_is_text_and_no_html(tmp_path: Path) -> None:
    name = "<script>alert(1)</script>\"'&"
    device = nodes.gpu(0, key=name, ids=(name,), reason=name, message=name, state="Unhealthy")
    shown = nodes.node(Resource("a.b/c", "gpu", True, True, devices=(device,)))
    async with served(tmp_path, FakeDaemon(shown=shown)) as face:
        body = (await face.get("/")).body
    assert "<script>alert" not in body
    assert "&lt;script&gt;alert(1)&lt;/script&gt;&quot;&#x27;&amp;" in body


async def test_a_failure_of_ours_is_told_once_and_costs_one_answer(face: Served) -> None:
    async def fail() -> Status:
        raise RuntimeError("no status today")

    face.daemon.status = fail  # type: ignore[method-assign]
    with capture_logs() as said:
        answers = [await face.get("/readyz") for _ in range(3)]
    assert [answer.status for answer in answers] == [500, 500, 500]
    assert "today" not in str(answers)
    assert [(line["event"], line["path"]) for line in said] == [("http-failed", "/readyz")]
    (shown,) = face.problems.lasting()
    assert (
        shown.sentence
        == "an answer over HTTP fails by an error of Fairlead's: /readyz: RuntimeError('no status today')"
    )
    assert (await face.get("/healthz")).status == 200


async def _news(reader: asyncio.StreamReader) -> dict[str, str]:
    """The parts of the next message that completes a version."""
    async with limit("a version is complete"):
        await reader.readuntil(b"\nid: ")
        await reader.readuntil(b"data: ")
        parts: dict[str, str] = json.loads(await reader.readuntil(b"\n"))
        return parts


async def test_events_come_as_they_happen(face: Served) -> None:
    reader, writer = await face.connect()
    writer.write(b"GET /events HTTP/1.1\r\nHost: node\r\n\r\n")
    await _news(reader)
    face.daemon.shown = nodes.node(nodes.gpus())
    face.daemon.news.put_nowait(nodes.EVENTS[0])
    assert "All is well" in (await _news(reader))["verdict"]


async def test_who_comes_back_is_sent_only_what_it_has_not_got(face: Served) -> None:
    seen = re.search(r'data-seen="([^"]+)"', (await face.get("/")).body)
    assert seen
    reader, writer = await face.connect()
    writer.write(f"GET /events?seen={seen[1]} HTTP/1.1\r\nHost: node\r\n\r\n".encode())
    await reader.readuntil(b"event: hello\n")
    face.daemon.shown = nodes.node(*nodes.busy().resources, problems=())
    face.daemon.news.put_nowait(nodes.EVENTS[0])
    assert (await _news(reader)).keys() == {"attention"}


async def test_signals_stay_the_daemon_s(face: Served) -> None:
    assert (await face.get("/healthz")).status == 200
    assert {number: signal.getsignal(number) for number in _HANDLERS} == _HANDLERS


async def test_the_end_cuts_everybody_off_and_removes_the_socket(tmp_path: Path) -> None:
    async with served(tmp_path, FakeDaemon()) as face:
        reader, writer = await face.connect()
        writer.write(b"GET /events HTTP/1.1\r\nHost: node\r\n\r\n")
        await reader.readuntil(b"event: hello\n")
    async with limit("it is cut off"):
        with suppress(ConnectionError):
            await reader.read(-1)
    assert os.listdir(tmp_path) == []  # noqa: PTH208


def test_an_answer_is_read_as_it_was_sent() -> None:
    assert Answer.parse(b"HTTP/1.1 200 OK\r\nA: b\r\n\r\nc") == Answer(200, {"a": "b"}, "c")
