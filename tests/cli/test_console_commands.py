"""The commands that ask the daemon: what they print, and what they end with."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from msgspec.structs import replace

from agent.cli import commands, devices, output
from agent.cli.commands import fairlead
from agent.cli.events import line as event_line
from agent.cli.explain import lines
from agent.console import advice, sockets
from agent.console.control import NoDaemonError, WrongNameError
from agent.console.sockets import node_name
from agent.console.views import (
    Configuration,
    Device,
    Event,
    Explanation,
    Held,
    Holder,
    Kubelet,
    Problem,
    Reloaded,
    Resource,
    Signal,
    Unclaimed,
    Witness,
)
from tests.cli.daemon import running
from tests.console.fakes import GPU, FakeDaemon, status

Run = Callable[..., Result]


@pytest.fixture
def daemon() -> FakeDaemon:
    return FakeDaemon()


@pytest.fixture
def run(daemon: FakeDaemon, tmp_path: Path) -> Iterator[Run]:
    config = tmp_path / "config.toml"
    config.write_text(f'[agent]\nadmin_socket = "{tmp_path}/admin.sock"\n')

    def invoke(command: str, *arguments: str) -> Result:
        return CliRunner().invoke(fairlead, [command, "--config", str(config), *arguments], prog_name="fairlead")

    with running(daemon, tmp_path / "admin.sock"):
        yield invoke


@pytest.fixture
def at_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal of 80 columns."""
    monkeypatch.setattr(output, "is_terminal", lambda: True)
    monkeypatch.setattr(output, "columns", lambda: 80)


def widest(result: Result) -> int:
    """Of what is folded: a command stays whole, to be copied."""
    return max(len(line) for line in result.output.splitlines() if not line.startswith("    run "))


HOLDER = Holder("team", "training-0", "main")
FALLEN = "The GPU has fallen off the bus."
SICK = Device("GPU-2", ("GPU-2",), "Unhealthy", "xid-79", FALLEN, 1500.0, hardware=("pci:0000:5e:00.0",))
USED = replace(GPU, held=(Held("GPU-1", (HOLDER,)),))


def troubled() -> FakeDaemon:
    shown = status(
        Resource("nvidia.com/gpu", "gpu", True, True, devices=(USED, SICK)),
        Resource("rdma/hca", "infiniband", False, False, complaint="the kubelet refused it: bad name"),
        Resource("old.example/thing", "", True, True, devices=(Device("x", ("x",), "Unhealthy", "retired"),)),
    )
    return FakeDaemon(
        replace(
            shown,
            kubelet=Kubelet("/plugins/kubelet.sock", False, "waiting for /plugins/kubelet.sock"),
            configuration=Configuration(
                "/etc/fairlead/config.toml", 1.0, ("config.toml:3: no key 'resinc'",), ("host",)
            ),
            unclaimed=(Unclaimed("0000:5e:00.0", "gpu", "it has no driver; " * 10),),
            problems=(Problem("gpu", "0000:5e:00.0", "its uevent file is garbage"),),
        )
    )


# --- status ---


def test_a_node_that_is_well_is_a_short_table(run: Run) -> None:
    result = run("status")
    assert result.exit_code == 0
    assert "nvidia.com/gpu  registered" in result.output
    assert len(result.output.splitlines()) == 8
    assert "1 device, all well" in result.output.splitlines()


@pytest.mark.usefixtures("at_a_terminal")
def test_everything_that_is_wrong_is_shown_within_80_columns(daemon: FakeDaemon, run: Run) -> None:
    daemon.shown = troubled().shown
    result = run("status")
    for said in ("xid-79", "fallen off the bus", "bad name", "retiring", "resinc", "restart is needed", "no driver"):
        assert said in result.output
    assert "its uevent file is garbage" in result.output
    assert widest(result) <= 80


def test_status_says_which_witnesses_of_faults_are_heard_and_why_one_is_not(daemon: FakeDaemon, run: Run) -> None:
    log, nvml = Witness("the kernel's log", heard=True), Witness("NVIDIA's library (NVML)", heard=True)
    daemon.shown = replace(status(), witnesses=(log, replace(nvml, heard=False, needed=False, why="not needed")))
    assert run("status").output.splitlines()[2:4] == ["Faults are told by the kernel's log", ""]
    daemon.shown = replace(status(), witnesses=(log, nvml))
    assert run("status").output.splitlines()[2] == "Faults are told by the kernel's log and NVIDIA's library (NVML)"
    daemon.shown = replace(status(), witnesses=(replace(log, heard=False, why="permission denied"), nvml))
    assert run("status").output.splitlines()[2:4] == [
        "Faults are told by NVIDIA's library (NVML)",
        "The kernel's log is not heard: permission denied",
    ]


