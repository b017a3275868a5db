"""Finds the daemon's sockets and this node's name, and asks for a probe, with nothing that takes long to import: a kubelet asks often.

The probes have a socket of their own beside the admin socket, named after the PID namespace: of two containers that share
/run/fairlead, the old and the new one of an update, each asks its own daemon.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Final

_DEFAULT: Final = Path("/run/fairlead/admin.sock")
_CONFIG: Final = Path("/etc/fairlead/config.toml")
_CONFIG_BYTES: Final = 4 << 20

PROBES: Final = ("live", "ready")
"""What a probe asks: whether the daemon itself works (`live`), and whether the kubelet has every resource (`ready`)."""

WELL: Final = "well"
"""The first line of an answer to a probe that succeeds; the second is a sentence."""

_PATIENCE: Final = 4.0  # seconds; the manifests give a probe 5
_ANSWER_BYTES: Final = 1 << 16


def configured(config: Path | None) -> tuple[Path, str]:
    """Where the daemon is reached, and why the configuration does not say so, if it might; else empty.

    It is not loaded as a whole: that takes as long as all the rest, and a daemon runs on with an earlier one.
    """
    import tomllib  # noqa: PLC0415  # both take 20 ms

    from backends.linux import files  # noqa: PLC0415

    file = config or _CONFIG
    try:
        tables = tomllib.loads(files.read(file, _CONFIG_BYTES).decode())
        return Path(tables["agent"]["admin_socket"]), ""
    except FileNotFoundError:
        return _DEFAULT, f"there is no {file}" if config else ""
    except (OSError, ValueError) as error:
        return _DEFAULT, f"{file} cannot be read ({error})"
    except (KeyError, TypeError):  # it has no such key
        return _DEFAULT, ""


def probe_socket(admin_socket: Path) -> Path:
    """Where the daemon of this PID namespace answers probes."""
    return admin_socket.with_name(f"probe-{Path('/proc/self/ns/pid').stat().st_ino:x}.sock")


def probe(what: str, config: Path | None = None) -> tuple[bool, str]:
    """Whether this probe succeeds, and the daemon's sentence, or why it has none."""
    path = probe_socket(configured(config)[0])
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as sock:
            sock.settimeout(_PATIENCE)
            sock.connect(os.fspath(path))
            sock.sendall(f"{what}\n".encode())
            answer = b""
            while len(answer) < _ANSWER_BYTES and (more := sock.recv(_ANSWER_BYTES)):
                answer += more
    except TimeoutError:
        return False, f"Fairlead did not answer at {path} within {_PATIENCE:g} s"
    except OSError as error:
        return False, f"no Fairlead answers at {path}: {error.strerror or error}"
    first, _, sentence = answer.decode(errors="replace").partition("\n")
    return first == WELL, sentence.strip() or f"Fairlead broke the connection at {path}"


def node_name(environment: Mapping[str, str] = os.environ) -> str:
    """Kubernetes' name for it, which the manifests hand in as NODE_NAME, else the machine's own."""
    return environment.get("NODE_NAME") or socket.gethostname()
