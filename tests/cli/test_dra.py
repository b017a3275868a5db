"""`fairlead dra`: what it prints for an administrator and for users."""

from __future__ import annotations

import json
from pathlib import Path

import yaml
from click.testing import CliRunner
from msgspec.structs import replace

from agent.cli.commands import fairlead
from agent.console.views import Configuration, Device, Held, Holder, Resource
from tests.cli.daemon import running
from tests.console.fakes import FakeDaemon

TOYS = (
    '[[resource]]\nname = "example.com/{name}"\nbackend = "stub"\ndevices = [{{ count = 2 }}]\nreplicas = {replicas}\n'
)


def run(tmp_path: Path, what: str, *resources: str) -> list[dict[str, object]]:
    (file := tmp_path / "config.toml").write_text("".join(resources))
    done = CliRunner().invoke(fairlead, ["dra", what, "--config", str(file)], catch_exceptions=False)
    return list(yaml.safe_load_all(done.stdout))


def test_each_resource_that_is_served_so_has_a_class_and_pods_need_no_change(tmp_path: Path) -> None:
    toy, other = TOYS.format(name="toy", replicas=1) + 'serve = "dra"\n', TOYS.format(name="other", replicas=1)
    (made,) = run(tmp_path, "classes", toy, other, '[dra]\ndriver = "d.example.com"\n')
    assert made["kind"] == "DeviceClass"
    assert made["spec"] == {
        "selectors": [
            {
                "cel": {
                    "expression": 'device.driver == "d.example.com" && "resource" in device.attributes["d.example.com"] '
                    '&& device.attributes["d.example.com"].resource == "example.com/toy"'
                }
            }
        ],
        "extendedResourceName": "example.com/toy",
    }


def test_examples_ask_for_what_is_here_and_for_a_share_of_what_is_shared(tmp_path: Path) -> None:
    made = run(tmp_path, "examples", TOYS.format(name="shared", replicas=3) + 'serve = "dra"\n')
    assert [it["kind"] for it in made] == ["ResourceClaimTemplate", "Pod", "Pod"]
    (request,) = made[0]["spec"]["spec"]["devices"]["requests"]  # type: ignore[index]
    assert request["exactly"] == {
        "deviceClassName": "fairlead-shared.example.com", "count": 1, "capacity": {"requests": {"tokens": "1"}},
    }  # fmt: skip


def test_before_any_resource_is_served_so_it_prints_what_all_would_need(tmp_path: Path) -> None:
    made = run(tmp_path, "classes", TOYS.format(name="toy", replicas=1), TOYS.format(name="other", replicas=1))
    assert [it["spec"]["extendedResourceName"] for it in made] == ["example.com/toy", "example.com/other"]  # type: ignore[index]


def test_before_a_switch_it_says_what_stays_with_its_pods_and_what_moves(tmp_path: Path) -> None:
    (file := tmp_path / "config.toml").write_text(
        f'[agent]\nadmin_socket = "{tmp_path}/admin.sock"\n' + TOYS.format(name="toy", replicas=1)
    )
    held = Device("b", ("b",), "Healthy", held=(Held("b", (Holder("ml", "trainer", "main"),)),))
    shown = Resource("example.com/toy", "stub", True, True, devices=(Device("a", ("a",), "Healthy"), held))
    daemon = FakeDaemon()
    daemon.shown = replace(daemon.shown, resources=(shown,), configuration=Configuration(str(file), 0.0))
    command = ["dra", "switch", "example.com/toy", "--config", str(file)]
    with running(daemon, tmp_path / "admin.sock"):
        told = CliRunner().invoke(fairlead, [*command, "--dry-run", "--json"], catch_exceptions=False).stdout
        text = CliRunner().invoke(fairlead, [*command, "--dry-run"], catch_exceptions=False).stdout
        refused = CliRunner().invoke(fairlead, command)
        unknown = CliRunner().invoke(fairlead, ["dra", "switch", "example.com/toi", "--dry-run", "--config", str(file)])
    assert json.loads(told) == {
        "resource": "example.com/toy", "from": "device-plugin", "to": "dra",
        "stays": [{"device": "b", "pods": ["ml/trainer"]}], "moves": ["a"],
    }  # fmt: skip
    assert "b  ml/trainer" in text
    assert (refused.exit_code, unknown.exit_code) == (2, 2)
    assert "example.com/toy" in unknown.output