def test_what_is_gone_since_nobody_knows_when_is_not_dated(daemon: FakeDaemon, run: Run) -> None:
    gone = Device("x", ("x",), "Unhealthy", "gone", "The device is gone.")
    daemon.shown = status(Resource("a.b/c", "stub", True, True, devices=(gone,)))
    assert "  gone: The device is gone." in run("status").output.splitlines()


def test_the_tokens_of_one_device_that_is_gone_are_one_thing(daemon: FakeDaemon, run: Run) -> None:
    gone = [Device(f"kvm::{n}", (f"kvm::{n}",), "Unhealthy", "gone", "The device is gone.", 1500.0) for n in range(50)]
    daemon.shown = status(Resource("a.b/kvm", "chardev", True, True, devices=(*gone, SICK, replace(SICK, key="GPU-3"))))
    said = [line for line in run("status").output.splitlines() if line.startswith("unhealthy")]
    assert said == ["unhealthy kvm::0 and 49 more IDs of a.b/kvm"] + ["unhealthy GPU-2 of a.b/kvm"] * 2


def test_the_status_as_json_is_one_document(run: Run) -> None:
    shown = json.loads(run("status", "--json").output)
    assert shown["resources"][0]["devices"][0]["key"] == "GPU-1"


def test_who_holds_what(daemon: FakeDaemon, run: Run) -> None:
    assert run("status", "--pods").output == "No pod holds a device.\n"
    daemon.shown = troubled().shown
    assert run("status", "--pods").output.splitlines()[1].split() == [
        "team/training-0",
        "main",
        "GPU-1",
        "nvidia.com/gpu",
        "GPU-1",
    ]


def test_what_is_held_by_a_pod_that_the_kubelet_does_not_name_says_what_is_awaited(
    daemon: FakeDaemon, run: Run
) -> None:
    ending = replace(GPU, held=(Held("GPU-1"),))
    daemon.shown = status(Resource("nvidia.com/gpu", "gpu", True, True, devices=(ending,)))
    _, row, *awaited = run("status", "--pods").output.splitlines()
    assert row.split() == ["(not", "named)", "GPU-1", "nvidia.com/gpu", "GPU-1"]
    assert " ".join(map(str.strip, awaited)) == (
        "A pod that the kubelet does not name starts, or has ended; its device is free once the kubelet's checkpoint leaves "
        "it out, too."
    )


@pytest.mark.usefixtures("at_a_terminal")
def test_a_long_name_of_the_node_is_shown_within_80_columns(daemon: FakeDaemon, run: Run) -> None:
    kubelet = Kubelet("/var/lib/kubelet/device-plugins/kubelet.sock", False)
    daemon.shown = replace(status(), node="worker-3.europe.hardware.example.com", kubelet=kubelet)
    assert widest(run("status")) <= 80


@pytest.mark.usefixtures("at_a_terminal")
def test_a_name_that_leaves_no_room_for_numbers_stands_above_them(daemon: FakeDaemon, run: Run) -> None:
    name = f"hardware.example.com/{'x' * 63}"
    daemon.shown = status(
        Resource(name, "gpu", True, True, devices=(USED,)), Resource("a.b/c", "gpu", True, True, devices=(GPU,))
    )
    assert [line.split() for line in run("status").output.splitlines()[3:7]] == [
        ["RESOURCE", "KUBELET", "OK", "DEGRADED", "BAD", "DRAINED", "IN", "USE"],
        [name],
        ["registered", "1", "0", "0", "0", "1"],
        ["a.b/c", "registered", "1", "0", "0", "0", "0"],
    ]
    assert len({len(line) for line in run("status").output.splitlines()[3:7] if line != name}) == 1


# --- devices ---

DRAINED = Device(
    "GPU-3", ("GPU-3",), "Unhealthy", "drained", "an operator drained it", 1500.0, hardware=("pci:0000:5f:00.0",)
)
LOST = Unclaimed(
    "0000:60:00.0", "gpu", "it has no driver; nvidia is needed", "nvidia.com/gpu", "unusable", 1500.0,
    hardware=("pci:0000:60:00.0",), name="nvidia5", model="H100",
)  # fmt: skip
WENT = replace(
    LOST, device="GPU-6", reason="gone", why="it is not there any more", hardware=("pci:0000:61:00.0",), name=""
)
ALIEN = Unclaimed("0000:62:00.0", "gpu", "no resource selects it")


