"""Implements AdminService, the RPCs for operators. The interceptor checks permissions."""

import asyncio
import math
from collections.abc import Callable
from typing import Any

from meshserve.protos import inference_pb2 as pb
from meshserve.protos import inference_pb2_grpc as pb_grpc

from ..api.errors import InvalidRequestError, UnavailableFeatureError
from ..telemetry.profiler import Profiler
from .grpc_status import abort
from .inference_service import Edge

_MAX_GRACE_SECONDS = 86_400.0


class Admin(pb_grpc.AdminServiceServicer):
    """Drains the server, flushes the prefix cache and records profiles.

    Args:
      drain: Starts draining; takes the grace period in seconds, or None for the server's default.
      profiler: None if the server has no --profile-dir.
    """

    def __init__(self, edge: Edge, drain: Callable[[float | None], None], profiler: Profiler | None):
        self._edge = edge
        self._drain = drain
        self._profiler = profiler

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

    def _checked_profiler(self) -> Profiler:
        if self._profiler is None:
            raise UnavailableFeatureError("this server cannot record profiles; restart it with --profile-dir.")
        return self._profiler
