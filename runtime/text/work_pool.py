"""Runs text work of many callers in a few threads, fairly and up to a bound. Part of steps 2 and 9 of 10.

Tokenising a long text takes tenths of a second. Each kind of work has a pool of its own, so that no kind waits for
another. Within a pool the tenants take turns, so that a tenant waits for one call of each other tenant at most.
"""

import asyncio
import contextlib
import math
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from ..api.errors import QueueFullError, QuotaExceededError

Result = TypeVar("Result")

_MIN_RETRY_SECONDS = 1.0
_CHARS_PER_SECOND = 2_000_000  # per thread; 3 million are usual


@dataclass
class _Load:
    """Calls that wait or run, and their sizes."""

    num_calls: int = 0
    size: int = 0

    def add(self, num_calls: int, size: int) -> None:
        self.num_calls += num_calls
        self.size += size


class Paced:
    """Calls functions for a share of the time only. Used by one thread.

    For work that holds Python's lock, and with it all other threads, for tens of milliseconds at a time.

    Args:
      share: The share.
      max_rest_seconds: Bound on a rest: a call that took long may have waited.
    """

    def __init__(
        self,
        share: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        *,
        max_rest_seconds: float = math.inf,
    ):
        self._max_rest_seconds = max_rest_seconds
        self._rest = 1.0 / share - 1.0  # per second of work
        self._clock = clock
        self._sleep = sleep
        self._ready = clock()

    def __call__(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """Calls a function, after the rest that the one before it has earned."""
        self._sleep(max(0.0, self._ready - self._clock()))
        began = self._clock()
        try:
            return function(*arguments)
        finally:
            now = self._clock()
            self._ready = now + min(self._max_rest_seconds, self._rest * (now - began))


class WorkPool:
    """A few threads with a bounded queue. All methods run on one event loop.

    Args:
      name: The beginning of the threads' names.
      num_threads: The number of threads.
      max_calls: The bound on calls that wait or run; a single tenant may have half of them.
      max_size: The same for the sizes of these calls together. A size counts characters, bytes or tokens.
    """

    def __init__(self, name: str, *, num_threads: int, max_calls: int, max_size: int):
        self.name = name
        self.max_calls, self.max_size = max_calls, max_size
        self._num_threads = num_threads
        self._executor = ThreadPoolExecutor(num_threads, name)
        self._num_idle = num_threads
        self._turns: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()  # by tenant, the next one first
        self._loads: dict[str, _Load] = {}
        self._total = _Load()

    @property
    def num_calls(self) -> int:
        """Calls that wait or run."""
        return self._total.num_calls

    async def run(self, tenant: str, size: int, function: Callable[..., Result], *arguments: Any) -> Result:
        """Calls a function in a thread, when it is the tenant's turn.

        Raises:
          QuotaExceededError: The tenant has too much in this pool.
          QueueFullError: All tenants together have too much in this pool.
        """
        self._check_room(tenant, size)
        loads = self._loads.setdefault(tenant, _Load()), self._total
        for load in loads:
            load.add(1, size)
        try:
            await self._turn(tenant)
            # Not in a variable: with an exception it would be a cycle, which keeps the arguments until it is collected.
            return await asyncio.wrap_future(self._submitted(function, *arguments))
        finally:
            for load in loads:
                load.add(-1, -size)
            if not self._loads[tenant].num_calls:
                del self._loads[tenant]

    def _submitted(self, function: Callable[..., Result], *arguments: Any) -> "Future[Result]":
        """Starts a call. Its thread is free again when it ends, even if its result is no longer awaited."""
        loop, work = asyncio.get_running_loop(), self._executor.submit(function, *arguments)

        def release(_: object) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._release)

        work.add_done_callback(release)
        return work

    def _check_room(self, tenant: str, size: int) -> None:
        own = self._loads.get(tenant, _Load())
        if own.num_calls + 1 > self.max_calls // 2 or own.size + size > self.max_size // 2:
            raise QuotaExceededError(
                f"{own.num_calls} calls of {own.size} characters, bytes or tokens are in progress ({self.name}); a "
                f"tenant may have {self.max_calls // 2} of {self.max_size // 2}. Retry later.",
                f"tenant:{tenant}",
                self._retry_seconds(own.size),
            )
        if self._total.num_calls + 1 > self.max_calls or self._total.size + size > self.max_size:
            raise QueueFullError(
                f"{self._total.num_calls} calls are in progress ({self.name}); this server queues {self.max_calls} "
                f"of {self.max_size} characters, bytes or tokens. Retry later.",
                self._retry_seconds(self._total.size),
            )

    def _retry_seconds(self, size: int) -> float:
        return max(_MIN_RETRY_SECONDS, size / self._num_threads / _CHARS_PER_SECOND)

    async def _turn(self, tenant: str) -> None:
        """Waits for an idle thread, which then belongs to the caller."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._turns.setdefault(tenant, deque()).append(turn)
        self._grant()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._release()  # granted, but the caller left at the same moment
            raise

    def _grant(self) -> None:
        while self._num_idle and self._turns:
            tenant, turns = self._turns.popitem(last=False)
            turn = turns.popleft()
            if turns:
                self._turns[tenant] = turns  # last, so that every tenant has its turn
            if not turn.done():
                self._num_idle -= 1
                turn.set_result(None)

    def _release(self) -> None:
        self._num_idle += 1
        self._grant()