def broken() -> FakeDaemon:
    used = replace(USED, name="nvidia0", model="H100")
    shown = status(Resource("nvidia.com/gpu", "gpu", True, True, devices=(SICK, DRAINED, used)))
    return FakeDaemon(replace(shown, unclaimed=(LOST, WENT, ALIEN)))


def test_each_device_has_a_line_that_can_be_searched(daemon: FakeDaemon, run: Run) -> None:
    daemon.shown = broken().shown
    since = output.since(1500.0, is_brief=False)
    lines = run("devices").output.splitlines()
    assert [line.split() for line in lines] == [
        ["NAME", "MODEL", "ADDRESS", "RESOURCE", "STATE", "REASON", "SINCE", "POD"],
        ["nvidia0", "H100", "0000:3b:00.0", "nvidia.com/gpu", "healthy", "-", "-", "team/training-0"],
        ["GPU-2", "-", "0000:5e:00.0", "nvidia.com/gpu", "unhealthy", "xid-79", since, "-"],
        ["GPU-3", "-", "0000:5f:00.0", "nvidia.com/gpu", "drained", "drained", since, "-"],
        ["nvidia5", "H100", "0000:60:00.0", "nvidia.com/gpu", "not-offered", "unusable", since, "-"],
        ["GPU-6", "H100", "0000:61:00.0", "nvidia.com/gpu", "gone", "gone", since, "-"],
        ["0000:62:00.0", "-", "-", "-", "not-offered", "-", "-", "-"],
    ]
    assert set(lines) <= set(run("status").output.splitlines())
    told = json.loads(run("devices", "--json").output)["devices"]
    assert [(it["name"], it["state"], it["pods"]) for it in told[:2]] == [
        ("nvidia0", "healthy", ["team/training-0"]), ("GPU-2", "unhealthy", []),
    ]  # fmt: skip


@pytest.mark.usefixtures("at_a_terminal")
def test_a_narrow_terminal_cuts_the_table_and_folds_no_line(daemon: FakeDaemon, run: Run) -> None:
    daemon.shown = broken().shown
    result = run("devices")
    assert len(result.output.splitlines()) == 7
    assert widest(result) <= 80


def test_off_a_terminal_no_line_is_folded_however_long(daemon: FakeDaemon, run: Run) -> None:
    name, pod_name = f"hardware.example.com/{'x' * 63}", "p" * 60
    held = Held("GPU-1", (Holder("team", pod_name, "main"),))
    daemon.shown = status(
        Resource(name, "gpu", True, True, devices=(replace(GPU, held=(held,)), replace(SICK, message="why " * 60)))
    )
    for command in (("status", "--pods"), ("status",), ("devices",)):
        assert any(name in line and pod_name in line for line in run(*command).output.splitlines())
    assert sum("why why" in line for line in run("status").output.splitlines()) == 1


def test_a_drain_is_no_failure(daemon: FakeDaemon, run: Run) -> None:
    daemon.shown = status(Resource("nvidia.com/gpu", "gpu", True, True, devices=(GPU, DRAINED)))
    lines = run("status").output.splitlines()
    assert lines[1] == "2 devices, all well, 1 drained"
    assert [line.split()[2:] for line in lines if line.startswith("nvidia.com/gpu")] == [["1", "0", "0", "1", "0"]]
    assert any(line.startswith("drained GPU-3") for line in lines)


COVERING = replace(
    DRAINED, name="nvidia3", message="an operator drained it; besides, it is Unhealthy with xid-48 (…)", besides="xid-48",
    held=(Held("GPU-3", (Holder("training", "llama-1", "main"),)),),
)  # fmt: skip


def test_a_drain_hides_no_fault_and_says_that_undrain_would_declare_it_mended(daemon: FakeDaemon, run: Run) -> None:
    timed = replace(DRAINED, key="GPU-4", ids=("GPU-4",), until="2027-01-15 08:00:00 UTC")
    daemon.shown = status(Resource("nvidia.com/gpu", "gpu", True, True, devices=(DRAINED, COVERING, timed)))
    said = [line.strip() for line in run("status").output.splitlines()]
    at = said.index("held  training/llama-1")
    mend = advice.of_xid(48)
    assert said[at + 1].endswith(f"besides, it has xid-48: {mend.means}.")
    assert said[at + 2] == f"do    {mend.do} Then give it back."
    assert "--gpu-reset --id=0000:5f:00.0 && fairlead undrain nvidia3" in said[at + 3]
    assert said[at + 4] == (
        "ends  With `fairlead undrain nvidia3`, which also declares xid-48 mended: mend that first."
    )
    assert "ends  With `fairlead undrain GPU-3`." in said
    assert "ends  At 2027-01-15 08:00:00 UTC, or with `fairlead undrain GPU-4`." in said


