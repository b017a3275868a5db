"""Seven devices and not eight: every face names what is missing, why, and since when."""

from __future__ import annotations

import json
import re
import shutil
import signal
from collections.abc import Callable

from tests.backends.machines import CONTROLS, information, nvidia_gpu, uuid
from tests.backends.trees import planted_host
from tests.e2e.kmsg import KernelLog
from tests.e2e.node import WIDGET, Node, chardev, pod
from tests.e2e.pods.test_claims import OFTEN_ASKING
from tests.e2e.process import finish
from tests.wait import limit

GPUS = "nvidia.com/gpu"
GPU = f'[[resource]]\nname = "{GPUS}"\nbackend = "gpu"\n'
AT_ONCE = "from agent.daemon import list_reporter\nlist_reporter._PAUSE = 0.01\n"
PLACES = ["0000:19:00.0", "0000:3b:00.0", "0000:4c:00.0", "0000:5d:00.0", "0000:9b:00.0"]
HIDDEN = {
    "0000:4c:00.0": ("0000:4c:00.0", "it has no driver; nvidia is needed"),
    "0000:5d:00.0": (uuid(3), "the NVIDIA driver excludes it"),
    "0000:9b:00.0": (uuid(4), "/dev/nvidia4 does not exist"),
}
"""By their places: what each is called, and why it is not offered."""


def five_gpus_of_which_three_are_hidden() -> str:
    lines = nvidia_gpu(PLACES[0], 0) + nvidia_gpu(PLACES[1], 1)
    lines += nvidia_gpu(PLACES[2], 2, driver=None, registered=False, node=False)
    excluded = information(3, "NVIDIA H100 80GB HBM3", excluded="Yes")
    lines += nvidia_gpu(PLACES[3], 3, registered=False, node=False)
    lines += f"proc/driver/nvidia/gpus/{PLACES[3]}/information = {excluded}\n"
    return CONTROLS + lines + nvidia_gpu(PLACES[4], 4, node=False)


async def says(node: Node, *command: str) -> str:
    """What a command prints, on one line."""
    _, out, err = await finish(*command, "--config", str(node.root / "config.toml"))
    return " ".join((out + err).split())


async def until_seen(node: Node, holds: Callable[[str], bool]) -> None:
    """Wait until the metrics say so."""
    seen = [""]
    async with limit("a metric", lambda: seen[0]):
        while not holds(seen[0]):
            seen[0] = await node.get("/metrics")


async def test_every_face_names_each_gpu_that_is_there_and_cannot_be_offered(bare_node: Node) -> None:
    node = bare_node
    node.dev.rmdir()
    planted_host(node.root, five_gpus_of_which_three_are_hidden())
    async with (
        node.kubelet,
        node.agent(GPU, node.serving, prelude=AT_ONCE, sys=f"{node.root}/sys", proc=f"{node.root}/proc") as agent,
    ):
        await node.healthy(uuid(0), uuid(1), resource=GPUS)
        await agent.says("device-not-offered", times=3)
        await agent.says("http-served")
        told = {
            (line["device"], line["reason"].partition(" (")[0], line["level"], line["resource"])
            for line in agent.said("device-not-offered")
        }
        faces = {
            "status": await says(node, "status"),
            "doctor": await says(node, "doctor"),
            "page": await node.get("/"),
            **{place: await says(node, "explain", place) for place in HIDDEN},
        }
        metrics = await node.get("/metrics")
        document = json.loads((await finish("status", "--json", "--config", str(node.root / "config.toml")))[1])
    for place, (key, why) in HIDDEN.items():
        assert f"{key} is not offered unusable: {why}" in await says(node, "explain", place), "without a daemon, too"
    assert told == {(key, why, "warning", GPUS) for key, why in HIDDEN.values()}
    for place, (key, why) in HIDDEN.items():
        assert re.search(rf"unusable {key} of {GPUS} since [^a-z]*: {why}", faces["status"])
        assert f"{key}: {why}" in faces["doctor"]
        assert re.search(rf">{key}</span>((?!</summary>).)*>{why}", faces["page"])
        assert re.search(rf"{key} is not offered unusable since [^a-z]*: {why}", faces[place])
    assert f"warning hardware {GPUS}: 3 more are not offered" in faces["doctor"]
    assert "3 of 5 devices are not offered" in faces["page"]
    assert f'fairlead_devices_not_offered{{resource_name="{GPUS}",reason="unusable"}} 3' in metrics
    assert {(it["resource"], it["reason"]) for it in document["unclaimed"]} == {(GPUS, "unusable")}


