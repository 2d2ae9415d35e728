"""Turns changes of the prefix cache into numbered batches of events, and passes them on.

    engine's thread -> PageChanges -> feed's thread: batch, index, history -> ZeroMQ publisher, gRPC subscriptions

The feed takes the changes every 20 ms on its own thread. It knows every cached page, so a reader that has missed
more than the history holds gets the whole state instead, as one batch that begins with "all blocks cleared".

A block is a page under the name that other engines give it. Its hash is the last 8 bytes of the page's key, a number.
Readers use it to tell blocks apart; the routers that are known compute hashes of their own from the tokens.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ...scheduler.page_changes import CacheChange, CachedPage, PageChanges, parents_first
from ...supervision.supervisor import BackgroundTask, Supervisor

_INTERVAL_SECONDS = 0.02
_MAX_HISTORY_BATCHES = 10_000
_MAX_HISTORY_PAGES = 65_536


@dataclass(frozen=True, slots=True)
class BlockRun:
    """Stored blocks of which each follows the one before it."""

    parent: int | None  # hash of the block before the first one; None at the beginning of a prompt
    hashes: tuple[int, ...]
    token_ids: tuple[int, ...]
    cache_salt: str
    adapter: str = ""


@dataclass(frozen=True, slots=True)
class EventBatch:
    """Events with one sequence number; they apply in the order of the fields."""

    sequence: int
    unix_seconds: float
    is_cleared: bool = False
    removed: tuple[int, ...] = ()
    stored: tuple[BlockRun, ...] = ()

    @property
    def num_blocks(self) -> int:
        return len(self.removed) + sum(len(run.hashes) for run in self.stored)


@dataclass(frozen=True, slots=True)
class Replay:
    """What a reader has missed: batches, or one with the whole state if they are no longer known."""

    batches: Sequence[EventBatch]
    is_snapshot: bool


@dataclass(frozen=True, slots=True)
class PublisherAddress:
    """Where batches are published over ZeroMQ."""

    endpoint: str
    topic: str
    replay_endpoint: str  # empty: there are no replays
    max_queued: int  # messages that wait for a slow reader; later ones are dropped


class Publisher(Protocol):
    """Publishes batches outside the process. Used by the feed's thread only, except `source`."""

    @property
    def source(self) -> PublisherAddress:
        """Where it publishes."""

    def send(self, batch: EventBatch) -> None:
        """Sends a batch without waiting for readers."""

    def serve(self, seconds: float, replay: Callable[[int], Replay]) -> None:
        """Waits about that long, and meanwhile answers readers that have missed batches."""

    def close(self) -> None:
        """Closes the sockets."""


def block_hash(key: bytes) -> int:
    """Returns the hash of a block, 0 to 2**64 - 1."""
    return int.from_bytes(key[-8:], "big")


def block_runs(pages: Iterable[CachedPage], max_blocks: int = 2**62) -> tuple[BlockRun, ...]:
    """Joins pages that follow each other."""
    runs: list[list[CachedPage]] = []
    for page in pages:
        if runs and page.parent == runs[-1][-1].key and len(runs[-1]) < max_blocks:
            runs[-1].append(page)
        else:
            runs.append([page])
    return tuple(
        BlockRun(
            parent=None if run[0].parent is None else block_hash(run[0].parent),
            hashes=tuple(block_hash(page.key) for page in run),
            token_ids=tuple(token_id for page in run for token_id in page.token_ids),
            cache_salt=run[0].cache_salt,
            adapter=run[0].adapter,
        )
        for run in runs
    )


class KvEventFeed:
    """Publishes the changes of one prefix cache from a thread of its own."""

    def __init__(self, changes: PageChanges, publisher: Publisher | None = None):
        self.changes = changes
        self._publisher = publisher
        self._lock = threading.Lock()  # guards everything below; held for milliseconds
        self._pages: dict[bytes, CachedPage] = {}  # what readers that have read everything know
        self._next_sequence = 0
        self._history: deque[EventBatch] = deque()
        self._num_history_blocks = 0
        self._readers: list[Callable[[EventBatch], None]] = []
        self._has_failed = False  # readers may lack a change, so that they get the whole state next
        self._is_stopping = threading.Event()
        self._task: BackgroundTask | None = None

    @property
    def source(self) -> PublisherAddress | None:
        """Where batches are published over ZeroMQ; None if they are not."""
        return self._publisher.source if self._publisher is not None else None

    def start(self, supervisor: Supervisor | None = None) -> None:
        """Starts the thread."""
        self._task = (supervisor or Supervisor()).forever("kv-events", self._run, self._is_stopping)

    def stop(self) -> None:
        """Publishes what is left and ends the thread. Idempotent."""
        self._is_stopping.set()
        if self._task is not None:
            self._task.join()
        if self._publisher is not None:
            self._publisher.close()

    def add_reader(self, read: Callable[[EventBatch], None]) -> None:
        """Passes every later batch to `read`, on the feed's thread; it must neither block nor raise."""
        with self._lock:
            self._readers.append(read)

    def remove_reader(self, read: Callable[[EventBatch], None]) -> None:
        """Stops passing batches to `read`."""
        with self._lock:
            self._readers.remove(read)

    def replay(self, start: int) -> Replay:
        """Returns the batches from sequence number `start` on. Takes milliseconds if it must return the whole state."""
        with self._lock:
            oldest = self._history[0].sequence if self._history else self._next_sequence
            if oldest <= start <= self._next_sequence or not self._next_sequence:
                return Replay([batch for batch in self._history if batch.sequence >= start], is_snapshot=False)
            return Replay([self._snapshot(self._next_sequence - 1)], is_snapshot=True)

    def publish(self) -> None:
        """Publishes the changes since the last call. The feed's thread calls it every 20 ms."""
        change = self.changes.take()
        if not (change or self._has_failed):
            return
        with self._lock:
            has_failed, self._has_failed = self._has_failed, True  # until this batch is out
            self._apply(change)
            if has_failed:
                batch = self._snapshot(self._next_sequence)
            else:
                removed, stored = tuple(map(block_hash, change.removed)), block_runs(parents_first(change.stored))
                batch = EventBatch(self._next_sequence, time.time(), change.is_cleared, removed, stored)
            self._next_sequence += 1
            self._remember(batch)
            for read in self._readers:
                read(batch)
        if self._publisher is not None:
            self._publisher.send(batch)
        self._has_failed = False

    def _apply(self, change: CacheChange) -> None:
        if change.is_cleared:
            self._pages.clear()
        for key in change.removed:
            self._pages.pop(key, None)
        self._pages.update(change.stored)

    def _snapshot(self, sequence: int) -> EventBatch:
        """Returns the whole state as one batch."""
        return EventBatch(sequence, time.time(), True, (), block_runs(parents_first(self._pages)))

    def _remember(self, batch: EventBatch) -> None:
        self._history.append(batch)
        self._num_history_blocks += batch.num_blocks
        while len(self._history) > _MAX_HISTORY_BATCHES or self._num_history_blocks > _MAX_HISTORY_PAGES:
            self._num_history_blocks -= self._history.popleft().num_blocks

    def _run(self) -> None:
        while not self._is_stopping.is_set():
            if self._publisher is None:
                self._is_stopping.wait(_INTERVAL_SECONDS)
            else:
                self._publisher.serve(_INTERVAL_SECONDS, self.replay)
            self.publish()