def test_an_explanation_of_a_drained_device_is_no_failure_and_has_the_faults_advice() -> None:
    it = Explanation(
        "GPU-3", "gpu", "1", resource="a.b/c", ids=("GPU-3",), state="Unhealthy", reason="drained", besides="xid-48"
    )
    said = list(lines(it))
    assert said[0].endswith(f"is offered in a.b/c: {output.state('Drained', 'drained')}")
    assert any(advice.of_xid(48).do in line for line in said)


def test_each_trouble_says_what_it_means_what_to_do_and_what_ends_it(daemon: FakeDaemon, run: Run) -> None:
    daemon.shown = broken().shown
    said = [line.strip() for line in run("status").output.splitlines()]
    at = said.index("do    Move the node's pods away and reboot it. " + advice._FAULTY_CARD)
    assert said[at - 1].startswith("xid-79 since ")  # whose sentence has what it means
    clear = f"kubectl drain {node_name()} --ignore-daemonsets --delete-emptydir-data"
    assert said[at + 1] == f"run   {clear} && systemctl reboot"
    assert said[at + 2].startswith("ends  With a new binding")
    assert "run   fairlead undrain GPU-3" in said
    assert "run   modprobe nvidia && echo 0000:60:00.0 > /sys/bus/pci/drivers_probe" in said


def test_commands_of_every_face_name_the_node_as_the_daemon_does(daemon: FakeDaemon, run: Run) -> None:
    daemon.shown = replace(broken().shown, node="gpu-17")
    assert "kubectl drain gpu-17 " in run("status").output
    it = Explanation("GPU-2", "gpu", "1", resource="a.b/c", state="Unhealthy", reason="xid-79", node="gpu-17")
    assert any("kubectl drain gpu-17 " in line for line in lines(it))


def test_replies_and_events_have_the_name_that_a_person_knows(daemon: FakeDaemon, run: Run) -> None:
    event = Event(1, 1500.0, "allocated", "nvidia.com/gpu", "GPU-1, GPU-2", name="nvidia0, nvidia1")
    assert "nvidia.com/gpu nvidia0, nvidia1 (GPU-1, GPU-2)" in event_line(event)
    assert "nvidia.com/gpu GPU-1 " in event_line(replace(event, name="", device="GPU-1", message="x"))
    daemon.name = "nvidia0"
    assert "nvidia0 (GPU-1)" in run("undrain", "GPU-1").output


def test_no_colours_where_there_is_no_terminal(run: Run, daemon: FakeDaemon) -> None:
    daemon.shown = troubled().shown
    assert "\x1b" not in run("status").output


def test_without_a_daemon_a_sentence_says_so(tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text(f'[agent]\nadmin_socket = "{tmp_path}/nobody.sock"\n')
    failure = CliRunner().invoke(fairlead, ["status", "--config", str(config)], prog_name="fairlead").exception
    assert isinstance(failure, NoDaemonError)
    assert (failure.exit_code, "no Fairlead answers" in failure.sentence) == (1, True)


@pytest.mark.parametrize(
    ("text", "why"),
    [(None, "there is no {}"), (b"[agent", "{} cannot be read (Expected"), (b"\xff", "{} cannot be read (")],
)
def test_a_file_that_cannot_say_where_the_daemon_is_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: bytes | None, why: str
) -> None:
    monkeypatch.setattr(sockets, "_DEFAULT", tmp_path / "nobody.sock")
    config = tmp_path / "config.toml"
    if text is not None:
        config.write_bytes(text)
    failure = CliRunner().invoke(fairlead, ["status", "--config", str(config)], prog_name="fairlead").exception
    assert isinstance(failure, NoDaemonError)
    assert why.format(config) in failure.sentence
    assert "so that this is only where it is by default" in failure.sentence


# --- events ---


