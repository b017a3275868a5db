from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.kubelet.server import listen
from agent.kubelet.wire import device_head, device_tail, list_item
from agent.runtime import limits

_LABELS = st.from_regex(r"[a-z0-9]([-a-z0-9]{0,5}[a-z0-9])?", fullmatch=True)
_DOMAINS = st.lists(_LABELS, min_size=1, max_size=4).map(".".join).filter(lambda text: not text.startswith("requests."))
_NAMES = st.from_regex(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?", fullmatch=True)
_RESOURCES = st.builds("{}/{}".format, _DOMAINS, _NAMES)


@given(st.text(max_size=300), st.none() | st.integers(0, 2**40))
def test_a_slot_is_as_large_as_its_encoding(device_id: str, numa_node: int | None) -> None:
    encoded = list_item(device_head(device_id), device_tail(False, numa_node))
    assert limits.slot_bytes(device_id, numa_node) == len(encoded)


def test_a_slot_is_counted_in_its_larger_form() -> None:
    assert limits.slot_bytes("kvm-1", 0) > len(list_item(device_head("kvm-1"), device_tail(True, 0)))


@given(_RESOURCES)
def test_names_that_follow_the_rules_are_accepted(name: str) -> None:
    assert limits.resource_name_problem(name) is None


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("gpu", "exactly one '/'"),
        ("nvidia.com/gpu/a100", "exactly one '/'"),
        ("devices.kubernetes.io/gpu", "kubernetes.io"),
        ("mykubernetes.io/gpu", "kubernetes.io"),
        ("requests.nvidia.com/gpu", "'requests.'"),
        ("Nvidia.com/gpu", "no domain"),
        ("nvidia..com/gpu", "no domain"),
        ("-nvidia.com/gpu", "no domain"),
        ("nvidia_x.com/gpu", "no domain"),
        ("/gpu", "no domain"),
        ("nvidia.com\n/gpu", "no domain"),
        ("d" * 245 + "/gpu", "245 characters, and 244 is the most"),
        ("nvidia.com/", "after the '/'"),
        ("nvidia.com/-gpu", "after the '/'"),
        ("nvidia.com/gpu.", "after the '/'"),
        ("nvidia.com/gpü", "after the '/'"),
        ("nvidia.com/gpu\n", "after the '/'"),
        ("nvidia.com/" + "g" * 64, "64 characters, and 63 is the most"),
    ],
)
def test_a_name_the_kubelet_would_refuse_is_refused_with_the_reason(name: str, said: str) -> None:
    problem = limits.resource_name_problem(name)
    assert problem is not None
    assert said in problem


@pytest.mark.parametrize("name", ["d" * 244 + "/gpu", "nvidia.com/" + "g" * 63, "kubernetes.iox/gpu", "a/B_c.d-e"])
def test_names_on_the_edge_of_the_rules_are_accepted(name: str) -> None:
    assert limits.resource_name_problem(name) is None


@given(st.lists(_RESOURCES | st.text(max_size=30), unique=True, max_size=20), st.integers(0, 80))
def test_no_two_resources_share_a_socket(resources: list[str], room: int) -> None:
    assert len({limits.socket_name(resource, room) for resource in resources}) == len(resources)


@given(_RESOURCES | st.text(max_size=80), st.integers(15, 80))
def test_a_socket_name_fits_and_is_one_component(resource: str, room: int) -> None:
    name = limits.socket_name(resource, room)
    assert len(name.encode()) <= room
    assert re.fullmatch(r"[A-Za-z0-9][-A-Za-z0-9_.]*\.sock", name)


def test_a_socket_is_named_after_its_resource() -> None:
    assert limits.socket_name("nvidia.com/gpu") == "nvidia.com_gpu.sock"


@given(_RESOURCES)
def test_the_usual_plugin_directory_has_room_for_every_socket(resource: str) -> None:
    plugin_dir = Path("/var/lib/kubelet/device-plugins")
    assert len(bytes(plugin_dir / limits.endpoint(plugin_dir, resource))) <= limits.SOCKET_PATH_LIMIT


def test_a_plugin_directory_is_refused_exactly_when_nothing_could_listen_there(tmp_path: Path) -> None:
    longest = tmp_path / ("d" * (75 - len(bytes(tmp_path)) - 1))
    inside = longest / limits.SOCKET_DIRECTORY
    inside.mkdir(parents=True)
    listen(longest / limits.endpoint(longest, "a/" + "g" * 63)).close()
    assert limits.plugin_directory_problem(longest) is None
    problem = limits.plugin_directory_problem(longest.with_name(longest.name + "d"))
    assert problem is not None
    assert "108 bytes, and 107 is the most" in problem
