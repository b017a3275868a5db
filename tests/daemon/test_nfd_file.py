from __future__ import annotations

import asyncio
import re
import stat
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from agent.daemon import nfd_file as module
from agent.daemon.nfd_file import LIFETIME, MOST_BYTES, NAMESPACE, FeatureFile, content, features
from agent.model import HEALTHY, Health, Slot, State
from backends.base import Device
from tests.wait import until

GPU = "nvidia.com/gpu"
ILL = Health(State.UNHEALTHY, "xid-79", "It fell.")
SLOW = Health(State.DEGRADED, "slow-link", "It is slow.")
NAME = re.compile("[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")  # of a label, without its domain; of its value, too


def device(key: str, **attributes: str) -> Device:
    return Device(key, key, frozenset({key}), attributes={name: (value,) for name, value in attributes.items()})


def slot(key: str, health: Health = HEALTHY, **attributes: str) -> Slot:
    return Slot(key, device(key, **attributes), health)


def listed(*slots: Slot) -> dict[str, Slot]:
    return {one.id: one for one in slots}


def labels(lines: Iterable[str]) -> dict[str, str]:
    """The labels' names, without our domain, and their values."""
    pairs = (line.partition("=") for line in lines)
    return {name.removeprefix(f"{NAMESPACE}/"): value for name, _, value in pairs}


# --- what it says ---


def test_it_counts_devices_by_health_and_model() -> None:
    h100 = "NVIDIA H100 80GB HBM3"
    slots = listed(slot("a", model=h100), slot("b", SLOW, model=h100), slot("c", ILL, model="NVIDIA L4 (test)"))
    assert labels(features({GPU: slots})) == {
        "nvidia.com_gpu.count": "3",
        "nvidia.com_gpu.healthy": "1",
        "nvidia.com_gpu.degraded": "1",
        "nvidia.com_gpu.model.NVIDIA-H100-80GB-HBM3": "2",
        "nvidia.com_gpu.model.NVIDIA-L4-test": "1",
    }


def test_a_device_with_many_ids_counts_once_and_is_as_well_as_its_best_id() -> None:
    gpu = device("a")
    slots = listed(Slot("a::0", gpu, ILL), Slot("a::1", gpu, HEALTHY), Slot("a::2", gpu, SLOW))
    assert labels(features({GPU: slots})) == {
        "nvidia.com_gpu.count": "1",
        "nvidia.com_gpu.healthy": "1",
        "nvidia.com_gpu.degraded": "0",
    }


def test_what_is_gone_is_no_device_though_a_pod_holds_its_id() -> None:
    assert labels(features({GPU: listed(Slot("a", None, ILL))}))["nvidia.com_gpu.count"] == "0"


def test_an_adapters_model_is_its_type() -> None:
    slots = listed(slot("a", hca_type="MT4129"))
    assert labels(features({"a.b/hca": slots}))["a.b_hca.model.MT4129"] == "1"


def test_resources_come_in_the_order_of_their_names() -> None:
    assert list(labels(features({"b.c/x": {}, "a.c/x": {}}))) == [
        f"{name}_x.{what}" for name in ("a.c", "b.c") for what in ("count", "healthy", "degraded")
    ]


label = st.from_regex("[a-z0-9]([-a-z0-9]{0,40}[a-z0-9])?", fullmatch=True)
names = st.builds(lambda a, b, c: f"{a}.{b}/{c}", label, label, label)


@given(st.dictionaries(names, st.lists(st.text(max_size=100), max_size=4), max_size=4))
def test_every_line_is_a_label_that_kubernetes_takes_and_no_two_are_the_same(models: Mapping[str, list[str]]) -> None:
    resources = {
        name: listed(*(slot(str(n), model=model) for n, model in enumerate(texts))) for name, texts in models.items()
    }
    lines = list(features(resources))
    names = [line.partition("=")[0] for line in lines]
    assert len(set(names)) == len(names)
    for line in lines:
        domain, _, rest = line.partition("/")
        name, _, value = rest.partition("=")
        assert domain == NAMESPACE
        assert NAME.fullmatch(name), name
        assert value.isdecimal()


def test_long_names_that_differ_at_their_ends_stay_different() -> None:
    found = labels(features({f"example.com/{'x' * 60}{end}": {} for end in "ab"}))
    assert len(found) == 6
    assert all(name.endswith((".count", ".healthy", ".degraded")) for name in found)


