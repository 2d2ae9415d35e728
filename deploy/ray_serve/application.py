"""A Ray Serve application: replicas of `meshserve serve` in placement groups, behind Ray's gRPC proxy.

    serve run meshserve.deploy.ray_serve.application:build model=demo

    client -> gRPC proxy of Ray (meshserve.v1.InferenceService) -> Replica, an actor -> meshserve serve, its child

The proxy must know the service: `--grpc-servicer-functions` of `serve start`, or `grpc_options` of a config; see
rayservice.yaml. docs/fleet.md explains the arguments.
"""

import dataclasses
import inspect
import math
from collections.abc import AsyncIterator
from typing import Any

import grpc
from ray import serve

from meshserve.protos import inference_pb2 as pb
from meshserve.protos import inference_pb2_grpc as pb_grpc
from meshserve.runtime.api.loopback import proxy_options

from .server_child import ServerChild, flags

SERVICER = "meshserve.protos.inference_pb2_grpc.add_InferenceServiceServicer_to_server"
# Abort and GetLoad concern one replica, and callers of the proxy cannot tell which.
METHODS = ("Generate", "Chat", "Embed", "Score", "Rerank", "Tokenize", "Detokenize", "GetModelInfo", "GetServerInfo")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """The arguments of `build` besides the options of `meshserve serve`.

    Attributes:
      min_replicas, max_replicas: The bounds of the autoscaler; equal numbers turn it off.
      cpus, gpus: The resources of each replica, reserved on one node.
      target_load: The load of a replica, 0 to 1, that the autoscaler aims at; see `load_of`.
      upscale_delay_seconds, downscale_delay_seconds: How long the load must ask for another number of replicas.
      max_ongoing_requests: Requests that a replica takes at a time, running and waiting.
    """

    min_replicas: int = 1
    max_replicas: int = 1
    cpus: float = 1.0
    gpus: float = 0.0
    target_load: float = 0.7
    upscale_delay_seconds: float = 30.0
    downscale_delay_seconds: float = 900.0
    max_ongoing_requests: int = 1_024


def load_of(load: pb.GetLoadResponse) -> dict[str, float]:
    """Returns the metrics by which the application is scaled: the use of the cache, and waiting by running requests."""
    used = 1.0 - load.num_free_pages / load.num_pages if load.num_pages else 0.0
    return {"kv_usage": used, "queue": load.num_waiting / max(load.num_running, 1)}


class LoadPolicy:
    """Says how many replicas the load asks for. Ray bounds the number and applies the delays.

    The load of a replica is the use of its cache, 0 to 1; where requests wait, it is 1 to 2, with their number.
    """

    def __init__(self, target_load: float = Arguments.target_load):
        self._target_load = target_load

    def __call__(self, context: Any) -> tuple[float, dict[str, Any]]:
        usage, queue = ((context.aggregated_metrics or {}).get(name) or {} for name in ("kv_usage", "queue"))
        if not usage:
            return context.target_num_replicas, {}
        loads = [1.0 + min(queue[each], 1.0) if queue.get(each) else used for each, used in usage.items()]
        return max(1, math.ceil(sum(loads) / self._target_load - 1e-9)), {}


class Replica:
    """An actor with a server as its child. Its methods are those of InferenceService, passed on unchanged."""

    def __init__(self, options: dict[str, Any]):
        self._child = ServerChild(options)
        self._stub: Any = None

    def __del__(self) -> None:
        if (child := getattr(self, "_child", None)) is not None:
            child.stop()

    @property
    def stub(self) -> Any:
        """The server's methods. Created on the event loop, on which they are called."""
        if self._stub is None:
            options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
            options += proxy_options(self._child.target)
            self._stub = pb_grpc.InferenceServiceStub(grpc.aio.insecure_channel(self._child.target, options=options))
        return self._stub

    def check_health(self) -> None:
        """Raises if the server has ended; Ray then replaces the replica."""
        if (failure := self._child.failure) is not None:
            raise RuntimeError(f"meshserve serve has ended:\n{failure}")

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Returns the metrics for `LoadPolicy`."""
        return load_of(await self.stub.GetLoad(pb.GetLoadRequest()))


def _forwarding(method: str, has_stream: bool) -> Any:
    """Returns a method of `Replica` that calls the server's method of the same name."""

    def told(context: Any, error: grpc.aio.AioRpcError) -> None:
        context.set_code(error.code())
        context.set_details(error.details())

    async def stream(self: Replica, request: Any, grpc_context: Any) -> AsyncIterator[Any]:
        call = getattr(self.stub, method)(request)
        try:
            async for response in call:
                yield response
        except grpc.aio.AioRpcError as error:
            told(grpc_context, error)
            raise RuntimeError(error.details()) from None
        finally:
            call.cancel()

    async def single(self: Replica, request: Any, grpc_context: Any) -> Any:
        try:
            return await getattr(self.stub, method)(request)
        except grpc.aio.AioRpcError as error:
            told(grpc_context, error)
            raise RuntimeError(error.details()) from None

    found = stream if has_stream else single
    found.__name__ = method
    return found


_service = pb.DESCRIPTOR.services_by_name["InferenceService"]
for _name in METHODS:
    setattr(Replica, _name, _forwarding(_name, _service.methods_by_name[_name].server_streaming))


def build(arguments: dict[str, Any]) -> serve.Application:
    """Returns the application. The arguments are those of `Arguments` and the options of `meshserve serve`.

    Raises:
      ConfigError, TypeError: An option does not exist or has a value that is not allowed.
    """
    kinds = inspect.get_annotations(Arguments)
    own = {name: kinds[name](value) for name, value in arguments.items() if name in kinds}
    options = {name: value for name, value in arguments.items() if name not in kinds}
    flags(options)
    chosen = Arguments(**own)
    resources = {"CPU": chosen.cpus} | ({"GPU": chosen.gpus} if chosen.gpus else {})
    scaling: dict[str, Any] = {"num_replicas": chosen.min_replicas}
    if chosen.max_replicas > chosen.min_replicas:
        scaling = {
            "autoscaling_config": {
                "min_replicas": chosen.min_replicas,
                "max_replicas": chosen.max_replicas,
                "upscale_delay_s": chosen.upscale_delay_seconds,
                "downscale_delay_s": chosen.downscale_delay_seconds,
                "policy": {
                    "policy_function": f"{__name__}:LoadPolicy",
                    "policy_kwargs": {"target_load": chosen.target_load},
                },
            }
        }
    deployment = serve.deployment(
        name="meshserve",
        max_ongoing_requests=chosen.max_ongoing_requests,
        placement_group_bundles=[resources],
        placement_group_strategy="STRICT_PACK",
        ray_actor_options={"num_cpus": chosen.cpus, "num_gpus": chosen.gpus},
        graceful_shutdown_timeout_s=120,
        health_check_period_s=5,
        **scaling,
    )(Replica)
    return deployment.bind(options)
