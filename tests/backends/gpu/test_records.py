"""What the kernel says once: NVIDIA's XIDs, PCI error recoveries, hanging DRM devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from backends.base import Clears, Host, Record, Signal, Verdict
from backends.gpu import Gpu, GpuResource, xid
from tests.backends.gpu.gpus import resource

GPU = "0000:3b:00.0"
ALL_ENDS = {Clears.REBIND, Clears.OUR_RESET, Clears.RECOVERED, Clears.BOOT, Clears.OPERATOR}


def kmsg(text: str) -> Record:
    return Record("kmsg", "boot", 1, 12.5, text)


def line(number: int, place: str = "PCI:0000:3b:00") -> Record:
    return kmsg(f"NVRM: Xid ({place}): {number}, pid=1234, name=python3, Ch 00000010")


IGNORED = [Verdict.NOTE]  # an event, and nothing more


def event(path: str, **properties: str) -> Record:
    return Record("uevent", "boot", 4711, 12.5, path, properties)


def signals(record: Record, *resources: GpuResource) -> list[Signal]:
    return list(Gpu(Host(Path("/nowhere")), resources or (resource(),)).signals(record))


def verdicts(number: int, *resources: GpuResource) -> list[Verdict]:
    return [signal.verdict for signal in signals(line(number), *resources)]


# --- XIDs ---


@pytest.mark.parametrize(
    "text",
    [
        "NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
        "NVRM: Xid (PCI:0000:3B:00): 79, pid=1234, name=python3, Ch 00000010",
        "NVRM: Xid (PCI:0000:3b:00.0): 79, GPU has fallen off the bus.",
        "NVRM: Xid (PCI:00000000:3B:00): 79",
        "NVRM: Xid (0000:3b:00): 79, Channel 00000001",
    ],
)
def test_every_form_of_the_line_is_understood(text: str) -> None:
    (signal,) = signals(kmsg(text))
    assert (signal.hardware, signal.reason, signal.verdict) == (f"pci:{GPU}", "xid-79", Verdict.NOW)
    assert signal.message == f"the NVIDIA driver has reported XID 79 of {GPU}: the GPU has fallen off the bus"
    assert signal.clears_on == ALL_ENDS


@pytest.mark.parametrize(
    "words",
    [
        "NVRM: GPU 0000:3b:00.0: RmInitAdapter failed! (0x24:0x72:1568)",
        "NVRM: GPU 0000:3b:00.0: rm_init_adapter failed, device minor number 5",
    ],
)
def test_a_gpu_that_the_driver_cannot_initialize_is_unhealthy(words: str) -> None:
    (signal,) = signals(kmsg(words), resource(xid_ignored="all"))
    assert (signal.hardware, signal.reason, signal.verdict) == (f"pci:{GPU}", "init-failed", Verdict.NOW)
    assert words.partition("3b:00.0: ")[2] in signal.message
    assert signal.clears_on == ALL_ENDS


@pytest.mark.parametrize(
    "words",
    [
        "NVRM: GPU 0000:3b:00.0: GPU has fallen off the bus.",
        "NVRM: GPU at 0000:3b:00.0 has fallen off the bus.",
        (
            "NVRM: The NVIDIA GPU 0000:3b:00.0\nNVRM: (PCI ID: 10de:2330) installed in this system has\n"
            "NVRM: fallen off the bus and is not responding to commands."
        ),
    ],
)
def test_a_gpu_that_has_fallen_off_the_bus_without_an_xid_is_one_fault_with_xid_79(words: str) -> None:
    assert signals(kmsg(words)) == signals(kmsg("NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus."))
    assert signals(kmsg(words), resource(xid_ignored=[79]))[0].verdict is Verdict.NOTE


@pytest.mark.parametrize(
    "words",
    [
        "NVRM: GPU 0000:3b:00.0: RmInitAdapter succeeded!",
        "NVRM: GPU 0000:3b:00.0: GPU serial number is 0000000000001.",
        "NVRM: GPU at PCI:0000:3b:00: GPU-00000000-0000-4000-8000-0000000000a1",
        "NVRM: GPU 0000:3b:00.0: request_irq() failed (-22)",
        "NVRM: GPU 0000:[77]: segfault at 3b ip 000055 sp 00007f error 4",  # a process of this name
        "NVRM: The NVIDIA GPU 0000:3b:00.0 (PCI ID: 10de:1c03)\nNVRM: installed in this system is not supported by open",
    ],
)
def test_what_else_the_driver_says_of_a_gpu_is_no_fault(words: str) -> None:
    assert signals(kmsg(words)) == []


def test_a_recovery_that_needs_nothing_any_more_is_never_a_fault() -> None:
    over = "GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)"
    needed = "GPU recovery action changed from 0x0 (None) to 0x4 (Drain and Reset)"
    for options in ({}, {"xid_critical": "all"}, {"xid_critical": [154]}, {"style": "gke", "xid_critical": [154]}):
        for before in ("", "pid=1234, name=x to 0x1 (, "):  # a process may have any name
            record = kmsg(f"NVRM: Xid (PCI:0000:3b:00): 154, {before}{over}")
            assert [it.verdict for it in signals(record, resource(**options))] == IGNORED
    (signal,) = signals(kmsg(f"NVRM: Xid (PCI:0000:3b:00): 154, {needed}"))
    assert (signal.verdict, "needs another recovery" in signal.message) == (Verdict.NOW, True)


def test_no_name_of_a_process_makes_an_error_of_nvlink_fatal() -> None:
    said = "NVRM: Xid (PCI:0000:3b:00): 145, pid=7, name=a, RLW Fatal XC, RLW_REMAP Nonfatal XC1 i0 Link 12"
    assert [it.verdict for it in signals(kmsg(said), resource(xids="catalog"))] == [Verdict.INFO]


@pytest.mark.parametrize(
    ("words", "pid", "process"),
    [
        ("pid=1634, name=python3, channel 0x0000001e, intr 00000000. MMU Fault", 1634, "python3"),
        ("pid='<unknown>', name=<unknown>, Graphics SM Warp Exception", None, ""),  # until 550
        ("Graphics SM Warp Exception on (GPC 1, TPC 4, SM 0): Misaligned Address", None, ""),  # since 570
        ("pid=1647, name=a b\x1b[2J\n, Ch 1e", 1647, "a b\x1b[2J\n"),
        ("", None, ""),
    ],
)
def test_an_xid_has_the_process_that_its_line_names(words: str, pid: int | None, process: str) -> None:
    (signal,) = signals(kmsg(f"NVRM: Xid (PCI:0000:3b:00): 31, {words}"))
    assert (signal.verdict, signal.pid, signal.process) == (Verdict.NOTE, pid, process)


def test_a_witness_that_has_but_a_number_decides_the_same() -> None:
    """NVML's events have no words."""
    (signal,) = xid.signals_of(xid.Xid(GPU, 48, 12.5, "nvml"), [resource()])
    assert [signal] == signals(kmsg("NVRM: Xid (PCI:0000:3b:00): 48, DBE (double bit error)"))


