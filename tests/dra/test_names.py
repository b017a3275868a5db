"""Names of devices and pools: what the API server takes, for every ID, and never the same for two."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.dra import names

LABEL = re.compile("[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")  # RFC 1123, as apimachinery's IsDNS1123Label
SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")

IDS = st.one_of(
    st.text(st.one_of(st.sampled_from("a0i-xwzh/.:_AZ"), st.characters(codec="utf-8")), min_size=1, max_size=90),
    st.from_regex(r"[0-9a-f]{4}[:-][0-9a-f]{2}[:-][0-9a-f]{2}[.-][0-7]", fullmatch=True),
    st.text(st.sampled_from("a-/v"), max_size=4).map("/dev/".__add__),
    st.text(st.sampled_from("a-/v"), max_size=4).map("dev-".__add__),
    st.from_regex(r"i?(--(x[0-9a-f]{2}|[schduwz]))?[a-z-]{1,4}", fullmatch=True),
)


@given(IDS, IDS)
def test_every_id_has_a_name_of_its_own_that_leads_back_to_it(one: str, other: str) -> None:
    name = names.device_name(one)
    assert LABEL.fullmatch(name)
    assert (name == names.device_name(other)) == (one == other)
    assert names.device_id(name, [other, one]) == one
    if "--z" not in name:
        assert names.device_id(name) == one


@given(st.from_regex("[a-z0-9-]{1,40}", fullmatch=True))
def test_a_name_that_was_made_of_no_id_is_nobodys(name: str) -> None:
    if (read := names.device_id(name)) is not None:
        assert names.device_name(read) == name


@pytest.mark.parametrize(
    ("device_id", "name"),
    [
        ("0000:3b:00.0", "0000-3b-00-0"),
        ("10000:e1:00.0", "10000-e1-00-0"),
        ("0000-3b-00-0", "0000--h3b--h00--h0"),
        ("kvm", "kvm"),
        ("/dev/kvm", "dev-kvm"),
        ("/dev/dri/renderD128", "dev-dri--srender--wd128"),
        ("dev-kvm", "dev--hkvm"),
        ("GPU-5a8c1f3e-0d3b-4b61-9c6e-2f1f3a1b7c90", "i--wgpu-5--wa8c1f3e-0d3b-4b61-9c6e-2f1f3a1b7c90"),
        ("renderD128", "render--wd128"),
    ],
)
def test_people_recognize_a_device_by_its_name(device_id: str, name: str) -> None:
    assert names.device_name(device_id) == name


@given(
    st.from_regex(r"[a-z0-9]{1,63}(\.[a-z0-9]{1,60}){0,3}", fullmatch=True),
    st.from_regex(r"[A-Za-z0-9]([-_.A-Za-z0-9]{0,61}[A-Za-z0-9])?", fullmatch=True),
)
def test_a_pool_and_its_slices_have_names_that_the_api_server_takes(node: str, name: str) -> None:
    pool = names.pool_name(node, f"example.com/{name}")
    assert len(pool) <= 253
    assert all(SUBDOMAIN.fullmatch(part) for part in pool.split("/"))
    made = names.slice_name(node, "fairlead.dev", pool, 15)
    assert len(made) <= 253
    assert SUBDOMAIN.fullmatch(made)
    assert made != names.slice_name(node, "fairlead.dev", names.pool_name(node, f"example.org/{name}"), 15)


def test_a_pool_is_called_as_its_node_and_resource() -> None:
    assert names.pool_name("node1", "nvidia.com/gpu") == "node1/nvidia.com/gpu"
