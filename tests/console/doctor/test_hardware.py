"""What the doctor says of hardware."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from agent.console import views
from agent.console.doctor import Finding, Level
from agent.console.doctor.hardware import hardware
from agent.console.views import Status
from agent.health import HealthBook
from agent.inventory.inventory import Inventory
from agent.inventory.shortfall import not_offered, unmatched
from agent.inventory.survey import Survey
from agent.model import Health, State
from backends.base import Device, Problem, Resource, ResourceSpec
from backends.chardev import CharDev
from backends.chardev.options import CharDevOptions, PathOption
from tests.backends.chardev.chardevs import FTDI, chardev, configured
from tests.backends.linux.sticks import stick
from tests.backends.trees import planted_host
from tests.fakes import KIND, Fake, by_unit, device, resource

A = "a.example/one"


def look(
    *devices: Device, names: Sequence[str] = (A,), problems: Sequence[Problem] = (), said: Status | None = None
) -> list[Finding]:
    resources = [resource(name) for name in names]
    inventory = Inventory(resources, {KIND: Fake(*resources)})
    inventory.update(KIND, by_unit(devices))
    inventory.set_health({"sick": Health(State.UNHEALTHY, "on-fire", "It burns.")})
    return list(hardware(Survey(inventory, HealthBook(), tuple((KIND, problem) for problem in problems), {}), said))


def test_what_is_offered_is_counted() -> None:
    assert [(one.level, one.found) for one in look(device("d", A))] == [(Level.FINE, f"{A} offers 1.")]


def test_no_resource_at_all() -> None:
    assert look(names=())[0].level is Level.FAILURE


def test_a_resource_without_any_hardware() -> None:
    (one,) = look()
    assert one.found == f"{A} offers nothing: the backend fake finds no such hardware on this node."


def test_hardware_that_is_not_offered_by_the_only_resource_that_takes_it_says_why_once(tmp_path: Path) -> None:
    backend = chardev(tmp_path, stick("1-2", 5), configured(A, usb=[FTDI], together="all", nodes="tty"))
    (unit,) = backend.units()
    (problem,) = backend.discover(unit).problems
    assert problem.sentence.endswith("it has no tty node; is its driver there?")
    (one,) = look(problems=[problem])
    assert one.found == f"{A} offers nothing: {problem.sentence}."


def test_sticks_that_make_no_set_are_why_their_resource_offers_nothing(tmp_path: Path) -> None:
    backend = chardev(tmp_path, stick("1-2", 5), configured(A, usb=[FTDI, {"vendor": "534d"}], together="each"))
    (unit,) = backend.units()
    (one,) = look(problems=backend.discover(unit).problems)
    assert one.found == (
        f"{A} offers nothing: 1 of 0403:6001 and 0 of 534d:* are plugged in: what is left over is in no set."
    )


def test_the_only_device_of_a_resource_that_cannot_be_used_comes_with_what_to_do() -> None:
    (one,) = look(replace(device("0000:3b:00.0", A), unusable="it is bound to vfio-pci, not to nvidia"))
    assert one.found == f"{A} offers nothing: 0000:3b:00.0: it is bound to vfio-pci, not to nvidia."
    assert "give it back to its driver" in one.mend


def test_a_template_is_asked_about_as_long_as_it_has_given_nothing() -> None:
    devices = [device("d", "a.example/{ids}", ids=["one"]), device("e", "a.example/x-{none}")]
    given, unused = look(*devices, names=["a.example/{ids}", "a.example/x-{none}"])
    assert (given.level, given.found) == (Level.FINE, "a.example/one offers 1.")
    assert unused.level is Level.WARNING
    assert "a.example/x-{none} does not take it: it has no none, after which it would be named" in unused.found


def test_a_template_whose_devices_an_earlier_resource_has_says_which() -> None:
    _, unused = look(device("d", A, "a.example/x-{ids}"), names=(A, "a.example/x-{ids}"))
    why = f"d: a.example/x-d selects it, but {A} comes before it in the configuration and has it"
    assert unused.found == f"a.example/x-{{ids}} offers nothing: {why}."


def test_a_template_whose_hardware_may_come_is_all_right() -> None:
    (one,) = look(names=["a.example/{ids}"])
    assert (one.level, one.found) == (
        Level.FINE,
        "a.example/{ids} offers nothing: no device gives it a name so far.",
    )


def test_what_a_daemon_serves_under_a_name_that_no_device_gives_any_more_is_told() -> None:
    gone = views.Device("d", ("d",), "Unhealthy", "gone", "the device is gone; a pod still holds it")
    held = views.Resource("a.example/held", KIND, registered=True, streaming=True, devices=(gone,))
    empty = views.Resource("a.example/empty", KIND, registered=True, streaming=True)
    template = views.Template("a.example/{ids}", KIND, "", (held.name, empty.name))
    kubelet, configuration = views.Kubelet("", present=True), views.Configuration("", 0.0)
    said = Status("", 0.0, 0.0, kubelet, configuration, (held, empty), templates=(template,))
    first, *_ = look(names=["a.example/{ids}"], said=said)
    assert (first.level, first.found) == (
        Level.WARNING,
        "a.example/held: 1 of 1 IDs are Unhealthy; the device is gone; a pod still holds it (gone).",
    )


def test_a_resource_of_nodes_that_are_not_there_says_which(tmp_path: Path) -> None:
    tty = Resource("a.example/tty", ResourceSpec("chardev", CharDevOptions(paths=[PathOption("/dev/ttyS9")])))
    backend = CharDev(planted_host(tmp_path), [tty])
    inventory = Inventory([tty], {"chardev": backend})
    missing = Problem("/dev/ttyS9", "/dev/ttyS9 does not exist")
    (one,) = hardware(Survey(inventory, HealthBook(), (("chardev", missing),), {}))  # and not a second time
    assert one.found == "a.example/tty offers nothing: /dev/ttyS9 does not exist."


@pytest.mark.parametrize(
    ("there", "said"),
    [
        ("", "no device node is at /dev/spi*"),
        ("dev/spi0/", "no device node is at /dev/spi*"),
        ("dev/spi0", "/dev/spi0 is a plain file, not a device node"),
        ("dev/spi0 -> gone", "/dev/spi0 is a link to /dev/gone, which does not exist"),
        ("dev/spi0 -> spi1\ndev/spi1 -> spi0", "/dev/spi0 is a loop of symbolic links; /dev/spi1 is a loop of"),
    ],
)
def test_what_a_glob_finds_and_does_not_take_is_told(tmp_path: Path, there: str, said: str) -> None:
    spi = Resource("a.example/spi", ResourceSpec("chardev", CharDevOptions(paths=[PathOption("/dev/spi*")])))
    backend = CharDev(planted_host(tmp_path, there), [spi])
    problems = tuple(("chardev", it) for unit in backend.units() for it in backend.discover(unit).problems)
    (one,) = hardware(Survey(Inventory([spi], {"chardev": backend}), HealthBook(), problems, {}))
    assert one.found.startswith(f"a.example/spi offers nothing: {said}")


def test_a_resource_that_comes_after_another_that_takes_all_says_which_has_it() -> None:
    _, after = look(device("d", A, "b.example/two"), names=(A, "b.example/two"))
    why = f"d: b.example/two selects it, but {A} comes before it in the configuration and has it"
    assert after.found == f"b.example/two offers nothing: {why}."


def test_a_resource_whose_hardware_is_left_out_says_why() -> None:
    (one,) = look(device("d", A, unusable="it has no driver"))
    assert one.found == f"{A} offers nothing: d: it has no driver."


def test_many_that_are_left_out_are_not_all_named() -> None:
    (one,) = look(*(device(f"d{n}", A, unusable="it has no driver") for n in range(5)))
    assert one.found.endswith("; and 2 more.")


def test_a_resource_names_no_hardware_that_its_selectors_exclude_but_what_they_ask_for_instead() -> None:
    nvidias = replace(device("0000:07:00.0", unusable="it has no driver"), attributes={"vendor": ("10de",)})
    amd = resource(A)
    amd = replace(amd, spec=replace(amd.spec, select=({"vendor": ("1002",)},)))
    inventory = Inventory([amd], {KIND: Fake(amd)})
    inventory.update(KIND, by_unit([nvidias]))
    problems = tuple(unmatched([amd], {KIND: [nvidias]}))
    (one,) = hardware(Survey(inventory, HealthBook(), problems, {}))  # and the problem not a second time
    assert one.found == (
        f"{A} offers nothing: its selector vendor = '1002' matches nothing; the fake backend found vendor 10de (1)."
    )
    assert not_offered(inventory) == []


def test_a_fault_below_a_pod_is_a_failure_and_a_drain_is_none_unless_it_covers_a_fault() -> None:
    held = (views.Held("d", (views.Holder("training", "llama-1", "main"),)),)
    fallen = views.Device("d", ("d",), "Unhealthy", "xid-79", "It fell.", name="nvidia2", held=held)

    def first(it: views.Device) -> Finding:
        kubelet, configuration = views.Kubelet("", present=True), views.Configuration("", 0.0)
        serves = views.Resource(A, KIND, registered=True, streaming=True, devices=(it,))
        finding = look(device("d", A), said=Status("", 0.0, 0.0, kubelet, configuration, (serves,), node="gpu-17"))
        return max(finding, key=lambda one: one.level)

    assert first(fallen).level is Level.FAILURE
    assert first(fallen).found.endswith("It fell (xid-79); training/llama-1 has nvidia2.")
    assert first(replace(fallen, held=())).level is Level.WARNING
    assert first(replace(fallen, reason="retired")).level is Level.WARNING  # the hardware is well
    drained = replace(fallen, reason="drained", message="an operator drained it")
    assert first(drained).level is Level.FINE
    assert first(replace(drained, besides="xid-48")).level is Level.WARNING
    assert "kubectl drain gpu-17 " in first(replace(fallen, reason="xid-79")).mend  # as the daemon calls the node
    assert "--gpu-reset" in first(replace(drained, besides="xid-48", hardware=("pci:0000:3b:00.0",))).mend


def test_devices_that_are_not_well_and_problems_are_warnings() -> None:
    lame, problem = look(device("sick", A), device("well", A), problems=[Problem("x", "it cannot be read")])
    assert lame.found == f"{A}: 1 of 2 IDs are Unhealthy; It burns (on-fire)."
    assert problem.found == "fake: it cannot be read."
    assert {lame.level, problem.level} == {Level.WARNING}
