from __future__ import annotations

import ssl
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import cast

import pytest

from agent.kubernetes.api import ApiError
from agent.kubernetes.client import ApiClient
from agent.kubernetes.identity import Identity
from agent.kubernetes.own_node import Devices, DrainAnnotation
from agent.runtime.problems import Problems
from agent.runtime.workers import Workers
from tests.apiserver import NODE, TOKEN, ApiServer
from tests.wait import at_once

PATH = f"/api/v1/nodes/{NODE}"
WATCH = f"/api/v1/nodes?fieldSelector=metadata.name%3D{NODE}&watch=true"


@pytest.fixture
async def server() -> AsyncIterator[ApiServer]:
    async with ApiServer().running() as server:
        yield server


@pytest.fixture
def workers() -> Iterator[Workers]:
    workers = Workers("kubernetes", limit=2)
    yield workers
    workers.close()


class Caller:
    """A client whose time and identity a test sets."""

    def __init__(self, workers: Workers, identity: Identity) -> None:
        self.now = 1000.0
        self.identity = identity
        self.problems = Problems(lambda: self.now)
        away = self.problems.trouble("kubernetes", "the API server is away", "kubernetes-away")
        self.api = ApiClient(lambda: self.identity, workers, away, lambda: self.now)

    def sentences(self) -> list[str]:
        return [it.sentence for it in self.problems.lasting()]


Make = Callable[[Identity], Caller]


@pytest.fixture
async def make(workers: Workers) -> AsyncIterator[Make]:
    made: list[Caller] = []

    def make(identity: Identity) -> Caller:
        made.append(Caller(workers, identity))
        return made[-1]

    yield make
    for one in made:
        await one.api.close()


async def test_a_server_that_hangs_costs_a_deadline_and_is_a_problem_until_it_answers(
    make: Make, server: ApiServer
) -> None:
    caller = make(Identity(server.url, token=TOKEN))
    server.hangs = True
    with pytest.raises(ApiError, match="does not answer within 10 s") as error:
        await at_once(caller.api.call("GET", PATH))
    assert not error.value.is_final
    assert caller.sentences() == [f"the API server is away: {server.url}: it does not answer within 10 s"]
    server.hangs = False
    await caller.api.call("GET", PATH)
    assert caller.sentences() == []


async def test_a_watch_that_does_not_begin_costs_a_deadline_too(make: Make, server: ApiServer) -> None:
    caller = make(Identity(server.url, token=TOKEN))
    server.hangs = True
    with pytest.raises(ApiError, match="does not answer within 10 s"):
        await at_once(caller.api.watch(WATCH, "application/json", lambda _: None))
    assert len(caller.sentences()) == 1


async def test_a_watch_of_which_nobody_speaks_any_more_is_given_up(make: Make, server: ApiServer) -> None:
    caller, lines = make(Identity(server.url, token=TOKEN)), list[bytes]()
    await at_once(caller.api.watch(WATCH, "application/json", lines.append))
    assert len(lines) == 1
    assert caller.sentences() == []


async def test_a_refusal_says_what_the_server_says_and_that_it_is_there(make: Make, server: ApiServer) -> None:
    caller = make(Identity(server.url, token=TOKEN))
    server.refuses["GET"] = 403
    with pytest.raises(ApiError, match=r"refuses it \(403\): worker-1 is forbidden to GET") as error:
        await caller.api.call("GET", PATH)
    assert error.value.is_final
    assert caller.sentences() == []


async def test_a_token_that_was_exchanged_is_taken_up_within_a_minute_and_at_once_when_the_old_one_is_refused(
    make: Make, server: ApiServer
) -> None:
    caller = make(Identity(server.url, token=TOKEN))
    await caller.api.call("GET", PATH)
    server.token = "another"
    caller.identity = Identity(server.url, token="another")
    with pytest.raises(ApiError, match="401") as error:
        await caller.api.call("GET", PATH)
    assert not error.value.is_final
    await caller.api.call("GET", PATH)
    server.token = "third"
    caller.identity = Identity(server.url, token="third")
    caller.now += 60.0
    await caller.api.call("GET", PATH)


async def test_a_proxy_of_the_environment_is_not_asked(
    make: Make, server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    caller = make(Identity(server.url, token=TOKEN))
    assert NODE.encode() in await caller.api.call("GET", PATH)


# --- TLS ---


class Authority:
    """Certificates of our own."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._openssl("req", "-x509", "-subj", "/CN=ca", "-keyout", "ca.key", "-out", "ca.crt")
        self.certificate = (directory / "ca.crt").read_bytes()

    def _openssl(self, what: str, *arguments: str) -> None:
        key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")
        subprocess.run(["openssl", what, *key, *arguments], cwd=self._directory, check=True, capture_output=True)

    def issue(self, name: str) -> tuple[Path, Path]:
        """A certificate for 127.0.0.1, and its key."""
        self._openssl(
            "req", "-x509", "-CA", "ca.crt", "-CAkey", "ca.key", "-subj", f"/CN={name}",
            "-addext", "subjectAltName=IP:127.0.0.1", "-addext", "basicConstraints=critical,CA:false",
            "-keyout", f"{name}.key", "-out", f"{name}.crt",
        )  # fmt: skip
        return self._directory / f"{name}.crt", self._directory / f"{name}.key"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.mark.needs("openssl 3")
async def test_over_tls_both_sides_show_who_they_are(make: Make, authority: Authority) -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cadata=authority.certificate.decode())
    context.verify_mode = ssl.CERT_REQUIRED
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT  # this authority is as plain as those of older clusters
    context.load_cert_chain(*authority.issue("server"))
    certificate, key = (file.read_bytes() for file in authority.issue("node"))
    async with ApiServer(context).running() as server:
        identity = partial(Identity, server.url, token=TOKEN, certificate=certificate, key=key)
        assert NODE.encode() in await make(identity(authority=authority.certificate)).api.call("GET", PATH)
        stranger = make(identity())
        with pytest.raises(ApiError, match="CERTIFICATE_VERIFY_FAILED"):
            await stranger.api.call("GET", PATH)
        assert NODE.encode() in await make(identity(is_verified=False)).api.call("GET", PATH)


@pytest.mark.parametrize(
    "page",
    [b"<html>please log in</html>", b"\xff\xfe", b"[]", b"null", b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}"],
    ids=["HTML", "no text", "a list", "null", "deep"],
)
async def test_what_a_proxy_answers_in_the_place_of_the_api_server_is_no_answer(
    make: Make, server: ApiServer, page: bytes
) -> None:
    caller, server.page = make(Identity(server.url, token=TOKEN)), page
    problems = Problems()
    unread = DrainAnnotation(NODE, cast("Devices", None), lambda _: None, problems)
    for method in ("GET", "POST", "PATCH"):
        with pytest.raises(ApiError, match=r"makes no sense \(200\)") as error:
            await caller.api.call(method, PATH, {})
        assert error.value.status == 200
        assert not error.value.is_final
    with pytest.raises(ApiError, match="makes no sense"):
        await caller.api.watch(WATCH, "application/json", unread._take)
    server.page = b""
    await caller.api.call("GET", PATH)
