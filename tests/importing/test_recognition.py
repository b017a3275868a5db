"""Whose configuration a file is, seen from its shape or said."""

from __future__ import annotations

import pytest

from agent.importing import FORMATS, ImportRefusedError, import_text

_SMARTER = "- {devicematch: ^fuse$, nummaxdevices: 1}\n"
_GDP = "devices: [{name: a, groups: [{paths: [{path: /dev/a}]}]}]\n"
_KUBEVIRT = "permittedHostDevices: {}\n"
_CEX = "cryptoconfigsets: []\n"
_SOLARFLARE = "data: {onload-version: 8.1, resource-name: solarflare/smartNIC}\n"
_SRIOV = '{"resourceList": [{"resourceName": "a", "selectors": {}}]}\n'
_OWN = {
    "smarter": _SMARTER,
    "generic-device-plugin": _GDP,
    "kubevirt": _KUBEVIRT,
    "cex": _CEX,
    "solarflare": _SOLARFLARE,
    "sriov": _SRIOV,
}


def test_the_one_configuration_among_other_documents_is_taken() -> None:
    assert "smarter-devices/fuse" in import_text(f"kind: Namespace\n---\n{_SMARTER}---\n").toml
    assert "smarter-devices/fuse" in import_text(f"{_GDP}---\n{_SMARTER}", "smarter").toml


def test_what_stands_in_a_config_map_is_taken_with_its_lines_in_the_file() -> None:
    found = import_text(
        "kind: ConfigMap\ndata:\n  conf.yaml: |\n    - devicematch: nvidia-gpu\n      nummaxdevices: 1\n"
    )
    assert [remark.line for remark in found.remarks] == [4]


@pytest.mark.parametrize("text", ["[]", "- {devicematch: ^a$}", "- a"])
def test_a_list_that_is_said_to_be_smarters_is_read_as_such(text: str) -> None:
    assert import_text(text, "smarter").toml.startswith("# From smarter-device-manager's")


@pytest.mark.parametrize(
    ("text", "line", "sentence"),
    [
        ("", None, "the file is empty"),
        ("# nothing\n---\n", None, "the file is empty"),
        ("a: b", None, "this is no configuration of generic-device-plugin (a list 'devices'), smarter-device-manager"),
        ("a", None, "this is no configuration of"),
        ("[]", None, "this is no configuration of"),
        ("devices: 3", None, "this is no configuration of"),
        (f"{_SMARTER}---\n{_GDP}", 3, "here begins a second configuration; import them one by one"),
        ("kind: ConfigMap\ndata: {conf.yaml: ''}", None, "this is a ConfigMap; import what stands in it"),
        ("kind: DaemonSet\nspec: {}", None, "this is a DaemonSet; for generic-device-plugin, write the values"),
    ],
)
def test_what_is_not_recognised_is_refused_with_the_reason(text: str, line: int | None, sentence: str) -> None:
    with pytest.raises(ImportRefusedError) as raised:
        import_text(text)
    assert raised.value.line == line
    assert raised.value.sentence.startswith(sentence)


@pytest.mark.parametrize("source", FORMATS)
@pytest.mark.parametrize("text", [*_OWN.values(), "a", "a: b"])
def test_a_file_of_another_shape_than_said_is_refused(source: str, text: str) -> None:
    if text == _OWN[source]:
        import_text(text, source)
        return
    with pytest.raises(ImportRefusedError) as raised:
        import_text(text, source)
    assert raised.value.line == 1