def test_the_past_is_told_line_by_line(daemon: FakeDaemon, run: Run) -> None:
    daemon.events = [
        Event(1, time.time(), "device-changed", "nvidia.com/gpu", "GPU-2", "Unhealthy", "xid-79", "It fell."),
        Event(2, 0.0, "config-reloaded"),
    ]
    lines = run("events").output.splitlines()
    assert lines[0].endswith("device-changed  nvidia.com/gpu GPU-2  Unhealthy  xid-79: It fell.")
    assert lines[1].startswith("1970-01-01")
    drained = Event(
        3, 0.0, "device-changed", "nvidia.com/gpu", "GPU-3", "Unhealthy", "drained", "an operator drained it"
    )
    assert f"  {output.state('Drained')}  drained: " in event_line(drained)
    assert [json.loads(line)["number"] for line in run("events", "--json", "--last", "1").output.splitlines()] == [2]


# --- explain ---


def test_a_state_is_explained_with_its_date_if_that_is_known() -> None:
    sick = Explanation(
        "GPU-1", "gpu", "u", resource="a.b/c", ids=("GPU-1",), state="Unhealthy", reason="gone", message="x"
    )
    assert list(lines(sick))[1] == "  gone: x"
    assert list(lines(replace(sick, since=1e9)))[1] == f"  gone since {output.moment(1e9)}: x"


def test_a_device_is_explained(run: Run) -> None:
    result = run("explain", "GPU-1")
    assert result.output.startswith("GPU-1 is offered in nvidia.com/gpu")
    assert "env A=b" in result.output


def test_what_ends_a_signal_is_said_as_one_would_do_it() -> None:
    latched = Signal("pci:1", "xid-79", "now", "It fell.", 0.0, True, ("operator", "our-reset"))
    said = " ".join(" ".join(lines(Explanation("GPU-2", "gpu", "1", signals=(latched,)))).split())
    assert "xid-79 (now, ends with `fairlead undrain` or a reset by Fairlead) since" in said
    advised = Explanation("GPU-2", "gpu", "1", resource="a.b/c", state="Unhealthy", reason="xid-79", signals=(latched,))
    assert "xid-79 (now) since" in " ".join(lines(advised))  # its advice has said what ends it


def test_of_what_was_read_the_empty_is_left_out() -> None:
    shown = list(lines(Explanation("GPU-2", "gpu", "1", attributes={"node_numbers": ("", "", "c:195:1")})))
    assert [line.split() for line in shown if "node_numbers" in line] == [["node_numbers", "c:195:1"]]


def test_an_unknown_device_is_wrong_usage(run: Run) -> None:
    failure = run("explain", "GPU-2").exception
    assert isinstance(failure, WrongNameError)
    assert "did you mean 'GPU-1'" in failure.sentence


# --- drain, undrain, reload ---


def test_a_device_is_drained_and_put_back(daemon: FakeDaemon, run: Run) -> None:
    assert run("drain", "GPU-1", "--reason", "new fan").output == "Drained: GPU-1.\n"
    assert run("undrain", "GPU-1").output == "Back in service: GPU-1 (ended: drained).\n"
    assert daemon.asked == [("drain", "GPU-1", "new fan", None), ("undrain", "GPU-1")]


def test_a_drain_says_who_keeps_the_device_and_that_one_that_is_gone_stays_drained(
    daemon: FakeDaemon, run: Run
) -> None:
    daemon.held = ("GPU-1",)
    assert (
        run("drain", "GPU-1").output
        == "Drained: GPU-1.\nA pod that the kubelet does not name has GPU-1 and keeps it.\n"
    )
    daemon.name, daemon.pods, daemon.besides = "nvidia2", ("training/llama-1",), ("xid-48",)
    assert run("drain", "GPU-1").output.splitlines() == [
        "Drained: nvidia2 (GPU-1).",
        "training/llama-1 has nvidia2 and keeps it.",
        "It also has xid-48; `undrain` will end that, too.",
    ]
    daemon.name, daemon.pods, daemon.besides = "", ("a/b", "a/c"), ()
    assert run("drain", "GPU-1").output.splitlines()[1] == "a/b, a/c have GPU-1 and keep it."
    daemon.gone = True
    assert run("drain", "GPU-1").output.splitlines() == [
        "Drained: nothing that is offered now; it stays drained once it is back.",
        "a/b, a/c have GPU-1; it is gone or cannot be used.",
    ]


