"""The kubelet's messages as Google's protobuf makes them, generated into `build/`: what most plugins use."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
BUILD: Final = ROOT / "build"
_GENERATED: Final = BUILD / "bench" / "messages"


def generate() -> None:
    """Generate them anew."""
    from grpc_tools import protoc

    _GENERATED.mkdir(parents=True, exist_ok=True)
    source = ROOT / "proto" / "kubelet"
    if code := protoc.main(["protoc", f"-I{source}", f"--python_out={_GENERATED}", f"{source}/deviceplugin.proto"]):
        sys.exit(f"bench: protoc failed with {code}")


def load() -> Any:
    """The generated module."""
    sys.path.insert(0, str(_GENERATED))
    try:
        return import_module("deviceplugin_pb2")
    finally:
        sys.path.remove(str(_GENERATED))
