"""A directory as a device: a container gets every node below it, and what is plugged in joins it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from agent.inventory.lookup import Place, find
from backends.base import ALL, Hint, HostPath, PathChange, Uevent
from backends.chardev import CharDev
from backends.interface.values import Known
from tests.backends.chardev.chardevs import Looked, chardev, configured, known, only, problems
from tests.backends.trees import plant
from tests.work import growth

CARD = "dev/snd/timer c 116:33\ndev/snd/controlC0 c 116:2\ndev/snd/by-path/card0 -> ../controlC0\n"
MICROPHONE = "dev/snd/pcmC1D0c c 116:24\n"
SND = "/dev/snd"
SOUND = HostPath("/dev/sound")


def sound(**option: Any) -> Any:
    return configured(paths=[{"path": SND, **option}])


def event(path: str, action: str = "add") -> Uevent:
    return Uevent(action, "sound", "/devices/virtual/sound/x", HostPath(path))


def affected(backend: CharDev, hint: Hint, what: Known) -> set[str]:
    units = backend.affects(hint, what)
    assert units is not ALL
    return set(units)


def test_a_container_gets_every_node_below_a_directory_and_no_links(tmp_path: Path) -> None:
    tree = CARD + "dev/snd/sub/x c 116:99\ndev/snd/plain\nsys/dev/char/116:2/device/numa_node = 1"
    for option, inside in (({}, SND), ({"mount_path": "/audio"}, "/audio"), ({"mount_path": "/a/"}, "/a/snd")):
        device = only(chardev(tmp_path, tree, sound(**option)), SND)
        names = ["controlC0", "sub/x", "timer"]
        assert [node.path.text for node in device.nodes] == [f"{SND}/{name}" for name in names]
        assert [node.container_path for node in device.nodes] == [f"{inside}/{name}" for name in names]
        tree = ""  # it is there now
    assert device.numa_node == 1
    assert (device.attributes["path"], device.attributes["name"]) == ((SND,), ("snd",))


def test_a_named_directory_is_no_device_without_a_node(tmp_path: Path) -> None:
    backend = chardev(tmp_path, "dev/snd/", sound())
    assert problems(backend, SND) == ["/dev/snd is a directory with no device node below it"]
    plant(tmp_path, CARD)
    assert [device.resource for device in backend.discover(SND).devices] == ["example.com/x"]


# generic-device-plugin takes whatever its glob does, and a runtime every node below a directory that it is given.
TUNERS = "".join(
    f"dev/dvb/adapter{n}/frontend0 c 212:{4 * n}\ndev/dvb/adapter{n}/demux0 c 212:{4 * n + 1}\n" for n in (0, 1)
)


def test_a_glob_takes_directories_of_nodes_and_passes_over_those_of_links(tmp_path: Path) -> None:
    tree = TUNERS + "dev/dvb/by-path/x -> ../adapter0/frontend0\ndev/dvb/first -> adapter0\n"
    tuners = configured(paths=[{"path": "/dev/dvb/*", "mount_path": "/dev/dvb/adapter0"}])
    backend = chardev(tmp_path, tree, tuners)
    found = {it.key: it for unit in backend.units() for it in backend.discover(unit).devices}
    assert list(found) == ["/dev/dvb/adapter0", "/dev/dvb/adapter1"]
    second = found["/dev/dvb/adapter1"]
    assert [node.container_path for node in second.nodes] == ["/dev/dvb/adapter0/demux0", "/dev/dvb/adapter0/frontend0"]
    assert list(backend.ids(tuners, second)) == ["dvb/adapter1"]
    assert [problem for unit in backend.units() for problem in backend.discover(unit).problems] == []


def test_an_event_of_a_node_in_a_directory_that_a_glob_takes_is_about_the_directory(tmp_path: Path) -> None:
    backend = chardev(tmp_path, TUNERS, configured(paths=[{"path": "/dev/dvb/adapter*"}]))
    here = known(backend)
    assert affected(backend, event("/dev/dvb/adapter2/frontend0"), here) == {"/dev/dvb/adapter2"}
    assert HostPath("/dev/dvb/adapter0") in backend.watches(here).directories


def test_a_directory_of_too_many_entries_is_refused(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("backends.chardev.nodes.MOST_MATCHES", 2)
    sentence = "/dev/snd has more than 2 entries; name the nodes that are needed"
    assert problems(chardev(tmp_path, CARD, sound()), SND) == [sentence]


def test_what_is_plugged_in_later_joins_the_device_that_a_pod_keeps(tmp_path: Path) -> None:
    looked = Looked(tmp_path, CARD, sound())
    looked.hold("snd0")
    plant(tmp_path, MICROPHONE)
    looked.look()
    assert looked.state("snd0") == ""
    (tmp_path / "dev/snd/controlC0").unlink()
    looked.look()
    assert looked.state("snd0") == ""
    nodes = looked.grant("snd0").device.nodes
    assert [node.path.name for node in nodes] == ["pcmC1D0c", "timer"]


def test_a_node_below_a_directory_belongs_to_the_first_who_takes_it_unless_it_is_shared(tmp_path: Path) -> None:
    def timer(**option: Any) -> Any:
        return configured("example.com/timer", paths=[{"path": f"{SND}/timer", **option}])

    looked = Looked(tmp_path, CARD, sound(), timer())
    assert (list(looked.listed()), list(looked.listed("example.com/timer"))) == (["snd0"], [])
    looked = Looked(tmp_path, "", sound(shared=True), timer(shared=True))
    assert (list(looked.listed()), list(looked.listed("example.com/timer"))) == (["snd0"], ["timer0"])


def test_a_missing_node_is_told_of_the_directory(tmp_path: Path) -> None:
    for number, option in enumerate(({}, {"shared": True})):
        backend = chardev(tmp_path / str(number), CARD, sound(**option))
        device = only(backend, SND)
        (tmp_path / str(number) / "dev/snd/timer").unlink()
        (signal,) = backend.probe(device)
        assert (signal.reason, signal.hardware) == ("node-missing", min(device.hardware))


@pytest.mark.parametrize("shared", [False, True])
def test_whatever_comes_and_goes_below_a_directory_has_it_looked_at_again(tmp_path: Path, *, shared: bool) -> None:
    linked = configured("example.com/y", paths=[{"path": SOUND.text, "shared": shared}])
    backend = chardev(tmp_path, CARD + "dev/snd/sub/x c 116:99\ndev/sound -> snd", sound(shared=shared), linked)
    found = known(backend)
    assert backend.watches(found).directories >= {HostPath(path) for path in (SND, f"{SND}/sub", "/dev/sound")}
    for hint in (event(f"{SND}/pcmC1D0c"), PathChange(HostPath(f"{SND}/sub/y")), event(f"{SND}/timer", "remove")):
        assert affected(backend, hint, found) == {SND, SOUND.text}, hint
    for hint in (event("/dev/sndx"), event(f"{SND}/timer", "change"), PathChange(HostPath("/dev/sndx/timer"))):
        assert not affected(backend, hint, found), hint
    empty = CharDev(backend.host, backend.resources)
    assert affected(empty, event(f"{SND}/timer"), known(chardev(tmp_path / "empty", "", sound()))) == {SND}


async def test_a_shared_directory_is_named_by_its_path(tmp_path: Path) -> None:
    ((device,),) = known(chardev(tmp_path, CARD, sound(shared=True))).values()
    place = Place(device.hardware, device.key, "example.com/x", ("snd0",), device.depends, device)
    assert await find(SND, [place]) == device.hardware


def test_what_to_watch_is_told_for_many_nodes_as_fast_as_for_few(tmp_path: Path) -> None:
    """It is asked at every event."""

    def asked(nodes: int) -> Callable[[], object]:
        tree = "".join(f"dev/x{n} c 240:{n}\n" for n in range(nodes))
        backend = chardev(tmp_path / str(nodes), CARD + tree, sound(), configured(paths=[{"path": "/dev/x*"}]))
        return partial(backend.watches, known(backend))

    assert growth(asked, 25) == 1


def test_a_bundle_of_directories_says_that_it_wants_nodes(tmp_path: Path) -> None:
    tuners = configured(paths=[{"path": "/dev/dvb/adapter*"}, {"path": "/dev/tty*"}])
    backend = chardev(tmp_path, TUNERS + "dev/ttyS0 c 4:64", tuners)
    (unit,) = [unit for unit in backend.units() if unit.startswith("bundle:")]
    assert [problem.sentence for problem in backend.discover(unit).problems] == [
        *(
            f"/dev/dvb/adapter{n} is a directory, not a device node; a bundle is made of nodes, name those in it"
            for n in (0, 1)
        ),
        "there is no bundle, because /dev/dvb/adapter* matches no device node",
    ]