def test_it_says_until_when_it_may_be_believed() -> None:
    text, omitted = content(["a=1"], 1_700_000_000.0)
    assert text.splitlines()[1:] == ["# +expiry-time=2023-11-14T22:13:20Z", "a=1"]
    assert text.startswith("# ")
    assert omitted == 0


def test_more_than_nfd_reads_is_left_out_and_counted() -> None:
    lines = [f"{'x' * 99}{n:04}=1" for n in range(1000)]
    text, omitted = content(lines, 0.0)
    assert len(text) <= MOST_BYTES
    assert omitted == 1000 - len(text.splitlines()) + 2
    assert omitted > 0


# --- the file ---


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TOGETHER", 0.0)


class House:
    """A feature file, what it is about, and a clock."""

    def __init__(self, path: Path) -> None:
        self.now = 1_700_000_000.0
        self.lists = {GPU: listed(slot("a"))}
        self.asked = 0
        self.it = FeatureFile(path, self._resources, lambda: self.now)

    def _resources(self) -> dict[str, dict[str, Slot]]:
        self.asked += 1
        return {name: dict(slots) for name, slots in self.lists.items()}

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.it.run())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])

    def says(self, healthy: int) -> bool:
        return self.it.path.exists() and f"nvidia.com_gpu.healthy={healthy}\n" in self.it.path.read_text()

    async def looks_again(self) -> None:
        asked = self.asked
        self.it.changed()
        await until(lambda: self.asked > asked and self.it._workers._idle != [])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "features.d" / "fairlead"


@pytest.fixture
def house(path: Path) -> House:
    path.parent.mkdir()
    return House(path)


async def test_it_follows_the_lists_and_stays_at_the_end(house: House) -> None:
    async with house.running():
        await until(lambda: house.says(1))
        house.lists[GPU] = listed(slot("a", ILL))
        house.it.changed()
        await until(lambda: house.says(0))
    assert house.says(0)
    assert stat.S_IMODE(house.it.path.stat().st_mode) == 0o644
    assert [file.name for file in house.it.path.parent.iterdir()] == ["fairlead"]


async def test_what_says_the_same_is_not_written_again_until_it_is_old(house: House) -> None:
    async with house.running():
        await until(lambda: house.says(1))
        before = house.it.path.stat().st_ino, house.it.path.read_text()
        await house.looks_again()
        assert (house.it.path.stat().st_ino, house.it.path.read_text()) == before
        house.now += module.REFRESH
        await house.looks_again()
        assert house.it.path.read_text() != before[1]
    assert LIFETIME > 3 * module.REFRESH


async def test_a_reader_never_sees_half_of_it(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    rename = Path.rename

    def look(self: Path, target: Path) -> Path:
        seen.append(self.name)
        assert not house.it.path.exists()
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", look)
    async with house.running():
        await until(lambda: house.says(1))
    assert seen == [".fairlead.new"]


async def test_that_it_cannot_be_written_is_said_once_and_so_is_the_end_of_it(house: House) -> None:
    house.it.path.parent.rmdir()
    with capture_logs() as logs:
        async with house.running():
            await until(lambda: bool(logs))
            await house.looks_again()
            house.it.path.parent.mkdir()
            house.it.changed()
            await until(lambda: house.says(1) and len(logs) > 1)
    assert [line["event"] for line in logs] == ["features-not-written", "features-written-again"]
    assert "No such file or directory" in logs[0]["reason"]


async def test_a_file_of_somebody_elses_is_left_alone(house: House) -> None:
    house.it.path.write_text("vendor.io/feature=1\n")
    with capture_logs() as logs:
        async with house.running():
            await until(lambda: bool(logs))
    assert "is not Fairlead's" in logs[0]["reason"]
    assert house.it.path.read_text() == "vendor.io/feature=1\n"


async def test_that_nfd_would_not_read_all_is_said_once(house: House) -> None:
    house.lists = {f"example.com/{n:04}": {} for n in range(1000)}
    with capture_logs() as logs:
        async with house.running():
            await until(lambda: bool(logs))
            await house.looks_again()
    assert [(line["event"], line["limit"]) for line in logs] == [("features-too-long", MOST_BYTES)]
