"""Implements AdminService, the RPCs for operators. The interceptor checks permissions."""

import asyncio
import math
from collections.abc import Callable
from typing import Any

from meshserve.protos import inference_pb2 as pb
from meshserve.protos import inference_pb2_grpc as pb_grpc

from ..api import proto_codec
from ..api.adapters import AdapterInfo
from ..api.errors import InvalidRequestError, UnavailableFeatureError
from ..telemetry.profiler import Profiler
from .adapter_methods import AdapterMethods
from .edge import Edge
from .grpc_status import abort, answered
from .weight_methods import WeightMethods

_MAX_GRACE_SECONDS = 86_400.0


class Admin(pb_grpc.AdminServiceServicer):
    """Drains the server, flushes the prefix cache, records profiles, loads adapters, replaces weights, pauses.

    Args:
      drain: Starts draining; takes the grace period in seconds, or None for the server's default.
      profiler: None if the server has no --profile-dir.
    """

    def __init__(self, edge: Edge, drain: Callable[[float | None], None], profiler: Profiler | None):
        self._edge = edge
        self._drain = drain
        self._profiler = profiler
        self._adapters = AdapterMethods(edge)
        self._weights = WeightMethods(edge)

    async def Drain(self, request: pb.DrainRequest, context: Any) -> pb.DrainResponse:
        try:
            grace_seconds = request.grace_seconds if request.HasField("grace_seconds") else None
            if grace_seconds is not None and not (
                math.isfinite(grace_seconds) and 0.0 <= grace_seconds <= _MAX_GRACE_SECONDS
            ):
                raise InvalidRequestError(
                    "grace_seconds", f"got {grace_seconds}; allowed is 0 to {_MAX_GRACE_SECONDS:.0f}."
                )
            self._drain(grace_seconds)
            return pb.DrainResponse(num_open_requests=self._edge.queues.num_open)
        except Exception as error:
            await abort(context, error)

    async def FlushPrefixCache(self, request: pb.FlushPrefixCacheRequest, context: Any) -> pb.FlushPrefixCacheResponse:
        try:
            backend, _ = self._edge.serving()
            num_pages = await asyncio.to_thread(backend.engine.flush_prefix_cache)
            return pb.FlushPrefixCacheResponse(num_flushed_pages=num_pages)
        except Exception as error:
            await abort(context, error)

    async def StartProfile(self, request: pb.StartProfileRequest, context: Any) -> pb.StartProfileResponse:
        try:
            backend, _ = self._edge.serving()
            start = self._checked_profiler().start
            return pb.StartProfileResponse(directory=await asyncio.to_thread(start, backend.engine.between_steps))
        except Exception as error:
            await abort(context, error)

    async def StopProfile(self, request: pb.StopProfileRequest, context: Any) -> pb.StopProfileResponse:
        try:
            backend, _ = self._edge.serving()
            stop = self._checked_profiler().stop
            return pb.StopProfileResponse(directory=await asyncio.to_thread(stop, backend.engine.between_steps))
        except Exception as error:
            await abort(context, error)

    async def LoadAdapter(self, request: pb.LoadAdapterRequest, context: Any) -> pb.LoadAdapterResponse:
        try:
            info = await self._adapters.load(request.name, request.path, replaces=request.replaces)
            return pb.LoadAdapterResponse(adapter=self._shown(info))
        except Exception as error:
            await abort(context, error)

    async def UnloadAdapter(self, request: pb.UnloadAdapterRequest, context: Any) -> pb.UnloadAdapterResponse:
        try:
            await self._adapters.unload(request.name)
            return pb.UnloadAdapterResponse()
        except Exception as error:
            await abort(context, error)

    async def ListAdapters(self, request: pb.ListAdaptersRequest, context: Any) -> pb.ListAdaptersResponse:
        try:
            return pb.ListAdaptersResponse(adapters=map(self._shown, self._adapters.list()))
        except Exception as error:
            await abort(context, error)

    def _shown(self, info: AdapterInfo) -> pb.Adapter:
        backend, _ = self._edge.serving()
        return proto_codec.adapter_message(info, backend.info.name)

    async def UpdateWeights(self, request: pb.UpdateWeightsRequest, context: Any) -> pb.UpdateWeightsResponse:
        return await answered(self._weights.update(request), context)

    async def GetWeightVersion(self, request: pb.GetWeightVersionRequest, context: Any) -> pb.GetWeightVersionResponse:
        return await answered(self._weights.version(request), context)

    async def Pause(self, request: pb.PauseRequest, context: Any) -> pb.PauseResponse:
        return await answered(self._weights.pause(request), context)

    async def Continue(self, request: pb.ContinueRequest, context: Any) -> pb.ContinueResponse:
        return await answered(self._weights.resume(request), context)

    async def Sleep(self, request: pb.SleepRequest, context: Any) -> pb.SleepResponse:
        return await answered(self._weights.sleep(request), context)

    async def Wake(self, request: pb.WakeRequest, context: Any) -> pb.WakeResponse:
        return await answered(self._weights.wake(request), context)

    def _checked_profiler(self) -> Profiler:
        if self._profiler is None:
            raise UnavailableFeatureError("this server cannot record profiles; restart it with --profile-dir.")
        return self._profiler
