from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.config.resources import (
    NamelessError,
    can_meet,
    fits,
    is_distinctive,
    is_template,
    name_of,
    name_problem,
    sanitised,
)
from agent.runtime.limits import resource_name_problem

MIG = "nvidia.com/mig-{profile}"

_FIXED = st.text("ab-._", max_size=3)
_TEMPLATES = st.builds(
    lambda first, parts: "a.b/" + first + "".join(parts),
    _FIXED,
    st.lists(st.builds("{{{}}}{}".format, st.sampled_from("pq"), _FIXED), min_size=1, max_size=3),
).filter(lambda text: name_problem(text) is None)
_ATTRIBUTES = st.fixed_dictionaries({"p": st.tuples(st.text(max_size=8)), "q": st.tuples(st.text("ab+ .", max_size=5))})


@pytest.mark.parametrize(
    ("profile", "name"),
    [
        ("1g.5gb", "nvidia.com/mig-1g.5gb"),
        ("1g.10gb+me", "nvidia.com/mig-1g.10gb.me"),
        ("1c.3g.20gb", "nvidia.com/mig-1c.3g.20gb"),
    ],
)
def test_mig_devices_are_named_as_nvidias_plugin_names_them(profile: str, name: str) -> None:
    assert name_of(MIG, {"profile": (profile,)}).name == name


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("GRID T4-1Q", "GRID_T4-1Q"),
        ("NVIDIA H100 80GB HBM3", "NVIDIA_H100_80GB_HBM3"),
        ("GA102GL [A10]", "GA102GL_A10"),
        ("Realtek RTL8111/8168", "Realtek_RTL8111_8168"),
        ("-edge-", "edge"),
        ("größer", "grer"),
        ("[]", ""),
    ],
)
def test_a_value_loses_what_a_name_cannot_have(value: str, text: str) -> None:
    assert sanitised(value) == text


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ((), "it has no profile, after which it would be named"),
        (("a", "b"), "it has more than one profile, after which it would be named: a, b"),
        (("+",), "its profile is '+', of which nothing can be in a resource's name"),
        (("x" * 60,), "makes no valid name: the part after the '/' has 64 characters, and 63 is the most"),
    ],
)
def test_a_device_that_cannot_be_named_is_told_why(values: tuple[str, ...], why: str) -> None:
    with pytest.raises(NamelessError, match=re.escape(why)):
        name_of(MIG, {"profile": values})


def test_the_same_value_twice_is_one() -> None:
    assert name_of(MIG, {"profile": ("a", "a")}).name == "nvidia.com/mig-a"


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("nvidia.com/mig-{}", "braces only around the name of an attribute"),
        ("nvidia.com/mig-{profile", "braces only around the name of an attribute"),
        ("nvidia.com/mig-}{profile}", "braces only around the name of an attribute"),
        ("nvidia.com/{two words}", "braces only around the name of an attribute"),
        ("{vendor}.com/gpu", "only after the '/'"),
        ("{vendor}", "only after the '/'"),
        ("nvidia.com/-{profile}", "it must leave valid names"),
        ("nvidia.com/{profile}-", "it must leave valid names"),
        ("nvidia.com/a b{profile}", "it must leave valid names"),
        ("nvidia.com/" + "x" * 63 + "{profile}", "it must leave valid names"),
        ("kubernetes.io/{profile}", "Kubernetes' own"),
    ],
)
def test_a_template_that_leaves_no_valid_name_is_refused(name: str, why: str) -> None:
    assert is_template(name)
    assert why in (name_problem(name) or "")


def test_what_is_no_template_is_judged_as_a_name() -> None:
    assert name_problem("nvidia.com/gpu") is None
    assert name_problem("gpu") == resource_name_problem("gpu")


@pytest.mark.parametrize(
    ("one", "other", "meet"),
    [
        (MIG, "nvidia.com/{model}", True),
        (MIG, "nvidia.com/gpu-{model}", False),
        (MIG, "amd.com/mig-{profile}", False),
        ("a.b/{p}", "a.b/{q}", True),
        ("a.b/{p}-x", "a.b/{q}-y", False),
        ("a.b/{p}-x", "a.b/y-{q}", True),
        ("a.b/{p}{q}", "a.b/{p}x", True),
        ("a.b/a-{p}", "a.b/a-", False),
        ("a.b/x{p}x{q}x", "a.b/xx", False),
    ],
)
def test_two_templates_meet_where_both_could_give_a_name(one: str, other: str, meet: bool) -> None:
    assert can_meet(one, other) is can_meet(other, one) is meet


def test_a_template_that_fixes_nothing_fits_every_name_of_its_domain() -> None:
    assert fits("nvidia.com/{model}", "nvidia.com/gpu")
    assert not is_distinctive("nvidia.com/{model}")
    assert not fits(MIG, "nvidia.com/gpu")
    assert is_distinctive(MIG)


@given(_TEMPLATES, _ATTRIBUTES)
def test_every_name_that_is_given_is_valid_and_fits_its_template(
    template: str, attributes: dict[str, tuple[str, ...]]
) -> None:
    try:
        named = name_of(template, attributes)
    except NamelessError:
        return
    assert resource_name_problem(named.name) is None
    assert fits(template, named.name)


@given(_TEMPLATES, _ATTRIBUTES, _ATTRIBUTES)
def test_values_that_make_the_same_name_can_be_told_apart(
    template: str, one: dict[str, tuple[str, ...]], other: dict[str, tuple[str, ...]]
) -> None:
    try:
        mine, theirs = name_of(template, one), name_of(template, other)
    except NamelessError:
        return
    asked = [name for name in "pq" if f"{{{name}}}" in template]
    assert (mine.value == theirs.value) == all(one[name] == other[name] for name in asked)
    if mine.value == theirs.value:
        assert mine.name == theirs.name


@given(_TEMPLATES, _TEMPLATES, _ATTRIBUTES, _ATTRIBUTES)
def test_templates_that_gave_the_same_name_can_meet(
    one: str, other: str, mine: dict[str, tuple[str, ...]], theirs: dict[str, tuple[str, ...]]
) -> None:
    try:
        same = name_of(one, mine).name == name_of(other, theirs).name
    except NamelessError:
        return
    if same:
        assert can_meet(one, other)


def test_no_name_keeps_a_template_long() -> None:
    template = "a.b/" + "-".join(f"{{p{n}}}" for n in range(16)) + "_"
    assert not fits(template, "a.b/" + "-".join("a" * 32))  # 31 over 15 ways to cut it
    assert fits(template + "x", "a.b/" + "-".join("a" * 30) + "_x")
    assert fits("a.b/" + "{p}" * 63, "a.b/" + "a" * 63)
    assert not fits("a.b/" + "{p}" * 63, "a.b/" + "a" * 62)
    assert not fits("a.b/x-{p}", "a.c/x-a")
