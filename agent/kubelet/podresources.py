"""Asks the kubelet which devices its pods hold, and which it could give them (podresources v1, kubelet contract: A5)."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final, TypeVar

from grpclib.const import Status
from grpclib.exceptions import GRPCError, ProtocolError, StreamTerminatedError

from agent.kubelet.transport.client import Channel
from agent.kubelet.wire import SENSELESS, Encoded, PodDevices, allocatable_devices, pod_devices
from agent.runtime.workers import in_slices

MOST_BYTES: Final = 16 << 20
"""Of an answer: what the kubelet's own clients take."""

_Part = TypeVar("_Part")


class PodResourcesError(Exception):
    """The kubelet did not say which devices its pods hold, or could; the message says why."""


async def list_pods(socket: Path, timeout: float) -> list[PodDevices]:  # noqa: ASYNC109  # of the call, told to the kubelet
    """The devices that the containers of active pods hold; absence from one list proves nothing (A5).

    Each call has a connection of its own: it is asked every minute or so, and a kubelet restarts in between.

    Args:
        socket: the kubelet's `pod-resources/kubelet.sock`, as this process sees it.
        timeout: seconds for everything.

    Raises:
        PodResourcesError: no kubelet, no answer in time, or none that makes sense.
    """
    return await _ask(socket, "List", pod_devices, timeout)


async def list_allocatable(socket: Path, timeout: float) -> dict[str, set[str]]:  # noqa: ASYNC109  # as above
    """Resource → the IDs that the kubelet has as healthy, from its memory; a resource without one is missing.

    Raises:
        PodResourcesError: as above, or the kubelet is older than 1.23.
    """
    found: defaultdict[str, set[str]] = defaultdict(set)
    for resource, ids in await _ask(socket, "GetAllocatableResources", allocatable_devices, timeout):
        if ids:
            found[resource].update(ids)
    return found


async def _ask(
    socket: Path,
    method: str,
    read: Callable[[bytes], Iterable[_Part]],
    timeout: float,  # noqa: ASYNC109  # as above
) -> list[_Part]:
    if socket.is_symlink():  # noqa: ASYNC240  # it waits for no disk
        raise PodResourcesError(f"{socket} is a symbolic link, which no kubelet makes: it is not followed; remove it")
    channel = Channel(str(socket), most_bytes=MOST_BYTES)
    try:
        request = Encoded()  # neither has fields
        answer = await channel.call(f"/v1.PodResourcesLister/{method}", request, Encoded, timeout)
        return await in_slices(read(answer))
    except GRPCError as error:
        if error.status is Status.DEADLINE_EXCEEDED:  # it knows our deadline, and may see it pass a moment before us
            raise PodResourcesError(_silence(socket, timeout)) from error
        raise PodResourcesError(_refusal(socket, error)) from error
    except TimeoutError as error:
        raise PodResourcesError(_silence(socket, timeout)) from error
    except OSError as error:
        raise PodResourcesError(
            f"no kubelet answers at {socket}: {os.strerror(error.errno) if error.errno else error}"
        ) from error
    except (StreamTerminatedError, ProtocolError, AttributeError) as error:  # the last is grpclib's: lost when made
        if channel.excess:
            raise PodResourcesError(f"what answers at {socket} sends {channel.excess}: that is no kubelet's") from error
        raise PodResourcesError(f"the kubelet at {socket} ended the call: {error}") from error
    except SENSELESS as error:
        raise PodResourcesError(f"the kubelet's answer at {socket} is no pod list: {error}") from error
    finally:
        channel.close()


def _silence(socket: Path, seconds: float) -> str:
    return f"the kubelet did not answer at {socket} within {seconds:g} s"


def _refusal(socket: Path, error: GRPCError) -> str:
    if error.status is Status.UNIMPLEMENTED:
        return f"what answers at {socket} does not serve podresources v1 (Kubernetes 1.20 and later do)"
    return f"the kubelet at {socket} refused to list its pods' devices: {error.message or error.status.name}"
