"""The doctor asks the API server itself whether policies bind the pod's token, by what they must refuse."""

from __future__ import annotations

import pytest

from agent.cli.doctor import _policies
from agent.config import Config
from agent.config.file import KubernetesConfig
from agent.console.doctor import Level
from agent.kubernetes.identity import Identity
from tests.apiserver import NODE, TOKEN, ApiServer

BOTH = KubernetesConfig(events=True, condition=True)
EVENTS, STATUS = "Events about any object", "all of this Node's status and its labels"


async def found(config: KubernetesConfig) -> tuple[Level, str]:
    (finding,) = await _policies(Config(kubernetes=config))
    return finding.level, finding.found


@pytest.fixture
def in_a_pod(monkeypatch: pytest.MonkeyPatch) -> ApiServer:
    server = ApiServer()
    monkeypatch.setenv("NODE_NAME", NODE)
    monkeypatch.setattr("agent.kubernetes.identity.read", lambda kubeconfig: Identity(server.url, token=TOKEN))
    return server


async def test_policies_that_bind_nobody_are_found(in_a_pod: ApiServer) -> None:
    in_a_pod.has_policies = False
    async with in_a_pod.running():
        level, sentence = await found(BOTH)
        assert (level, f"{EVENTS} and {STATUS} can be written" in sentence) == (Level.WARNING, True)
        level, sentence = await found(KubernetesConfig(condition=True))
        assert (level, EVENTS in sentence, STATUS in sentence) == (Level.WARNING, False, True)
    assert all(it.endswith("?dryRun=All") for it in in_a_pod.requests)


async def test_policies_that_refuse_are_well(in_a_pod: ApiServer) -> None:
    async with in_a_pod.running():
        level, sentence = await found(BOTH)
    assert (level, "bind this pod's token" in sentence) == (Level.FINE, True)
    assert [it.split()[0] for it in in_a_pod.requests] == ["POST", "PATCH"]


@pytest.mark.parametrize("status", [401, 500])
async def test_what_cannot_be_asked_is_not_known(in_a_pod: ApiServer, status: int) -> None:
    in_a_pod.refuses = {"POST": status}
    async with in_a_pod.running():
        level, sentence = await found(BOTH)
    assert (level, f"is not known: the API server refuses it ({status})" in sentence) == (Level.FINE, True)


async def test_outside_a_pod_there_is_no_token_to_try(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    assert (await found(BOTH))[0] is Level.FINE


async def test_where_nothing_is_written_nothing_is_asked(in_a_pod: ApiServer) -> None:
    async with in_a_pod.running():
        for config in (KubernetesConfig(), KubernetesConfig(drain_annotation=True)):
            assert await _policies(Config(kubernetes=config)) == []
    assert in_a_pod.requests == []
