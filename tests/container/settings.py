"""Checks an image's settings: settings.py IMAGE VERSION, what `buildah inspect` says and what `fairlead --version` said.

It runs as root, with one layer, no health check of its own, and labels that say what it is.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path


def main() -> None:
    """The command."""
    image = json.loads(Path(sys.argv[1]).read_text())["OCIv1"]
    settings, labels = image["config"], image["config"]["Labels"]
    version = sys.argv[2].split()[-1]
    assert settings.get("User", "") in ("", "root", "0"), settings
    assert "Healthcheck" not in settings, settings
    assert (settings["Entrypoint"], settings["Cmd"]) == (["fairlead"], ["run"]), settings
    assert len(image["rootfs"]["diff_ids"]) == 1, image["rootfs"]
    prefix = "org.opencontainers.image."
    assert labels[f"{prefix}version"] == version, (labels, version)
    assert labels[f"{prefix}title"] == "Fairlead", labels
    assert labels[f"{prefix}licenses"] == "Apache-2.0", labels
    assert re.fullmatch("[0-9a-f]{40}", labels[f"{prefix}revision"]), labels
    print(f"fairlead {version}")


if __name__ == "__main__":
    main()
