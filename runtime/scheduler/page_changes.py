"""Collects which pages enter and leave the prefix cache, on the engine's side.

In: calls of the scheduler, under the engine's lock. Out: the net change since the last `take`.

Only the net change is kept: a page that is stored and removed between two calls of `take` leaves no trace. The memory
is therefore bounded by the number of pages, however late the reader is, and nothing is ever lost. A call takes about
a microsecond and never waits for the reader, which holds the lock only to exchange two references.
"""

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ..api.request import Request


@dataclass(frozen=True, slots=True)
class CachedPage:
    """A page of the prefix cache: its key, the key of the page before it, and its tokens."""

    key: bytes
    parent: bytes | None  # None for the first page of a prompt
    token_ids: Sequence[int]
    cache_salt: str
    adapter: str = ""  # name of the adapter that computed it


@dataclass(slots=True)
class CacheChange:
    """The difference between two states of the prefix cache. Applied in the order of the fields."""

    is_cleared: bool = False
    removed: dict[bytes, None] = field(default_factory=dict)
    stored: dict[bytes, CachedPage] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.is_cleared or self.removed or self.stored)


class PageChanges:
    """The net change of the prefix cache. The scheduler writes it; one reader takes it, from any thread."""

    def __init__(self, page_size: int):
        self.page_size = page_size
        self._lock = threading.Lock()
        self._change = CacheChange()

    def stored(self, request: Request, index: int) -> None:
        """Records that a page of a request, which was not in the cache, can be found from now on."""
        keys, start = request.page_keys, index * self.page_size
        key = keys[index]
        token_ids = request.tokens(start, start + self.page_size)
        with self._lock:
            if self._change.removed.pop(key, self) is self:  # otherwise the reader still knows it
                parent = keys[index - 1] if index else None
                self._change.stored[key] = CachedPage(key, parent, token_ids, request.cache_salt, request.adapter)

    def removed(self, key: bytes) -> None:
        """Records that a page can no longer be found."""
        with self._lock:
            if self._change.stored.pop(key, None) is None:  # otherwise the reader never knew it
                self._change.removed[key] = None

    def cleared(self) -> None:
        """Records that the cache starts over."""
        with self._lock:
            self._change = CacheChange(is_cleared=True)

    def take(self) -> CacheChange:
        """Returns the change since the last call."""
        if not self._change:
            return CacheChange()  # without the lock, as most calls find nothing
        with self._lock:
            taken, self._change = self._change, CacheChange()
        return taken


def parents_first(pages: dict[bytes, CachedPage]) -> Iterator[CachedPage]:
    """Yields the pages in their order, but each after the page before it."""
    seen: set[bytes] = set()
    for first in pages.values():
        line = [first]
        while (parent := line[-1].parent) is not None and parent in pages and parent not in seen:
            line.append(pages[parent])
        for page in reversed(line):
            if page.key not in seen:
                seen.add(page.key)
                yield page
