"""Host memory for the simulated device: copies take a random number of polls, and some fail."""

import random

import numpy as np

from meshserve.runtime.host_cache.commands import Op
from meshserve.runtime.host_cache.sizes import HostCacheSize


def make_size(num_blocks: int = 8, block_pages: int = 2, **changes: int) -> HostCacheSize:
    values = dict(num_blocks=num_blocks, block_pages=block_pages, page_bytes=1, max_fetches=3, max_saves=4)
    return HostCacheSize(**(values | changes))


class FakeCopies:
    """Implements `host_cache.Copier`, and `run` for a cache [P, S] of the simulated device.

    Contents are taken and written at once, when the command comes in the order of the steps, as the devices do.

    Args:
      max_polls: The largest number of polls before a fetched block has arrived.
      failing: The probability that a copy fails.
    """

    def __init__(self, size: HostCacheSize, seed: int = 0, max_polls: int = 3, failing: float = 0.0):
        self.size = size
        self.max_polls, self.failing = max_polls, failing
        self.blocks: dict[int, np.ndarray] = {}
        self.fetched: dict[int, tuple[np.ndarray | None, int]] = {}  # by ticket: content, polls to come
        self.pages: dict[int, list[int]] = {}  # by ticket: where the rows of a fetched block are to be written
        self.num_commands = {op: 0 for op in Op}
        self._draw = random.Random(seed)
        self.max_blocks = size.num_blocks  # for which the host really has memory
        self._failed: list[tuple[int, bool]] = []

    def run(self, command: np.ndarray, cache: np.ndarray) -> None:
        op, *numbers = command.tolist()
        self.num_commands[Op(op)] += 1
        if op == Op.SAVE:
            block, *pages = numbers
            assert len(pages) == self.size.block_pages
            self.blocks.pop(block, None)
            is_full = len(self.blocks) >= self.max_blocks
            if is_full or self._draw.random() < self.failing:
                self._failed.append((block, is_full))
            else:
                self.blocks[block] = cache[pages].copy()
        elif op == Op.FETCH:
            ticket, block, *pages = numbers
            assert len(set(pages)) == len(pages) == self.size.block_pages
            content = None if self._draw.random() < self.failing else self.blocks[block].copy()
            self.fetched[ticket] = content, self._draw.randint(0, self.max_polls)
            self.pages[ticket] = pages
            assert len(self.fetched) <= self.size.max_fetches
        elif op == Op.WRITE:
            (ticket,) = numbers
            content, polls = self.fetched.pop(ticket)
            assert content is not None and not polls, "written before it has arrived"
            for row, page in enumerate(self.pages.pop(ticket)):
                if page < len(cache):
                    cache[page] = content[row]
        elif op == Op.FORGET:
            del self.fetched[numbers[0]], self.pages[numbers[0]]
        else:
            self.blocks.clear()

    def has_arrived(self, ticket: int) -> bool | None:
        content, polls = self.fetched[ticket]
        if polls:
            self.fetched[ticket] = content, polls - 1
            return None
        return content is not None

    def wait(self, ticket: int) -> None:
        self.fetched[ticket] = self.fetched[ticket][0], 0

    def wait_saved(self) -> None:
        pass

    def num_saving(self) -> int:
        return self._draw.randint(0, min(2, self.size.max_saves - 1))

    def take_failed(self) -> list[tuple[int, bool]]:
        failed, self._failed = self._failed, []
        return failed
