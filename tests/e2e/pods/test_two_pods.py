"""No hardware to two pods, also where the kubelet forgets what it gave out (kubelet contract: A11.1, A11.8)."""

from __future__ import annotations

from agent.simulation.model import Container, Phase, Pod, PodStatus
from tests.e2e.node import WIDGET, Node, chardev, pod
from tests.e2e.process import finish
from tests.wait import limit


async def test_a_second_pod_is_refused_what_the_kubelet_gives_out_twice(node: Node) -> None:
    node.mknod("w1")
    async with node.agent():
        await node.healthy("w1")
        assert (await node.admit(pod())).phase == Phase.RUNNING
        node.kubelet.overlook(pod())
        second = await node.admit(pod("second"))
        assert second.phase == Phase.FAILED
        assert "Device w1 of fl.test/widget is in use: default/pod (main) has it" in second.message
        node.kubelet.end(pod())
        assert (await node.admit(pod("third"))).phase == Phase.RUNNING, "at once: the first has ended"


async def test_what_may_be_shared_is_given_again(node: Node) -> None:
    node.mknod("w1")
    async with node.agent(chardev(count=2)):
        await node.registered()
        assert (await node.admit(pod(count=2))).phase == Phase.RUNNING
        node.kubelet.overlook(pod())
        assert (await node.admit(pod("second"))).phase == Phase.RUNNING


async def test_the_devices_of_an_init_container_are_given_to_those_after_it(node: Node) -> None:
    node.mknod("w1")
    whole = Pod("pod", (Container("main", {WIDGET: 1}),), init=(Container("init", {WIDGET: 1}),))
    async with node.agent():
        await node.healthy("w1")
        assert (await node.admit(whole)).phase == Phase.RUNNING


class Cgroups:
    """The node's cgroups of pods, as the kubelet's systemd driver makes them (cgroup v2)."""

    def __init__(self, node: Node) -> None:
        self.sys = node.root / "sys"
        self._pods = self.sys / "fs/cgroup/kubepods.slice/kubepods-burstable.slice"
        (self.sys / "fs/cgroup").mkdir(parents=True)
        (self.sys / "fs/cgroup/cgroup.controllers").touch()

    def run(self, status: PodStatus, *, runs: bool = True) -> None:
        """The pod has processes now, or none any more."""
        group = self._pods / f"kubepods-burstable-pod{status.uid.replace('-', '_')}.slice"
        group.mkdir(parents=True, exist_ok=True)
        (group / "cgroup.events").write_text(f"populated {int(runs)}\nfrozen 0\n")


async def lost(node: Node, *, emptied: bool) -> None:
    """The kubelet starts again without its record."""
    await node.kubelet.stop()
    node.kubelet.lose_checkpoint(emptied=emptied)
    await node.kubelet.start()
    await node.registered()


async def test_what_a_pod_has_goes_to_no_other_once_the_kubelets_record_was_removed(node: Node) -> None:
    node.mknod("w1", "w2")
    async with node.agent() as agent:
        await node.healthy("w1", "w2")
        await node.admit(pod())
        (held,) = node.held(pod())
        (free,) = {"w1", "w2"} - {held}
        since = len(node.lists)
        await lost(node, emptied=False)
        assert not any(it.after is not None and held in it.after.healthy for it in node.lists[since:])
        assert (await node.admit(pod("second"))).phase == Phase.RUNNING
        assert (await node.admit(pod("third"))).phase == Phase.FAILED
        await agent.kill()
    async with node.agent():
        await node.healthy(free)  # nothing is known of the first pod; an operator knows
        code, out, _ = await finish("undrain", held, "--config", str(node.root / "config.toml"))
        assert (code, "forgotten" in out) == (0, True)
        await node.healthy("w1", "w2")


async def test_what_a_pod_had_that_ended_before_the_kubelet_started_again_is_given_to_the_next(node: Node) -> None:
    node.mknod("w1", "w2")
    config = str(node.root / "config.toml")
    async with node.agent():
        await node.healthy("w1", "w2")
        await node.admit(pod(count=2))
        async with limit("the first pod is known"):
            while "default/pod " not in (await finish("status", "--pods", "--config", config))[1]:
                pass
        node.kubelet.end(pod())
        await node.kubelet.restart()
        await node.registered()
        assert (await node.admit(pod("second"))).phase == Phase.RUNNING
        async with limit("the second pod is known"):
            while "default/second" not in (await finish("status", "--pods", "--config", config))[1]:
                pass
        assert (await node.admit(pod("third"))).phase == Phase.RUNNING
        assert "forgotten" not in (await finish("status", "--config", config))[1]


async def test_while_the_processes_of_a_pod_are_seen_it_has_its_devices_whatever_the_kubelet_knows(node: Node) -> None:
    node.mknod("w1")
    cgroups = Cgroups(node)
    config = str(node.root / "config.toml")
    async with node.agent(sys=str(cgroups.sys)) as agent:
        await node.healthy("w1")
        first = await node.admit(pod())
        cgroups.run(first)
        await node.keeps(first.uid)
        await lost(node, emptied=True)
        await node.shows(lambda k: k.resources[WIDGET].unhealthy == {"w1"})
        await agent.kill()
    async with node.agent(sys=str(cgroups.sys)) as agent:
        await node.shows(lambda k: k.resources[WIDGET].unhealthy == {"w1"})
        _, out, _ = await finish("explain", "w1", "--config", config)
        assert "unhealthy" in out
        assert "forgotten" in out
        assert f"w1 is held by the pod with the UID {first.uid}" in out
        cgroups.run(first, runs=False)
        node.kubelet.end(pod())
        agent.pass_minute()
        await node.healthy("w1")
        assert (await node.admit(pod("second"))).phase == Phase.RUNNING


async def test_two_pods_with_one_device_are_an_error_in_every_face(node: Node) -> None:
    """The second is given it where podresources does not answer."""
    node.mknod("w1")
    async with node.agent(node.serving, chardev(), kubelet_root=str(node.root / "elsewhere")) as agent:
        await node.healthy("w1")
        first = await node.admit(pod())
        node.kubelet.overlook(pod())
        second = await node.admit(pod("second"))
        assert second.phase == Phase.RUNNING
        await agent.says("device-changed", reason="two-pods")
        config = ("--config", str(node.root / "config.toml"))
        _, told, _ = await finish("status", *config)
        assert "two pods hold it at the same time" in " ".join(told.split())
        _, told, _ = await finish("explain", "w1", *config)
        assert first.uid in told
        assert second.uid in told
        assert "two pods hold it" in " ".join(told.split())
        code, told, _ = await finish("doctor", *config)
        assert code == 2
        assert "two-pods" in told
        assert "Delete one of" in " ".join(told.split())
        assert "two-pods" in await node.get("/")
        assert 'reason="two-pods"} 1' in await node.get("/metrics")
        node.kubelet.end(pod("second"))
        assert (await node.admit(pod("third"))).phase == Phase.FAILED  # the kubelet notices the end by that
        await node.healthy("w1")
