"""Resets one PCI function alone (Function Level Reset), and tells which function cannot be reset so."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from backends.base import AllocationRefused, Host, HostPath
from backends.errors import reason_of
from backends.linux import sysfs
from backends.linux.pci import functions


def refusal(host: Host, function: functions.Function) -> str:
    """Why a function cannot be reset alone (Function Level Reset), one sentence; empty if it can.

    From 5.15 on the kernel lists the methods in a file. If there is no method, that file and `reset` are missing.
    """
    if function.virtual:  # they would vanish (PCI Express Base Specification, 9.2.2.3)
        return f"{function.address} has {len(function.virtual)} virtual functions, which would go with a reset"
    if function.vgpu_type:
        return f"{function.address} has the vGPU type {function.vgpu_type}, and its driver resets it"
    methods = sysfs.attribute(host, function.path / "reset_method")
    if methods is None and not host.local(function.path / "reset").exists():
        methods = ""
    if methods is None or "flr" in methods.split():
        return ""
    other = f"only by {methods}" if methods else "at all"
    return f"{function.address} cannot be reset by itself (FLR), {other}"


def reset(host: Host, address: str) -> None:
    """Reset one function alone (Function Level Reset); may block for seconds.

    Raises:
        AllocationRefused: it cannot be reset so, or the reset failed.
    """
    path = functions.FUNCTIONS / address
    function = functions.read(host, address)
    if function is not None and (why := refusal(host, function)):
        raise AllocationRefused(
            f"{address} is to be reset before each use, but {why}. "
            'Ask this node\'s administrator to set pre_start = "check" for it.'
        )
    try:
        with _only_method(host, path, sysfs.attribute(host, path / "reset_method")):
            host.local(path / "reset").write_text("1")
    except OSError as error:
        reason = reason_of(error)
        raise AllocationRefused(
            f"{address} could not be reset before its use: {reason}. Create the pod again."
        ) from error


@contextmanager
def _only_method(host: Host, path: HostPath, methods: str | None) -> Iterator[None]:
    """Allow the kernel no method but FLR meanwhile: it would try others next, among them a reset of the whole bus."""
    if methods in (None, "flr"):
        yield
        return
    file = host.local(path / "reset_method")
    file.write_text("flr")
    try:
        yield
    finally:
        file.write_text(str(methods))
