from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from agent.health.drains import Drain
from agent.kubernetes.own_node import MOST_NAMES, named_by, names, plan, reason

NAME = st.text("abc0123456789:.-/_", min_size=1, max_size=12)
HARDWARE = st.frozensets(st.sampled_from("abcdef"), min_size=1, max_size=2)


def drain(hardware: str, why: str) -> Drain:
    return Drain(hardware, why, 0.0)


@given(st.lists(NAME, max_size=2 * MOST_NAMES), st.sampled_from([",", " ", ", ", "\n", ",,\t"]))
def test_names_are_separated_by_commas_or_blanks_and_count_once(those: list[str], separator: str) -> None:
    assert names(separator.join(["", *those, ""])) == tuple(dict.fromkeys(those))


def test_a_name_that_nobody_reads_to_its_end_is_cut() -> None:
    (name,) = names("x" * 100_000)
    assert len(name) < 500


@given(NAME)
def test_a_drain_says_by_which_name_it_came_about(name: str) -> None:
    assert named_by(drain("pci:a", reason(name))) == name


def test_a_persons_drain_is_never_ended_nor_replaced() -> None:
    mine = drain("pci:a", "fan is loud")
    todo = plan({"gpu-a": frozenset({"pci:a"})}, ["gpu-a"], [mine])
    assert (todo.drain, todo.undrain) == ({}, {})
    todo = plan({}, [], [mine, drain("pci:b", "")])
    assert (todo.drain, todo.undrain) == ({}, {})


def test_what_is_named_and_not_there_at_the_moment_stays_drained() -> None:
    todo = plan({}, ["gpu-a"], [drain("pci:a", reason("gpu-a"))])
    assert todo.undrain == {}


def test_a_device_that_is_named_otherwise_now_stays_drained() -> None:
    todo = plan({"0000:3b:00.0": frozenset({"pci:a"})}, ["0000:3b:00.0"], [drain("pci:a", reason("gpu-a"))])
    assert (todo.drain, todo.undrain) == ({}, {})


@given(st.dictionaries(NAME, HARDWARE), st.dictionaries(st.sampled_from("abcdef"), st.none() | NAME))
def test_one_step_brings_about_what_is_asked_for_and_the_next_has_nothing_to_do(
    found: dict[str, frozenset[str]], drained: dict[str, str | None]
) -> None:
    drains = {it: drain(it, "mine" if name is None else reason(name)) for it, name in drained.items()}
    todo = plan(found, found, drains.values())
    for name, hardware in todo.drain.items():
        drains |= {it: drain(it, reason(name)) for it in hardware}
    for hardware in todo.undrain.values():
        for it in hardware:
            del drains[it]
    wanted = frozenset[str]().union(*found.values())
    assert wanted <= drains.keys()
    assert {it for it, name in drained.items() if name is None} <= drains.keys()
    assert all(it in wanted or named_by(its) is None or named_by(its) in found for it, its in drains.items())
    after = plan(found, found, drains.values())
    assert (after.drain, after.undrain) == ({}, {})
