"""kubectl fairlead: one question to all nodes, one answer, whatever single nodes do."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from agent.cli.explain import OWN_LOOK
from agent.console.doctor import failure, fine, named, warning
from agent.console.views import Event, Period, Resource
from tests.console.fakes import GPU, FakeDaemon, status
from tests.console.http import nodes
from tests.deploy.kubectl.fleet import PLUGIN, Kubectl, Recorder, Result, ended, findings, plugin, pod
from tests.deploy.manifests import REPOSITORY, Manifests, kustomize
from tests.needs import skip_without

SICK = replace(GPU, state="Unhealthy", reason="xid-79", message="The GPU fell off the bus.", since=1900.0)
DRAINED = replace(GPU, state="Unhealthy", reason="drained", message="an operator drained it", since=1900.0)


class Daemon(FakeDaemon):
    """Knows its GPU by the names that lookup.find knows, too."""

    def _known(self, device: str) -> None:
        super()._known("GPU-1" if device in ("nvidia.com/gpu/GPU-1", "serial=4711") else device)


def gpus(*devices: Any) -> Resource:
    return Resource("nvidia.com/gpu", "gpu", True, True, devices=devices)


def dead(_: Sequence[str]) -> Result:
    return ended(1, stderr="Error from server: error dialing backend: dial tcp 10.0.0.9:10250: i/o timeout\n")


def silent(_: Sequence[str]) -> Result:
    raise subprocess.TimeoutExpired("kubectl", 30)


def old(arguments: Sequence[str]) -> Result:
    """A Fairlead of before most of this: other fields, and no --json for some commands."""
    if arguments[0] == "status" and "--history" not in arguments:
        device = {"key": "GPU-1", "ids": ["GPU-1"], "state": "Unhealthy"}
        resource = {"name": "nvidia.com/gpu", "registered": True, "streaming": True, "devices": [device]}
        return ended(stdout=json.dumps({"now": 2000.0, "resources": [resource], "to_come": {"a": 1}}))
    return ended(2, stderr="Usage: fairlead explain [OPTIONS] DEVICE\nTry 'fairlead explain --help' for help.\n\nError: No such option: --json\n")  # fmt: skip


@pytest.fixture
def kubectl() -> Kubectl:
    return Kubectl()


@pytest.fixture
def well(tmp_path: Path) -> Recorder:
    return Recorder(FakeDaemon(), tmp_path / "well")


@pytest.fixture
def sick(tmp_path: Path) -> Recorder:
    past = (Period(2000.0 - 86400, 1900.0, "Healthy"), Period(1900.0, 2000.0, "Unhealthy", "xid-79"))
    return Recorder(Daemon(status(gpus(SICK)), past={"nvidia.com/gpu/GPU-1": past}), tmp_path / "sick")


class Ran:
    """What came of a command."""

    def __init__(self, kubectl: Kubectl, line: str, patch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:  # fmt: skip
        module = plugin()
        patch.setattr(module, "subprocess", SimpleNamespace(**vars(subprocess) | {"run": kubectl.run}))
        patch.setattr(sys, "argv", ["kubectl-fairlead", *shlex.split(line)])
        try:
            self.code = module.main()
        except SystemExit as end:
            self.code = end.code
        said = capsys.readouterr()
        self.out, self.err = said.out, said.err
        self.lines = said.out.splitlines()

    @property
    def document(self) -> dict[str, dict[str, Any]]:
        """The JSON by nodes."""
        return {it["node"]: it for it in json.loads(self.out)["nodes"]}


@pytest.fixture
def ask(kubectl: Kubectl, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    return lambda line: Ran(kubectl, line, monkeypatch, capsys)


def test_a_thousand_nodes_are_one_table_and_one_that_does_not_answer_is_a_line_of_it(
    kubectl: Kubectl, ask: Any, well: Recorder, sick: Recorder
) -> None:
    kubectl.nodes = {f"worker-{n}": well for n in range(1, 991)}
    kubectl.nodes |= dict.fromkeys(("worker-991", "worker-992", "worker-993"), sick)
    kubectl.nodes |= {"worker-994": dead, "worker-995": silent, "worker-996": old}
    kubectl.nodes["worker-997"] = lambda _: ended(1, stderr="no Fairlead answers at /run/fairlead/admin.sock\n")
    kubectl.nodes["worker-998"] = lambda _: ended(stdout="<html>")
    kubectl.pods = [pod("worker-999", "Pending", "ImagePullBackOff"), pod("worker-1000", "Failed")]
    ran = ask("status")
    head, *rows = ran.lines
    assert ran.code == 1
    assert " ".join(head.split()) == "NODE VERSION REGISTERED OK DEGRADED BAD IN USE NOT OFFERED PROBLEMS"
    assert len(rows) == 1000
    assert [row.split()[0] for row in rows[:995]] == [f"worker-{n}" for n in (*range(1, 994), 996, 994)]
    assert rows[0].split() == ["worker-1", "1.2.3", "1/1", "1", "0", "0", "0", "0", "0"]
    assert rows[992].split() == ["worker-993", "1.2.3", "1/1", "0", "0", "1", "0", "0", "0"]
    assert rows[993].split() == ["worker-996", "?", "1/1", "0", "0", "1", "0", "0", "0"]
    assert [row.partition("no answer: ")[2] for row in rows[994:]] == [
        "error dialing backend: dial tcp 10.0.0.9:10250: i/o timeout",
        "it did not answer within 30 s",
        "no Fairlead answers at /run/fairlead/admin.sock",
        "its answer is not understood here: '<html>'",
        "its pod fairlead-worker-999 is Pending (ImagePullBackOff)",
        "its pod fairlead-worker-1000 is Failed",
    ]


@pytest.mark.parametrize(
    ("command", "answer"),
    [
        ("status", "[]"),
        ("status", "null"),
        (
            "sick",
            '{"now": 0, "resources": [{"name": "a", "registered": true, "streaming": true, "devices": [{"key": "k"}]}]}',
        ),
        ("fewer", '{"resources": []}'),
        ("doctor", "{}"),
        ("events --last 1", "3"),
        ("explain x", "[]"),
    ],
)
def test_one_node_whose_answer_has_another_shape_is_a_line_and_hides_no_other(
    kubectl: Kubectl, ask: Any, command: str, answer: str
) -> None:
    kubectl.nodes = {"odd": lambda _: ended(stdout=answer + "\n")}
    ran = ask(command)
    assert ran.code
    assert "its answer is not understood here" in "\n".join(ran.lines)


def test_as_json_each_node_has_its_answer_or_the_reason_why_there_is_none(
    kubectl: Kubectl, ask: Any, well: Recorder
) -> None:
    kubectl.nodes = {"a": well, "b": dead}
    ran = ask("status --json")
    assert ran.code == 1
    assert ran.document["a"]["answer"]["resources"][0]["devices"][0]["key"] == "GPU-1"
    assert ran.document["b"]["error"].startswith("error dialing backend")


def test_so_many_nodes_are_asked_at_once(kubectl: Kubectl, ask: Any, well: Recorder) -> None:
    kubectl.nodes = {f"n{n}": well for n in range(12)}
    kubectl.barrier = threading.Barrier(4)  # fewer at once, and this waits for ever
    assert ask("status --parallel 4").code == 0


def test_nodes_are_named_or_selected_and_one_without_a_pod_is_told(kubectl: Kubectl, ask: Any, well: Recorder) -> None:
    kubectl.nodes = {"a": well, "b": well, "c": well}
    kubectl.labels = {"rack=r7": ["b", "d"]}
    assert [node for node, it in ask("status --json --node a,c --node x").document.items()] == ["a", "c", "x"]
    assert [node for node, it in ask("status --json --selector rack=r7 --node a,b").document.items()] == ["b"]
    ran = ask("status -l rack=r7")
    assert (ran.code, ran.lines[-1].split(maxsplit=1)) == (1, ["d", "no answer: no pod of Fairlead is on this node"])
    assert ask("status --selector rack=r7 --node c").code == 2


def test_a_resource_has_a_line_for_each_node_that_serves_it(kubectl: Kubectl, ask: Any, tmp_path: Path) -> None:
    shown = replace(nodes.busy(), unclaimed=(nodes.unusable(4),))
    kubectl.nodes = {"a": Recorder(FakeDaemon(shown), tmp_path / "busy")}
    rows = [line.split() for line in ask("status --resources").lines[1:]]
    assert rows[0] == ["a", "0.1.0", "nvidia.com/gpu", "1/1", "7", "0", "1", "3", "1", "1"]
    assert {row[-2] for row in rows[1:]} == {"0"}
    assert rows[3][:4] == ["a", "0.1.0", "example.com/camera", "0/1"]


def test_what_is_sick_anywhere_is_told_with_who_has_it_and_drains_only_if_asked_for(
    kubectl: Kubectl, ask: Any, well: Recorder, tmp_path: Path
) -> None:
    gone = replace(nodes.node(nodes.gpus(**nodes.FALLEN)), unclaimed=(nodes.unusable(4),))
    kubectl.nodes = {
        "a": well, "b": Recorder(FakeDaemon(gone), tmp_path / "b"), "c": old, "d": dead,
        "e": Recorder(FakeDaemon(status(gpus(DRAINED))), tmp_path / "e"),
    }  # fmt: skip
    ran = ask("sick")
    _, fallen, missing, unknown, unanswered, end = ran.lines
    assert "GPU-5f3c2a3b" in fallen
    assert "nvidia3 H100" in fallen
    assert "training/notebook-7d9f" in fallen
    assert fallen.endswith(str(nodes.FALLEN["message"]))
    assert "Not offered" in missing
    assert "unusable" in missing
    assert unknown.split()[:3] == ["c", "nvidia.com/gpu", "GPU-1"]
    assert unanswered.startswith("d ")
    assert (ran.code, end) == (1, "3 devices on 4 nodes are not well.")
    assert "drained" in ask("sick --all").out


def test_nodes_that_offer_fewer_than_a_day_ago_are_told_by_the_daemons_own_memory(
    kubectl: Kubectl, ask: Any, well: Recorder, sick: Recorder, tmp_path: Path
) -> None:
    long_ago = replace(SICK, since=2000.0 - 90000)
    again = Recorder(
        Daemon(status(gpus(SICK)), past={"nvidia.com/gpu/GPU-1": (Period(2000.0 - 86400, 2000.0, "Unhealthy"),)}),
        tmp_path / "again",
    )
    kubectl.nodes = {
        "a": well, "b": sick, "c": Recorder(FakeDaemon(status(gpus(long_ago))), tmp_path / "long"), "d": again, "e": dead,
    }  # fmt: skip
    ran = ask("fewer --json")
    (lost,) = ran.document["b"]["answer"]
    assert (lost["device"], lost["yesterday"], lost["reason"]) == ("GPU-1", "Healthy", "xid-79")
    assert [ran.document[node]["answer"] for node in "acd"] == [[], [], []]
    assert (ran.code, ask("fewer").lines[-1]) == (1, "1 of 5 nodes offer fewer than 24 hours ago.")
    kubectl.nodes["b"] = old  # that cannot tell
    assert ask("fewer").lines[-1] == (
        "1 of 5 nodes offer fewer than 24 hours ago; of Unknown ones nobody knows how they were then."
    )
    asked = [(node, command) for node, command in kubectl.asked if "--history" in command]
    assert set(asked) == {
        (node, ("fairlead", "status", "--history", "nvidia.com/gpu/GPU-1", "--json")) for node in "bd"
    }


def test_events_of_all_nodes_stand_in_the_order_of_their_time(kubectl: Kubectl, ask: Any, tmp_path: Path) -> None:
    for node, times in {"a": (10.0, 30.0), "b": (20.0,)}.items():
        seen = [Event(n, at, "device-changed", "r", f"{node}{n}", "Healthy") for n, at in enumerate(times)]
        kubectl.nodes[node] = Recorder(FakeDaemon(events=seen), tmp_path / node)
    ran = ask("events --last 5")
    assert [line.split()[5] for line in ran.lines[1:]] == ["a0", "b0", "a1"]
    assert {command for _, command in kubectl.asked} == {("fairlead", "events", "--json", "--last", "5")}


def test_doctors_that_find_the_same_are_told_together_and_the_worst_is_the_exit_code(
    kubectl: Kubectl, ask: Any
) -> None:
    full = warning("The disk is full.", "Make room.", "state-directory")
    dark = failure("There is no kubelet.", "Start it.", "kubelet-socket")
    (well,) = named("sysfs", [fine("It is there.")])
    for n in range(5):
        kubectl.nodes[f"n{n}"] = lambda _: findings(well, full)
    kubectl.nodes["sick"] = lambda _: findings(full, dark)
    kubectl.nodes["well"] = lambda _: findings(well)
    ran = ask("doctor")
    assert ran.lines == [
        "failure kubelet-socket on sick", "  There is no kubelet.", "  → Start it.",
        "warning state-directory on n0, n1, n2 and 3 more", "  The disk is full.", "  → Make room.",
        "1 of 7 nodes are well.",
    ]  # fmt: skip
    assert ran.code == 2
    assert ask("doctor --node n1,well").code == 1
    assert ask("doctor --node well").code == 0
    kubectl.nodes["well"] = dead
    assert ask("doctor --node well").code == 2


def test_in_the_installers_pod_the_doctor_looks_from_where_the_service_is(kubectl: Kubectl, ask: Any) -> None:
    kubectl.pods = [pod("i", command=("/opt/fairlead/share/fairlead/install.sh", "follow"))]
    kubectl.beneath = {"i": lambda _: findings()}
    assert ask("doctor").code == 0
    ask("status")
    (_, doctor), (_, shown) = kubectl.asked
    assert doctor[:2] == ("sh", "-c")
    assert re.search(r"exec nsenter --target .* --mount --root \"\$@\"$", doctor[2])
    assert doctor[3:] == ("sh", "fairlead", "doctor", "--json")
    assert shown == ("fairlead", "status", "--json")


@pytest.mark.parametrize(("name", "is_installer"), [("base", False), ("hardened", False), ("installer", True)])
def test_the_installers_pods_are_known_by_their_command(name: str, is_installer: bool) -> None:
    skip_without("kustomize 5 (make build/kustomize/.ready)")
    it = Manifests.of(name, kustomize() or ())
    made = {**pod("n"), "spec": {"nodeName": "n", "containers": it.pod["containers"]}}
    assert plugin()._target("n", [made]).is_installer is is_installer
    labels = it.one("DaemonSet")["spec"]["template"]["metadata"]["labels"]
    assert dict(pair.split("=") for pair in plugin().LABELS.split(",")).items() <= labels.items()
    assert [container["name"] for container in it.pod["containers"]] == ["fairlead"]


def test_in_an_update_the_pod_that_is_ready_and_does_not_end_is_asked() -> None:
    pods = [pod("n", deletionTimestamp="now"), pod("n", "Pending"), pod("n", name="best"), pod("n", "Failed")]
    assert plugin()._target("n", pods).pod == "best"
    assert plugin()._target("n", pods[:2]).pod == "fairlead-n"


# --- one device ---


def test_a_device_is_explained_by_the_node_that_has_it(kubectl: Kubectl, ask: Any, well: Recorder) -> None:
    kubectl.nodes = {"a": well, "b": lambda _: ended(2, stderr="there is no device 'GPU-1'; there are none at all\n")}
    ran = ask("explain GPU-1")
    assert ran.lines[1].split()[:3] == ["a", "nvidia.com/gpu", "GPU-1"]
    assert "GPU-1 is offered in nvidia.com/gpu" in ran.out
    assert ran.code == 0
    assert list(ask("explain GPU-1 --json").document) == ["a"]
    nobody = ask("explain GPU-2")
    assert (nobody.code, nobody.err) == (2, "kubectl fairlead: no node has a device 'GPU-2'\n")


def test_a_look_without_a_daemon_is_no_answer(kubectl: Kubectl, ask: Any) -> None:
    note = f"no Fairlead answers at /a. {OWN_LOOK}"
    kubectl.nodes = {"a": lambda _: ended(0, "{}", note)}
    assert ask("explain GPU-1").lines == [f"a     no answer: {note}"]


def test_a_drain_finds_the_node_that_has_the_serial(kubectl: Kubectl, ask: Any, tmp_path: Path) -> None:
    it = Daemon()
    kubectl.nodes = {f"n{n}": Recorder(FakeDaemon(), tmp_path / f"n{n}") for n in range(3)}
    kubectl.nodes |= {"here": Recorder(it, tmp_path / "here"), "down": dead}
    ran = ask("drain --serial 4711 --reason 'fan is loud' --until 2h")
    assert (ran.code, [line.split() for line in ran.lines[1:]]) == (0, [["here", "ids", "serial=4711"]])
    (drain,) = it.asked
    assert drain[:3] == ("drain", "serial=4711", "fan is loud")
    assert drain[3] is not None
    assert ask("undrain --serial 4711").code == 0
    assert it.asked[-1] == ("undrain", "serial=4711")
    assert ask("drain --serial 4712").err == ""


def test_a_drain_touches_nothing_where_several_nodes_have_the_name_or_may_have_it(
    kubectl: Kubectl, ask: Any, tmp_path: Path
) -> None:
    daemons = {name: FakeDaemon() for name in "ab"}
    kubectl.nodes = {name: Recorder(it, tmp_path / name) for name, it in daemons.items()}
    ran = ask("drain GPU-1")
    assert (ran.code, ran.err) == (2, "kubectl fairlead: a, b have a device 'GPU-1'; say which you mean with --node\n")
    kubectl.nodes["b"] = dead
    ran = ask("drain GPU-1")
    assert ran.code == 1
    assert ran.lines[0].endswith("nothing was changed: only a is known to have it, and 1 did not answer; name the node with --node")  # fmt: skip
    kubectl.nodes["a"] = dead
    assert "no node that answers has it" in ask("drain GPU-1").out
    assert not daemons["a"].asked + daemons["b"].asked
    kubectl.nodes["a"] = Recorder(daemons["a"], tmp_path / "again")
    assert ask("drain GPU-1 --node a").code == 0
    assert daemons["a"].asked[0][:2] == ("drain", "GPU-1")


# --- what goes wrong ---


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("", "required: COMMAND"),
        ("drian GPU-1", "invalid choice: 'drian'"),
        ("drain", "DEVICE --serial is required"),
        ("drain GPU-1 --serial 4711", "not allowed with argument"),
        ("status --parallel 0", "invalid"),
        ("status --timeout soon", "invalid"),
        ("status GPU-1", "unrecognized arguments: GPU-1"),
        ("events --last -1", "--last"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_asked(kubectl: Kubectl, ask: Any, line: str, said: str) -> None:
    ran = ask(line)
    assert (ran.code, kubectl.asked) == (2, [])
    assert said in " ".join(ran.err.split())


def test_a_cluster_that_refuses_or_has_no_fairlead_is_one_sentence(kubectl: Kubectl, ask: Any) -> None:
    assert ask("status").err == "kubectl fairlead: there is no pod of Fairlead\n"
    kubectl.refusal = (
        'E1124 03:10:32.8 23407 memcache.go:265] "Unhandled Error" err="refused"\n'
        'Error from server (Forbidden): pods is forbidden: User "eve" cannot list resource "pods"\n'
    )
    ran = ask("status")
    assert ran.code == 2
    assert ran.err == 'kubectl fairlead: kubectl get pods: pods is forbidden: User "eve" cannot list resource "pods"\n'


def test_what_nodes_say_does_no_more_to_a_terminal_than_show_itself(kubectl: Kubectl, ask: Any, tmp_path: Path) -> None:
    evil = replace(SICK, message="\x1b[2J\x1b]0;owned\x07\nroot# ")
    kubectl.nodes = {"a": Recorder(FakeDaemon(status(gpus(evil))), tmp_path / "evil")}
    kubectl.nodes["b"] = lambda _: ended(1, stderr="\x1b[31mred\x1b[0m\n")
    ran = ask("sick")
    assert all(c == "\n" or c.isprintable() for c in ran.out)
    assert len(ran.lines) == 4


def test_it_is_one_file_that_a_laptops_python_runs(tmp_path: Path) -> None:
    """As kubectl starts it: found in PATH, with a kubectl that is a process of its own."""
    text = PLUGIN.read_text()
    tree = ast.parse(text, feature_version=(3, 9))
    imported = {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    imported |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.partition(".")[0] for name in imported} <= sys.stdlib_module_names
    fake = tmp_path / "kubectl"
    listed = json.dumps({"items": [pod("a"), pod("b")]})
    answer = json.dumps({"version": "9", "now": 1.0, "resources": []})
    fake.write_text(
        f"#!/bin/sh\ncase \"$*\" in\n*' get pods '*) echo '{listed}' ;;\n*fairlead-b*) echo gone >&2; exit 1 ;;\n"
        f"*) echo '{answer}' ;;\nesac\n"
    )
    fake.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = [sys.executable, str(PLUGIN), "status", "--context", "here"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[1:] == ["a     9        0/0         0   0         0    0       0            0", "b     no answer: gone"]  # fmt: skip
    assert (done.returncode, done.stderr) == (1, "")
    empty = {**os.environ, "PATH": str(tmp_path / "none")}
    done = subprocess.run([sys.executable, PLUGIN, "status"], env=empty, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, "kubectl fairlead: there is no kubectl in PATH\n")


@pytest.mark.parametrize("document", ["alerts.md", "fleet.md"])
def test_what_the_docs_have_people_type_is_understood(document: str) -> None:
    text = (REPOSITORY / "docs" / document).read_text()
    examples = [line for block in re.findall(r"```sh\n(.*?)```", text, flags=re.DOTALL) for line in block.splitlines()]
    typed = [it for it in (*examples, *re.findall(r"`([^`\n]+)`", text)) if it.startswith("kubectl fairlead ")]
    assert typed
    for line in typed:
        if (words := shlex.split(line, comments=True)[2:])[0] != "COMMAND":
            plugin().parser().parse_args(words)
