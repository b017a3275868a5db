"""What two agents tell each other in a hand-over, and who answers the kubelet meanwhile."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.kubelet.handover import Relay, StandbyLostError
from tests.wait import limit


async def test_what_the_kubelet_asks_after_a_standby_was_lost_is_ours_to_answer_again_at_once(tmp_path: Path) -> None:
    relay = Relay(tmp_path)
    relay.close()
    async with limit():
        with pytest.raises(StandbyLostError):
            await relay.allocate("fl.test/never-there", ["a"])
