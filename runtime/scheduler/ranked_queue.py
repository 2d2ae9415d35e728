"""A priority queue of requests that supports removal from any position. Serves step 4 of 10.

In: requests, each with a key. Out: the request with the smallest key; equal keys leave in order of arrival.
"""

import heapq
import itertools
from collections.abc import Iterator
from typing import Generic, TypeVar

from ..api.request import Request

Key = TypeVar("Key")

_MIN_STALE_ENTRIES = 64  # fewer stale entries are not cleaned up


class RankedQueue(Generic[Key]):
    """A heap with lazy deletion: removing a request leaves a stale entry, which `first` skips.

    `push` and `discard` take amortized O(log n), `first` and `len` amortized O(1). Stale entries are removed when they
    outnumber the live ones.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[Key, int, Request]] = []
        self._entry_of: dict[Request, int] = {}  # the number of each request's live entry
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._entry_of)

    def __contains__(self, request: object) -> bool:
        return request in self._entry_of

    def __iter__(self) -> Iterator[Request]:
        """Iterates over the requests in no particular order."""
        return iter(self._entry_of)

    @property
    def first(self) -> Request | None:
        """The request with the smallest key, or None if the queue is empty."""
        heap = self._heap
        while heap and not self._is_live(heap[0]):
            heapq.heappop(heap)
        return heap[0][2] if heap else None

    def push(self, key: Key, request: Request) -> None:
        """Adds a request.

        Raises:
          ValueError: The request is already in the queue.
        """
        if request in self._entry_of:
            raise ValueError(f"request {request.request_id} is in this queue already.")
        number = next(self._numbers)
        self._entry_of[request] = number
        heapq.heappush(self._heap, (key, number, request))

    def discard(self, request: Request) -> None:
        """Removes a request from the queue. Does nothing if it is not in the queue."""
        if self._entry_of.pop(request, None) is None:
            return
        if len(self._heap) > 2 * len(self._entry_of) + _MIN_STALE_ENTRIES:
            self._heap = [entry for entry in self._heap if self._is_live(entry)]
            heapq.heapify(self._heap)

    def _is_live(self, entry: tuple[Key, int, Request]) -> bool:
        return self._entry_of.get(entry[2]) == entry[1]
