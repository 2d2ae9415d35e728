"""Records which page is in which block of host memory, and which block to drop next. Pure Python."""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence


class BlockIndex:
    """The blocks in host memory, each with a few pages, least recently used first.

    A block is the unit of copying and dropping: its pages were saved together. A pinned block is not dropped.
    """

    def __init__(self, num_blocks: int):
        self.num_blocks = num_blocks
        self.clear()

    def clear(self) -> None:
        """Forgets all blocks and pins."""
        self._keys: OrderedDict[int, tuple[bytes, ...]] = OrderedDict()  # keys of each block, by row
        self._places: dict[bytes, tuple[int, int]] = {}  # block and row of each page
        self._pins: Counter[int] = Counter()
        self._free = list(range(self.num_blocks - 1, -1, -1))

    def __contains__(self, key: bytes) -> bool:
        return key in self._places

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def num_free(self) -> int:
        """The number of blocks that can be added without dropping another."""
        return len(self._free)

    def blocks(self) -> list[tuple[int, tuple[bytes, ...]]]:
        """Returns all blocks with the keys of their pages, least recently used first."""
        return list(self._keys.items())

    @property
    def num_pages(self) -> int:
        return len(self._places)

    def num_found(self, keys: Iterable[bytes]) -> int:
        """Returns how many of `keys`, from the first on, are in a block."""
        count = 0
        for key in keys:
            if key not in self._places:
                break
            count += 1
        return count

    def place(self, key: bytes) -> tuple[int, int]:
        """Returns the block and the row of a page, which must be in one."""
        return self._places[key]

    def add(self, keys: Sequence[bytes]) -> int | None:
        """Adds a block with these pages, dropping the least recently used one if needed, and returns its number.

        Returns None if all blocks are pinned.
        """
        assert not any(key in self._places for key in keys), "a page is saved twice"
        if not self._free:
            victim = next((block for block in self._keys if not self._pins[block]), None)
            if victim is None:
                return None
            self.forget(victim)
        block = self._free.pop()
        self._keys[block] = tuple(keys)
        self._places.update((key, (block, row)) for row, key in enumerate(keys))
        return block

    def forget(self, block: int) -> None:
        """Forgets a block, if it is known."""
        if block not in self._keys:
            return
        for key in self._keys.pop(block):
            del self._places[key]
        self._free.append(block)

    def touch(self, key: bytes) -> bool:
        """Makes the block of a page the most recently used one. Returns False if the page is in no block."""
        place = self._places.get(key)
        if place is None:
            return False
        self._keys.move_to_end(place[0])
        return True

    def demote(self, block: int) -> None:
        """Makes a block the next to be dropped, if it is known: the devices hold its pages."""
        if block in self._keys:
            self._keys.move_to_end(block, last=False)

    def shrink(self) -> None:
        """Gives up half of the blocks that are not in use, or the last one: the host has no memory for all of them."""
        del self._free[len(self._free) // 2 :]

    def pin(self, block: int) -> None:
        self._pins[block] += 1

    def unpin(self, block: int) -> None:
        self._pins[block] -= 1
        if self._pins[block] <= 0:
            del self._pins[block]

    def audit(self, pins: Counter[int]) -> None:
        """Checks the index against the pins that there should be. Raises AssertionError with the violation."""
        found = {key: (block, row) for block, keys in self._keys.items() for row, key in enumerate(keys)}
        assert found == self._places, "the index of pages is not that of the blocks"
        assert not set(self._free) & set(self._keys) and len(set(self._free)) == len(self._free), (
            "a block is free twice"
        )
        assert len(self._keys) + len(self._free) <= self.num_blocks, "there are more blocks than there may be"
        assert self._pins == pins, f"blocks are pinned {self._pins}, but should be {pins}"
