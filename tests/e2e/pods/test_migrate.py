"""A node changes from another plugin to Fairlead: what `fairlead migrate` says before, and that it comes so."""

from __future__ import annotations

import json

from agent.simulation.model import Phase
from tests.e2e.foreign import hold, other_plugin
from tests.e2e.node import WIDGET, Node, pod
from tests.e2e.process import finish

_THEIRS = """\
domain: fl.test
devices:
- name: widget
  groups:
  - paths:
    - path: /dev/w*
"""


async def test_what_migrate_says_is_what_becomes_of_the_pods_of_another_plugin(node: Node) -> None:
    node.mknod("w1", "w2", "w3")
    file = node.root / "old.yaml"
    file.write_text(_THEIRS)
    command = ("migrate", str(file), "--config", str(node.config()))
    async with other_plugin(node, WIDGET, "sha-1", "sha-2", nodes=["/dev/w1"]) as theirs:
        holder, held = await hold(node, WIDGET)
        code, out, err = await finish(*command, "--json")
        assert (code, err) == (0, "")
        said = json.loads(out)
        (holding,) = said["holdings"]
        assert (holding["ids"], holding["devices"], holding["same_ids"]) == ([held], ["/dev/w1"], False)
        assert holding["pod"].endswith("/foreign")
        assert [step.partition(" ")[0] for step in said["steps"]] == ["Write", "Let", "Take", "Start", "Look", "Let"]

        theirs.on_allocate = None
        other, unmapped = await hold(node, WIDGET, "other")
        code, out, _ = await finish(*command)
        assert code == 1
        assert "the foreign ID stays listed, and the device is kept from others, until the pod ends" in _words(out)
        assert f"{WIDGET} {unmapped}: what default/other (main) was given leads to no device" in _words(out)
        node.kubelet.end(other)
    before = len(node.lists)
    async with node.agent(said["configuration"]):
        await node.shows(lambda k: k.resources[WIDGET].healthy == {"w2", "w3", held})
        given: set[str] = set()
        for name in ("one", "two"):
            one = pod(name)
            assert (await node.admit(one)).phase == Phase.RUNNING
            given |= node.held(one)
        assert given == {"w2", "w3"}
        assert (await node.admit(pod("late"))).phase == Phase.FAILED
        assert node.held(holder) == {held}
        assert node.lists_without(held, before) == []
    assert node.kubelet.panics == []


def _words(text: str) -> str:
    return " ".join(text.split())
