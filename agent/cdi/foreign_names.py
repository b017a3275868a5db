"""Lets no container name a device that no CDI specification defines, where a backend names others' (`nvidia.com/gpu=…`).

A runtime cannot make such a container, and says so to nobody but itself, again and again. A device of the pod's own that is
not defined is a refusal; what belongs to all (`gds=all`) is left out, and reported once.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final

from msgspec.structs import replace

from agent.cdi.definitions import Definitions
from agent.runtime import running_time
from agent.runtime.errors import words
from agent.runtime.supervision.problems import Problems, Trouble
from agent.runtime.workers import NoWorkerError, Workers
from backends.base import AllocationRefused, ContainerEdits, Host, Resource

READ_DEADLINE: Final = 10.0
"""Seconds that an Allocate waits for the disk; the kubelet's sync loop waits meanwhile (kubelet contract: A4)."""

_KEY: Final = "cdi.k8s.io/"
"""In the key of an annotation that names devices; NVIDIA's may have something before it."""
_FOR_ALL: Final = "=all"


class ForeignNames:
    """Checks the CDI names in backends' answers."""

    def __init__(self, host: Host, problems: Problems) -> None:
        self._definitions = Definitions(host)
        self._problems = problems
        self._left_out: dict[str, Trouble] = {}
        self._workers = Workers("cdi definitions")

    async def checked(self, resource: Resource[Any], edits: ContainerEdits) -> ContainerEdits:
        """A backend's answer without the names that no specification defines.

        Raises:
            AllocationRefused: one of them is the pod's own device, or the specifications cannot be read.
        """
        if not (wanted := _named(edits)):
            return edits
        try:
            async with running_time.timeout(READ_DEADLINE):
                undefined = await self._workers.start(partial(self._definitions.undefined, wanted))
        except (OSError, NoWorkerError, TimeoutError) as error:
            why = words(error) if str(error) else f"not done within {READ_DEADLINE:g} s"
            raise AllocationRefused(
                f"Whether a CDI specification defines {', '.join(sorted(wanted))} for {resource.name} cannot be read: "
                f"{why}. Create the pod again; if it happens again, this node's administrator must look at /etc/cdi and /run/cdi."
            ) from error
        if own := sorted(name for name in undefined if not name.endswith(_FOR_ALL)):
            raise AllocationRefused(
                f"No CDI specification in /etc/cdi or /run/cdi defines {', '.join(own)}, which a container with "
                f"{resource.name} is to have. Ask this node's administrator to have it written, or another name given."
            )
        for name in wanted:
            self._tell(resource.name, name, is_there=name not in undefined)
        return _without(edits, undefined) if undefined else edits

    def _tell(self, resource: str, name: str, *, is_there: bool) -> None:
        """Report a name that is left out, and when it is defined again."""
        if is_there:
            if (trouble := self._left_out.pop(name, None)) is not None:
                trouble.healed()
            return
        if name not in self._left_out:
            what = f"containers with {resource} are not given {name}"
            self._left_out[name] = self._problems.trouble(
                "cdi", what, "cdi-name-left-out", "cdi-name-given", resource=resource, subject=name
            )
        self._left_out[name].report_once("no CDI specification in /etc/cdi or /run/cdi defines it")


def _named(edits: ContainerEdits) -> frozenset[str]:
    """The devices that a backend names by CDI, in either way."""
    values = [value for key, value in edits.annotations.items() if _KEY in key]
    return frozenset((*edits.cdi_devices, *(name for value in values for name in value.split(","))))


def _without(edits: ContainerEdits, names: frozenset[str]) -> ContainerEdits:
    """The same without these names."""
    kept = {
        key: ",".join(name for name in value.split(",") if name not in names) if _KEY in key else value
        for key, value in edits.annotations.items()
    }
    return replace(edits, annotations=kept, cdi_devices=tuple(it for it in edits.cdi_devices if it not in names))
