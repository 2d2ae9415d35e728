"""Decides which pages go to host memory and which come back, and tells `page_copies` what to copy when.

    pages near their eviction  -> SAVE blocks, before a step may overwrite the pages
    a request finds its prefix -> FETCH blocks to staging memory -> once there: WRITE their pages into the cache

Commands are carried out in order on the engine's thread, between two steps. A page is written only by WRITE, which is
issued after the copy from host memory has ended and while the request still holds the page. So no step waits for a
copy, a request can be cancelled or preempted at any time, and a copy that fails costs no page: its request computes the
tokens again. docs/decisions/053-host-cache.md has the reasons.
"""

import itertools
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from ..api.request import Request
from ..scheduler.limits import SchedulerLimits
from ..scheduler.page_allocator import PageAllocator
from ..scheduler.step_plan import StepPlan
from .block_index import BlockIndex
from .commands import clear, fetch, forget, save, write
from .counts import HostCacheCounts
from .rates import Rates
from .sizes import HostCacheSize

_MAX_TICKETS = 2**31  # a ticket is sent as an int32
_URGENT_DECODES = 8  # for each request that waits for copies, for which decodes are delayed by more of them
_URGENT_FACTOR = 5  # times as many blocks are then written between two steps


class Copier(Protocol):
    """Carries out the commands. Implemented by `page_copies.PageCopies`; commands reach it through the runner."""

    size: HostCacheSize

    def adopt(self, block: int, shards: Any) -> None:
        """Makes shards that are in host memory already a block."""

    def has_arrived(self, ticket: int) -> bool | None:
        """Returns whether a fetched block is in staging memory; None while it is on its way, False if it failed."""

    def wait(self, ticket: int) -> None:
        """Waits until a fetched block has arrived or failed."""

    def wait_saved(self) -> None:
        """Waits until the oldest block that is being copied to host memory is there, if there is one."""

    def num_saving(self) -> int:
        """Returns how many blocks are being copied to host memory."""

    def take_failed(self) -> list[tuple[int, bool]]:
        """Returns the blocks that could not be saved since the last call, and whether host memory was exhausted."""


class Arrival(NamedTuple):
    """The next pages of a request, which are in the cache once the commands are carried out."""

    request: Request
    num_pages: int
    is_last: bool


@dataclass
class _Part:
    """The pages that a fetch takes from one block."""

    block: int
    rows: dict[int, int] = field(default_factory=dict)  # row of the block -> index among the fetched pages


@dataclass(eq=False)
class _Fetch:
    request: Request
    first_page: int  # index in the request's pages
    keys: Sequence[bytes]
    parts: list[_Part]
    num_sent: int = 0  # parts sent
    has_arrived: list[bool] = field(default_factory=list)  # by fetched page
    num_reported: int = 0  # pages that were reported as arrived
    has_failed: bool = False

    def take_arrived(self) -> int:
        """Returns the number of pages, in order, that have arrived since the last call."""
        before = self.num_reported
        while self.num_reported < len(self.has_arrived) and self.has_arrived[self.num_reported]:
            self.num_reported += 1
        return self.num_reported - before

    @property
    def is_done(self) -> bool:
        return self.has_failed or self.num_reported == len(self.has_arrived)


