"""Functions chosen by the DDP profile that their card runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from backends.base import Host
from backends.linux import netlink
from tests.backends.sriov.sriov_trees import CONNECTX, E810, small
from tests.backends.sriov.test_backend import backend, offered, resource


def test_functions_are_chosen_by_the_profile_that_their_card_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def running(_: Host, address: str) -> dict[str, str]:
        asked.append(address)
        return {"fw.mgmt": "6.1.4", "fw.app.name": "ICE COMMS Package"} if address == E810.address else {}

    monkeypatch.setattr(netlink, "devlink_versions", running)
    other, comms = (
        resource({"ddp_profile": (profile,)}, name=f"intel.com/{name}")
        for name, profile in (("os", "ICE OS Default Package"), ("comms", "ICE COMMS Package"))
    )
    found = backend(tmp_path, small(E810).tree() + small(CONNECTX).tree(), other, comms)
    every = offered(found)
    assert every["intel.com/os"] == []
    assert every["intel.com/comms"]
    assert set(asked) == {E810.address}
    asked.clear()
    assert offered(backend(tmp_path / "unasked", small(E810).tree()))["intel.com/sriov_net"] == every["intel.com/comms"]
    assert not asked
