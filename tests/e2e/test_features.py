"""The file for Node Feature Discovery follows what the kubelet is told."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.node import Node
from tests.wait import until

COUNT = "fairlead.feature.node.kubernetes.io/fl.test_widget.count="


async def test_the_feature_file_follows_the_devices_and_outlives_a_stop(node: Node, tmp_path: Path) -> None:
    file = tmp_path / "fairlead-features"
    node.mknod("w1", "w2")

    def counts(number: int) -> bool:
        return file.exists() and f"{COUNT}{number}\n" in file.read_text()

    async with node.agent(
        prelude="from agent.daemon import feature_file\nfeature_file.TOGETHER = 0.0", nfd_features=str(file)
    ):
        await until(lambda: counts(2), "two devices in the file")
        node.mknod("w3")
        await until(lambda: counts(3), "three devices in the file")
    assert counts(3)
