"""What people call a device, from what its backend says of it."""

from __future__ import annotations

import pytest

from agent.inventory.lookup import model_of, name_of


@pytest.mark.parametrize(
    ("whole", "short"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100"),
        ("NVIDIA H100 NVL", "H100 NVL"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("Tesla V100-SXM2-16GB", "V100"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA RTX A6000", "RTX A6000"),
        ("AMD Instinct MI210", "MI210"),
        ("Intel Data Center GPU Flex 170", "Intel Data Center GPU Flex 170"),
        ("", ""),
    ],
)
def test_a_gpus_model_is_shortened_as_people_do_and_else_whole(whole: str, short: str) -> None:
    assert model_of({"model": (whole,)}) == short


@pytest.mark.parametrize(
    ("vendor", "device", "model"),
    [("15b3", "1021", "ConnectX-7"), ("15b3", "101e", "ConnectX VF"), ("15b3", "ffff", ""), ("8086", "1021", "")],
)
def test_an_adapters_model_follows_from_its_pci_id(vendor: str, device: str, model: str) -> None:
    assert model_of({"vendor": (vendor,), "device": (device,)}) == model


def test_a_mig_device_is_called_by_its_profile_and_its_place_in_the_gpu() -> None:
    mig = {
        "vendor": ("10de",), "minor": ("3",), "model": ("NVIDIA H100 80GB HBM3",),
        "profile": ("1g.10gb",), "gi": ("9",), "ci": ("0",),
    }  # fmt: skip
    assert (model_of(mig), name_of(mig)) == ("H100 1g.10gb", "nvidia3/gi9/ci0")


@pytest.mark.parametrize(
    ("attributes", "name"),
    [
        ({"vendor": ("10de",), "minor": ("3",)}, "nvidia3"),
        ({"minor": ("232",), "name": ("kvm",)}, "kvm"),
        ({"hca": ("mlx5_0",), "ifname": ("ib0",)}, "mlx5_0"),
        ({"ifname": ("eth4",)}, "eth4"),
        ({"hca": ("mlx5_0", "mlx5_1")}, "mlx5_0, mlx5_1"),
        ({"hca": tuple(f"mlx5_{n}" for n in range(8))}, "mlx5_0, mlx5_1 and 6 more"),
        ({"vendor": ("10de",), "address": ("0000:3b:00.0",)}, ""),
        ({}, ""),
    ],
)
def test_a_device_is_called_as_its_driver_calls_it(attributes: dict[str, tuple[str, ...]], name: str) -> None:
    assert name_of(attributes) == name
