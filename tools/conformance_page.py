"""Writes the table of checks in docs/conformance.md, from the checks themselves.

`make generated` runs it; a test compares the page with what it would write.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from agent.simulation.conformance.checks import CHECKS
from agent.simulation.conformance.reports import reference

PAGE: Final = Path(__file__).resolve().parents[1] / "docs/conformance.md"
_MARK: Final = "do not edit up to their end. -->\n"
_END: Final = "<!-- End of the checks. -->"


def page() -> str:
    """The whole page; what is around the checks stays as it is."""
    above, _, rest = PAGE.read_text().partition(_MARK)
    return above + _MARK + "\n".join(reference(CHECKS)) + f"\n\n{_END}" + rest.partition(_END)[2]


if __name__ == "__main__":
    PAGE.write_text(page())
