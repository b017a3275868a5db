"""What a chardev resource may say, and by which key the rest is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.config import ConfigError, load, typed
from backends.chardev import MOST_TOKENS, CharDev, CharDevOptions, PathOption
from backends.chardev.options import UsbOption, usb_id
from tests.backends.chardev.chardevs import FTDI, configured, refused

SERIAL = {"vendor": "0403"}


def paths(*texts: str, count: int = 1, **keys: Any) -> dict[str, Any]:
    """Paths that all have these keys."""
    return {"paths": [{"path": text, **keys} for text in texts], "count": count}


def second(path: str, **keys: Any) -> dict[str, Any]:
    """A bundle whose second member is this."""
    return {"paths": [{"path": "/dev/a"}, {"path": path, **keys}]}


def mount(path: str, **keys: Any) -> dict[str, Any]:
    return second(path, type="mount", **keys)


def usb(*selectors: Any, **keys: Any) -> dict[str, Any]:
    return {"usb": selectors[0] if len(selectors) == 1 else list(selectors), **keys}


def groups(*tables: dict[str, Any], **keys: Any) -> dict[str, Any]:
    return {"groups": list(tables), **keys}


@pytest.mark.parametrize(
    ("table", "options"),
    [
        (
            {"paths": [{"path": "/dev/kvm", "permissions": "rw", "mount_path": "/dev/x/"}], "count": 1000},
            CharDevOptions([PathOption("/dev/kvm", "rw", "/dev/x/")], 1000),
        ),
        (
            {
                "paths": [
                    {"path": "/dev/video*", "shared": True, "limit": 2},
                    {"path": "/etc/x", "type": "mount", "read_only": True, "optional": True},
                ]
            },
            CharDevOptions(
                [
                    PathOption("/dev/video*", shared=True, limit=2),
                    PathOption("/etc/x", type="mount", read_only=True, optional=True),
                ]
            ),
        ),
        (
            {"usb": [{**FTDI, "serial": "x"}], "nodes": "all", "count": 2},
            CharDevOptions(usb=[UsbOption("0403", "6001", "x")], nodes="all", count=2),
        ),
    ],
    ids=["paths", "bundle", "usb"],
)
def test_options_are_read_from_the_config(table: dict[str, Any], options: CharDevOptions) -> None:
    assert configured(**table).spec.options == options


@pytest.mark.parametrize(
    ("table", "paths"),
    [
        ({"paths": [{"path": "/dev/kvm", "mode": "rw"}]}, [("paths", 0, "mode")]),
        *(({"paths": [{"path": "/etc/x", "type": word}]}, [("paths", 0, "type")]) for word in ("Mount", "file", "")),
        ({"usb": [{"vendor": "1", "serials": "x"}, {}], "id": "bus"}, [("usb", 0, "serials"), ("usb", 1), ("id",)]),
        ({"match": {"driver": "ftdi_sio"}}, [("match",)]),  # it names its subsystem
    ],
)
def test_mistyped_keys_are_mistakes(table: dict[str, Any], paths: list[tuple[Any, ...]]) -> None:
    assert [path for path, _ in typed.convert(table, CharDevOptions)[1]] == paths


@pytest.mark.parametrize(
    "table",
    [
        paths("/dev/kvm", count=1000),
        paths("/dev/serial/by-id/*", permissions="mrw", mount_path="/dev/serial/"),
        paths("/dev/cpu/*/msr", count=MOST_TOKENS),
        second("/dev/b*", limit=3, optional=True),
        mount("/var/lib/x/*", mount_path="/x/", read_only=True),
        paths("/dev/log", type="mount"),
        paths("/dev/kvm", "/dev/net/tun", shared=True),
        *(
            usb(selectors, nodes=["tty", "hidraw"], id="port", permissions="r", count=3)
            for selectors in (FTDI, [FTDI, {"vendor": "0x10C4"}], {"vendor": "403", "serial": "A 1"})
        ),
        usb({**FTDI, "serial": "A"}, {**FTDI, "serial": "B"}, together="each"),
        groups(
            paths("/dev/a", count=3),
            paths("/dev/b", "/dev/c*"),
            usb(FTDI, nodes=["tty"], id="port"),
            {"match": {"subsystem": "tty"}},
            usb(FTDI, {"vendor": "10c4"}, together="each"),
        ),
    ],
)
def test_what_is_possible_passes(table: dict[str, Any]) -> None:
    CharDev.check(configured(**table))


@pytest.mark.parametrize(
    ("table", "path", "words"),
    [
        (usb(FTDI, owner=-1), ("owner",), "a user's number is from 0 to 4294967294"),
        (usb(FTDI, owner=2**32 - 1), ("owner",), "a user's number is from 0 to 4294967294"),
        (usb(FTDI, owner=107, shared=True), ("owner",), "is beside shared"),
        ({**paths("/dev/a"), "owner": 107}, ("owner",), "is for usb"),
        ({**paths("/dev/a"), "shared": True}, ("shared",), "is for usb; a path says it in its table"),
        # a path
        (paths(""), ("paths", 0, "path"), "not an absolute path"),
        (paths("dev/kvm"), ("paths", 0, "path"), "not an absolute path"),
        (paths("/sys/kvm"), ("paths", 0, "path"), "not below /dev"),
        (paths("/device"), ("paths", 0, "path"), "not below /dev"),
        (paths("/dev"), ("paths", 0, "path"), "not below /dev"),
        (
            paths("/dev/net/"),
            ("paths", 0, "path"),
            "'/dev/net' is all nodes below it as one device, '/dev/net/*' one each",
        ),
        (paths("/dev/../etc/passwd"), ("paths", 0, "path"), "'..'"),
        (paths("/dev/net/.."), ("paths", 0, "path"), "'..'"),
        (paths("/dev/./kvm"), ("paths", 0, "path"), "'.'"),
        (paths("/dev//kvm"), ("paths", 0, "path"), "empty name"),
        (paths("/dev/k\0m"), ("paths", 0, "path"), "cannot be printed"),
        (paths("/dev/**/x"), ("paths", 0, "path"), "one '*' for each"),
        (paths("/dev/x", permissions=""), ("paths", 0, "permissions"), "is empty"),
        (paths("/dev/x", permissions="rwx"), ("paths", 0, "permissions"), "'x'"),
        (paths("/dev/x", permissions="rwr"), ("paths", 0, "permissions"), "twice"),
        (paths("/dev/x", mount_path="x"), ("paths", 0, "mount_path"), "not an absolute path"),
        (paths("/dev/x", mount_path="/dev/../x"), ("paths", 0, "mount_path"), "'..'"),
        # the resource
        ({"paths": []}, ("paths",), "no path"),
        (paths("/dev/a", count=0), ("count",), "is 0"),
        (paths("/dev/a", count=MOST_TOKENS + 1), ("count",), str(MOST_TOKENS)),
        ({**paths("/dev/a"), "replicas": 2}, ("replicas",), "say count"),
        # a member of a bundle
        (second("/etc/x"), ("paths", 1, "path"), 'has type = "mount"'),
        (mount("/etc/x/"), ("paths", 1, "path"), "leave it out"),
        (mount("/"), ("paths", 1, "path"), "leave it out"),
        (mount("/etc/../x"), ("paths", 1, "path"), "'..'"),
        (mount("etc/x"), ("paths", 1, "path"), "not an absolute path"),
        (mount("/etc/**/x"), ("paths", 1, "path"), "one '*' for each"),
        (mount("/etc/x", permissions="r"), ("paths", 1, "permissions"), "read_only"),
        (mount("/etc/x", shared=True), ("paths", 1, "shared"), "is for nodes"),
        (second("/dev/x", read_only=True), ("paths", 1, "read_only"), "is for mounts"),
        (second("/dev/x", limit=0), ("paths", 1, "limit"), "1 or more"),
        # sticks
        (usb({"vendor": ""}), ("usb", "vendor"), "four hexadecimal digits"),
        (usb({"vendor": "04O3"}), ("usb", "vendor"), "four hexadecimal digits"),
        (usb({"vendor": "04030"}), ("usb", "vendor"), "four hexadecimal digits"),
        (usb([{**SERIAL, "product": "0x"}]), ("usb", 0, "product"), "four hexadecimal digits"),
        (usb({**SERIAL, "serial": ""}), ("usb", "serial"), "empty"),
        (usb({**SERIAL, "serial": "A "}), ("usb", "serial"), "spaces"),
        (usb(SERIAL, nodes=[]), ("nodes",), "is empty"),
        (usb(SERIAL, permissions="x"), ("permissions",), "'x'"),
        # what does not go together
        ({}, ("paths",), "name one, or say usb or match"),
        (usb(SERIAL, **paths("/dev/a")), ("usb",), "beside paths"),
        ({**paths("/dev/a"), "nodes": "tty"}, ("nodes",), "is for usb"),
        ({**paths("/dev/a"), "id": "port"}, ("id",), "is for usb"),
        ({**paths("/dev/a"), "permissions": "rw"}, ("permissions",), "each path"),
        ({"match": {"subsystem": "tty"}, "nodes": "all"}, ("nodes",), "is for usb"),
        ({"match": {"subsystem": "tty"}, "id": "port"}, ("id",), "is for usb"),
        ({"match": {"subsystem": "tty"}, "usb": {"vendor": "1"}}, ("match",), "beside usb"),
        # a match
        ({"match": {"subsystem": ""}}, ("match", "subsystem"), "not the name of a directory"),
        ({"match": {"subsystem": "../tty"}}, ("match", "subsystem"), "not the name of a directory"),
        ({"match": {"subsystem": ".."}}, ("match", "subsystem"), "not the name of a directory"),
        ({"match": [{"subsystem": "tty"}, {"subsystem": "t ty"}]}, ("match", 1, "subsystem"), "not the name"),
        ({"match": {"subsystem": "tty", "attributes": {"../x": "1"}}}, ("match", "attributes", "../x"), "'../x'"),
        ({"match": {"subsystem": "tty", "attributes": {"/etc/x": "*"}}}, ("match", "attributes", "/etc/x"), "path"),
        # groups
        (groups({}), ("groups", 0, "paths"), "has no path; name one, or say usb or match"),
        (groups(paths("/dev/a"), usb(FTDI, **paths("/dev/b"))), ("groups", 1, "usb"), "beside paths"),
        (groups(paths("/dev/a"), **paths("/dev/b")), ("paths",), "is beside groups"),
        (groups(paths("/dev/a"), usb=FTDI), ("usb",), "is beside groups; say it in each group that it is for"),
        (groups(paths("/dev/a"), count=3), ("count",), "is beside groups"),
        (groups(paths("/dev/a", count=0)), ("groups", 0, "count"), "it must be from 1"),
        (groups(paths("/dev/a"), paths("/dev/b", "/tmp/c")), ("groups", 1, "paths", 1, "path"), "not below /dev"),
        (groups(usb({"vendor": 403})), ("groups", 0, "usb", "vendor"), "is ambiguous"),
        (groups(paths("/dev/a*"), *[paths("/dev/b")] * 2), ("groups", 2), "with the ID b, as one before it would"),
        (groups(paths("/dev/b", count=3), paths("/dev/b", count=2)), ("groups", 1), "with the ID b::0, as one before"),
        (groups(paths("/dev/a", "/dev/b"), paths("/dev/a")), ("groups", 1), "let their first paths differ"),
        # sticks together
        ({**paths("/dev/a"), "together": "all"}, ("together",), "is for usb"),
        (usb(FTDI, together="each"), ("together",), "there is one selector"),
        (usb([FTDI], together="all", id="port"), ("id",), "is for single sticks"),
        (usb(FTDI, SERIAL, together="each"), ("usb", 1), "may take the same sticks"),
        (usb({**FTDI, "serial": "A"}, SERIAL, together="each"), ("usb", 1), "may take the same sticks"),
        (usb(FTDI, {"vendor": "x"}, together="each"), ("usb", 1, "vendor"), "four hexadecimal digits"),
    ],
)
def test_what_is_impossible_is_refused_with_its_key(table: dict[str, Any], path: tuple[Any, ...], words: str) -> None:
    error = refused(configured(**table))
    assert error.path == path
    assert words in error.sentence


def test_a_mistake_in_a_group_is_told_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text(
        '[[resource]]\nname = "example.com/x"\nbackend = "chardev"\n'
        '[[resource.groups]]\npaths = [{ path = "/dev/a" }]\n'
        '[[resource.groups]]\ncount = 2\npaths = [\n  { path = "/dev/b" },\n  { path = "b" },\n]\n'
    )
    with pytest.raises(ConfigError) as error:
        load(file)
    (problem,) = error.value.problems
    assert (problem.line, problem.path) == (10, "resource[0].groups[1].paths[1].path")


UNSURE = "is ambiguous without quotes; write"
IMPOSSIBLE = "is no USB ID; write its four hexadecimal digits in quotes, as `lsusb` shows them"


@pytest.mark.parametrize(
    ("number", "sentence"),
    [
        (1234, f'{UNSURE} "1234" if these are the digits that `lsusb` shows, or "04d2" if 0x4d2 is meant'),
        (403, f'{UNSURE} "0403" if these are the digits that `lsusb` shows, or "0193" if 0x193 is meant'),
        (0x8087, f'{UNSURE} "8087" if 0x8087 is meant'),
        (0x10000, IMPOSSIBLE),
        (-1, IMPOSSIBLE),
    ],
)
def test_a_number_is_refused_and_both_ways_to_read_it_are_shown(number: int, sentence: str) -> None:
    error = refused(configured(**usb(FTDI, {"vendor": number})))
    assert (error.path, error.sentence) == (("usb", 1, "vendor"), f"{number} {sentence}")


@given(st.integers(0, 0xFFFF))
def test_the_ways_to_read_a_number_are_themselves_accepted(number: int) -> None:
    written = refused(configured(**usb({**SERIAL, "product": number}))).sentence.split('"')[1::2]
    assert usb_id(written[-1]) == f"{number:04x}"
    for text in written:
        CharDev.check(configured(**usb({"vendor": text})))


@pytest.mark.parametrize("written", ["403", "0403", "0x0403", "0X403"])
def test_ids_are_hexadecimal_with_or_without_0x(written: str) -> None:
    assert usb_id(written) == "0403"
    CharDev.check(configured(**usb({"vendor": written})))