def test_the_driver_and_the_device_that_dev_printk_puts_first_are_understood_where_the_tags_agree() -> None:
    text = f"nvidia {GPU}: NVRM: Xid (PCI:0000:3b:00): 79, pid=7"
    for device, count in ((f"+pci:{GPU}", 1), ("+pci:0000:5e:00.0", 0), ("n3", 0)):
        record = replace(kmsg(text), properties={"SUBSYSTEM": "pci", "DEVICE": device})
        assert len(signals(record)) == count
    assert not signals(kmsg(text))


def test_a_domain_of_more_than_four_digits() -> None:
    assert signals(line(79, "PCI:00010000:e1:00"))[0].hardware == "pci:10000:e1:00.0"


def test_an_error_of_one_gpu_instance_is_not_the_whole_gpus() -> None:
    (signal,) = signals(line(94, "PCI:0000:3b:00 GPU-I:05"))
    assert signal.hardware == f"mig:{GPU}/gi5"
    assert "GPU instance 5: contained memory error" in signal.message
    assert signals(line(94, "PCI:0000:3b:00 GPU-I:05 GPU-CI:00"))[0].hardware == f"mig:{GPU}/gi5"


def test_the_default_is_that_of_nvidias_plugin() -> None:
    """All but six, also those that nobody has heard of."""
    assert [n for n in range(1, 400) if verdicts(n) != [Verdict.NOW]] == [13, 31, 43, 45, 68, 109]
    assert verdicts(13) == IGNORED


