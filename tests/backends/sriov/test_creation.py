"""The `sriov` backend makes virtual functions when asked: never where there are any, and undone when it fails half way."""

from __future__ import annotations

import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from backends.base import AllocationRefused, Device, Grant, Host, HostPath, NotReady
from backends.linux import pci
from backends.linux.kernel import Kernel
from backends.sriov import Sriov, SriovResource
from backends.sriov.creation import Creator
from tests.backends.sriov.sriov_trees import E810, ROUTES, small
from tests.backends.sriov.test_backend import backend, devices, offered, resource
from tests.backends.trees import plant, planted_host

CARD = small(E810, 0)
AT = f"sys/devices/{CARD.below}/{CARD.address}"


class Crash(BaseException):
    """The process ends here."""


class ActingKernel(Kernel):
    """Makes and removes virtual functions as it is told."""

    def __init__(self, host: Host, *, makes: int | None = None, refuses: str = "", crash_at: int | None = None) -> None:
        super().__init__(host)
        self.host = host
        self.makes = makes
        """How many virtual functions the driver makes, whatever is asked for."""
        self.refuses = refuses
        """The attribute that cannot be written to."""
        self.crash_at = crash_at
        """The write after which the process ends, from 0."""
        self.used = False
        """Whether a virtual machine takes the first function as soon as it is there."""
        self.refused = False
        self.written: list[tuple[str, str]] = []

    def write(self, path: HostPath, text: str) -> None:
        if path.name == self.refuses and (path.name, text) != ("sriov_numvfs", "0"):
            self.refused = True
            raise OSError(5, "Input/output error")
        self.written.append((path.name, text))
        super().write(path, f"{text}\n")
        if path.name == "sriov_numvfs":
            self._divide(min(int(text), self.makes if self.makes is not None else int(text)))
        if len(self.written) - 1 == self.crash_at:
            raise Crash

    def _divide(self, count: int) -> None:
        for link in self.host.root.joinpath(AT).glob("virtfn*"):
            link.unlink()
        (self.host.sys / "bus/pci/devices" / CARD.vf(0)).unlink(missing_ok=True)
        if self.used and count:
            plant(self.host.root, CARD.virtual_function(0, "vfio-pci"))
        for number in range(count):
            plant(self.host.root, f"{AT}/virtfn{number} -> ../{CARD.vf(number)}")
        self.host.root.joinpath(AT, "sriov_numvfs").write_text(f"{count}\n")


def making(**options: Any) -> SriovResource:
    return resource({"pf": (CARD.netdev,), "vf": ("0", "1")}, **{"create": {CARD.netdev: 4}, **options})


def made_on(root: Path, kernel: type[ActingKernel] = ActingKernel, **how: Any) -> tuple[Sriov, ActingKernel]:
    host = planted_host(root, ROUTES + CARD.tree())
    acting = kernel(host, **how)
    return Sriov(host, [making()], acting), acting


def only(found: Sriov) -> Device:
    (device,) = devices(found)
    return device


def state(root: Path) -> tuple[int, str]:
    """How many functions there are, and whether drivers take them."""
    function = pci.read(Host.below(root), CARD.address)
    assert function is not None
    return len(function.virtual), (root / AT / "sriov_drivers_autoprobe").read_text().strip()


def test_the_functions_to_come_are_listed_unhealthy_until_they_are_made_and_then_offered(tmp_path: Path) -> None:
    found, kernel = made_on(tmp_path)
    card = only(found)
    assert offered(found) == {"intel.com/sriov_net": [CARD.address]}
    assert [(one.hardware, one.reason) for one in found.probe(card)] == [(f"vfs:{CARD.address}", "not-created")]
    with pytest.raises(AllocationRefused, match="are not made yet"):
        found.claim(found.resources[0], [Grant(card.key, card)])
    assert found.adopts(found.resources[0])
    assert found.adopt(found.resources[0], card)
    assert kernel.written == [("sriov_numvfs", "4")]
    assert found.discover(CARD.address).devices == ()
    drivers = planted_host(tmp_path / "later", ROUTES + small(E810, 4).tree())
    assert offered(Sriov(drivers, [making()])) == {"intel.com/sriov_net": [CARD.vf(0), CARD.vf(1)]}


def test_a_card_may_be_named_by_its_address_and_have_its_functions_left_to_vfio(tmp_path: Path) -> None:
    found, kernel = made_on(tmp_path)
    of = making(create={CARD.address: 2}, autoprobe=False)
    found = Sriov(found.host, [of], kernel)
    assert found.adopt(of, only(found))
    assert kernel.written == [("sriov_drivers_autoprobe", "0"), ("sriov_numvfs", "2")]


