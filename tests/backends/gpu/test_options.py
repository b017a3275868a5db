"""The keys of a `gpu` resource that no hardware could make right."""

from __future__ import annotations

from typing import Any

import pytest

from backends.base import OptionsError
from backends.gpu import Gpu
from tests.backends.gpu.gpus import resource


@pytest.mark.parametrize(
    ("options", "key", "said"),
    [
        ({"device_list_strategy": []}, ("device_list_strategy",), "is empty"),
        ({"device_driver_root": "run/nvidia"}, ("device_driver_root",), "'run/nvidia' is not an absolute path"),
        ({"style": "gke", "pass_device_specs": True}, ("pass_device_specs",), 'with style = "gke" it would do nothing'),
        ({"style": "gke", "device_list_strategy": "cdi-cri"}, ("device_list_strategy",), "is for NVIDIA's own style"),
        ({"driver_path": "/opt/nvidia"}, ("driver_path",), 'is for style = "gke"'),
        ({"style": "gke", "vulkan_mount": "icd"}, ("vulkan_mount",), "'icd' is not an absolute path"),
        ({"sharing": "mps"}, ("replicas",), 'is 1; with sharing = "mps" it is 2 to 48'),
        ({"sharing": "mps", "replicas": 49}, ("replicas",), "is 49"),
        ({"sharing": "mps", "replicas": 2, "name": "a.com/{model}"}, ("sharing",), "write the resource's name out"),
        ({"style": "gke", "imex": "required"}, ("imex",), "is for NVIDIA's own style"),
        ({"xid_critical": [79, 0]}, ("xid_critical", 1), "is 0; XIDs are numbers from 1"),
        ({"xid_critical": [79], "xid_ignored": [13, 79]}, ("xid_ignored", 1), "79 is among xid_critical too"),
        ({"xid_critical": "all", "xid_ignored": "all"}, ("xid_ignored",), "and so is xid_critical"),
    ],
)
def test_an_impossible_value_is_refused(options: dict[str, Any], key: tuple[str | int, ...], said: str) -> None:
    with pytest.raises(OptionsError, match=said) as caught:
        Gpu.check(resource(**options))
    assert caught.value.path == key


def test_all_that_is_wrong_is_told_at_once() -> None:
    with pytest.raises(ExceptionGroup) as caught:
        Gpu.check(resource(device_list_strategy=[], device_driver_root="x", xid_ignored=[-1]))
    assert len(caught.value.exceptions) == 3


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"style": "gke", "xid_critical": "all", "fail_requests_greater_than_one": True},
        {"device_list_strategy": ["envvar", "cdi-cri"], "xid_critical": "all", "xid_ignored": [13]},
    ],
)
def test_what_makes_sense_passes(options: dict[str, Any]) -> None:
    Gpu.check(resource(**options))
