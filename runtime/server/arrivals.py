"""Lets an idle engine begin with all requests that arrive together, not with the first of them alone.

A short step with one prompt takes as long as one with several. Without this, the engine would begin as soon as the
first of several requests is submitted, and the others would wait for that step.
"""

import asyncio
from collections.abc import Callable

_QUIET_TURNS = 10  # turns of the event loop: a received call gets to `begin` in four; empty, ten take 10 us
_MAX_SECONDS = 0.003  # as long as a short step of a small model on a GPU


class Arrivals:
    """Counts requests from the arrival of their calls until they are submitted. Its methods run on the event loop.

    An idle engine is held from the first arrival until all of them are submitted and the event loop has turned ten
    times without another. A request that is not submitted in time, because it is refused or takes longer to prepare,
    no longer holds the engine.

    Args:
      hold: See `engine_api.EngineApi.hold`.
    """

    def __init__(self, hold: Callable[[bool], bool]):
        self._hold = hold
        self._num_arriving = 0  # since the engine is held
        self._limit: asyncio.TimerHandle | None = None  # None while the engine is not held

    def begin(self) -> None:
        """Counts a request whose call has arrived."""
        if self._limit is None and self._hold(True):
            self._num_arriving = 0
            self._limit = asyncio.get_running_loop().call_later(_MAX_SECONDS, self._release)
        self._num_arriving += 1

    def end(self) -> None:
        """Counts a request as submitted."""
        self._num_arriving -= 1
        self._release_after(_QUIET_TURNS)

    def _release_after(self, num_turns: int) -> None:
        if self._limit is None or self._num_arriving > 0:
            return
        if num_turns:
            asyncio.get_running_loop().call_soon(self._release_after, num_turns - 1)
        else:
            self._release()

    def _release(self) -> None:
        if self._limit is not None:
            self._limit.cancel()
            self._limit = None
            self._hold(False)