def test_the_default_for_gke_is_that_of_its_plugin() -> None:
    assert [n for n in range(1, 400) if verdicts(n, resource(style="gke")) == [Verdict.NOW]] == [48]
    xid_config = resource(style="gke", xid_critical=[61, 79])
    assert [n for n in range(1, 400) if verdicts(n, xid_config) == [Verdict.NOW]] == [48, 61, 79]


@pytest.mark.parametrize(
    ("number", "rest", "expected"),
    [
        (94, "Contained memory error", [Verdict.INFO]),  # RESTART_APP
        (63, "Row Remapper: New row marked for remapping", [Verdict.INFO]),  # IGNORE
        (13, "Graphics Exception", IGNORED),
        (109, "CTX SWITCH TIMEOUT", [Verdict.NOW]),  # RESET_GPU
        (79, "GPU has fallen off the bus.", [Verdict.NOW]),  # RESTART_BM
        (145, "RLW_REMAP Nonfatal XC1 i0 Link 12 (0x00000004)", [Verdict.INFO]),
        (145, "RLW_SRC_TRACK Fatal   XC0 i0 Link 12 (0x00000001)", [Verdict.NOW]),
        (154, "GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)", [Verdict.NOW]),
        (154, "GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)", IGNORED),
    ],
)
def test_the_catalog_asks_what_the_gpu_needs(number: int, rest: str, expected: list[Verdict]) -> None:
    record = kmsg(f"NVRM: Xid (PCI:0000:3b:00): {number}, pid=1234, name=python3, {rest}")
    assert [signal.verdict for signal in signals(record, resource(xids="catalog"))] == expected


@pytest.mark.parametrize(
    ("options", "critical", "ignored", "shown"),
    [
        ({"xid_critical": "all"}, [48, 154], [13, 109], []),
        ({"xid_critical": "all", "xid_ignored": [154]}, [13, 48], [154], []),
        ({"xid_ignored": "all"}, [], [13, 48, 79, 154], []),
        ({"xid_ignored": "all", "xid_critical": [79]}, [79], [13, 48, 154], []),
        ({"xid_critical": [13]}, [13, 48, 79], [31], []),
        ({"xid_ignored": [48]}, [79, 154], [13, 48], []),
        ({"style": "gke", "xid_critical": "all"}, [48, 154], [13, 109], []),
        ({"xids": "catalog", "xid_critical": [94], "xid_ignored": [48]}, [94, 109], [13, 48], [63, 500]),
    ],
)
def test_the_sets_can_be_configured(
    options: dict[str, Any], critical: list[int], ignored: list[int], shown: list[int]
) -> None:
    wanted = resource(**options)
    assert [verdicts(n, wanted) for n in critical] == [[Verdict.NOW]] * len(critical)
    assert [verdicts(n, wanted) for n in ignored] == [IGNORED] * len(ignored)
    assert [verdicts(n, wanted) for n in shown] == [[Verdict.INFO]] * len(shown)


XIDS = st.integers(1, 200)
WRITTEN = st.none() | st.just("all") | st.lists(XIDS, max_size=8)


@given(XIDS, st.sampled_from(["vendor", "gke"]), st.sampled_from(["plugin", "catalog"]), WRITTEN, WRITTEN)
def test_what_is_written_counts_before_any_set_and_critical_before_ignored(
    number: int, style: str, xids: str, critical: Any, ignored: Any
) -> None:
    found = verdicts(number, resource(style=style, xids=xids, xid_critical=critical, xid_ignored=ignored))
    if isinstance(critical, list) and number in critical:
        assert found == [Verdict.NOW]
    elif ignored == "all" or (ignored is not None and number in ignored):
        assert found == IGNORED
    elif critical == "all":
        assert found == (IGNORED if ignored is None and number in {13, 31, 43, 45, 68, 109} else [Verdict.NOW])
    else:
        assert found == verdicts(number, resource(style=style, xids=xids))


def test_of_several_resources_that_might_have_the_gpu_the_strictest_decides() -> None:
    lax, strict = resource("a.com/lax", xid_ignored="all"), resource("a.com/strict")
    assert verdicts(154, lax, strict) == verdicts(154, strict, lax) == [Verdict.NOW]


