"""Hardware that cannot be reset is offered by no resource that resets it before each start: every pod would be refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.backends.machines import nvidia_gpu
from tests.backends.trees import HOST, plant
from tests.backends.vfio.vfio_node import BUS, GPU, gpu, sound
from tests.e2e.process import finish

CONFIG = (
    HOST
    + """
[[resource]]
name = "fl.test/reset"
backend = "{backend}"
select = {{ address = "0000:3b:00.0" }}
pre_start = "reset"
[[resource]]
name = "fl.test/other"
backend = "{backend}"
select = {{ address = "0000:3b:00.0" }}
"""
)


async def asked(root: Path, backend: str, *command: str) -> Any:
    config = root / "config.toml"
    config.write_text(CONFIG.format(root=root, backend=backend))
    code, out, err = await finish(*command, "--json", "--config", str(config))
    assert code == 0, err
    return json.loads(out)


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ({"reset": "", "reset_method": "flr bus"}, ""),
        ({"reset": ""}, ""),  # a kernel before 5.15
        ({"reset": "", "reset_method": "bus"}, "only by bus"),
        ({"reset": "", "reset_method": ""}, "cannot be reset by itself (FLR), at all"),
        ({}, "cannot be reset by itself (FLR), at all"),
    ],
)
@pytest.mark.parametrize("backend", ["vfio", "gpu"])
async def test_what_cannot_be_reset_goes_to_the_resource_that_does_not_ask_for_it(
    tmp_path: Path, backend: str, files: dict[str, str], why: str
) -> None:
    plant(tmp_path, BUS + gpu(files=files) + sound() if backend == "vfio" else nvidia_gpu(GPU, 0, files=files))
    found = await asked(tmp_path, backend, "discover")
    by_name = {resource["name"]: len(resource["devices"]) for resource in found["resources"]}
    assert by_name == ({"fl.test/reset": 0, "fl.test/other": 1} if why else {"fl.test/reset": 1, "fl.test/other": 0})
    decided = {it["resource"]: it["why"] for it in (await asked(tmp_path, backend, "explain", GPU))["decisions"]}
    assert why in decided["fl.test/reset"]
    assert ("pre_start" in decided["fl.test/reset"]) == bool(why)