async def test_what_was_offered_and_is_gone_is_missing_until_it_comes_back(node: Node) -> None:
    node.mknod("w1", "w2")
    count = f'fairlead_devices_not_offered{{resource_name="{WIDGET}",reason="gone"}}'
    async with node.agent(chardev(), node.serving, prelude=AT_ONCE) as agent:
        await agent.says("http-served")
        await until_seen(node, lambda metrics: f"{count} 0" in metrics)
        node.unlink("w2")
        await node.healthy("w1")
        await until_seen(node, lambda metrics: f"{count} 1" in metrics)
        assert (await agent.says("device-changed", state="Gone"))["level"] == "warning"
        assert f"gone /dev/w2 of {WIDGET} since" in await says(node, "status")
        assert f"{WIDGET}: 1 more is not offered: /dev/w2: it is not there any more" in await says(node, "doctor")
        explained = await says(node, "explain", "/dev/w2")
        assert "/dev/w2 is not offered gone since" in explained
        assert f"{WIDGET}: offered it, and it is not there any more" in explained
        assert "1 of 2 devices is not offered" in await node.get("/")
        node.mknod("w2")
        await agent.says("device-offered-again", device="/dev/w2")
        await until_seen(node, lambda metrics: f"{count} 0" in metrics)


async def test_what_goes_while_no_daemon_runs_is_missing_for_the_next_one(node: Node) -> None:
    node.mknod("w1", "w2")
    async with node.agent(prelude=AT_ONCE) as agent:
        await node.healthy("w1", "w2")
        await node.keeps('"device":"/dev/w2"')
        agent.signal(signal.SIGTERM)
        assert await agent.ended() == 0
    node.unlink("w2")
    async with node.agent(prelude=AT_ONCE) as agent:
        line = await agent.says("device-not-offered", device="/dev/w2")
        assert (line["level"], line["reason"]) == ("warning", "it is not there any more")
        assert f"gone /dev/w2 of {WIDGET} since" in await says(node, "status")


async def test_what_the_kernel_said_last_of_a_gpu_that_is_gone_is_told_with_it(bare_node: Node) -> None:
    node, (first, second, *_) = bare_node, PLACES
    node.dev.rmdir()
    planted_host(node.root, CONTROLS + nvidia_gpu(first, 0) + nvidia_gpu(second, 1))
    sys, proc = f"{node.root}/sys", f"{node.root}/proc"
    with KernelLog(node.dev / "kmsg") as log:
        async with node.kubelet, node.agent(GPU, node.serving, prelude=AT_ONCE, sys=sys, proc=proc) as agent:
            await agent.says("http-served")
            await node.healthy(uuid(0), uuid(1), resource="nvidia.com/gpu")
            log.say(f"NVRM: Xid (PCI:{second}): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.")
            await node.healthy(uuid(0), resource="nvidia.com/gpu")
            function = node.root / "sys/bus/pci/devices" / second
            shutil.rmtree(function.resolve())
            function.unlink()
            node.unlink("nvidia1")
            await until_seen(node, lambda metrics: 'resource_name="nvidia.com/gpu",reason="gone"} 1' in metrics)
            last = "it is not there any more; the kernel's last word of it: the NVIDIA driver has reported XID 79"
            assert last in await says(node, "status")
            assert last in await says(node, "explain", second)
            assert last in await says(node, "doctor")


