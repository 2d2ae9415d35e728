"""Lets the first call of a client wait until the server is ready. Does not import JAX.

A server opens its port before it has loaded the model, and until then refuses requests. The first call of a client
therefore asks for the server's health, and waits while it starts. A server that does not tell its health is taken for
ready, and so is one that is stopping or has failed: the call itself then returns the reason.
"""

import asyncio
import logging
import time
from typing import Any

import grpc
from grpc_health.v1 import health_pb2

from meshserve.protos import inference_pb2 as pb

from .messages import CallError

READY_SECONDS = 300.0  # default limit: large models load and compile for minutes
HEALTH_REQUEST = health_pb2.HealthCheckRequest(service=pb.DESCRIPTOR.services_by_name["InferenceService"].full_name)

_UNREACHABLE_SECONDS = 30.0  # a server that is being started opens its port within this time
_POLL_SECONDS = 0.1
_SILENT_SECONDS = 1.0  # shorter waits are not mentioned
_log = logging.getLogger("meshserve.client")


def is_serving(response: Any) -> bool:
    return response.status == health_pb2.HealthCheckResponse.SERVING


class _Wait:
    """One wait: what has been found so far, and when to give up."""

    def __init__(self, target: str, limit_seconds: float):
        self._target, self._limit_seconds, self._began = target, limit_seconds, time.monotonic()
        self._reached = False
        self._told = ""

    def left_seconds(self) -> float:
        return max(_POLL_SECONDS, self._limit_seconds - (time.monotonic() - self._began))

    def is_over_unreachable(self, error: grpc.RpcError) -> bool:
        """Notes that the health could not be read. Returns whether waiting is useless, because the server answers.

        Raises:
          CallError: Nothing has answered for too long.
        """
        if error.code() is not grpc.StatusCode.UNAVAILABLE:
            return True
        limit = self._limit_seconds if self._reached else min(self._limit_seconds, _UNREACHABLE_SECONDS)
        message = f"no server answers at {self._target}"
        if time.monotonic() - self._began >= limit:
            advice = "Start one with `meshserve serve`, or correct the address."
            raise CallError(grpc.StatusCode.UNAVAILABLE, f"{message} ({error.details()}). {advice}") from None
        self._tell(message, limit)
        return False

    def is_over_starting(self, info: pb.GetServerInfoResponse | None) -> bool:
        """Notes that the server is not ready. Returns whether waiting is useless, because it is not starting.

        A server that does not tell this caller its state is not waited for.

        Raises:
          CallError: It has been starting for too long.
        """
        if info is None or info.state != pb.SERVER_STATE_STARTING:
            return True
        self._reached = True
        progress = f" ({info.progress})" if info.progress else ""
        message = f"the server at {self._target} is starting{progress}"
        if time.monotonic() - self._began >= self._limit_seconds:
            advice = f"It was not ready within {self._limit_seconds:g} s. Retry later, or wait longer (ready_seconds)."
            raise CallError(grpc.StatusCode.UNAVAILABLE, f"{message}. {advice}") from None
        self._tell(message, self._limit_seconds)
        return False

    def _tell(self, message: str, limit: float) -> None:
        """Logs a message that has changed; Python prints such warnings to stderr unless logging is configured."""
        if message != self._told and time.monotonic() - self._began >= _SILENT_SECONDS:
            self._told = message
            _log.warning("%s; waiting up to %g s", message, limit)


class Readiness:
    """Whether a client has found its server ready.

    Args:
      target: Address of the server, for messages.
      limit_seconds: How long to wait. 0 never waits.
      metadata: Metadata of calls.
    """

    def __init__(self, target: str, limit_seconds: float, metadata: Any):
        if limit_seconds < 0:
            raise ValueError(f"ready_seconds is {limit_seconds}; it must be 0 or more.")
        self.is_known = limit_seconds == 0
        self._target, self._limit_seconds, self._metadata = target, limit_seconds, metadata

    def wait(self, health: Any, stub: Any, timeout_seconds: float | None) -> float | None:
        """Waits before the first call. Returns what is left of the call's time limit.

        Args:
          health: Stub for the health, which may be that of any server of the target.
          stub: Stub for a server's state, on a channel that also reaches servers that are not ready.
          timeout_seconds: Time limit of the call.

        Raises:
          CallError: The server was not ready in time.
        """
        began, wait = time.monotonic(), self._new_wait(timeout_seconds)
        while not self.is_known:
            try:
                if is_serving(health.Check(HEALTH_REQUEST, timeout=wait.left_seconds())):
                    self.is_known = True
                else:
                    self.is_known = wait.is_over_starting(self._server_info(stub, wait))
            except grpc.RpcError as error:
                info = self._server_info(stub, wait)
                self.is_known = wait.is_over_unreachable(error) if info is None else wait.is_over_starting(info)
            if not self.is_known:
                time.sleep(_POLL_SECONDS)
        return _left(timeout_seconds, began)

    async def wait_async(self, health: Any, stub: Any, timeout_seconds: float | None) -> float | None:
        """Asyncio version of `wait`."""
        began, wait = time.monotonic(), self._new_wait(timeout_seconds)
        while not self.is_known:
            try:
                if is_serving(await health.Check(HEALTH_REQUEST, timeout=wait.left_seconds())):
                    self.is_known = True
                else:
                    self.is_known = wait.is_over_starting(await self._server_info_async(stub, wait))
            except grpc.RpcError as error:
                info = await self._server_info_async(stub, wait)
                self.is_known = wait.is_over_unreachable(error) if info is None else wait.is_over_starting(info)
            if not self.is_known:
                await asyncio.sleep(_POLL_SECONDS)
        return _left(timeout_seconds, began)

    def _new_wait(self, timeout_seconds: float | None) -> _Wait:
        limit = self._limit_seconds if timeout_seconds is None else min(self._limit_seconds, timeout_seconds)
        return _Wait(self._target, limit)

    def _server_info(self, stub: Any, wait: _Wait) -> pb.GetServerInfoResponse | None:
        """Returns the state of the server, or None if it does not tell."""
        try:
            request = pb.GetServerInfoRequest()
            return stub.GetServerInfo(request, timeout=wait.left_seconds(), metadata=self._metadata)
        except grpc.RpcError:
            return None

    async def _server_info_async(self, stub: Any, wait: _Wait) -> pb.GetServerInfoResponse | None:
        """Asyncio version of `_server_info`."""
        try:
            request = pb.GetServerInfoRequest()
            return await stub.GetServerInfo(request, timeout=wait.left_seconds(), metadata=self._metadata)
        except grpc.RpcError:
            return None


def _left(timeout_seconds: float | None, began: float) -> float | None:
    return None if timeout_seconds is None else max(0.0, timeout_seconds - (time.monotonic() - began))
