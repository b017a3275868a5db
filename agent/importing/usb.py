"""Reads USB IDs as other plugins' YAML has them, in quotes or not."""

from __future__ import annotations

import re
from typing import Final

from agent.importing.fields import Fields

_PLAIN: Final = re.compile(r"0|[1-9][0-9]*")


def usb_id(fields: Fields, key: str) -> str | None:
    """The digits of a vendor or product, as they are written."""
    found = fields.scalar(key)
    if found is None or not found.text:
        return None
    if found.kind != "str" and not _PLAIN.fullmatch(found.text):
        fields.note(key, f"{found.text} without quotes is no text to YAML; it is taken for the digits of an ID")
    return found.text
