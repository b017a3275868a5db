"""Writes a feature file for Node Feature Discovery: how many devices the node has, their health, their models.

NFD's worker makes node labels of it (customization-guide.md there, "Local feature source"): lines `name=value`, at most
64 kB, in a directory where it ignores names that begin with a dot. The labels' names and values keep to Kubernetes'
limits. After a time that is written into the file, NFD drops it: labels of a Fairlead that is gone do not stay.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Final

from agent.model import Slot, State
from agent.runtime.pacing import Doorbell
from agent.runtime.problems import Problems
from agent.runtime.workers import Workers
from backends.base import Device
from backends.linux import files

NAMESPACE: Final = "fairlead.feature.node.kubernetes.io"
"""Below the one namespace of kubernetes.io that NFD allows to others."""
LIFETIME: Final = 3600.0
"""Seconds for which NFD may believe what it reads."""
REFRESH: Final = 900.0
"""Seconds after which it is written again though nothing changed, or tried again if it could not be."""
TOGETHER: Final = 2.0
"""Seconds for which changes are gathered: each costs the cluster's API server a write."""
MOST_BYTES: Final = 64_000
"""What NFD reads of a file."""

_HEADER: Final = "# Written by Fairlead; it is overwritten at every change.\n"
_MOST_READ: Final = 1 << 20  # bytes of a file that is ours or another's
_LONGEST: Final = 63  # characters of a label's name, and of its value
_DIGEST: Final = 4  # bytes

Resources = Mapping[str, Mapping[str, Slot]]
"""The slots of every resource."""


def features(resources: Resources) -> Iterator[str]:
    """The lines, without ends, in the order of the resources' names."""
    for resource, slots in sorted(resources.items()):
        devices: dict[str, Device] = {}
        states: dict[str, set[State]] = {}
        for slot in slots.values():
            if slot.device is not None:  # a tombstone is no device
                devices[slot.device.key] = slot.device
                states.setdefault(slot.device.key, set()).add(slot.health.state)
        degraded = sum(State.HEALTHY not in said and State.DEGRADED in said for said in states.values())
        yield _line(resource, "count", len(devices))
        yield _line(resource, "healthy", sum(State.HEALTHY in said for said in states.values()))
        yield _line(resource, "degraded", degraded)
        models = Counter(model for device in devices.values() if (model := _model(device)))
        for model, number in sorted(models.items()):
            yield _line(resource, f"model.{model}", number)


def _model(device: Device) -> str:
    """The model's name as a label may have it; empty if the device's backend tells none."""
    text = next(iter(device.attributes.get("model") or device.attributes.get("hca_type") or ()), "")
    return re.sub(r"[^A-Za-z0-9_.]+", "-", text).strip("-_.")


def _line(resource: str, feature: str, number: int) -> str:
    """`nvidia.com/gpu` is `nvidia.com_gpu` here, as in its socket's name; what is too long ends in a hash."""
    name = f"{resource.replace('/', '_')}.{feature}"
    if len(name) > _LONGEST:
        import hashlib  # noqa: PLC0415  # 0.5 MB that most nodes can do without

        digest = hashlib.blake2b(name.encode(), digest_size=_DIGEST).hexdigest()
        kept = max(0, _LONGEST - len(feature) - len(digest) - 2)
        name = f"{name[:kept]}-{digest}.{feature}" if kept else f"{name[: _LONGEST - len(digest) - 1]}-{digest}"
    return f"{NAMESPACE}/{name}={number}"


def content(lines: Iterable[str], expires: float) -> tuple[str, int]:
    """The file's text, and how many lines are left out of it because NFD would not read more."""
    when = datetime.fromtimestamp(expires, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    text, omitted = f"{_HEADER}# +expiry-time={when}\n", 0
    for line in lines:
        if len(text) + len(line) < MOST_BYTES:
            text += f"{line}\n"
        else:
            omitted += 1
    return text, omitted


class FeatureFile:
    """The file, written whenever it would say something else."""

    def __init__(
        self,
        path: Path,
        resources: Callable[[], Resources],
        wall: Callable[[], float] = time.time,
        problems: Problems | None = None,
    ) -> None:
        """Prepare; `resources` is asked for the slots of every resource, which a thread then reads: give it copies."""
        self.path = path
        self._resources = resources
        self._wall = wall
        self._changed = Doorbell()
        self._workers = Workers("features", 1)
        self._said: list[str] | None = None  # the lines in the file; None: unknown
        self._written = 0.0
        self._omitted = 0
        problems = problems or Problems()
        self._unwritten = problems.trouble(
            "features",
            "the features for Node Feature Discovery are not written",
            "features-not-written",
            "features-written-again",
            file=str(path),
            then="trying again",
        )
        self._cut = problems.trouble(
            "features", "some features are not written", "features-too-long", file=str(path), limit=MOST_BYTES
        )

    def changed(self) -> None:
        """A list changed."""
        self._changed.set()

    async def run(self) -> None:
        """Write it for ever. At the end it stays: a restart is no reason to take labels away and give them back."""
        try:
            while True:
                resources = self._resources()
                try:
                    omitted = await self._workers.start(partial(self._update, resources))
                except OSError as error:
                    self._unwritten.report_once(str(error))
                else:
                    self._unwritten.healed()
                    self._note_omitted(omitted)
                await self._changed.rung(REFRESH, gather=TOGETHER)
        finally:
            self._workers.close()

    def _update(self, resources: Resources) -> int:
        """In the thread: write what is new, or old; how many lines are left out.

        Raises:
            OSError: it cannot be written.
        """
        lines, now = list(features(resources)), self._wall()
        if lines == self._said and now - self._written < REFRESH:
            return self._omitted
        self._said = None
        text, omitted = content(lines, now + LIFETIME)
        replace(self.path, text)
        self._said, self._written = lines, now
        return omitted

    def _note_omitted(self, omitted: int) -> None:
        self._omitted = omitted
        if omitted:
            self._cut.report_once(f"{omitted} lines are left out, since NFD reads {MOST_BYTES} bytes")
        else:
            self._cut.healed()


def replace(path: Path, text: str) -> None:
    """Put our file there whole, and nothing in the place of another's.

    Raises:
        OSError: it cannot be written, or another program wrote it.
    """
    with suppress(FileNotFoundError):
        if not files.read(path, _MOST_READ, follow=False).startswith(_HEADER.encode()):
            raise FileExistsError(f"{path} is not Fairlead's; move it away, or name another file as agent.nfd_features")
    files.replace(path, text.encode(), 0o644)  # NFD's worker is not root
