"""What the doctor says of a running daemon."""

from __future__ import annotations

from msgspec.structs import replace

from agent.console.doctor import Level
from agent.console.doctor.kubelet import daemon
from agent.console.views import Kubelet, Resource, Status, Witness
from tests.console.fakes import status

MISSING = Resource("a.example/one", "stub", False, False)
REFUSED = Resource("a.example/two", "stub", False, False, complaint="the kubelet refused: Unimplemented.")


def waiting(*resources: Resource) -> Status:
    return replace(status(*resources), kubelet=Kubelet("/plugins/kubelet.sock", False, "waiting for /plugins"))


def test_what_all_resources_wait_for_is_said_once() -> None:
    (one,) = daemon(waiting(MISSING, MISSING))
    assert (one.level, one.found) == (
        Level.FAILURE,
        "It is waiting for /plugins. 2 of its 2 resources are not registered.",
    )


def test_what_keeps_one_resource_out_is_said_of_it_too() -> None:
    _, own = daemon(waiting(MISSING, REFUSED))
    assert own.found == "a.example/two is not registered with the kubelet: the kubelet refused: Unimplemented."


def test_each_resource_that_is_missing_for_no_common_reason_is_named() -> None:
    assert [one.found.partition(" ")[0] for one in daemon(status(MISSING, REFUSED))] == [MISSING.name, REFUSED.name]


def test_where_everything_is_registered_all_is_well() -> None:
    (one,) = daemon(status())
    assert (one.level, one.mend) == (Level.FINE, "")


def test_each_witness_of_faults_is_a_finding_and_one_that_should_be_heard_and_is_not_a_warning() -> None:
    log = Witness("the kernel's log", heard=False, why="permission denied")
    nvml = Witness("NVIDIA's library (NVML)", heard=True)
    spare = replace(nvml, heard=False, needed=False, why="the kernel's log tells the same")
    found = [it for it in daemon(replace(status(), witnesses=(log, nvml, spare))) if it.check == "witnesses"]
    assert [(it.level, it.found) for it in found] == [
        (Level.WARNING, "It does not hear the kernel's log: permission denied."),
        (Level.FINE, "It hears NVIDIA's library (NVML)."),
        (Level.FINE, "It need not hear NVIDIA's library (NVML): the kernel's log tells the same."),
    ]
