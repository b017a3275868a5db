"""What sysfs says of a PCI function's health."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.base import Host, Measure, Signal, Trend, Verdict
from backends.linux import pci, pci_health
from tests.backends.kernel_calls import kernel_calls
from tests.backends.pci_trees import function
from tests.backends.trees import planted_host

GPU = "0000:3b:00.0"
BRIDGE = "0000:3a:00.0"
BELOW = f"pci0000:3a/{BRIDGE}"

RESOURCE = [
    "0x00000000fb000000 0x00000000fbffffff 0x0000000000040200",
    "0x0000038000000000 0x00000387ffffffff 0x000000000014220c",
    "0x0000000000000000 0x0000000000000000 0x0000000000000000",
    "0x0000000000000000 0x000000000000007f 0x0000000000040101",  # ports that no firmware assigned
    "0x0000000000000000 0x0000000000000000 0x0000000000000000",
    "0x0000000000000000 0x0000000000000000 0x0000000000000000",
    "0x0000000000000000 0x000000000007ffff 0x0000000020046200",  # a ROM without an address, as on most GPUs
]

WELL = {
    "power/runtime_status": "active",
    "power_state": "D0",
    "broken_parity_status": "0",
    "resource": "\\n".join(RESOURCE),
    "aer_dev_fatal": "Undefined 0\\nDLP 0\\nTOTAL_ERR_FATAL 0",
    "aer_dev_nonfatal": "Undefined 0\\nDLP 0\\nTOTAL_ERR_NONFATAL 0",
    "current_link_width": "16",
    "max_link_width": "16",
    "current_link_speed": "32.0 GT/s PCIe",
    "max_link_speed": "32.0 GT/s PCIe",
}
UPSTREAM = {"max_link_width": "16", "max_link_speed": "32.0 GT/s PCIe"}
HEADER = bytes.fromhex("de10302306041000a1000203") + bytes(52)


def machine(tmp_path: Path, files: dict[str, str], upstream: dict[str, str] = UPSTREAM, header: bytes = HEADER) -> Host:
    bridge = function(BRIDGE, "8086:347a", below="pci0000:3a", kind="060400", files=upstream)
    host = planted_host(tmp_path, bridge + function(GPU, below=BELOW, driver="nvidia", files=WELL | files))
    host.local(pci.FUNCTIONS / GPU / "config").write_bytes(header)
    return host


def said(signals: Iterable[Signal]) -> dict[str, Verdict]:
    """What counts without a past: a number that nobody saw before cannot have risen."""
    return {signal.reason: signal.verdict for signal in signals if signal.measure is None}


def changed(tmp_path: Path, header: bytes = HEADER, **files: str) -> dict[str, Verdict]:
    return said(pci_health.signals(machine(tmp_path, files, header=header), GPU))


UNSET_BAR = "\\n".join([RESOURCE[0], "0x0000000000000000 0x00000007ffffffff 0x000000002014220c"])


@pytest.mark.parametrize(
    ("files", "signals"),
    [
        pytest.param({}, {}, id="a function that is well"),
        pytest.param({"power_state": "error"}, {"power-error": Verdict.NOW}, id="it cannot be powered"),
        pytest.param({"resource": UNSET_BAR}, {"bar-unassigned": Verdict.NOW}, id="a BAR without an address"),
        pytest.param({"broken_parity_status": "1"}, {"broken-parity": Verdict.DEGRADED}, id="parity errors"),
        pytest.param({"current_link_width": "8"}, {"link-width": Verdict.DEGRADED}, id="a narrow link"),
        *(
            pytest.param({"current_link_width": lanes}, {}, id=f"a width that cannot be: {lanes}")
            for lanes in ("0", "255", "63", "Unknown", "")
        ),
        pytest.param(
            {"current_link_speed": "2.5 GT/s PCIe"}, {"link-speed": Verdict.INFO}, id="a slow link, which is only shown"
        ),
        pytest.param({"current_link_speed": "Unknown"}, {}, id="a speed that cannot be"),
    ],
)
def test_what_sysfs_says_of_a_function(tmp_path: Path, files: dict[str, str], signals: dict[str, Verdict]) -> None:
    assert said(pci_health.signals(machine(tmp_path, files), GPU)) == signals


def test_nothing_is_said_of_a_function_that_is_gone(tmp_path: Path) -> None:
    assert list(pci_health.signals(planted_host(tmp_path), GPU)) == []
    assert list(pci_health.driver_signals(planted_host(tmp_path), GPU, ["nvidia"])) == []


def test_a_configuration_space_of_nothing_but_ones_is_off_the_bus(tmp_path: Path) -> None:
    assert changed(tmp_path, header=b"\xff" * 64, current_link_width="63") == {"off-bus": Verdict.NOW}


@pytest.mark.parametrize(
    "header",
    [b"", b"\xff" * 12, b"\xff" * 63, b"\xff" * 63 + b"\0", b"\xff\xff\xff\xff" + HEADER[4:]],
    ids=["nothing", "a part", "all but one byte", "not all ones", "a virtual function's vendor"],
)
def test_less_than_a_configuration_space_of_ones_proves_nothing(tmp_path: Path, header: bytes) -> None:
    assert changed(tmp_path, header=header) == {}


@pytest.mark.parametrize("status", ["suspended", "suspending", "resuming", "error"])
def test_a_sleeping_function_is_not_woken_and_so_nothing_is_known(tmp_path: Path, status: str) -> None:
    files = {"power/runtime_status": status, "power_state": "D3cold", "current_link_width": "1"}
    assert said(pci_health.signals(machine(tmp_path, files, header=b"\xff" * 64), GPU)) == {}


def test_a_link_that_is_as_wide_as_its_slot_is_well(tmp_path: Path) -> None:
    host = machine(tmp_path, {"current_link_width": "8"}, upstream={"max_link_width": "8"})
    assert said(pci_health.signals(host, GPU)) == {}


def test_counted_errors_are_numbers_that_matter_when_they_rise(tmp_path: Path) -> None:
    host = machine(tmp_path, {"aer_dev_fatal": "DLP 2\\nTLP 1\\nTOTAL_ERR_FATAL 3"})
    fatal, nonfatal = (signal for signal in pci_health.signals(host, GPU) if signal.measure)
    assert (fatal.reason, fatal.verdict, fatal.hardware) == ("aer-fatal", Verdict.NOW, f"pci:{GPU}")
    assert fatal.measure == Measure(f"{GPU} aer_dev_fatal", 3, Trend.RISES)
    assert "3" not in fatal.message.replace(GPU, "")
    assert (nonfatal.reason, nonfatal.verdict, nonfatal.measure is not None) == ("aer-nonfatal", Verdict.DEGRADED, True)
    assert fatal.recover_after == nonfatal.recover_after == pci_health.ERROR_LASTS


@pytest.mark.parametrize("text", ["", "DLP 2", "TOTAL_ERR_FATAL", "TOTAL_ERR_FATAL many", "TOTAL_ERR_FATAL 3\\nmore"])
def test_a_counter_that_is_garbage_is_unknown(tmp_path: Path, text: str) -> None:
    host = machine(tmp_path, {"aer_dev_fatal": text})
    assert "aer-fatal" not in {signal.reason for signal in pci_health.signals(host, GPU)}


@pytest.mark.parametrize("name", [*WELL, "config"])
@pytest.mark.parametrize("content", [None, b"", b"\xfe\0\xff" * 50, b"0x" * 5000, "directory"])
def test_no_file_raises_a_false_alarm(tmp_path: Path, name: str, content: bytes | str | None) -> None:
    host = machine(tmp_path, {})
    file = host.local(pci.FUNCTIONS / GPU / name)
    file.unlink()
    if isinstance(content, bytes):
        file.write_bytes(content)
    elif content == "directory":
        file.mkdir()
    assert said(pci_health.signals(host, GPU)) == {}


@given(st.binary(max_size=200))
def test_no_bytes_make_the_readers_fail(garbage: bytes) -> None:
    assert pci_health._bar_without_address(garbage) in (None, *range(6))
    for reader in (pci_health._total, pci_health._lanes, pci_health._transfers):
        found = reader(garbage)
        assert found is None or found >= 0


@settings(max_examples=20)
@given(st.binary(min_size=64, max_size=64))
def test_only_ones_are_off_the_bus(tmp_path_factory: pytest.TempPathFactory, header: bytes) -> None:
    found = changed(tmp_path_factory.mktemp("machine"), header=header)
    assert ("off-bus" in found) == (header == b"\xff" * 64)


def test_the_expected_driver_is_no_signal(tmp_path: Path) -> None:
    assert list(pci_health.driver_signals(machine(tmp_path, {}), GPU, ["nvidia", "vfio-pci"])) == []


def test_a_function_without_its_driver_is_unhealthy(tmp_path: Path) -> None:
    host = machine(tmp_path, {})
    host.local(pci.FUNCTIONS / GPU / "driver").unlink()
    (signal,) = pci_health.driver_signals(host, GPU, ["nvidia"])
    assert (signal.hardware, signal.reason, signal.verdict) == (f"pci:{GPU}", "driver-unbound", Verdict.NOW)


def test_another_driver_than_expected_is_unhealthy_and_named(tmp_path: Path) -> None:
    (signal,) = pci_health.driver_signals(machine(tmp_path, {}), GPU, ["vfio-pci", "i915"])
    assert (signal.reason, signal.verdict) == ("wrong-driver", Verdict.NOW)
    assert signal.message == f"{GPU} is bound to nvidia, not to i915 or vfio-pci"


def test_a_probe_of_a_function_asks_the_kernel_for_little(tmp_path: Path) -> None:
    host = machine(tmp_path, {})
    assert kernel_calls(lambda: list(pci_health.signals(host, GPU))) <= 45
