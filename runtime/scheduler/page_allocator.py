"""Which pages of the KV cache are free, shared, or worth keeping. Serves step 4 of 10, the scheduler.

In: how many pages a request needs, and under which keys its full pages may be found again (`prefix.py`). Out: their
numbers. Every device holds the same pages (each its own KV heads), so one allocator speaks for the whole mesh.

A page is in one of three states:

    unused   nothing worth keeping in it                                    -> allocated first
    held     by one request, or by several if it was published
    kept     published, held by nobody: found by the next `match`           -> allocated last, longest unheld first

A page is published when it is full; from then on nobody writes to it. Sharing copies nothing.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class PageAllocator:
    """Hands out pages 0..num_pages-1 and takes them back, O(1) a page.

    Callers look at `num_free_pages` before they allocate: who must give way when pages are short is the scheduler's
    decision. Misuse therefore raises ValueError, and nothing here ever waits or returns less than was asked for.
    """

    def __init__(self, num_pages: int):
        if num_pages < 1:
            raise ValueError(f"num_pages is {num_pages}; a cache has 1 page or more.")
        self.num_evictions = 0  # pages kept that had to make room, since the start
        self.reset(num_pages)

    def reset(self, num_pages: int) -> None:
        """Begins anew with that many pages, all unused: what was kept is forgotten, and nobody may hold any."""
        self.num_pages = num_pages
        # A stack, lowest page on top: pages freed last are used first, so a lightly loaded cache touches few of them.
        self._unused = list(range(num_pages - 1, -1, -1))
        self._evictable: OrderedDict[int, None] = OrderedDict()  # longest unheld first
        self._num_holders = [0] * num_pages
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}

    @property
    def num_free_pages(self) -> int:
        """Pages that can be allocated now: unused and kept ones."""
        return len(self._unused) + len(self._evictable)

    @property
    def num_evictable_pages(self) -> int:
        return len(self._evictable)

    def allocate(self, num_pages: int) -> list[int]:
        """Takes that many free pages; the caller holds them until it frees them.

        Raises:
          ValueError: fewer are free, or the count is negative. Nothing was taken.
        """
        if not 0 <= num_pages <= self.num_free_pages:
            raise ValueError(f"{num_pages} pages asked for; {self.num_free_pages} of {self.num_pages} are free.")
        num_evictions = max(num_pages - len(self._unused), 0)
        self.num_evictions += num_evictions
        pages = [self._unused.pop() for _ in range(num_pages - num_evictions)]
        pages += [self._evict() for _ in range(num_evictions)]
        for page in pages:
            self._num_holders[page] = 1
        return pages

    def _evict(self) -> int:
        page, _ = self._evictable.popitem(last=False)
        del self._page_of[self._key_of.pop(page)]
        return page

    def flush(self) -> int:
        """Forgets what the kept pages hold; returns how many there were. Held pages stay known."""
        num_pages = len(self._evictable)
        for _ in range(num_pages):
            self._unused.append(self._evict())
        return num_pages

    def free(self, pages: Sequence[int]) -> None:
        """Takes pages back. Published ones are kept, the last of `pages` first to be evicted: without the pages before
        it, it could not be found.

        Raises:
          ValueError: a page is free already (or named too often), or is not of this cache.
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

    def publish(self, page: int, key: bytes) -> None:
        """Lets a full, held page be found under `key`. If another page has the key already, that one stays known."""
        assert self._num_holders[page], f"page {page} is published, but nobody holds it"
        assert page not in self._key_of, f"page {page} is published twice"
        if self._page_of.setdefault(key, page) == page:
            self._key_of[page] = key

    def match(self, keys: Iterable[bytes]) -> list[int]:
        """The pages of the longest known beginning of `keys`. They may be gone after the next `allocate`."""
        pages = []
        for key in keys:
            page = self._page_of.get(key)
            if page is None:
                break
            pages.append(page)
        return pages

    def num_evictable_of(self, pages: Iterable[int]) -> int:
        """How many of these are held by nobody: holding them takes them from `num_free_pages`."""
        return sum(not self._num_holders[page] for page in pages)

    def hold(self, pages: Iterable[int]) -> None:
        """One more holder for each of these pages, which `match` has found."""
        for page in pages:
            assert page in self._key_of, f"page {page} is shared, but was not published"
            if not self._num_holders[page]:
                del self._evictable[page]
            self._num_holders[page] += 1

    def audit(self, holders: Iterable[Sequence[int]]) -> None:
        """Proves that every page is unused, kept, or held by exactly those who say so. `holders` are the page lists of
        all who hold any. O(pages).

        Raises:
          AssertionError: names the first page for which this does not hold.
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
        free = {*self._unused, *self._evictable}
        assert len(free) == self.num_free_pages, "a page is twice among the free"
        for page, number in enumerate(num_holders):
            assert (page in free) != (number > 0), f"page {page} has {number} holders and is among the free, or neither"
            assert number <= 1 or page in self._key_of, f"page {page} has {number} holders, but was not published"
        assert all(page in self._key_of for page in self._evictable), "a page is kept that nobody could find"
        assert not any(page in self._key_of for page in self._unused), "an unused page can be found"
        assert {page: key for key, page in self._page_of.items()} == self._key_of, "the index is not one to one"
