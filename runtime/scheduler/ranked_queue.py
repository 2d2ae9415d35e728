"""A queue of requests in an order of their own, from which any of them may leave. Serves step 4 of 10.

In: requests, each with a key. Out: the one with the smallest key, first come first out among equals.
"""

import heapq
import itertools
from collections.abc import Iterator
from typing import Generic, TypeVar

from ..api.request import Request

Key = TypeVar("Key")

_MIN_STALE_ENTRIES = 64  # fewer are not worth a clean-up


class RankedQueue(Generic[Key]):
    """A heap whose entries go stale when their request leaves early; `first` skips them.

    Every operation costs O(log n), `first` and `len` O(1) amortised. Stale entries never outnumber the others for long.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[Key, int, Request]] = []
        self._entry_of: dict[Request, int] = {}  # the number of its entry; any other entry is stale
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._entry_of)

    def __contains__(self, request: object) -> bool:
        return request in self._entry_of

    def __iter__(self) -> Iterator[Request]:
        """In no order."""
        return iter(self._entry_of)

    @property
    def first(self) -> Request | None:
        heap = self._heap
        while heap and not self._is_live(heap[0]):
            heapq.heappop(heap)
        return heap[0][2] if heap else None

    def push(self, key: Key, request: Request) -> None:
        """Raises ValueError if the request is in the queue already."""
        if request in self._entry_of:
            raise ValueError(f"request {request.request_id} is in this queue already.")
        number = next(self._numbers)
        self._entry_of[request] = number
        heapq.heappush(self._heap, (key, number, request))

    def discard(self, request: Request) -> None:
        """Takes a request out, wherever it stands; one that is not there is no error."""
        if self._entry_of.pop(request, None) is None:
            return
        if len(self._heap) > 2 * len(self._entry_of) + _MIN_STALE_ENTRIES:
            self._heap = [entry for entry in self._heap if self._is_live(entry)]
            heapq.heapify(self._heap)

    def _is_live(self, entry: tuple[Key, int, Request]) -> bool:
        return self._entry_of.get(entry[2]) == entry[1]
