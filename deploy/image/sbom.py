"""Lists what an image is made of as a CycloneDX document: sbom.py NAME VERSION, run by the image's own Python, inside it.

The build runs it once all that goes has gone. It lists what is really there: the distribution's packages as dpkg has
them, the Python distributions in /opt/fairlead, and a Python that is no package of the distribution's. Nothing in it
depends on the time or the machine: the same image has the same list. https://cyclonedx.org/docs/1.6/json/ is the format.
"""

from __future__ import annotations

import json
import platform
import re
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

ROOT: Final = Path("/opt/fairlead")
"""Where the Containerfile puts the virtual environment."""

_DPKG: Final = (
    "${db:Status-Status}\t${binary:Package}\t${Version}\t${Architecture}\t${source:Package}\t${source:Version}\n"
)
_LICENCE: Final = re.compile(r"^License: *(\S.*)$", re.MULTILINE)  # of Debian's machine-readable copyright files
_CLASSIFIER: Final = "License :: OSI Approved :: "


def debian_packages() -> Iterator[dict[str, Any]]:
    """One component for each package that dpkg says is installed."""
    release = platform.freedesktop_os_release()
    distro, distribution = release["ID"], f"{release['ID']}-{release.get('VERSION_ID', 'sid')}"
    said = _dpkg_query("--show", f"--showformat={_DPKG}")
    said.check_returncode()
    for line in said.stdout.splitlines():
        status, package, version, architecture, source, source_version = line.split("\t")
        if status != "installed":
            continue
        name = package.partition(":")[0]  # "libc6:amd64" where several architectures may be
        purl = f"pkg:deb/{distro}/{quote(name)}@{quote(version)}?arch={architecture}&distro={distribution}"
        copyright_file = Path("/usr/share/doc", name, "copyright")
        text = copyright_file.read_text(errors="replace") if copyright_file.exists() else ""
        yield _component("library", name, version, purl, sorted(set(_LICENCE.findall(text)))) | {
            "properties": [{"name": "debian:source", "value": f"{source} {source_version}"}]
        }


def python_distributions() -> Iterator[dict[str, Any]]:
    """One component for each distribution in the virtual environment; Fairlead itself is in no index."""
    library = next(ROOT.glob("lib/python3*/site-packages"))
    for found in distributions(path=[str(library)]):
        name = re.sub(r"[-_.]+", "-", found.name).lower()
        own = name == "fairlead"
        purl = f"pkg:{'generic' if own else 'pypi'}/{name}@{found.version}"
        licences = _licences(found.metadata.json)
        yield _component("application" if own else "library", name, found.version, purl, licences)


def interpreter() -> Iterator[dict[str, Any]]:
    """Python itself, where it was built from its sources, as in the image `python`."""
    binary = Path(sys.executable).resolve()
    if _dpkg_query("--search", str(binary)).returncode:
        version = platform.python_version()
        cpe = f"cpe:2.3:a:python:python:{version}:*:*:*:*:*:*:*"
        yield _component("application", "python", version, f"pkg:generic/python@{version}", ["PSF-2.0"]) | {"cpe": cpe}


def _dpkg_query(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["dpkg-query", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603


def _licences(about: Mapping[str, str | list[str]]) -> list[str]:
    """An expression, or what classifiers say, or a line of text; older metadata has the whole licence there."""
    if expression := about.get("license_expression"):
        return [str(expression)]
    names = [it.removeprefix(_CLASSIFIER) for it in about.get("classifier", ()) if it.startswith(_CLASSIFIER)]
    stated = str(about.get("license", ""))
    return names or ([stated] if stated and "\n" not in stated else [])


def _component(kind: str, name: str, version: str, purl: str, licences: list[str]) -> dict[str, Any]:
    component: dict[str, Any] = {"type": kind, "bom-ref": purl, "name": name, "version": version, "purl": purl}
    if licences:
        component["licenses"] = [{"license": {"name": licence}} for licence in licences]
    return component


def document(name: str, version: str) -> dict[str, Any]:
    """The whole document, for an image of that name and version."""
    found = [*debian_packages(), *python_distributions(), *interpreter()]
    components = sorted(found, key=lambda it: str(it["purl"]))
    content = json.dumps([name, version, components])
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, content)}",
        "version": 1,
        "metadata": {"component": {"type": "container", "bom-ref": name, "name": name, "version": version}},
        "components": components,
    }


if __name__ == "__main__":
    json.dump(document(*sys.argv[1:]), sys.stdout, indent=1)
