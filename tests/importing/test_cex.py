"""The configuration sets of IBM's Crypto Express plugin, and its environment; its ConfigMap is in test_golden."""

from __future__ import annotations

import json
import tomllib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.importing.helpers import import_text, imported, loads, said


def sets(*every: Any, **more: Any) -> str:
    """The plugin's own file, indented with tabs as people do."""
    return json.dumps({"cryptoconfigsets": list(every), **more}, indent="\t")


SET = {"setname": "one", "apqns": [{"adapter": 1, "domain": 6}]}
ENV = '\n---\nspec: {containers: [{env: [{name: %s, value: "%s"}]}]}\n'


def test_a_set_is_a_resource_of_the_same_name() -> None:
    found = imported(sets(SET))
    assert (found.lossless, said(found)) == (True, [])
    (resource,) = tomllib.loads(found.toml)["resource"]
    assert resource == {"name": "cex.s390.ibm.com/one", "backend": "cex", "apqns": [{"adapter": 1, "domain": 6}]}


@pytest.mark.parametrize(
    ("name", "value", "keys", "remark"),
    [
        ("APQN_OVERCOMMIT_LIMIT", "3", {"overcommit": 3}, None),
        ("APQN_OVERCOMMIT_LIMIT", "1", {}, None),
        ("APQN_OVERCOMMIT_LIMIT", "1000", {"overcommit": 100}, "is '1000', not a number from 1 to 100; 100 is taken"),
        ("APQN_OVERCOMMIT_LIMIT", "many", {}, "is 'many', not a number from 1 to 100"),
        ("APQN_LIVE_SYSFS", "0", {"live_sysfs": False}, None),
        ("APQN_LIVE_SYSFS", "1", {}, None),
        ("PODLISTER_POLL_INTERVAL", "30", {}, "note: PODLISTER_POLL_INTERVAL is not needed"),
        ("SOMETHING", "else", {}, None),
    ],
)
@pytest.mark.parametrize("place", [ENV, '\n---\nkind: ConfigMap\ndata: {%s: "%s"}\n'])
def test_the_environment_is_for_every_set(name: str, value: str, keys: Any, remark: str | None, place: str) -> None:
    found = imported(sets(SET, {**SET, "setname": "two", "apqns": []}) + place % (name, value))
    one, two = tomllib.loads(found.toml)["resource"]
    assert one == {"name": "cex.s390.ibm.com/one", "backend": "cex", "apqns": [{"adapter": 1, "domain": 6}], **keys}
    assert two == {"name": "cex.s390.ibm.com/two", "backend": "cex", "apqns": [], **keys}
    assert [remark is not None and remark in line for line in said(found)] == ([True] if remark else [])


@pytest.mark.parametrize(
    ("wrong", "remark"),
    [
        ({"apqns": [{"adapter": 1}]}, "an APQN has no domain; the set is left out"),
        ({"apqns": [{"adapter": 1, "domain": 256}]}, "is 256; it must be from 0 to 255"),
        ({"apqns": [{"adapter": 1, "domain": 6}] * 2}, "is adapter 1, domain 6 once more"),
        ({"mincexgen": "z16"}, "'z16' is none of cex4 to cex9"),
        ({"mincexgen": "cex3"}, "is 3; the oldest cards are of generation 4"),
        ({"cexmode": "CCA"}, "'CCA' is none of ep11, cca, accel"),
        ({"setname": "no name"}, "cex.s390.ibm.com/no name"),
        ({"setname": ""}, "it has no setname and is left out"),
    ],
)
def test_a_wrong_set_is_left_out_alone(wrong: Any, remark: str) -> None:
    found = imported(sets({**SET, **wrong}, {"setname": "right", "apqns": [{"adapter": 2, "domain": 6}]}))
    assert loads(found) == ["cex.s390.ibm.com/right"]
    assert any(remark in line for line in said(found)), said(found)


def test_what_the_plugin_reads_and_ignores_is_told() -> None:
    found = imported(sets({**SET, "project": "p", "overcommit": 2, "livesysfs": 1, "x": 1}))
    assert loads(found) == ["cex.s390.ibm.com/one"]
    assert [line.split(": ", 2)[2].split(" ")[0] for line in said(found)] == ["the", "the", "the", "Fairlead"]


def test_a_queue_of_two_sets_is_told_unless_they_are_for_two_machines() -> None:
    here, there = {"adapter": 1, "domain": 6, "machineid": "A"}, {"adapter": 1, "domain": 6, "machineid": "B"}
    assert imported(sets({"setname": "a", "apqns": [here]}, {"setname": "b", "apqns": [there]})).lossless
    found = imported(sets(SET, {"setname": "b", "apqns": [there]}))
    assert not found.lossless
    assert "adapter 1, domain 6 is in cex.s390.ibm.com/one too" in said(found)[0]


_VALUES: st.SearchStrategy[Any] = st.sampled_from(["", "one", "cca", "cex7", 1, 6, 256, -1, None, [], {}]) | st.text(
    max_size=4
)
_APQNS = st.lists(st.dictionaries(st.sampled_from(["adapter", "domain", "machineid"]), _VALUES), max_size=3) | _VALUES
_SETS = st.fixed_dictionaries(
    {},
    optional={
        **dict.fromkeys(("setname", "project", "cexmode", "mincexgen", "overcommit", "livesysfs", "x"), _VALUES),
        "apqns": _APQNS,
    },
)


@given(st.lists(_SETS | _VALUES, max_size=3))
def test_whatever_is_imported_loads(every: list[Any]) -> None:
    loads(import_text(sets(*every)))
