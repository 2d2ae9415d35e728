"""The page allocator: what it hands out, keeps and refuses, and that its audit sees every kind of fault."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshserve.runtime.scheduler.page_allocator import PageAllocator


def published(pages: PageAllocator, *keys: bytes) -> list[int]:
    """Pages of one holder, published under these keys."""
    held = pages.allocate(len(keys))
    for page, key in zip(held, keys, strict=True):
        pages.publish(page, key)
    return held


def test_hands_out_lowest_pages_first_and_reuses_the_last_freed():
    pages = PageAllocator(4)
    assert pages.allocate(3) == [0, 1, 2]
    pages.free([1, 2])
    assert pages.allocate(2) == [1, 2]
    assert (pages.num_pages, pages.num_free_pages) == (4, 1)


def test_allocating_nothing_takes_nothing():
    pages = PageAllocator(1)
    assert pages.allocate(0) == []
    assert pages.num_free_pages == 1


def test_a_shortage_raises_and_takes_nothing():
    pages = PageAllocator(3)
    held = pages.allocate(2)
    with pytest.raises(ValueError, match="2 pages requested; 1 of 3 are free"):
        pages.allocate(2)
    assert pages.num_free_pages == 1
    pages.audit([held])


@pytest.mark.parametrize("num_pages", [0, -1])
def test_a_cache_has_a_page(num_pages: int):
    with pytest.raises(ValueError, match="1 page or more"):
        PageAllocator(num_pages)


def test_a_negative_count_raises():
    with pytest.raises(ValueError, match="-1 pages requested"):
        PageAllocator(2).allocate(-1)


@pytest.mark.parametrize("freed", [[0], [1, 1]], ids=["free already", "named twice"])
def test_a_double_free_raises(freed: list[int]):
    pages = PageAllocator(3)
    pages.allocate(2)
    pages.free([0])
    with pytest.raises(ValueError, match="freed twice"):
        pages.free(freed)


@pytest.mark.parametrize("page", [-1, 3])
def test_an_unknown_page_raises(page: int):
    with pytest.raises(ValueError, match=f"page {page} freed; this cache has pages 0 to 2"):
        PageAllocator(3).free([page])


# --- published pages


def test_a_freed_page_is_found_until_its_room_is_needed():
    pages = PageAllocator(3)
    held = published(pages, b"a", b"b")
    assert pages.match([b"a", b"b", b"c"]) == held
    pages.free(held)
    assert (pages.num_free_pages, pages.num_evictable_pages) == (3, 2)
    assert pages.match([b"a", b"b"]) == held
    assert pages.allocate(1) == [2]  # a page that could not be found goes first
    assert pages.match([b"a", b"b"]) == held
    pages.allocate(1)
    assert pages.match([b"a", b"b"]) == held[:1]  # then the end of a chain
    assert pages.num_evictions == 1


def test_the_longest_unheld_page_makes_room_first():
    pages = PageAllocator(2)
    first, second = published(pages, b"a"), published(pages, b"b")
    pages.free(second)
    pages.free(first)
    pages.hold(pages.match([b"b"]))
    pages.free(second)
    pages.allocate(1)
    assert (pages.match([b"a"]), pages.match([b"b"])) == ([], second)


def test_a_page_has_as_many_holders_as_hold_it():
    pages = PageAllocator(2)
    held = published(pages, b"a")
    assert pages.num_evictable_of(held) == 0
    pages.hold(held)
    pages.audit([held, held])
    pages.free(held)
    pages.audit([held])
    assert pages.num_free_pages == 1
    pages.free(held)
    assert (pages.num_free_pages, pages.num_evictable_of(held)) == (2, 1)


def test_a_gap_ends_the_match():
    pages = PageAllocator(3)
    published(pages, b"a", b"c")
    assert len(pages.match([b"a", b"b", b"c"])) == 1


def test_of_two_pages_with_one_key_the_first_stays_known():
    pages = PageAllocator(2)
    first, second = published(pages, b"a"), published(pages, b"a")
    assert pages.match([b"a"]) == first
    pages.audit([first, second])
    pages.free(second)
    assert pages.num_evictable_pages == 0
    pages.audit([first])


@pytest.mark.parametrize(
    ("holders", "fault"),
    [
        ([[0, 1], [1]], "page 1 is held by 2 requests, but counted 1 times"),
        ([[0, 1, 2]], "page 2 is held by 1 requests, but counted 0 times"),
        ([[0]], "page 1 is held by 0 requests, but counted 1 times"),
        ([[0, 1], [7]], "holder 1 holds page 7 of 3"),
        ([[0, 1, 1]], "holder 0 holds a page twice"),
    ],
)
def test_audit_names_the_fault(holders: list[list[int]], fault: str):
    pages = PageAllocator(3)
    pages.allocate(2)
    with pytest.raises(AssertionError, match=fault):
        pages.audit(holders)


KEYS = st.lists(st.sampled_from([b"a", b"b", b"c", b"d"]), max_size=4, unique=True)


@given(st.integers(1, 12), st.lists(st.tuples(st.booleans(), st.integers(0, 12), KEYS), max_size=60))
def test_any_history_keeps_the_books(num_pages: int, actions: list[tuple[bool, int, list[bytes]]]):
    pages = PageAllocator(num_pages)
    holders: list[list[int]] = []
    for is_request, number, keys in actions:
        if not is_request and holders:
            pages.free(holders.pop(number % len(holders)))
        cached = pages.match(keys) if is_request else []
        if is_request and number + pages.num_evictable_of(cached) <= pages.num_free_pages:
            pages.hold(cached)
            new = pages.allocate(number)
            for page, key in zip(new, keys[len(cached) :], strict=False):
                pages.publish(page, key)
            holders.append(cached + new)
        pages.audit(holders)
        assert pages.num_free_pages == num_pages - len(set().union(*holders))


def test_a_flush_forgets_kept_pages_and_no_held_ones():
    pages = PageAllocator(4)
    held, kept = pages.allocate(2), pages.allocate(1)
    pages.publish(held[0], b"held")
    pages.publish(kept[0], b"kept")
    pages.free(kept)
    assert pages.flush() == 1 and pages.flush() == 0
    assert pages.num_evictions == 0  # no request needed the memory
    assert (pages.match([b"kept"]), pages.match([b"held"])) == ([], held[:1])
    pages.free(held)
    pages.audit([])
    assert pages.num_free_pages == 4


def test_a_reset_forgets_everything_and_keeps_the_count_of_evictions():
    """The cache behind the pages is another one then: what was kept must not be found."""
    pages = PageAllocator(2)
    for key in (b"first", b"second"):
        held = pages.allocate(2)
        pages.publish(held[0], key)
        pages.free(held)
    assert pages.num_evictions == 1 and pages.match([b"second"])
    pages.reset(5)
    assert (pages.num_pages, pages.num_free_pages, pages.num_evictable_pages, pages.num_evictions) == (5, 5, 0, 1)
    assert pages.match([b"second"]) == []
    pages.audit([])
