"""Forwards the step stream between process 0 and a follower, message by message, and corrupts it on request."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from meshserve.protos import steps_pb2 as pb
from meshserve.protos import steps_pb2_grpc as pb_grpc
from meshserve.runtime.api.loopback import proxy_options

Spoil = Callable[[pb.JoinResponse], Iterable[pb.JoinResponse]]
SpoilRequest = Callable[[pb.JoinRequest], Iterable[pb.JoinRequest]]


class StepProxy(pb_grpc.StepServiceServicer):
    """A proxy that listens at `port`.

    `spoil` maps each message to the follower to the messages that are forwarded; `spoil_request` does the same for
    messages from the follower. Both may block.
    """

    def __init__(self, target: str):
        self.spoil: Spoil = lambda response: [response]
        self.spoil_request: SpoilRequest = lambda request: [request]
        self._channel = grpc.insecure_channel(target, proxy_options(target))
        self._server = grpc.server(ThreadPoolExecutor(8))
        pb_grpc.add_StepServiceServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()

    def Join(self, requests: Iterator[pb.JoinRequest], context: Any) -> Iterator[pb.JoinResponse]:
        passed = (each for request in requests for each in self.spoil_request(request))
        stream = pb_grpc.StepServiceStub(self._channel).Join(passed, wait_for_ready=True)
        context.add_callback(stream.cancel)
        try:
            for response in stream:
                yield from self.spoil(response)
        except grpc.RpcError as error:
            assert isinstance(error, grpc.Call)
            context.abort(error.code(), error.details() or "")

    def close(self) -> None:
        self._channel.close()
        self._server.stop(None)