@pytest.mark.parametrize("select", [{"vendor": ("1002",)}, {"address": ("0000:5e:00.0",)}])
def test_a_resource_that_cannot_have_the_gpu_decides_nothing(select: dict[str, tuple[str, ...]]) -> None:
    others = resource("a.com/others", select=select, xid_critical=[154])
    mine = resource("a.com/mine", select={"vendor": ("10DE",), "model": ("H100",)}, xid_ignored="all")
    assert verdicts(154, others, mine) == IGNORED
    assert verdicts(154, others) == []


def test_a_resource_that_excludes_the_gpu_decides_nothing() -> None:
    spec = resource("a.com/others", xid_critical=[154])
    gone = replace(spec, spec=replace(spec.spec, exclude=({"address": (GPU.upper(),)},)))
    may_stay = replace(spec, spec=replace(spec.spec, exclude=({"address": (GPU,), "model": ("H100",)},)))
    assert verdicts(154, gone) == []
    assert verdicts(154, gone, may_stay) == [Verdict.NOW]


@pytest.mark.parametrize(
    "text",
    [
        "NVRM: Xid (PCI:garbage): 79",
        "tmpfs: Unknown parameter 'NVRM: Xid (PCI:0000:3b:00): 79'",
        "NVRM: Xid",
        "NVRM: loading",
        "",
        "\0\xff NVRM: Xid (",
    ],
)
def test_other_lines_say_nothing(text: str) -> None:
    assert signals(kmsg(text)) == []


@given(st.text(max_size=60), st.text(max_size=60))
def test_no_line_makes_it_fail(before: str, after: str) -> None:
    for text in (before + after, f"{before}NVRM: Xid (PCI:{after}", f"{before}NVRM: Xid (PCI:0000:3b:00): {after}"):
        assert len(signals(kmsg(text))) <= 1


# --- events ---

PATH = f"/devices/pci0000:3a/0000:3a:00.0/{GPU}"
DISPLAY = {"PCI_CLASS": "30200", "PCI_ID": "10DE:2330", "PCI_SLOT_NAME": GPU}


def test_an_error_recovery_is_told_of_a_gpu() -> None:
    (begun,) = signals(event(PATH, ERROR_EVENT="BEGIN_RECOVERY", DEVICE_ONLINE="0", **DISPLAY))
    assert (begun.hardware, begun.reason, begun.verdict) == (f"pci:{GPU}", "pci-recovery", Verdict.NOW)
    (over,) = signals(event(PATH, ERROR_EVENT="SUCCESSFUL_RECOVERY", DEVICE_ONLINE="1", **DISPLAY))
    assert (over.hardware, over.verdict) == (f"pci:{GPU}", Verdict.FINE)


def test_the_recovery_of_other_functions_is_not_ours() -> None:
    network = {"PCI_CLASS": "20000", "PCI_ID": "15B3:1021"}
    assert signals(event(PATH, ERROR_EVENT="BEGIN_RECOVERY", DEVICE_ONLINE="0", **network)) == []
    assert signals(event(PATH, ERROR_EVENT="SOMETHING_NEW", **DISPLAY)) == []


@pytest.mark.parametrize(
    ("methods", "said"),
    [
        ("rebind", "hangs; the driver asks for rebind"),
        ("rebind,bus-reset", "hangs; the driver asks for rebind or bus-reset"),
        ("unknown", "hangs"),
    ],
)
def test_a_hanging_drm_device_is_unhealthy_until_rebind_or_reset(methods: str, said: str) -> None:
    (signal,) = signals(event(f"{PATH}/drm/card0", WEDGED=methods))
    assert (signal.hardware, signal.reason, signal.verdict) == (f"pci:{GPU}", "wedged", Verdict.NOW)
    assert signal.message == f"{GPU} {said}"
    assert signal.clears_on == ALL_ENDS - {Clears.RECOVERED}


def test_a_drm_device_that_helped_itself_is_well() -> None:
    assert signals(event(f"{PATH}/drm/card0", WEDGED="none")) == []


def test_events_of_no_pci_device_say_nothing() -> None:
    assert signals(event("/devices/platform/vkms/drm/card1", WEDGED="rebind")) == []
