"""What this machine has, with the resource that would offer it, and a whole file of these."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from agent.cli.commands import fairlead
from agent.cli.suggest import PROPOSALS
from agent.config import load
from tests.backends.machines import CONTROLS, H100, nvidia_gpu
from tests.backends.rdma_trees import RDMA_CM, adapter
from tests.backends.trees import planted_host


def run(*arguments: str) -> Result:
    result = CliRunner().invoke(fairlead, [*arguments], prog_name="fairlead")
    assert isinstance(result.exception, SystemExit | None), result.exception
    return result


def host(root: Path, *resources: str) -> str:
    """The path of a configuration that says where this host is."""
    places = "".join(f'{name} = "{root / name}"\n' for name in ("sys", "dev", "proc", "run"))
    file = root / "here.toml"
    file.write_text(f'[host]\nroot = "{root}"\n{places}' + "".join(resources))
    return str(file)


def server() -> str:
    """Seven GPUs, one of them without a driver; and two adapters."""
    lines = CONTROLS + RDMA_CM
    for n, place in enumerate(H100[:6]):
        lines += nvidia_gpu(f"0000:{place}.0", n)
    lines += nvidia_gpu(f"0000:{H100[6]}.0", 6, driver=None, registered=False, node=False)
    for n in range(2):
        lines += adapter(f"mlx5_{n}", f"0000:{n + 0x20:02x}:00.0", number=n, guid=f"b83f:d203:00a1:{n:04x}")
    return lines


def test_every_proposal_is_a_resource_that_is_accepted_and_no_two_have_one_name(tmp_path: Path) -> None:
    file = tmp_path / "all.toml"
    file.write_text("\n".join(it.toml for it in PROPOSALS))
    assert len(load(file).resources) == len(PROPOSALS)


def test_a_whole_file_is_written_that_is_valid_and_offers_what_there_is(tmp_path: Path) -> None:
    planted_host(tmp_path, server())
    here = host(tmp_path)
    file = tmp_path / "config.toml"
    file.write_text(run("suggest", "--config", here).stdout)
    assert run("validate", str(file)).exit_code == 0
    written = file.read_text()
    assert "NVIDIA's GPUs: 6 found: H100 nvidia0, H100 nvidia1" in written
    assert f"0000:{H100[6]}.0 is there and cannot be offered yet: it has no driver" in " ".join(
        written.replace("\n#", "").split()
    )
    tables = tomllib.loads(written)
    assert tables["host"] == tomllib.loads(Path(here).read_text())["host"]
    assert [it["name"] for it in tables["resource"]] == ["nvidia.com/gpu", "rdma/hca"]
    found = json.loads(run("discover", "--json", "--config", str(file)).stdout)
    assert {it["name"]: len(it["devices"]) for it in found["resources"]}["nvidia.com/gpu"] == 6
    comments = [line for line in written.split("\n") if line.startswith("#")]
    assert len(comments) > 3 * len(tables["resource"])


def test_what_the_configuration_offers_is_proposed_no_more(tmp_path: Path) -> None:
    planted_host(tmp_path, server())
    mine = '[[resource]]\nname = "my.example/gpu"\nbackend = "gpu"\n'
    found = json.loads(run("discover", "--all", "--json", "--config", host(tmp_path, mine)).stdout)
    assert [it["name"] for it in found["resources"]] == ["my.example/gpu"]
    assert [(it["name"], len(it["devices"])) for it in found["proposals"]] == [("rdma/hca", 2)]
    shown = run("discover", "--all", "--config", host(tmp_path, mine)).stdout
    assert "my.example/gpu: " in shown
    assert 'name = "rdma/hca"' in shown
    assert "matches nothing" not in shown
    assert "proposals" not in json.loads(run("discover", "--json", "--config", host(tmp_path, mine)).stdout)


def test_discover_tells_each_thing_once(tmp_path: Path) -> None:
    planted_host(tmp_path, server())
    kvm = '[[resource]]\nname = "devices.kubevirt.io/kvm"\nbackend = "chardev"\npaths = [{ path = "/dev/kvm" }]\n'
    tun = kvm.replace("kvm", "tun").replace("/dev/tun", "/dev/net/tun*")
    none = '[[resource]]\nname = "a.example/none"\nbackend = "gpu"\nselect = { vendor = "1002" }\n'
    shown = run("discover", "--all", "--config", host(tmp_path, kvm, tun, none)).stdout
    assert "devices.kubevirt.io/kvm: nothing; /dev/kvm does not exist\n" in shown
    assert "a.example/none: nothing; its selector" in shown.replace("\n", " ")
    for said in ("/dev/kvm", "a.example/none", f"0000:{H100[6]}.0", "mlx5_0"):
        assert len(re.findall(rf"{re.escape(said)}\b", shown)) == 1, said


def test_without_a_configuration_the_machine_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agent.config.file.load.__defaults__", (None, load.__defaults__[1], tmp_path / "none"))  # type: ignore[index]
    shown = run("discover").stdout
    assert "There is no configuration file" in shown
    assert "`fairlead suggest > config.toml`" in shown
    assert "proposals" in json.loads(run("discover", "--json").stdout)
