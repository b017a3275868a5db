"""More devices than a kubelet's message has room for: their IDs are not even made, and what is held is listed."""

from __future__ import annotations

import json

from tests.e2e.node import WIDGET, Node, chardev, pod
from tests.e2e.process import finish

COUNT = 500
FITS = 4  # devices, at least, whose IDs fit
SMALL = """
from agent.runtime import limits
limits.MESSAGE_LIMIT = 100_000
"""
"""In place of 4 MiB, which take a kubelet in Python seconds."""


async def test_devices_that_find_no_room_in_a_list_wait_until_there_is_some(node: Node) -> None:
    node.mknod("w10", "x1")
    async with node.agent(chardev(count=COUNT), chardev("/dev/x*", "fl.test/x"), prelude=SMALL):
        await node.shows(lambda k: len(k.resources[WIDGET].healthy) == COUNT)
        holder = pod()
        await node.admit(holder)
        (held,) = node.held(holder)
        since = len(node.lists)
        node.mknod(*(f"w{n}" for n in range(11, 71)))
        node.mknod("x2")
        await node.healthy("x1", "x2", resource="fl.test/x")
        await node.shows(lambda k: len(k.resources[WIDGET].healthy) > FITS * COUNT)
        config = str(node.root / "config.toml")
        explained = json.loads((await finish("explain", "--json", "--config", config, "w70"))[1])
        (why,) = [it["why"] for it in explained["decisions"] if it["resource"] == WIDGET]
        fit = int(why.partition("its list is full: ")[2].partition(" such IDs")[0].replace(",", ""))
        assert abs(fit - len(node.listed())) < COUNT / 100
        assert node.lists_without(held, since) == []
        node.unlink("w11", "w12")
        await node.shows(lambda k: not any(i.startswith(("w11", "w12")) for i in k.resources[WIDGET].healthy))
        await node.shows(lambda k: len(k.resources[WIDGET].healthy) > FITS * COUNT)
        assert node.lists_without(held, since) == []
