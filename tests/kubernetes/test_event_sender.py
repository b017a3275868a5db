from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from agent.kubernetes.events import BURST, REFILL, EventSender, Notice, Subject, about_node
from agent.runtime.problems import Problems
from tests.kubernetes.fakes import FakeApi
from tests.wait import pass_time, settled

NODE = about_node("worker-1")


def notice(device: str, subject: Subject = NODE, message: str = "it failed") -> Notice:
    return Notice(subject, "DeviceUnhealthy", device, message, is_warning=True)


class Sending:
    def __init__(self) -> None:
        self.problems, self.api = Problems(), FakeApi()
        refused = self.problems.trouble("kubernetes", "an Event is not taken", "kubernetes-event-refused")
        self.sender = EventSender("worker-1", refused, clock=self.now, wall=lambda: 1_800_000_000.0)

    @staticmethod
    def now() -> float:
        return asyncio.get_running_loop().time()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.sender.run(self.api))
        yield
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def tell(self, *those: Notice) -> None:
        self.sender.tell(those)
        await settled()


@pytest.fixture
def sending() -> Sending:
    return Sending()


async def test_of_10_000_devices_that_fail_at_once_the_burst_is_told_and_the_rest_slowly(sending: Sending) -> None:
    async with sending.running():
        await sending.tell(*(notice(f"gpu-{n}") for n in range(10_000)))
        assert len(sending.api.calls) == BURST
        pass_time(REFILL)
        await settled()
        assert len(sending.api.calls) == BURST + 1


async def test_the_same_again_is_written_into_the_event_that_is_there(sending: Sending) -> None:
    async with sending.running():
        await sending.tell(notice("gpu-0"))
        await sending.tell(notice("gpu-0", message="it failed otherwise"))
        pass_time(3001)  # the API server may have forgotten it
        await sending.tell(notice("gpu-0"))
    (method, path, made), (again, where, changed), (anew, _, last) = sending.api.calls
    assert (method, again, anew) == ("POST", "PATCH", "POST")
    assert where == f"{path}/{made['metadata']['name']}"
    assert (changed["count"], changed["message"]) == (2, "it failed otherwise")
    assert last["count"] == 1
    assert last["metadata"]["name"] != made["metadata"]["name"]


async def test_the_event_of_a_pod_with_the_longest_name_has_a_name_that_kubernetes_takes(sending: Sending) -> None:
    async with sending.running():
        await sending.tell(notice("gpu-0", Subject("Pod", "a" * 199 + "-" + "b" * 53, "u-1", "ml")))
    name = sending.api.of("POST")[0]["metadata"]["name"]
    assert len(name) <= 253
    assert re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*", name)


async def test_an_event_that_somebody_removed_is_made_anew(sending: Sending) -> None:
    async with sending.running():
        await sending.tell(notice("gpu-0"))
        sending.api.refuses = lambda method, path: 404 if method == "PATCH" else None
        await sending.tell(notice("gpu-0"))
    assert [method for method, _, _ in sending.api.calls] == ["POST", "POST"]


async def test_a_namespace_that_takes_no_event_keeps_no_other_waiting_and_is_a_problem(sending: Sending) -> None:
    ending = Subject("Pod", "trainer", "u-1", "ending")
    sending.api.refuses = lambda method, path: 403 if "/ending/" in path else None
    async with sending.running():
        await sending.tell(notice("gpu-0", ending))
        assert [it.sentence for it in sending.problems.lasting()] == ["an Event is not taken: refused with 403"]
        await sending.tell(notice("gpu-1"))
    assert [it["involvedObject"]["kind"] for it in sending.api.of("POST")] == ["Node"]
    assert sending.problems.lasting() == []


@pytest.mark.parametrize("status", [0, 429, 503])
async def test_what_is_not_taken_now_is_sent_later_as_one_event(sending: Sending, status: int) -> None:
    sending.api.refuses = lambda method, path: status
    async with sending.running():
        await sending.tell(notice("gpu-0"), notice("gpu-1"))
        sending.sender.tell([notice("gpu-0", message="again")])
        sending.api.refuses = lambda method, path: None
        pass_time(200)
        await settled()
    assert {it["message"]: it["count"] for it in sending.api.of("POST")} == {"it failed": 1, "again": 2}
