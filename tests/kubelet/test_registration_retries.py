"""How long a resource waits for its next registration."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.kubelet.plugin import Plugin
from agent.kubelet.registration import Kubelet, Registrar, RegistrationError
from tests.kubelet.plugins import TOY, nothing
from tests.wait import limit

SLOW_POLL = 5.0
TRIES = 20


class EnoughError(BaseException):
    pass


async def test_a_kubelet_that_refuses_is_asked_again_within_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kubelet = Kubelet(tmp_path / "kubelet.sock")
    (tmp_path / "kubelet.sock").touch()
    kubelet.look()

    async def refuse(*_: object) -> None:
        raise RegistrationError("the kubelet refused: not now")

    monkeypatch.setattr(kubelet, "register", refuse)
    registrar = Registrar(Plugin(TOY, nothing), kubelet, tmp_path, "fairlead/x.sock")
    waits: list[float] = []

    async def wait(delay: float, most: float, _generation: int) -> float:
        waits.append(delay)
        if len(waits) == TRIES:
            raise EnoughError
        return min(delay * 2, most)

    monkeypatch.setattr(registrar, "_wait_to_retry", wait)
    with pytest.raises(EnoughError):
        async with limit("the tries"):
            await registrar.run()
    assert waits[0] < 1
    assert max(waits) == SLOW_POLL
