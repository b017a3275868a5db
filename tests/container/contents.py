"""Checks the list of what is in an image: contents.py ROOT SBOM, ROOT being where the image lies unpacked.

What it lists is there, and what is there is listed: Debian's packages with their files, Python's distributions with
theirs, each once, with its version.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

_EXCLUDED = re.compile(r"usr/share/(doc|man|locale)/")
"""What the base leaves out of packages."""


def debian(root: Path) -> Iterator[str]:
    """`name version` of each package that dpkg's own record has as installed, if any of its files is there."""
    for record in (root / "var/lib/dpkg/status").read_text().split("\n\n"):
        fields = dict(re.findall(r"^(Package|Status|Version|Architecture): (.*)$", record, re.MULTILINE))
        if fields.get("Status") == "install ok installed":
            name = fields["Package"]
            owned = [it for it in _files(root, name, fields["Architecture"]) if not _EXCLUDED.match(it)]
            assert not owned or any((root / it).exists() for it in owned), (
                f"dpkg has {name}, and none of its files is there"
            )
            yield f"{name} {fields['Version']}"


def _files(root: Path, package: str, architecture: str) -> list[str]:
    lists = [root / f"var/lib/dpkg/info/{package}{it}.md5sums" for it in ("", f":{architecture}")]
    return [line.split(maxsplit=1)[1] for file in lists if file.exists() for line in file.read_text().splitlines()]


def python(root: Path) -> Iterator[str]:
    """`name version` of each distribution that has its files in the virtual environment."""
    for about in (root / "opt/fairlead/lib").glob("python3*/site-packages/*.dist-info"):
        name, version = about.name.removesuffix(".dist-info").rsplit("-", 1)
        yield f"{re.sub('[-_.]+', '-', name).lower()} {version}"


def main() -> None:
    """The command."""
    root, sbom = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text())
    listed = Counter(f"{one['name']} {one['version']}" for one in sbom["components"])
    there = Counter([*debian(root), *python(root)])
    assert listed == there, f"listed alone: {listed - there}, there alone: {there - listed}"
    assert all(one["purl"].endswith(f"@{one['version']}") for one in sbom["components"] if "pypi" in one["purl"])
    assert {"fairlead", "nvidia-ml-py", "kmod", "python3", "msgspec"} <= {one["name"] for one in sbom["components"]}
    own = [one["version"] for one in sbom["components"] if one["name"] == "fairlead"]
    assert own == [sbom["metadata"]["component"]["version"]], own
    assert len({one["bom-ref"] for one in sbom["components"]}) == len(sbom["components"])
    licensed = sum("licenses" in one for one in sbom["components"])
    print(f"{len(sbom['components'])} components, {licensed} with a licence")


if __name__ == "__main__":
    main()