def test_a_card_that_has_functions_is_left_alone_and_told_of(tmp_path: Path) -> None:
    found = backend(tmp_path, small(E810, 2).tree(), making())
    (problem,) = found.discover(CARD.address).problems
    assert problem.sentence.startswith("0000:3b:00.0 has 2 virtual functions, and 4 are asked for (create)")
    kernel = ActingKernel(found.host)
    with pytest.raises(NotReady, match="touches none that is there"):
        Creator(found.host, kernel).create(CARD.address, 4, autoprobe=False)
    Creator(found.host, kernel).create(CARD.address, 2, autoprobe=False)
    assert kernel.written == []


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("sriov_totalvfs = 3", "0000:3b:00.0 can have 3 virtual functions, not 4"),
        ("sriov_totalvfs = ?", "turn SR-IOV on, in the firmware"),
        ("driver -> ../../../bus/pci/drivers/vfio-pci", "has no network interface here"),
    ],
)
def test_what_a_card_cannot_have_is_told_and_nothing_is_written(tmp_path: Path, change: str, sentence: str) -> None:
    found, kernel = made_on(tmp_path)
    card = only(found)
    plant(tmp_path, f"{AT}/{change}")
    with pytest.raises(NotReady, match=sentence):
        found.adopt(found.resources[0], card)
    assert kernel.written == []


def test_a_card_whose_interface_is_in_a_pod_is_not_divided(tmp_path: Path) -> None:
    found, kernel = made_on(tmp_path)
    card = only(found)
    (tmp_path / AT / "net").rename(tmp_path / "elsewhere")
    with pytest.raises(NotReady, match="a pod may have it"):
        found.adopt(found.resources[0], card)
    assert kernel.written == []


@dataclass(frozen=True)
class Attempt:
    """One run's attempt, and what happens in it."""

    makes: int | None = None
    refuses: str = ""
    crash_at: int | None = None
    used: bool = False
    somebody_makes: int | None = None  # between this attempt and the last one


ATTEMPTS = st.builds(
    Attempt,
    makes=st.sampled_from([None, 0, 2]),
    refuses=st.sampled_from(["", "", "sriov_numvfs", "sriov_drivers_autoprobe"]),
    crash_at=st.sampled_from([None, None, 0, 1, 2, 3]),
    used=st.booleans(),
    somebody_makes=st.sampled_from([None, None, None, 0, 3, 4]),
)


@settings(max_examples=25)
@given(attempts=st.lists(ATTEMPTS, max_size=5), autoprobe=st.booleans())
@example(attempts=[Attempt(makes=2)], autoprobe=False)
@example(attempts=[Attempt(crash_at=0), Attempt(refuses="sriov_numvfs")], autoprobe=False)
@example(attempts=[Attempt(makes=2, used=True)], autoprobe=False)
def test_whatever_fails_and_wherever_it_ends_no_function_in_use_goes_and_nothing_is_left_half_done(
    attempts: list[Attempt], autoprobe: bool
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        host = planted_host(root, CARD.tree())
        for attempt in attempts:
            if attempt.somebody_makes is not None:
                ActingKernel(host).write(pci.FUNCTIONS / CARD.address / "sriov_numvfs", str(attempt.somebody_makes))
            _attempt(root, attempt, autoprobe=autoprobe)
        before = state(root)
        _attempt(root, Attempt(), autoprobe=autoprobe)
        if before[0] == 0:  # else what is there may be used, and stays
            assert state(root) == (4, before[1] if autoprobe else "0")


def _attempt(root: Path, attempt: Attempt, *, autoprobe: bool) -> None:
    host = Host.below(root)
    kernel = ActingKernel(host, makes=attempt.makes, refuses=attempt.refuses, crash_at=attempt.crash_at)
    kernel.used = attempt.used
    before, failed = state(root), True
    with suppress(Crash):
        try:
            Creator(host, kernel).create(CARD.address, 4, autoprobe=autoprobe)
            failed = False
        except NotReady:
            pass
    after, crashed = state(root), attempt.crash_at is not None and len(kernel.written) == attempt.crash_at + 1
    if before[0]:
        assert kernel.written == []
    elif not failed:
        assert after == (4, before[1] if autoprobe else "0")
    elif crashed:
        pass  # the next attempt goes on from there
    elif attempt.makes and attempt.used and not kernel.refused:
        assert after[0] == attempt.makes  # a virtual machine has one of them by now
    elif attempt.refuses == "sriov_drivers_autoprobe" and not autoprobe:
        assert after == before
    else:
        assert after == (0, before[1] if autoprobe else "1")
