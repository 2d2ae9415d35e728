"""Which pages of the KV cache are free. Serves step 4 of 10, the scheduler.

In: how many pages a request needs. Out: their numbers. Every device holds the same pages (each its own KV heads), so
one allocator speaks for the whole mesh.
"""

from collections.abc import Iterable, Sequence


class PageAllocator:
    """Hands out pages 0..num_pages-1 and takes them back, O(1) a page.

    Callers look at `num_free_pages` before they allocate: who must give way when pages are short is the scheduler's
    decision. Misuse therefore raises ValueError, and nothing here ever waits or returns less than was asked for.
    """

    def __init__(self, num_pages: int):
        if num_pages < 1:
            raise ValueError(f"num_pages is {num_pages}; a cache has 1 page or more.")
        self.reset(num_pages)

    def reset(self, num_pages: int) -> None:
        """Begins anew with that many pages, all free; nobody may hold one."""
        self.num_pages = num_pages
        # A stack, lowest page on top: pages freed last are used first, so a lightly loaded cache touches few of them.
        self._free = list(range(num_pages - 1, -1, -1))
        self._is_free = bytearray(b"\x01" * num_pages)

    @property
    def num_free_pages(self) -> int:
        return len(self._free)

    def allocate(self, num_pages: int) -> list[int]:
        """Takes that many free pages; the caller owns them until it frees them.

        Raises:
          ValueError: fewer are free, or the count is negative. Nothing was taken.
        """
        if not 0 <= num_pages <= len(self._free):
            raise ValueError(f"{num_pages} pages asked for; {len(self._free)} of {self.num_pages} are free.")
        pages = [self._free.pop() for _ in range(num_pages)]
        for page in pages:
            self._is_free[page] = 0
        return pages

    def free(self, pages: Sequence[int]) -> None:
        """Takes pages back; they may be handed out again at once.

        Raises:
          ValueError: a page is free already (or named twice), or is not of this cache.
        """
        for page in reversed(pages):
            if not 0 <= page < self.num_pages:
                raise ValueError(f"page {page} freed; this cache has pages 0 to {self.num_pages - 1}.")
            if self._is_free[page]:
                raise ValueError(f"page {page} freed twice.")
            self._is_free[page] = 1
            self._free.append(page)

    def audit(self, owners: Iterable[Sequence[int]]) -> None:
        """Proves that every page is free or has exactly one owner. `owners` are the page lists of all who hold any.

        Raises:
          AssertionError: names the first page for which this does not hold.
        """
        free = set(self._free)
        assert len(free) == len(self._free), f"{len(self._free)} entries in the free list but {len(free)} pages"
        marked = {page for page in range(self.num_pages) if self._is_free[page]}
        assert free == marked, f"pages {sorted(free ^ marked)} are in the free list or marked free, but not both"
        owner_of: dict[int, int] = {}
        for index, pages in enumerate(owners):
            for page in pages:
                assert 0 <= page < self.num_pages, f"owner {index} holds page {page} of {self.num_pages}"
                assert page not in free, f"page {page} is free, yet owner {index} holds it"
                assert page not in owner_of, f"page {page} is held by owner {owner_of[page]} and by owner {index}"
                owner_of[page] = index
        lost = set(range(self.num_pages)) - free - owner_of.keys()
        assert not lost, f"pages {sorted(lost)} are neither free nor owned"
