"""Backends that others have written: what is wrong with one is said when it is loaded."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest

from backends import registry
from backends.base import Backend, ContainerEdits, Discovery, Grant, Resource


class Options(msgspec.Struct):
    pass


class Unfinished(Backend[Options]):
    options_type: ClassVar = Options

    def units(self) -> Iterable[str]:
        return ()


class WithoutOptions(Backend[Options]):
    def units(self) -> Iterable[str]:
        return ()

    def discover(self, unit: str) -> Discovery:
        return Discovery()

    def edits(self, resource: Resource[Options], grants: Sequence[Grant]) -> ContainerEdits:
        return ContainerEdits()


class WithOddOptions(WithoutOptions):
    options_type: ClassVar = dict


class WithOddAttributes(WithoutOptions):
    options_type: ClassVar = Options
    attributes: ClassVar[Any] = {"clock": "[a-z]+"}


class Whole(WithoutOptions):
    options_type: ClassVar = Options


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install this module's names as backends, as a distribution in a directory of its own."""
    metadata = tmp_path / "others-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: others\nVersion: 1.0\n")
    names = ["Options", "Unfinished", "WithoutOptions", "WithOddOptions", "WithOddAttributes", "Whole", "Missing"]
    points = "".join(f"{name.lower()} = {__name__}:{name}\n" for name in names)
    (metadata / "entry_points.txt").write_text(f"[fairlead.backends]\n{points}stub = {__name__}:Whole\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, __name__, sys.modules[Whole.__module__])


@pytest.mark.usefixtures("install")
class TestInstalled:
    def test_they_are_named_beside_the_built_in_ones(self) -> None:
        assert {"whole", "unfinished", "stub", "chardev"} <= set(registry.names())

    def test_one_is_loaded_by_its_name(self) -> None:
        assert registry.load("whole") is Whole

    def test_none_shadows_a_built_in_one(self) -> None:
        assert registry.load("stub") is not Whole

    def test_an_unknown_name_is_none(self) -> None:
        with pytest.raises(registry.UnknownBackendError):
            registry.load("nobody")

    @pytest.mark.parametrize(
        ("name", "fault"),
        [
            ("missing", "cannot be imported: AttributeError"),
            ("options", "is not a subclass of backends.base.Backend"),
            ("unfinished", "must be finished: it has no discover, edits"),
            ("withoutoptions", "has no options_type: the msgspec.Struct that"),
            ("withoddoptions", "has no options_type: the msgspec.Struct that"),
            (
                "withoddattributes",
                "has attributes that are not what they must be: names, each with a backends.base.Attribute",
            ),
        ],
    )
    def test_what_is_wrong_is_said(self, name: str, fault: str) -> None:
        with pytest.raises(registry.BrokenBackendError) as caught:
            registry.load(name)
        assert str(caught.value).startswith(f"backend '{name}' (")
        assert fault in str(caught.value)


def test_a_node_pays_for_no_kind_of_hardware_that_its_configuration_does_not_name(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from agent.config import load; import agent.daemon.supervisor\n"
        "from agent.discovery.backend_answers import make_backends; from backends import registry\n"
        f"config = load(default=Path({str(tmp_path / 'none.toml')!r})); make_backends(config.host, config.resources)\n"
        "print(*(name for name in registry.names() if f'backends.{name}' in sys.modules))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["chardev"]
