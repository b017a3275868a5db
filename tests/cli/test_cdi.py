"""`fairlead cdi clean`: what it removes, and when it does not."""

from __future__ import annotations

import fcntl
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from agent.cdi import spec
from agent.cdi.directory import Directory
from agent.cli.commands import fairlead
from agent.runtime.errors import FairleadError
from backends.base import ContainerEdits, Host, HostPath, Node


def test_it_removes_what_fairlead_wrote_and_nothing_while_a_daemon_serves_the_node(tmp_path: Path) -> None:
    (config := tmp_path / "config.toml").write_text(
        f'[agent]\nstate_dir = "{tmp_path}/state"\nplugin_dir = "{tmp_path}"\n[host]\nrun = "{tmp_path}/run"\n'
    )
    directory = Directory(Host(run=tmp_path / "run"), tmp_path / "state")
    tun = spec.edits(ContainerEdits((Node(HostPath("/dev/net/tun"), "/dev/net/tun", "rw"),)))
    directory.update("example.com/tun", lambda _: {"tun": tun})
    (tmp_path / "run/cdi/nvidia.yaml").write_text("kind: nvidia.com/gpu")
    command = ["cdi", "clean", "--json", "--config", str(config)]
    (tmp_path / "fairlead").mkdir()
    with (tmp_path / "fairlead/lock").open("w") as lock:
        lock.write("4711")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(FairleadError, match="process 4711 serves this node and would write them again"):
            CliRunner().invoke(fairlead, command, catch_exceptions=False)
    done = CliRunner().invoke(fairlead, command, catch_exceptions=False)
    assert json.loads(done.stdout) == {"removed": ["/run/cdi/fairlead_example.com_tun.json"]}
    assert [path.name for path in (tmp_path / "run/cdi").iterdir()] == ["nvidia.yaml"]
    assert CliRunner().invoke(fairlead, [*command[:2], *command[3:]]).stdout == "There are none of Fairlead's.\n"
