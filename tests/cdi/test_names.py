"""Names of CDI specifications: valid for every resource and ID, and never the same for two."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.cdi import spec
from agent.config.resources import name_problem
from tests.cdi.runtime import SCHEMA

KIND = re.compile(SCHEMA["properties"]["kind"]["pattern"])
NAME = re.compile(SCHEMA["properties"]["devices"]["items"]["properties"]["name"]["pattern"])
RESOURCES = st.from_regex(
    r"[a-z0-9]{1,3}(\.[a-z0-9]{1,3}(-[a-z0-9])?){1,2}/[A-Za-z0-9]([-_.A-Za-z0-9]{0,6}[A-Za-z0-9])?", fullmatch=True
)
IDS = st.text(st.one_of(st.sampled_from("a0_-/.:z2f"), st.characters(codec="utf-8")), min_size=1, max_size=12)


@given(RESOURCES, RESOURCES)
def test_every_resource_has_a_kind_and_a_file_of_its_own(one: str, other: str) -> None:
    assert name_problem(one) is None
    assert KIND.fullmatch(spec.kind(one))
    assert len(spec.kind(one).partition("/")[2]) > 1
    assert re.fullmatch(r"/run/cdi/fairlead_[a-z0-9.-]+_[A-Za-z0-9_-]+\.json", spec.file(one).text)
    if one != other:
        assert spec.kind(one) != spec.kind(other)
        assert spec.file(one) != spec.file(other)
        assert spec.annotation(one) != spec.annotation(other)


def test_a_resource_of_one_letter_does_not_end_the_container_runtime() -> None:
    assert spec.kind("example.com/x") == "fairlead.example.com/x_zz"


@given(IDS, IDS)
def test_every_id_has_a_name_of_its_own(one: str, other: str) -> None:
    assert NAME.fullmatch(spec.device(one))
    assert (spec.device(one) == spec.device(other)) == (one == other)
    assert read_back(spec.device(one)) == one


def read_back(name: str) -> str:
    """The ID that a name was made of, which is why no two have one."""
    pieces = re.findall(r"__|_z{1,2}|(?:_[0-9a-f]{2}_)+|[^_]+", name.removeprefix("z_z"))
    assert "".join(pieces) == name.removeprefix("z_z")
    text = b""
    for piece in pieces:
        if piece == "__":
            text += b"_"
        elif not piece.startswith("_"):
            text += piece.encode()
        elif piece != "_zz":
            text += bytes.fromhex(piece.replace("_", ""))
    return text.decode()


@pytest.mark.parametrize(
    ("device_id", "name"),
    [
        ("0000:3b:00.0", "0000:3b:00.0"),
        ("GPU-5f3a", "GPU-5f3a"),
        ("nvidia0/gi1", "nvidia0_2f_gi1"),
        ("mlx5_0", "mlx5__0"),
        ("/dev/kvm", "z_z_2f_dev_2f_kvm"),
        ("kvm-", "kvm-_zz"),
    ],
)
def test_names_look_like_their_ids(device_id: str, name: str) -> None:
    assert spec.device(device_id) == name


def test_kinds_look_like_their_resources() -> None:
    assert spec.kind("nvidia.com/mig-1g.5gb") == "fairlead.nvidia.com/mig-1g_2e_5gb"
    assert spec.file("nvidia.com/gpu").text == "/run/cdi/fairlead_nvidia.com_gpu.json"
    assert spec.annotation("nvidia.com/gpu").startswith("cdi.k8s.io/fairlead_")
    assert len(spec.annotation("nvidia.com/gpu").partition("/")[2]) <= 63
