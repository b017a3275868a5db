"""Writes the section "By reason" of docs/troubleshooting.md from the table that every face shows: python -m tools.reasons_section."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from agent.console.advice import REASONS, SEEN, UNKNOWN, UNUSABLE, Advice, of_xid
from backends.gpu.xid import XIDS

PAGE: Final = Path(__file__).parents[1] / "docs" / "troubleshooting.md"
BEGIN, END = "<!-- made by `make generated` of agent/console/advice.py -->\n", "<!-- end of what is made -->\n"


_NVIDIAS: Final = {
    "RESTART_APP": "start the application again",
    "IGNORE": "nothing is to be done at once",
    "RESET_GPU": "reset the GPU",
    "RESTART_BM": "restart the bare metal: reboot the node",
    "RESTART_VM": "restart the virtual machine that has the GPU",
    "CHECK_MECHANICALS": "look at the card, its slot and its power cables",
    "WORKFLOW_XID_48": "go by NVIDIA's instructions for XID 48, an ECC error of two bits",
    "WORKFLOW_NVLINK_ERR": "go by NVIDIA's instructions for errors of NVLink",
    "WORKFLOW_NVLINK5_ERR": "go by NVIDIA's instructions for errors of NVLink of the fifth generation",
    "XID_154": "do what the line of an XID 154 beside it asks for",
    "UPDATE_SWFW": "update the driver or the firmware",
    "CONTACT_SUPPORT": "ask NVIDIA's or the hardware's support",
}
"""Immediate action of NVIDIA's XID catalog → what the word says, which its users have to know."""


def section() -> str:
    """The section as it would be now."""
    return "\n".join(_lines()) + "\n"


def page() -> str:
    """The page with the section as it would be now."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    return f"{before}{BEGIN}{section()}{END}{rest.partition(END)[2]}"


def _lines() -> Iterator[str]:
    yield f"Where the last column is empty, the reason ends {SEEN}."
    yield ""
    yield "| reason | it means | what to do now | what ends it |"
    yield "| --- | --- | --- | --- |"
    yield from (_row(f"`{reason}`", it) for reason, it in REASONS.items())
    yield ""
    yield "A device that is there and cannot be used has the reason `unusable`, and its sentence tells why:"
    yield ""
    yield "| it says | it means | what to do now | what ends it |"
    yield "| --- | --- | --- | --- |"
    yield from (_row(f"… {words} …", it) for words, it in UNUSABLE.items())
    yield ""
    yield "### XIDs by number"
    yield ""
    yield (
        "`xid-79` is XID 79: what NVIDIA's driver reports, with what NVIDIA's catalog of October 2025 calls for at once. Which of "
        "them make a GPU unhealthy is the resource's [`xids`](gpu.md#health). All that the catalog lists and is not here are "
        f"exceptions in engines, as 68 is. What makes a GPU unhealthy ends {_filled(of_xid(79).ends)}."
    )
    yield ""
    yield "| XID | it means | NVIDIA says |"
    yield "| --- | --- | --- |"
    meant: dict[tuple[str, str], list[int]] = {}
    for number, told in XIDS.items():
        meant.setdefault(told, []).append(number)
    yield from (f"| {', '.join(map(str, of))} | {means} | {action} |" for (means, action), of in meant.items())
    yield ""
    yield "| NVIDIA says | that is | what to do now |"
    yield "| --- | --- | --- |"
    for action in dict.fromkeys(action for _, action in meant):
        number = next(number for number, (_, its) in XIDS.items() if its == action)
        yield f"| {action} | {_NVIDIAS[action]} | {_what_to_do(of_xid(number))} |"


def _row(first: str, it: Advice) -> str:
    return f"| {first} | {_filled(it.means)} | {_what_to_do(it)} | {'' if it.ends == SEEN else _filled(it.ends)} |"


def _what_to_do(it: Advice) -> str:
    command = f" `{_filled(it.command)}`" if it.command else ""
    return f"{_filled(it.do)}{command}"


def _filled(text: str) -> str:
    named = re.sub(r"\{(\w+)\}", lambda found: UNKNOWN if found[1] == "device" else found[1].upper(), text)
    return named.replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page())
