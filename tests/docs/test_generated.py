"""The generated pages are what would be generated now: every key of the configuration, every licence."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

from agent.config.resources import RESOURCE_KEYS
from agent.config.schema import schema
from tools import configuration_page, licences_page, reasons_section

_FINE: Final = re.compile(r"MIT|BSD|Apache|PSF-2\.0|Python Software Foundation|MPL|Mozilla|LGPL")
_STALE: Final = "run `make generated`"


def test_the_configuration_reference_is_current() -> None:
    assert configuration_page.PAGE.read_text() == configuration_page.page(), _STALE


def test_the_configuration_reference_has_every_key_with_a_meaning() -> None:
    page = configuration_page.page()
    for key in {*RESOURCE_KEYS, *_keys(schema())}:
        assert f"| `{key}` |" in page, key
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    assert not [row for row in rows if row.endswith("|  |")], "a key without a docstring below it"


def _keys(whole: dict[str, Any]) -> Iterator[str]:
    yield from (key for record in whole["$defs"].values() for key in record.get("properties", {}))


def test_the_table_of_reasons_is_current() -> None:
    assert reasons_section.PAGE.read_text() == reasons_section.page(), _STALE


def test_the_list_of_licences_is_current() -> None:
    assert licences_page.PAGE.read_text() == licences_page.page(), _STALE


def test_every_licence_may_be_used_with_the_apache_license() -> None:
    assert not [name for name, _ in licences_page.pinned() if not _FINE.search(licences_page.licence(name))]
