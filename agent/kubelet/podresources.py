"""Asks the kubelet which devices its pods hold (podresources v1, kubelet contract: A5)."""

from __future__ import annotations

import os
from pathlib import Path

from grpclib.client import Channel, UnaryUnaryMethod
from grpclib.const import Status
from grpclib.exceptions import GRPCError, ProtocolError, StreamTerminatedError

from agent.kubelet.api.v1 import ListPodResourcesRequest
from agent.kubelet.wire import Codec, MalformedError, PodList


class PodResourcesError(Exception):
    """The kubelet did not say which devices its pods hold; the message says why."""


async def list_pods(socket: Path, timeout: float) -> PodList:  # noqa: ASYNC109  # of the call, told to the kubelet
    """The devices that the containers of active pods hold; absence from one list proves nothing (A5).

    Each call has a connection of its own: it is asked every minute or so, and a kubelet restarts in between.

    Args:
        socket: the kubelet's `pod-resources/kubelet.sock`, as this process sees it.
        timeout: seconds for everything.

    Raises:
        PodResourcesError: no kubelet, no answer in time, or none that makes sense.
    """
    channel = Channel(path=str(socket), codec=Codec())
    try:
        call = UnaryUnaryMethod[ListPodResourcesRequest, PodList](
            channel, "/v1.PodResourcesLister/List", ListPodResourcesRequest, PodList
        )
        return await call(ListPodResourcesRequest(), timeout=timeout)
    except GRPCError as error:
        raise PodResourcesError(_refusal(socket, error)) from error
    except TimeoutError as error:
        raise PodResourcesError(f"the kubelet did not answer at {socket} within {timeout:g} s") from error
    except OSError as error:
        raise PodResourcesError(
            f"no kubelet answers at {socket}: {os.strerror(error.errno) if error.errno else error}"
        ) from error
    except (StreamTerminatedError, ProtocolError, AttributeError) as error:  # the last is grpclib's: lost when made
        raise PodResourcesError(f"the kubelet at {socket} ended the call: {error}") from error
    except (MalformedError, AssertionError, NotImplementedError) as error:  # grpclib's: cut off; compressed
        raise PodResourcesError(f"the kubelet's answer at {socket} is no pod list: {error}") from error
    finally:
        channel.close()


def _refusal(socket: Path, error: GRPCError) -> str:
    if error.status is Status.UNIMPLEMENTED:
        return f"what answers at {socket} does not serve podresources v1 (Kubernetes 1.20 and later do)"
    return f"the kubelet at {socket} refused to list its pods' devices: {error.message or error.status.name}"
