from grpclib.client import Channel
from grpclib.exceptions import GRPCError, StreamTerminatedError, ProtocolError
from agent.kubelet.wire import Codec, PodList


class PodResourcesError(Exception):
    pass


async def list_pods(socket, timeout):
    ch = Channel(path=str(socket), codec=Codec())
    try:
        from agent.kubelet.api.v1 import ListPodResourcesRequest
        import grpclib.client, grpclib.const

        async with ch.request(
            "/v1.PodResourcesLister/List",
            grpclib.const.Cardinality.UNARY_UNARY,
            ListPodResourcesRequest,
            PodList,
            timeout=None,
        ) as s:
            await s.send_message(ListPodResourcesRequest(), end=True)
            return await s.recv_message()
    except (OSError, GRPCError, StreamTerminatedError, ProtocolError) as e:
        raise PodResourcesError(str(e) or repr(e))
    finally:
        ch.close()