@pytest.mark.parametrize(
    ("until", "seconds"), [("2h30m", 9000.0), ("2030-01-01T00:01", 60.0)], ids=["a duration", "a moment"]
)
def test_a_drain_may_end_by_itself(
    daemon: FakeDaemon, run: Run, until: str, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    new_year = datetime.fromisoformat("2030-01-01T00:00").timestamp()  # as this machine's clock shows it
    monkeypatch.setattr(output, "now", lambda: new_year)
    assert run("drain", "GPU-1", "--until", until).output.startswith("Drained until ")
    (_, _, reason, when) = daemon.asked[0]
    assert when == new_year + seconds
    assert str(reason).endswith(" gave no reason")


def test_a_time_of_the_day_is_the_next_one(daemon: FakeDaemon, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    evening = datetime.fromisoformat("2026-11-20T22:30").timestamp()  # as this machine's clock shows it
    monkeypatch.setattr(output, "now", lambda: evening)
    for until in ("23:00", "06:00"):
        assert run("drain", "GPU-1", "--until", until).exit_code == 0
    assert [call[3] for call in daemon.asked] == [evening + 1800, evening + 27000]


@pytest.mark.parametrize(
    ("until", "said"), [("tomorrow", "is no duration"), ("90", "is no duration"), ("2020-01-01", "is past")]
)
def test_a_time_that_is_none_is_wrong_usage(daemon: FakeDaemon, run: Run, until: str, said: str) -> None:
    result = run("drain", "GPU-1", "--until", until)
    assert (result.exit_code, said in result.output, daemon.asked) == (2, True, [])


def test_a_reload_says_what_it_changed(daemon: FakeDaemon, run: Run) -> None:
    assert run("reload").output == "Added: a.b/new\n"
    assert json.loads(run("reload", "--json").output)["added"] == ["a.b/new"]
    daemon.changed = Reloaded()
    said = run("reload").output  # the daemon has read the file as soon as it was written
    assert said == f"Nothing has changed: what the file says is in force since {output.moment(1000.0)}.\n"


def test_the_commands_import_little_and_so_start_fast() -> None:
    looking = ("discover", "suggest", "doctor", "validate", "import", "migrate", "demo", "conformance")  # by themselves
    names = [f"agent.cli.{commands._BESIDE.get(name, name)}" for name in commands._COMMANDS if name not in looking]
    heavy = ("anyio", "betterproto", "structlog", "backends.registry", "agent.config")
    code = (
        "import sys; sys.argv = ['fairlead', 'status', '--config', '/nowhere']\n"
        f"import {', '.join(names)}\n"
        f"print(*(name for name in {heavy} if name in sys.modules))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == []


def test_what_looks_by_itself_looks_at_the_file_of_the_daemon_that_answers(
    daemon: FakeDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets, "_DEFAULT", tmp_path / "admin.sock")
    monkeypatch.setattr(sockets, "_CONFIG", tmp_path / "none.toml")
    config = tmp_path / "config.toml"
    config.write_text('[[resource]]\nname = "a.com/s"\nbackend = "stub"\ndevices = [{ count = 1 }]\n')
    daemon.shown = replace(daemon.shown, configuration=Configuration(str(config), 0.0))

    def said(*arguments: str) -> str:
        return " ".join(CliRunner().invoke(fairlead, arguments, prog_name="fairlead").output.split())

    with running(daemon, tmp_path / "admin.sock"):
        assert f"ok configuration {config} is valid, and the daemon runs with it." in said("doctor")
        found = said("discover")
        assert found.startswith("As the hardware looks now; drains and what the kernel said: `fairlead status`.")
        assert f"By {config}, which the daemon runs with: a.com/s: 1 healthy" in found
        other = tmp_path / "other.toml"
        other.write_text("")
        warned = f"warning configuration The daemon runs with {config}, and this looks at {other}."
        mend = f"→ fairlead doctor --config {config}"
        assert said("doctor", "--config", str(other)).startswith(f"{warned} {mend}")
        daemon.shown = replace(daemon.shown, configuration=Configuration("/not/here/config.toml", 0.0))
        assert "The daemon runs with /not/here/config.toml, and this looks at" in said("doctor")
    assert "ok configuration " in said("doctor")
    assert "As the hardware" not in said("discover")


def test_the_address_of_a_made_up_device_is_short_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "is_terminal", lambda: True)
    stub = replace(GPU, key="stub-0", hardware=("stub:demo.fairlead/stub/stub-0",))
    shown = status(Resource("demo.fairlead/stub", "stub", True, True, devices=(stub,)))
    assert not any("fairlead/stub/" in line for line in devices.table(devices.rows(shown)))
