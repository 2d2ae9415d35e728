"""Replaces the weights, pauses the engine and lets it sleep, for AdminService and for the HTTP names of trainers.

In: what a caller with the permission `admin` asked. The directories below which weights may lie are the operator's.
"""

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from meshserve.protos import inference_pb2 as pb
from meshserve.sharding.guarded_files import GuardedFileError, check_owner

from ..api.errors import InvalidRequestError, UnavailableFeatureError
from .edge import Edge

if TYPE_CHECKING:
    from ..weight_updates.engine_control import EngineControl
    from ..weight_updates.weight_updater import Running, WeightUpdater

_RUNNING: "dict[int, Running]" = {
    pb.RUNNING_REQUESTS_UNSPECIFIED: "continue",
    pb.RUNNING_REQUESTS_CONTINUE: "continue",
    pb.RUNNING_REQUESTS_FINISH: "finish",
    pb.RUNNING_REQUESTS_ABORT: "abort",
}
_MAX_PATH_CHARS = 4_096


class WeightMethods:
    """The methods of one edge. Each waits for the engine in a thread of its own."""

    def __init__(self, edge: Edge):
        self._edge = edge

    def _updater(self) -> "WeightUpdater":
        backend, _ = self._edge.serving()
        if backend.weights is None:
            raise UnavailableFeatureError("this server cannot replace its weights.")
        return backend.weights

    def _control(self) -> "EngineControl":
        backend, _ = self._edge.serving()
        if backend.control is None:
            raise UnavailableFeatureError("this server cannot be paused.")
        return backend.control

    async def update(self, request: pb.UpdateWeightsRequest) -> pb.UpdateWeightsResponse:
        """Raises as `WeightUpdater.update`, and what `checked_directory` raises."""
        updater = self._updater()
        version = request.version if request.HasField("version") else None
        running, roots = running_of(request.running), self._edge.weights_below

        def update() -> pb.UpdateWeightsResponse:
            directory = checked_directory(request.directory, roots)
            try:
                done = updater.update(directory, version=version, running=running)
            except MemoryError as error:
                raise UnavailableFeatureError(str(error)) from None
            return pb.UpdateWeightsResponse(
                version=done.version, num_bytes=done.num_bytes, seconds=done.seconds, paused_seconds=done.paused_seconds
            )

        return await asyncio.to_thread(update)

    async def version(self, request: pb.GetWeightVersionRequest) -> pb.GetWeightVersionResponse:
        """Answers also while another method waits."""
        updater, control = self._updater(), self._control()
        return pb.GetWeightVersionResponse(
            version=updater.version, is_paused=control.is_paused, is_asleep=control.is_asleep
        )

    async def pause(self, request: pb.PauseRequest) -> pb.PauseResponse:
        """Raises as `EngineControl.pause`."""
        await asyncio.to_thread(self._control().pause, running_of(request.running))
        return pb.PauseResponse()

    async def resume(self, request: pb.ContinueRequest) -> pb.ContinueResponse:
        """Raises as `EngineControl.resume`."""
        await asyncio.to_thread(self._control().resume)
        return pb.ContinueResponse()

    async def sleep(self, request: pb.SleepRequest) -> pb.SleepResponse:
        """Raises as `EngineControl.sleep`."""
        control = self._control()
        num_bytes = await asyncio.to_thread(lambda: control.sleep(drop_weights=request.drop_weights))
        return pb.SleepResponse(num_freed_bytes=num_bytes)

    async def wake(self, request: pb.WakeRequest) -> pb.WakeResponse:
        """Raises as `EngineControl.wake`."""
        return pb.WakeResponse(has_continued=await asyncio.to_thread(self._control().wake))


def running_of(value: int) -> "Running":
    """Returns what becomes of running requests.

    Raises:
      InvalidRequestError: The value is none of `pb.RunningRequests`.
    """
    if value not in _RUNNING:
        raise InvalidRequestError("running", f"got {value}; allowed is a value of RunningRequests.")
    return _RUNNING[value]


def checked_directory(text: str, roots: Sequence[str]) -> Path:
    """Returns the real path of a directory with weights, which lies below one of `roots`, links followed.

    Raises:
      UnavailableFeatureError: There are no roots.
      InvalidRequestError: It is not below one of them, or another user could replace it.
    """
    if not roots:
        raise UnavailableFeatureError(
            "this server was started without --weights-below, which names the directories that weights may come from."
        )
    if not 0 < len(text) <= _MAX_PATH_CHARS or "\0" in text or not os.path.isabs(text):
        raise InvalidRequestError("directory", f"got {ascii(text[:100])}; allowed is an absolute path on the server.")
    path = Path(os.path.realpath(text))
    if not any(path.is_relative_to(os.path.realpath(root)) for root in roots):
        allowed = ", ".join(roots)
        message = f"got {ascii(text[:200])}; allowed are directories below {allowed} (--weights-below)."
        raise InvalidRequestError("directory", message)
    if not path.is_dir():
        raise InvalidRequestError("directory", f"{ascii(text[:200])} is no directory.")
    try:
        check_owner(path, path.stat())
    except GuardedFileError as error:
        raise InvalidRequestError("directory", f"{ascii(text[:200])}: {error}.") from None
    return path