async def test_what_no_resource_wants_and_what_another_resource_offers_is_not_missing(node: Node) -> None:
    node.mknod("w1", "x1")
    first, second = chardev("/dev/w1"), chardev("/dev/?1", "fl.test/b")
    async with node.agent(first, second, node.serving, prelude=AT_ONCE) as agent:
        await node.healthy("x1", resource="fl.test/b")
        await agent.says("http-served")
        node.unlink("x1")
        await until_seen(
            node, lambda it: 'fairlead_devices_not_offered{resource_name="fl.test/b",reason="gone"} 1' in it
        )
        missing = [
            line for line in (await node.get("/metrics")).splitlines() if line.startswith("fairlead_devices_not")
        ]
        assert sum(not line.endswith(" 0") for line in missing) == 1
        told = await says(node, "status")
        assert re.search(r"NOT OFFERED gone /dev/x1 of fl.test/b since", told)
        assert "/dev/w1:" not in told  # fl.test/widget offers it
    assert agent.said("device-not-offered") == []


async def test_what_a_pod_had_when_it_went_is_missing_once_the_pod_is_over(node: Node) -> None:
    node.mknod("w1")
    count = f'fairlead_devices_not_offered{{resource_name="{WIDGET}",reason="gone"}}'
    async with node.agent(chardev(), node.serving, prelude=AT_ONCE + OFTEN_ASKING) as agent:
        await agent.says("http-served")
        held = pod()
        await node.admit(held)
        node.unlink("w1")
        await agent.says("device-changed", device="w1", state="Unhealthy")
        await until_seen(node, lambda metrics: f"{count} 0" in metrics)
        node.kubelet.end(held)
        agent.pass_minute()
        await agent.says("claims-ended")
        await until_seen(node, lambda metrics: f"{count} 1" in metrics)


async def test_a_gpu_goes_by_all_its_names_also_once_its_driver_is_gone_and_after_a_restart(bare_node: Node) -> None:
    node, (first, second, *_) = bare_node, PLACES
    node.dev.rmdir()
    planted_host(node.root, CONTROLS + nvidia_gpu(first, 0) + nvidia_gpu(second, 1))
    called = [
        uuid(1),
        uuid(1)[:-4],
        "nvidia1",
        "/dev/nvidia1",
        second,
        second.removeprefix("0000:"),
        f"{GPUS}/{uuid(1)}",
    ]

    async def answers() -> set[str]:
        """What each name's hardware is, by the faces that take one."""
        explained = [await says(node, "explain", name, "--json") for name in called]
        await says(node, "drain", "nvidia1", "--reason", "new riser")
        histories = [json.loads(await says(node, "status", "--history", name, "--json"))["key"] for name in called]
        ended = [await says(node, "undrain", name) for name in called]
        assert "drained" in ended[0]
        assert all("Nothing has ended" in it for it in ended[1:])
        assert len(set(histories)) == 1, histories
        return {it for one in explained for it in json.loads(one)["hardware"] if it.startswith("pci:")}

    async with node.kubelet:
        async with node.agent(GPU, prelude=AT_ONCE, sys=f"{node.root}/sys", proc=f"{node.root}/proc") as agent:
            await node.healthy(uuid(0), uuid(1), resource=GPUS)
            await node.keeps(f'"device":"{uuid(1)}"')
            assert await answers() == {f"pci:{second}"}
            (node.root / "sys/bus/pci/devices" / second / "driver").unlink()
            shutil.rmtree(node.root / "proc/driver/nvidia/gpus" / second)
            node.unlink("nvidia1")
            await agent.says("device-not-offered", device=second)
            assert await answers() == {f"pci:{second}"}
            shown = json.loads(await says(node, "status", "--json"))["unclaimed"]
            assert [(it["name"], it["model"]) for it in shown] == [("nvidia1", "H100")]
            agent.signal(signal.SIGTERM)
            assert await agent.ended() == 0
        async with node.agent(GPU, prelude=AT_ONCE, sys=f"{node.root}/sys", proc=f"{node.root}/proc") as agent:
            await agent.says("device-not-offered", device=second)
            assert await answers() == {f"pci:{second}"}
