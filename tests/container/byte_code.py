"""Imports all of Fairlead, run inside the image, and ends with an error where a module came without byte-code."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from pathlib import Path

import agent
import backends


def main() -> None:
    """The command."""
    for package in agent, backends:
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not module.name.endswith(".__main__"):
                importlib.import_module(module.name)
    cached = {name: getattr(module, "__cached__", None) for name, module in sys.modules.items()}
    missing = [name for name, file in cached.items() if file is not None and not Path(file).exists()]
    if missing:
        sys.exit(f"without byte-code: {missing}")
    print(f"{sum(file is not None for file in cached.values())} modules, all with byte-code")


if __name__ == "__main__":
    main()
