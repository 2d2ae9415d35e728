"""The page allocator: what it hands out, what it refuses, and that its audit sees every kind of fault."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshserve.runtime.pages import PageAllocator


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
    with pytest.raises(ValueError, match="2 pages asked for; 1 of 3 are free"):
        pages.allocate(2)
    assert pages.num_free_pages == 1
    pages.audit([held])


@pytest.mark.parametrize("num_pages", [0, -1])
def test_a_cache_has_a_page(num_pages: int):
    with pytest.raises(ValueError, match="1 page or more"):
        PageAllocator(num_pages)


def test_a_negative_count_raises():
    with pytest.raises(ValueError, match="-1 pages asked for"):
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


@pytest.mark.parametrize(
    ("owners", "fault"),
    [
        ([[0, 1], [1]], "page 1 is held by owner 0 and by owner 1"),
        ([[0, 1, 2]], "page 2 is free, yet owner 0 holds it"),
        ([[0]], r"pages \[1\] are neither free nor owned"),
        ([[0, 1], [7]], "owner 1 holds page 7 of 3"),
    ],
)
def test_audit_names_the_fault(owners: list[list[int]], fault: str):
    pages = PageAllocator(3)
    pages.allocate(2)
    with pytest.raises(AssertionError, match=fault):
        pages.audit(owners)


@given(st.integers(1, 12), st.lists(st.tuples(st.booleans(), st.integers(0, 12)), max_size=60))
def test_any_history_keeps_every_page_free_or_owned_once(num_pages: int, actions: list[tuple[bool, int]]):
    pages = PageAllocator(num_pages)
    owners: list[list[int]] = []
    for is_allocation, number in actions:
        if is_allocation and number <= pages.num_free_pages:
            owners.append(pages.allocate(number))
            assert len(owners[-1]) == number
        elif not is_allocation and owners:
            pages.free(owners.pop(number % len(owners)))
        pages.audit(owners)
        assert pages.num_free_pages == num_pages - sum(map(len, owners))
