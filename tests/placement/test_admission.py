"""What the container that a kubelet admits has been given so far, and when it is another container."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.placement.choice import LONGEST, Admission
from backends.base import Device

GPU, HCA, NIC = "a.b/gpu", "a.b/hca", "a.b/nic"


def device(key: str) -> Device:
    return Device(key, key, frozenset({f"hw:{key}"}))


class Kubelet:
    """Asks and writes as a kubelet does."""

    def __init__(self) -> None:
        self.written: int | None = 1
        self.now = 0.0
        self.admission = Admission(lambda: self.written, lambda: self.now)

    def beside(self, resource: str) -> list[str]:
        return [device.key for devices in self.admission.so_far(resource).values() for device in devices]

    def allocate(self, resource: str, *keys: str) -> None:
        self.admission.given({**self.admission.take(resource), resource: [device(key) for key in keys]})


def test_what_a_container_got_first_is_known_when_its_next_resource_is_asked_for() -> None:
    kubelet = Kubelet()
    assert kubelet.beside(GPU) == []
    kubelet.allocate(GPU, "g1", "g2")
    assert kubelet.beside(HCA) == ["g1", "g2"]
    kubelet.allocate(HCA, "h1")
    assert kubelet.beside(NIC) == ["g1", "g2", "h1"]


def test_a_resource_that_the_container_has_already_is_asked_for_by_another() -> None:
    kubelet = Kubelet()
    kubelet.allocate(GPU, "g1")
    assert kubelet.beside(GPU) == []
    kubelet.allocate(GPU, "g2")
    assert kubelet.beside(HCA) == ["g2"]


def test_a_checkpoint_ends_a_container() -> None:
    kubelet = Kubelet()
    kubelet.allocate(GPU, "g1")
    kubelet.written = 2
    assert kubelet.beside(HCA) == []
    kubelet.allocate(HCA, "h1")
    assert kubelet.beside(NIC) == ["h1"]


def test_a_container_that_is_given_up_is_over_after_a_while_or_once_it_is_refused() -> None:
    kubelet = Kubelet()
    kubelet.allocate(GPU, "g1")
    kubelet.now += LONGEST
    assert kubelet.beside(HCA) == ["g1"]
    kubelet.now += 0.1
    assert kubelet.beside(HCA) == []
    kubelet.allocate(GPU, "g2")
    kubelet.admission.take(HCA)  # and is refused
    assert kubelet.beside(NIC) == []


def test_a_slow_answer_does_not_end_a_container() -> None:
    kubelet = Kubelet()
    kubelet.allocate(GPU, "g1")
    so_far = kubelet.admission.take(HCA)
    kubelet.now += 10 * LONGEST  # the hardware is made ready
    kubelet.admission.given({**so_far, HCA: [device("h1")]})
    assert kubelet.beside(NIC) == ["g1", "h1"]


def test_where_there_is_no_checkpoint_nothing_is_known() -> None:
    kubelet = Kubelet()
    kubelet.written = None
    kubelet.allocate(GPU, "g1")
    assert kubelet.beside(HCA) == []
    admission = Admission()
    admission.given({GPU: [device("g1")]})
    assert admission.so_far(HCA) == {}


@given(st.lists(st.sets(st.sampled_from([GPU, HCA, NIC]), min_size=1), max_size=5), st.randoms(use_true_random=False))
@pytest.mark.parametrize("asks", [True, False])
def test_in_any_sequence_of_containers_each_sees_what_it_has_and_nothing_else(
    asks: bool, containers: list[set[str]], rng: random.Random
) -> None:
    kubelet = Kubelet()
    for number, resources in enumerate(containers):
        has: list[str] = []
        for resource in rng.sample(sorted(resources), len(resources)):
            if asks:
                assert kubelet.beside(resource) == has
            kubelet.allocate(resource, f"{resource} of {number}")
            has.append(f"{resource} of {number}")
        kubelet.written = (kubelet.written or 0) + 1