class HostCache:
    """The host tier of one engine. All access requires the engine's lock, except for `wait`.

    Args:
      pages: The page allocator, whose `host` it becomes.
      limits: The scheduler's limits.
      copier: Carries out the commands.
    """

    def __init__(self, pages: PageAllocator, limits: SchedulerLimits, copier: Copier):
        self.counts = HostCacheCounts()
        self.rates = Rates()
        self._pages = pages
        # Pages that may be evicted in one step without being lost: those of the longest request, and all decodes'.
        self._num_ahead = limits.num_pages_for(limits.max_context) + limits.max_running
        self._page_size, self._max_running = limits.page_size, limits.max_running
        self._tickets = itertools.count()
        self._last_collected = 0.0
        self.on_clear: Callable[[], None] = lambda: None  # replaced by a cache that also keeps pages
        self.attach()
        self.reset(copier)

    def reset(self, copier: Copier) -> None:
        """Starts over with an empty host memory and other devices, when no request runs."""
        self._copier, self._size = copier, copier.size
        self._index = BlockIndex(copier.size.num_blocks)
        self._fetches: dict[Request, _Fetch] = {}
        self._coming: dict[bytes, _Fetch] = {}
        self._queue: deque[_Fetch] = deque()  # with parts that are not sent
        self._in_flight: dict[int, tuple[_Fetch, _Part]] = {}  # by ticket, oldest first
        self._evicted: list[tuple[int, bytes]] = []
        # The keys of pages that were published, perhaps not saved yet, and not evicted since; the first before the plan
        # dispatched last, whose step fills the others.
        self._published: OrderedDict[int, bytes] = OrderedDict()
        self._just_published: dict[int, bytes] = {}
        self._commands: list[np.ndarray] = []
        self._in_flight_since = 0.0
        self._adopted: deque[tuple[object, tuple[bytes, ...], Any]] = deque()
        self.epoch = object()  # another one after every change after which blocks of before must not be adopted
        self._num_decodes = self._num_prompt_pages = 0  # in the step dispatched last
        self._uncollected: StepPlan | None = None  # that of the step dispatched last, until its tokens are collected
        self._num_waits = 0  # for copies to the device, since the last step
        self.is_behind = False  # whether pages are to be saved for which `take_commands` had no room

    @property
    def size(self) -> HostCacheSize:
        """The sizes of the tier."""
        return self._size

    @property
    def num_pages(self) -> int:
        """The number of pages in host memory."""
        return self._index.num_pages

    @property
    def is_fetching(self) -> bool:
        return bool(self._fetches)

    # What the scheduler calls; see `api.host_tier.HostTier`.

    def num_found(self, keys: Sequence[bytes]) -> int:
        return self._index.num_found(keys)

    def is_coming(self, key: bytes) -> bool:
        return key in self._coming

    def begin(self, request: Request, keys: Sequence[bytes]) -> bool:
        keys = keys[: self._index.num_found(keys)]
        if not keys:
            return False
        first_page = request.num_computed_tokens // self._page_size
        parts: dict[int, _Part] = {}
        for index, key in enumerate(keys):
            block, row = self._index.place(key)
            if block not in parts:
                parts[block] = _Part(block)
            parts[block].rows[row] = index
        num_blocks = len(parts) + sum(len(other.parts) - other.num_sent for other in self._queue) + len(self._in_flight)
        start = first_page * self._page_size
        end = start + len(keys) * self._page_size
        if not self.rates.is_copy_faster(num_blocks * self._size.block_bytes, start, end):
            self.counts.num_recomputed += len(keys)
            return False
        found = _Fetch(request, first_page, keys, list(parts.values()), has_arrived=[False] * len(keys))
        for part in found.parts:
            self._index.pin(part.block)
        self._fetches[request] = found
        self._coming.update(dict.fromkeys(keys, found))
        self._queue.append(found)
        return True

    def abort(self, request: Request) -> None:
        if request in self._fetches:
            self._end(self._fetches[request])

    def evicted(self, page: int, key: bytes) -> None:
        self._published.pop(page, None)
        self._just_published.pop(page, None)
        if not self._index.touch(key):
            self._evicted.append((page, key))

    def published(self, page: int, key: bytes) -> None:
        self._just_published[page] = key

    def clear(self) -> None:
        self.on_clear()
        self.epoch = object()
        self._index.clear()
        self._evicted.clear()
        self._published.clear()
        self._just_published.clear()
        self._commands.append(clear())
        for found in self._fetches.values():
            found.has_failed = True
            for part in found.parts:
                self._index.pin(part.block)  # until it ends

    # What the engine calls.

    def arrivals(self, now: float) -> list[Arrival]:
        """Returns the pages that have arrived. Their WRITE commands are added to those of `take_commands`."""
        self._evicted.clear()
        self._take_adopted()
        for block, is_out_of_memory in self._copier.take_failed():
            self._lose(block)
            if is_out_of_memory:
                self._index.shrink()
        num_blocks = 0
        is_decoding = self._num_decodes and not self._num_prompt_pages
        most = self._num_writes_beside() if is_decoding else len(self._in_flight)
        for ticket, (found, part) in itertools.islice(list(self._in_flight.items()), most):
            state = self._copier.has_arrived(ticket)
            if state is None:
                break
            num_blocks += 1
            del self._in_flight[ticket]
            if state and not found.has_failed:
                self._write(ticket, found, part)
                continue
            self._commands.append(forget(ticket))
            if not found.has_failed:
                self._lose(part.block)
        if num_blocks:
            if self._num_waits > 1:  # the copies that the first wait finds may have waited for a step or ended in one
                self.rates.copied(num_blocks * self._size.block_bytes, max(now - self._in_flight_since, 1e-9))
            self._in_flight_since = now
        arrivals = []
        for request, found in list(self._fetches.items()):
            num_pages = found.take_arrived()
            if num_pages or found.is_done:
                arrivals.append(Arrival(request, num_pages, found.is_done))
            if found.is_done:
                self._end(found)
        return arrivals

    def take_commands(self, now: float, plan: StepPlan | None) -> list[np.ndarray]:
        """Returns the commands to carry out before the step of the plan just made, or now if there is none."""
        is_beside = plan is not None or self._uncollected is not None
        num_prompt_pages = plan.num_prefill_tokens // self._page_size if plan is not None else 0
        self._save(num_prompt_pages, is_beside=is_beside)
        self._send(now, self._num_writes_beside() if is_beside else self._size.max_fetches)
        self._published.update(self._just_published)
        self._just_published.clear()
        if plan is not None or not is_beside:
            self._num_decodes = len(plan.decodes) if plan is not None else 0
            self._num_prompt_pages = num_prompt_pages
        if plan is not None:
            self._uncollected, self._num_waits = plan, 0
        self.counts.num_pages = self._index.num_pages
        commands, self._commands = self._commands, []
        return commands

    def wait(self) -> None:
        """Waits until the oldest copy to the device has ended, or, if there is none and pages are to be saved, one to
        host memory. Needs no lock, but the engine's thread.
        """
        oldest = next(iter(tuple(self._in_flight)), None)  # a copy: another thread may cancel a request meanwhile
        if oldest is not None:
            self._num_waits += 1
            self._copier.wait(oldest)
        elif self.is_behind:
            self._copier.wait_saved()

    def collected(self, plan: StepPlan, dispatched: float, now: float) -> None:
        """Records the time of a step whose tokens were collected."""
        if plan is self._uncollected:
            self._uncollected = None
        seconds = now - max(dispatched, self._last_collected)
        self._last_collected = now
        if plan.prefill_position is not None and seconds > 0.0:
            self.rates.prefill.prefilled(plan.prefill_position, plan.num_batch_tokens, seconds)

    def _write(self, ticket: int, found: _Fetch, part: _Part) -> None:
        self._commands.append(write(ticket))
        for index in part.rows.values():
            found.has_arrived[index] = True
        self.counts.num_restored += len(part.rows)
        self.counts.num_resumed += len(part.rows) if found.request.num_preemptions else 0

    def _lose(self, block: int) -> None:
        """Forgets a block that could not be copied, and fails the fetches that need it."""
        self.counts.num_failed += 1
        self._index.forget(block)
        for found in self._fetches.values():
            found.has_failed |= any(part.block == block for part in found.parts)

    def _end(self, found: _Fetch) -> None:
        """Ends a fetch, complete or not."""
        del self._fetches[found.request]
        if found in self._queue:
            self._queue.remove(found)
        for ticket, (other, _) in list(self._in_flight.items()):
            if other is found:
                del self._in_flight[ticket]
                self._commands.append(forget(ticket))
        for key in found.keys:
            del self._coming[key]
        for part in found.parts:
            self._index.unpin(part.block)

    def _num_writes_beside(self) -> int:
        """Returns how many blocks may be written behind the step in progress, and sent, to be copied beside the next.

        Twice as many may be on their way, because copies begin when the steps dispatched before them have ended. Not
        more than are copied during a step: the input of the one after it takes the same link. Beside decodes fewer,
        because writing delays all of them, unless many requests wait for the pages.
        """
        is_urgent = _URGENT_DECODES * len(self._fetches) >= self._num_decodes
        num_blocks = self._size.writes_beside_decodes * (_URGENT_FACTOR if is_urgent else 1)
        return num_blocks + self._num_beside_prompts(self._num_prompt_pages)

    def _num_beside_prompts(self, num_pages: int) -> int:
        """Returns the least number of blocks copied each way while prompts that fill `num_pages` pages are computed."""
        return 2 * num_pages // self._size.block_pages

    def _send(self, now: float, num_blocks: int) -> None:
        """Sends up to `num_blocks` blocks, until twice as many are in flight or the staging memory is full."""
        most = min(2 * num_blocks, self._size.max_fetches, len(self._in_flight) + num_blocks)
        while self._queue and len(self._in_flight) < most:
            found = self._queue[0]
            if found.has_failed or found.num_sent == len(found.parts):
                self._queue.popleft()
                continue
            part, ticket = found.parts[found.num_sent], next(self._tickets) % _MAX_TICKETS
            found.num_sent += 1
            if not self._in_flight:
                self._in_flight_since = now
            self._in_flight[ticket] = found, part
            held = found.request.pages
            rows = {row: held[found.first_page + index] for row, index in part.rows.items()}
            self._commands.append(fetch(ticket, part.block, rows, self._size.block_pages, self._pages.num_pages))

    def _save(self, num_prompt_pages: int, *, is_beside: bool) -> None:
        """Saves pages that this plan has evicted, then those that would be evicted next.

        Beside a step, as many of the latter are saved as prompts fill in it, and a few.
        """
        num_left, size = self._size.max_saves - self._copier.num_saving(), self._size.block_pages
        evicted, self._evicted = self._evicted, []
        # The first pages of a prefix are evicted last, and without them the others are of no use.
        while evicted and num_left > 0 and self._save_block(evicted[-size:]) is not None:
            del evicted[-size:]
            num_left -= 1
        self.counts.num_lost += len(evicted)
        if is_beside:
            num_left = min(num_left, self._size.saves_beside_decodes + self._num_beside_prompts(num_prompt_pages))
        self.is_behind = False
        while self._pages.num_clean_pages < self._num_ahead:
            found = self._pages.unsaved(size)
            known = [(page, key) for page, key in found if key in self._index]
            if not known:
                is_soon = self._pages.num_clean_pages < self._max_running + size
                if not found or (len(found) < size and not is_soon):
                    self._save_held(num_left)
                    return  # wait for more pages, to fill a block
                if num_left <= 0:
                    self.is_behind = True
                    return
                if self._save_block(found) is None:
                    return
                num_left -= 1
            for page, key in known or found:
                self._index.touch(key)
                self._pages.mark_saved(page)

    def _save_held(self, num_blocks: int) -> None:
        """Saves up to `num_blocks` blocks of pages that requests hold, because no others are left to save ahead.

        A request's pages are then in host memory when it ends and the next one takes them in the same step. Until then
        the devices have them, so these blocks are dropped first, and none is dropped for them.
        """
        size = self._size.block_pages
        while num_blocks > 0 and self._index.num_free:
            held: list[tuple[int, bytes]] = []
            while self._published and len(held) < size:
                page, key = self._published.popitem(last=False)
                if key not in self._index:
                    held.append((page, key))
            if len(held) < size:
                self._published.update(held)
                return
            block = self._save_block(held)
            assert block is not None
            self._index.demote(block)
            num_blocks -= 1

    def _save_block(self, pages: Sequence[tuple[int, bytes]]) -> int | None:
        block = self._index.add([key for _, key in pages])
        if block is None:
            return None
        self._commands.append(save(block, [page for page, _ in pages], self._size.block_pages))
        self.counts.num_saved += len(pages)
        return block

    # What keeps the tier between two runs calls.

    def adopt(self, epoch: object, keys: tuple[bytes, ...], shards: Any) -> None:
        """Adds a block that is in host memory already, as the least recently used one, unless `epoch` has passed.

        May be called from any thread.
        """
        self._adopted.append((epoch, keys, shards))

    def _take_adopted(self) -> None:
        while self._adopted:
            epoch, keys, shards = self._adopted.popleft()
            is_known = any(key in self._index for key in keys)
            if epoch is not self.epoch or is_known or not self._index.num_free:
                continue
            block = self._index.add(keys)
            assert block is not None
            self._index.demote(block)
            self._copier.adopt(block, shards)
            self.counts.num_loaded += len(keys)

    def save_rest(self, run: Callable[[np.ndarray], None]) -> None:
        """Saves the pages that only the devices hold, when the engine has ended. `run` carries out a command."""
        self._take_adopted()
        missing = [(page, key) for page, key in self._pages.kept() if key not in self._index]
        for first in range(0, len(missing), self._size.block_pages):
            if self._save_block(missing[first : first + self._size.block_pages]) is None:
                break
            while self._copier.num_saving() >= self._size.max_saves:
                self._copier.wait_saved()
            commands, self._commands = self._commands, []
            for command in commands:
                run(command)
        while self._copier.num_saving():
            self._copier.wait_saved()
        for block, _ in self._copier.take_failed():
            self._index.forget(block)

    def blocks(self) -> list[tuple[int, tuple[bytes, ...]]]:
        """Returns all blocks with the keys of their pages, least recently used first."""
        return self._index.blocks()

    def detach(self) -> None:
        """Takes the tier away from an engine in which no request runs, and which is to go on without it."""
        self._pages.host = None
        self._published.clear()  # it is not told which of them are evicted
        self._just_published.clear()

    def attach(self) -> None:
        """Gives the tier back to an engine from which it was taken away, and in which no request runs."""
        self._pages.host = self

    def audit(self) -> None:
        self._index.audit(Counter(part.block for found in self._fetches.values() for part in found.parts))
        assert len(self._in_flight) <= self._size.max_fetches, f"{len(self._in_flight)} blocks are on their way"
        coming = {key: found for found in self._fetches.values() for key in found.keys}
        assert coming == self._coming, "the index of pages on their way is not that of the fetches"
        for request, found in self._fetches.items():
            name = f"request {request.request_id}"
            assert request.is_fetching and request.slot is not None, f"{name} has a fetch, but is not fetching"
            num_pages = request.num_computed_tokens // self._page_size
            expected = found.first_page + found.num_reported
            assert num_pages == expected, f"{name} has {num_pages} pages; {found} reported others"
            assert len(request.pages) >= found.first_page + len(found.keys), f"{name} lacks pages for its fetch"
            for part in found.parts:
                for row, index in part.rows.items():
                    key = found.keys[index]
                    is_there = key in self._index and self._index.place(key) == (part.block, row)
                    assert found.has_failed or is_there, f"{name} fetches a page that is not in its block"
        for page, key in (*self._published.items(), *self._just_published.items()):
            assert self._pages.match([key]) == [page], f"page {page} is to be saved, but was evicted"
        assert {found for found, _ in self._in_flight.values()} <= set(self._fetches.values()), "a copy has no fetch"
