"""YAML of any kind becomes texts, lists and tables with their lines, or a sentence; never an object."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.importing import ImportRefusedError
from agent.importing.yaml_tree import Items, Scalar, Table, read_yaml
from tests.importing.helpers import import_text, loads


def test_everything_has_its_line() -> None:
    (tree,) = read_yaml("a:\n  - b\n  -\n    c: 1\n")
    assert isinstance(tree, Table)
    assert tree.lines == {"a": 1}
    items = tree.values["a"]
    assert isinstance(items, Items)
    assert items.items[0] == Scalar(2, "b", "str")
    assert items.items[1] == Table(4, {"c": Scalar(4, "1", "int")}, {"c": 4})


def test_an_alias_stands_for_what_it_names() -> None:
    (tree,) = read_yaml("- &a x\n- *a\n")
    assert isinstance(tree, Items)
    assert tree.items == (Scalar(1, "x", "str"), Scalar(1, "x", "str"))


@pytest.mark.parametrize(
    ("text", "line", "sentence"),
    [
        ("a: b: c", 1, "this is no YAML: mapping values are not allowed here"),
        ("a:\n\t- b", 2, "this is no YAML: found character '\\t' that cannot start any token"),
        ("a\n\x00", 2, "this is no YAML: it has a character that YAML does not allow"),
        ("- !!python/object/apply:os.system [id]", 1, "the tag '!!python/object/apply:os.system' is not read"),
        ("- a\n- !secret b", 2, "the tag '!secret' is not read"),
        ("a: !!binary aGk=", 1, "the tag '!!binary' is not read"),
        ("a:\n  <<: b", 2, "the merge key '<<' brings in no table"),
        ("a: 1\na: 2", 2, "the key 'a' stands there twice"),
        ("? [a]\n: b", 1, "a key is a list or a table"),
        ("&a [*a]", 1, "the file's aliases make it too large"),
        ('a: "\\ud800"', 1, "a text has half of a surrogate pair"),
        ("[" * 1_000, None, "the file has lists or tables that are nested too deeply"),
    ],
)
def test_what_is_not_read_is_said_with_its_line(text: str, line: int | None, sentence: str) -> None:
    with pytest.raises(ImportRefusedError) as raised:
        read_yaml(text)
    assert raised.value.line == line
    assert raised.value.sentence.startswith(sentence)


def test_a_pair_of_surrogates_is_one_character_as_in_json() -> None:
    assert read_yaml('"\\ud83d\\ude00"') == [Scalar(1, "😀", "str")]


def test_a_tag_runs_nothing(tmp_path: Path) -> None:
    with pytest.raises(ImportRefusedError):
        read_yaml(f"!!python/object/apply:os.mkdir ['{tmp_path / 'made'}']")
    assert not list(tmp_path.iterdir())


def test_aliases_of_aliases_are_refused_before_they_take_memory() -> None:
    levels = "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 10))
    with pytest.raises(ImportRefusedError, match="aliases"):
        read_yaml(f"a0: &a0 x\n{levels}")


@given(st.text("[]{}:-?&*!|>'\"#%@` \n\tabdevices012,<~", max_size=60) | st.text(max_size=60))
def test_no_text_at_all_ends_in_anything_but_an_import_or_a_sentence(text: str) -> None:
    with contextlib.suppress(ImportRefusedError):
        loads(import_text(text))
