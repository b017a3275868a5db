from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import fields, replace

from agent.config import AgentConfig, Config, Difference, compare
from agent.config.file import APPLIED_AT_ONCE, HttpConfig, KubernetesConfig
from agent.config.typed import Listen
from backends.base import Host, Resource, ResourceSpec, Seconds
from tests.config.fakes import StubOptions

A, B, C = "a.example/x", "b.example/x", "c.example/x"


def resource(name: str, kind: str = "stub", devices: int = 1) -> Resource[Any]:
    return Resource(name, ResourceSpec(kind, StubOptions(devices)))


def config(*resources: Resource[Any], **settings: Any) -> Config:
    return Config(AgentConfig(**settings), resources=resources)


def test_the_same_configuration_read_again_differs_in_nothing() -> None:
    before = replace(config(resource(A), resource(B)), read_at=1.0)
    after = replace(config(resource(A), resource(B)), read_at=2.0)
    difference = compare(before, after)
    assert not difference
    assert difference == Difference(after)
    assert difference.config.read_at == 2.0


def test_resources_are_added_removed_and_changed_by_name() -> None:
    before = config(resource(A), resource(B), resource(C, "other"))
    difference = compare(before, config(resource(B, devices=2), resource(C, "other"), resource("d.example/x", "new")))
    assert difference
    assert (difference.added, difference.removed, difference.changed) == (("d.example/x",), (A,), (B,))
    assert difference.kinds == {"stub", "new"}


def test_an_order_is_a_change_of_those_that_stand_elsewhere_and_of_their_backends() -> None:
    before = config(resource(A), resource(B), resource(C, "other"))
    within = compare(before, config(resource(B), resource(A), resource(C, "other")))
    assert (within.changed, within.kinds) == ((B, A), frozenset({"stub"}))
    across = compare(before, config(resource(C, "other"), resource(A), resource(B)))
    assert (across.changed, across.kinds) == ((C, A, B), frozenset())
    assert across
    shifted = compare(before, config(resource("new.example/x", "new"), *before.resources))
    assert (shifted.changed, shifted.kinds) == ((), frozenset({"new"}))


def test_a_resource_that_gets_another_backend_concerns_both() -> None:
    difference = compare(config(resource(A)), config(resource(A, "other")))
    assert (difference.changed, difference.kinds) == ((A,), frozenset({"stub", "other"}))


def test_timers_apply_at_once() -> None:
    difference = compare(config(), config(probe=Seconds(1), resync=Seconds(2)))
    assert difference
    assert difference.settings == ("agent.resync", "agent.probe")
    assert difference.needs_restart == ()
    assert (difference.config.agent.probe, difference.config.agent.resync) == (Seconds(1), Seconds(2))


def test_what_kubernetes_is_told_changes_at_once() -> None:
    before = config()
    difference = compare(before, replace(before, kubernetes=KubernetesConfig(events=True, condition=True)))
    assert difference
    assert difference.settings == ("kubernetes.events", "kubernetes.condition")
    assert difference.needs_restart == ()
    assert difference.config.kubernetes.events


OTHER = {"uevents": "off"}


@pytest.mark.parametrize("name", sorted({field.name for field in fields(AgentConfig)} - APPLIED_AT_ONCE))
def test_every_other_setting_waits_for_a_restart_and_stays_as_it_is(name: str) -> None:
    before = config()
    difference = compare(before, config(**{name: OTHER.get(name, Path("/elsewhere"))}))
    assert not difference
    assert difference.needs_restart == (f"agent.{name}",)
    assert difference.config.agent == before.agent


def test_the_hosts_trees_and_http_wait_for_a_restart() -> None:
    before = config()
    after = replace(before, host=Host(sys=Path("/host/sys")), http=HttpConfig(Listen("127.0.0.1:9440")))
    difference = compare(before, after)
    assert difference.needs_restart == ("host.sys", "http.listen")
    assert difference.config == before
