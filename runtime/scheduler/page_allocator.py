"""Allocates, shares and caches the pages of the KV cache. Serves step 4 of 10, the scheduler.

In: the number of pages that a request needs, and the keys of its full pages (`page_keys.py`). Out: page numbers. Every
device holds the same pages (each with its own KV heads), so one allocator serves the whole mesh.

A page is in one of four states:

    unused      contains nothing reusable                                   -> allocated first
    held        by one request, or by several if it has been published
    saved       as evictable, and a host tier has had a copy made of it     -> allocated next
    evictable   published, held by no request, can be found by `match`      -> allocated last, least recently held first

A page is published when it is full; after that it is never written. Sharing a page copies nothing.
"""

import itertools
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from ..api.host_tier import HostTier
from .page_changes import PageChanges


class PageAllocator:
    """Allocates and frees pages 0..num_pages-1 in O(1) per page.

    Callers check `num_free_pages` before they allocate, because the scheduler decides which request to preempt when
    pages are short. Misuse therefore raises ValueError; no method blocks or returns fewer pages than requested.
    """

    def __init__(self, num_pages: int):
        if num_pages < 1:
            raise ValueError(f"num_pages is {num_pages}; a cache needs 1 page or more.")
        self.num_evictions = 0  # evicted pages since the start
        self.changes: PageChanges | None = None  # receives which pages `match` can find; None: not recorded
        self.host: HostTier | None = None
        self.reset(num_pages)

    def reset(self, num_pages: int) -> None:
        """Starts over with `num_pages` unused pages. Drops all cached pages; no request may hold a page."""
        self.num_pages = num_pages
        # A stack with the lowest page on top. Pages freed last are reused first, so a lightly loaded cache uses few.
        self._unused = list(range(num_pages - 1, -1, -1))
        self._evictable: OrderedDict[int, None] = OrderedDict()  # least recently held first
        self._saved: OrderedDict[int, None] = OrderedDict()  # those with a copy in host memory, in order of saving
        self._num_holders = [0] * num_pages
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        if self.changes is not None:
            self.changes.cleared()

    @property
    def num_free_pages(self) -> int:
        """The number of pages that can be allocated now: unused and evictable ones, saved or not."""
        return len(self._unused) + self.num_evictable_pages

    @property
    def num_evictable_pages(self) -> int:
        return len(self._evictable) + len(self._saved)

    @property
    def num_clean_pages(self) -> int:
        """The number of pages that can be allocated now without losing content: unused and saved ones."""
        return len(self._unused) + len(self._saved)

    def allocate(self, num_pages: int) -> list[int]:
        """Allocates `num_pages` pages, which the caller holds until it frees them.

        Raises:
          ValueError: Fewer pages are free, or the count is negative. Nothing was allocated.
        """
        if not 0 <= num_pages <= self.num_free_pages:
            raise ValueError(f"{num_pages} pages requested; {self.num_free_pages} of {self.num_pages} are free.")
        num_evictions = max(num_pages - len(self._unused), 0)
        self.num_evictions += num_evictions
        pages = [self._unused.pop() for _ in range(num_pages - num_evictions)]
        pages += [self._evict() for _ in range(num_evictions)]
        for page in pages:
            self._num_holders[page] = 1
        return pages

    def _evict(self) -> int:
        page, _ = (self._saved or self._evictable).popitem(last=False)
        key = self._key_of.pop(page)
        del self._page_of[key]
        if self.changes is not None:
            self.changes.removed(key)
        if self.host is not None:
            self.host.evicted(page, key)
        return page

    def flush(self) -> int:
        """Drops all evictable pages from the prefix cache and returns their number. Held pages stay published.

        A host tier drops all its pages.
        """
        num_pages = self.num_evictable_pages
        for _ in range(num_pages):
            self._unused.append(self._evict())
        if self.host is not None:
            self.host.clear()
        return num_pages

    def unsaved(self, num_pages: int) -> list[tuple[int, bytes]]:
        """Returns the next pages that would be evicted with content that is not saved, and their keys."""
        return [(page, self._key_of[page]) for page in itertools.islice(self._evictable, num_pages)]

    def kept(self) -> list[tuple[int, bytes]]:
        """Returns all evictable pages and their keys, in the order in which they would be evicted."""
        return [(page, self._key_of[page]) for page in (*self._saved, *self._evictable)]

    def mark_saved(self, page: int) -> None:
        """Marks one of the pages of `unsaved`, of which a copy is dispatched, so that it is evicted before others."""
        del self._evictable[page]
        self._saved[page] = None

    def free(self, pages: Sequence[int]) -> None:
        """Releases one hold on each of `pages`. Published pages become evictable once no request holds them.

        The last of `pages` is evicted first, because a page cannot be found without the pages before it.

        Raises:
          ValueError: A page is already free, is listed too often, or does not belong to this cache.
        """
        for page in reversed(pages):
            if not 0 <= page < self.num_pages:
                raise ValueError(f"page {page} freed; this cache has pages 0 to {self.num_pages - 1}.")
            if not self._num_holders[page]:
                raise ValueError(f"page {page} freed twice.")
            self._num_holders[page] -= 1
            if self._num_holders[page]:
                continue
            if page in self._key_of:
                self._evictable[page] = None
            else:
                self._unused.append(page)

    def publish(self, page: int, key: bytes) -> bool:
        """Makes a full, held page available to `match` under `key`. Returns False if another page has that key."""
        assert self._num_holders[page], f"page {page} is published, but not held"
        assert page not in self._key_of, f"page {page} is published twice"
        if self._page_of.setdefault(key, page) != page:
            return False
        self._key_of[page] = key
        if self.host is not None:
            self.host.published(page, key)
        return True

    def match(self, keys: Iterable[bytes]) -> list[int]:
        """Returns the pages of the longest cached prefix of `keys`. The next `allocate` may evict them."""
        pages = []
        for key in keys:
            page = self._page_of.get(key)
            if page is None:
                break
            pages.append(page)
        return pages

    def num_evictable_of(self, pages: Iterable[int]) -> int:
        """Returns how many of `pages` are held by no request; holding them reduces `num_free_pages` by that number."""
        return sum(not self._num_holders[page] for page in pages)

    def hold(self, pages: Iterable[int]) -> None:
        """Adds one holder to each of these pages, which `match` has returned."""
        for page in pages:
            assert page in self._key_of, f"page {page} is shared, but not published"
            if not self._num_holders[page]:
                del (self._saved if page in self._saved else self._evictable)[page]
            self._num_holders[page] += 1

    def audit(self, holders: Iterable[Sequence[int]]) -> None:
        """Checks that every page is unused, evictable, or held by exactly the given holders. O(pages).

        Args:
          holders: The page lists of all requests that hold pages.

        Raises:
          AssertionError: The check failed; the message names the first such page.
        """
        num_holders = [0] * self.num_pages
        for index, pages in enumerate(holders):
            assert len(set(pages)) == len(pages), f"holder {index} holds a page twice"
            for page in pages:
                assert 0 <= page < self.num_pages, f"holder {index} holds page {page} of {self.num_pages}"
                num_holders[page] += 1
        if num_holders != self._num_holders:
            page = next(page for page, number in enumerate(num_holders) if number != self._num_holders[page])
            counted = self._num_holders[page]
            raise AssertionError(f"page {page} is held by {num_holders[page]} requests, but counted {counted} times")
        free = {*self._unused, *self._evictable, *self._saved}
        assert len(free) == self.num_free_pages, "a page is on the free lists twice"
        for page, number in enumerate(num_holders):
            assert (page in free) != (number > 0), f"page {page} has {number} holders; it must be either held or free"
            assert number <= 1 or page in self._key_of, f"page {page} has {number} holders, but is not published"
        evictable = (*self._evictable, *self._saved)
        assert all(page in self._key_of for page in evictable), "an evictable page is not published"
        assert not any(page in self._key_of for page in self._unused), "an unused page is published"
        assert {page: key for key, page in self._page_of.items()} == self._key_of, "the index is not one to one"
