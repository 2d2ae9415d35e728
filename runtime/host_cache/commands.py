"""Encodes the commands of the host tier as int32 vectors, which a cluster's followers replay. numpy only."""

import enum
from collections.abc import Mapping, Sequence

import numpy as np


class Op(enum.IntEnum):
    """The first entry of a command; the others follow in the order of the functions' arguments."""

    SAVE = 0  # copies pages of the cache to a block of host memory
    FETCH = 1  # copies a block, and the numbers of the pages to which it is to be written, to the devices
    WRITE = 2  # writes a fetched block to its pages in the cache, and frees the staging memory
    FORGET = 3  # frees the staging memory of a fetched block
    CLEAR = 4  # frees all blocks


def save(block: int, pages: Sequence[int], block_pages: int) -> np.ndarray:
    """Saves pages to the first rows of a block of `block_pages`; the other rows get copies of the last page."""
    return np.array([Op.SAVE, block, *pages, *[pages[-1]] * (block_pages - len(pages))], np.int32)


def fetch(ticket: int, block: int, rows: Mapping[int, int], block_pages: int, num_pages: int) -> np.ndarray:
    """Fetches a block. `ticket` is the number under which it is written or forgotten, `rows` the page of each row.

    The other rows go to distinct pages beyond the cache's `num_pages`, which drops them.
    """
    pages = [rows.get(row, num_pages + row) for row in range(block_pages)]
    return np.array([Op.FETCH, ticket, block, *pages], np.int32)


def write(ticket: int) -> np.ndarray:
    """Writes a fetched block to its pages."""
    return np.array([Op.WRITE, ticket], np.int32)


def forget(ticket: int) -> np.ndarray:
    """Frees the staging memory of a fetched block."""
    return np.array([Op.FORGET, ticket], np.int32)


def clear() -> np.ndarray:
    """Frees all blocks of host memory."""
    return np.array([Op.CLEAR], np.int32)
