"""The file for Node Feature Discovery follows what the kubelet is told."""

from __future__ import annotations

import json
from pathlib import Path

from tests.e2e.node import Node, chardev
from tests.e2e.process import finish
from tests.wait import until

AT_ONCE = "from agent.daemon import nfd_file\nnfd_file.TOGETHER = 0.0"
COUNT = "fairlead.feature.node.kubernetes.io/fl.test_widget.count="


async def test_the_feature_file_follows_the_devices_and_outlives_a_stop(node: Node, tmp_path: Path) -> None:
    file = tmp_path / "fairlead-features"
    node.mknod("w1", "w2")

    def counts(number: int) -> bool:
        return file.exists() and f"{COUNT}{number}\n" in file.read_text()

    async with node.agent(prelude=AT_ONCE, nfd_features=str(file)):
        await until(lambda: counts(2), "two devices in the file")
        node.mknod("w3")
        await until(lambda: counts(3), "three devices in the file")
    assert counts(3)


async def test_every_face_tells_what_keeps_the_feature_file_from_being_written_as_long_as_it_does(node: Node) -> None:
    in_the_way, config = node.root / "features", str(node.root / "config.toml")
    in_the_way.touch()
    node.mknod("w1")

    async def faces() -> dict[str, bool]:
        commands = [await finish(*command, "--config", config) for command in (("status",), ("doctor", "--json"))]
        found = json.loads(commands[1][1])
        return {
            "status": "Node Feature Discovery" in commands[0][1],
            "doctor": any(it["check"] == "features" for it in found["findings"]),
            "metrics": 'fairlead_problems{part="features"} 1' in await node.get("/metrics"),
            "page": "Node Feature Discovery" in await node.get("/"),
        }

    async with node.agent(chardev(), node.serving, prelude=AT_ONCE, nfd_features=str(in_the_way / "fairlead")) as agent:
        await agent.says("features-not-written")
        await agent.says("http-served")
        assert await faces() == dict.fromkeys(("status", "doctor", "metrics", "page"), True)
        in_the_way.unlink()
        in_the_way.mkdir()
        node.mknod("w2")
        await agent.says("features-written-again")
        assert await faces() == dict.fromkeys(("status", "doctor", "metrics", "page"), False)
