"""Lets the first call of a client wait until the server is ready. Does not import JAX.

A server opens its port before it has loaded the model, and until then refuses requests. The first call of a client
therefore asks for the server's health, and waits while it starts. A server that does not tell its health is taken for
ready, and so is one that is stopping or has failed: the call itself then returns the reason. A connection that will
never succeed, such as a refused TLS handshake, is an error at once (see `handshake`).

Both clients wait by the same steps: a generator that yields what to ask, and receives the answers.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Generator
from functools import partial
from typing import Any

import grpc
from grpc_health.v1 import health_pb2

from meshserve.protos import inference_pb2 as pb

from . import handshake
from .messages import CallError

READY_SECONDS = 300.0  # default limit: large models load and compile for minutes

_HEALTH_REQUEST = health_pb2.HealthCheckRequest(service=pb.DESCRIPTOR.services_by_name["InferenceService"].full_name)

_UNREACHABLE_SECONDS = 30.0  # a server that is being started opens its port within this time
_TLS_PROBE_SECONDS = 1.0  # between two checks whether a server that closes connections expects TLS
_POLL_SECONDS = 0.1
_SILENT_SECONDS = 1.0  # shorter waits are not mentioned
_log = logging.getLogger("meshserve.client")

# What a step asks for: a call, which a stub of grpc or grpc.aio returns; a pause; or whether the server speaks TLS. The
# answer to a call is its response or its error.
_PAUSE, _PROBE_TLS = "pause", "probe TLS"
Step = Callable[[], Any] | str
Steps = Generator[Step, Any, None]


def _is_serving(response: Any) -> bool:
    return response.status == health_pb2.HealthCheckResponse.SERVING


class _Wait:
    """One wait: what has been found so far, and when to give up."""

    def __init__(self, target: str, limit_seconds: float):
        self._target, self._limit_seconds, self._began = target, limit_seconds, time.monotonic()
        self._reached = False
        self._logged = ""

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
        if message != self._logged and time.monotonic() - self._began >= _SILENT_SECONDS:
            self._logged = message
            _log.warning("%s; waiting up to %g s", message, limit)


class Readiness:
    """Whether a client has found its server ready.

    Args:
      target: Address of the server.
      limit_seconds: How long to wait. 0 never waits.
      metadata: Metadata of calls.
      is_secure: Whether the client uses TLS.
    """

    def __init__(self, target: str, limit_seconds: float, metadata: Any, *, is_secure: bool):
        if limit_seconds < 0:
            raise ValueError(f"ready_seconds is {limit_seconds}; it must be 0 or more.")
        self.is_known = limit_seconds == 0
        self._target, self._limit_seconds, self._metadata = target, limit_seconds, metadata
        self._is_secure, self._probed = is_secure, float("-inf")

    def before_call(self, health: Any, stub: Any, timeout_seconds: float | None) -> Steps:
        """Returns the steps that wait before the first call.

        Args:
          health: Stub for the health, which may be that of any server of the target.
          stub: Stub for a server's state, on a channel that also reaches servers that are not ready.
          timeout_seconds: Time limit of the call.

        Raises:
          CallError: The server was not ready in time, or no connection to it is possible.
        """
        limit = self._limit_seconds if timeout_seconds is None else min(self._limit_seconds, timeout_seconds)
        wait = _Wait(self._target, limit)
        while not self.is_known:
            answer = yield partial(health.Check, _HEALTH_REQUEST, timeout=wait.left_seconds())
            error = answer if isinstance(answer, grpc.RpcError) else None
            if error is not None:
                yield from self._check_connection(error)
            elif _is_serving(answer):
                self.is_known = True
                return
            request, left = pb.GetServerInfoRequest(), wait.left_seconds()
            info = yield partial(stub.GetServerInfo, request, timeout=left, metadata=self._metadata)
            if isinstance(info, grpc.RpcError):
                info = None  # the server does not tell its state
            if error is not None and info is None:
                self.is_known = wait.is_over_unreachable(error)
            else:
                self.is_known = wait.is_over_starting(info)
            if not self.is_known:
                yield _PAUSE

    def until_serving(self, health: Any, timeout_seconds: float) -> Steps:
        """Returns the steps that wait until the server accepts requests.

        Raises:
          CallError: DEADLINE_EXCEEDED if the server is not ready in time; no connection to it is possible.
        """
        end = time.monotonic() + timeout_seconds
        while (left := end - time.monotonic()) > 0:
            answer = yield partial(health.Check, _HEALTH_REQUEST, timeout=left)
            if isinstance(answer, grpc.RpcError):
                yield from self._check_connection(answer)
            elif _is_serving(answer):
                self.is_known = True
                return
            yield _PAUSE
        message = f"the server was not ready within {timeout_seconds} s"
        raise CallError(grpc.StatusCode.DEADLINE_EXCEEDED, message)

    def run(self, steps: Steps) -> None:
        """Carries out steps by blocking calls."""
        answer: Any = None
        with contextlib.suppress(StopIteration):
            while True:
                step = steps.send(answer)
                if isinstance(step, str):
                    if step == _PROBE_TLS:
                        answer = handshake.speaks_tls(self._target)
                    else:
                        time.sleep(_POLL_SECONDS)
                    continue
                try:
                    answer = step()
                except grpc.RpcError as error:
                    answer = error

    async def run_async(self, steps: Steps) -> None:
        """Carries out steps by awaited calls."""
        answer: Any = None
        with contextlib.suppress(StopIteration):
            while True:
                step = steps.send(answer)
                if isinstance(step, str):
                    if step == _PROBE_TLS:
                        answer = await asyncio.to_thread(handshake.speaks_tls, self._target)
                    else:
                        await asyncio.sleep(_POLL_SECONDS)
                    continue
                try:
                    answer = await step()
                except grpc.RpcError as error:
                    answer = error

    def _check_connection(self, error: grpc.RpcError) -> Steps:
        """Raises CallError if the error says that no connection to the server is possible."""
        if error.code() is not grpc.StatusCode.UNAVAILABLE:
            return
        reason = handshake.refusal(self._target, error, is_secure=self._is_secure)
        is_probed = time.monotonic() - self._probed < _TLS_PROBE_SECONDS
        if reason is None and handshake.may_expect_tls(error, is_secure=self._is_secure) and not is_probed:
            self._probed = time.monotonic()
            if (yield _PROBE_TLS):
                reason = handshake.expects_tls(self._target)
        if reason is not None:
            raise CallError(grpc.StatusCode.UNAVAILABLE, reason) from None


def left_seconds(timeout_seconds: float | None, began: float) -> float | None:
    """Returns what is left of a time limit since `began`."""
    return None if timeout_seconds is None else max(0.0, timeout_seconds - (time.monotonic() - began))
