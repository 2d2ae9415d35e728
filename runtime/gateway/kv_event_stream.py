"""Streams KV cache events to a gateway, as `SubscribeKvEvents` of vLLM's gRPC protocol."""

import asyncio
import contextlib
from collections import deque
from typing import Any

from ..telemetry.kv_events.feed import BlockRun, EventBatch, KvEventFeed, Replay

_MAX_BATCHES = 1_000  # that wait for a slow gateway; beyond them it gets the whole state instead
_SNAPSHOT_BLOCKS = 512  # in a message
_SIGN = 2**63


def signed(number: int) -> int:
    """Returns the 64-bit number as the protocol has it, with a sign."""
    return number - 2 * _SIGN if number >= _SIGN else number


class _Waiting:
    """The batches that one gateway has not been sent. Filled by the feed's thread, emptied on the event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._batches: deque[EventBatch] = deque()
        self._filled = asyncio.Event()
        self.has_lost = False  # more batches arrived than it may hold

    def read(self, batch: EventBatch) -> None:
        """Receives a batch on the feed's thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed, as the server has stopped
            self._loop.call_soon_threadsafe(self._add, batch)

    def _add(self, batch: EventBatch) -> None:
        if len(self._batches) >= _MAX_BATCHES:
            self._batches.clear()
            self.has_lost = True
        if not self.has_lost:
            self._batches.append(batch)
        self._filled.set()

    def restart(self) -> None:
        """Starts over after a loss, before the gateway is sent the whole state."""
        self.has_lost = False

    async def take(self) -> list[EventBatch]:
        """Waits for batches and removes them."""
        await self._filled.wait()
        self._filled.clear()
        taken = list(self._batches)
        self._batches.clear()
        return taken


async def stream_events(feed: KvEventFeed, start: int, pb: Any, context: Any) -> None:
    """Sends the batches from `start` on, or the whole state and what follows, until the call ends.

    Args:
      start: The first sequence number that the gateway wants; 0 is the present state.
      pb: The module of the protocol's common messages.
    """
    await context.send_initial_metadata(())  # so that the gateway knows at once that the method exists
    waiting, messages = _Waiting(), _Messages(pb, feed.changes.page_size)
    feed.add_reader(waiting.read)
    try:
        replay = await asyncio.to_thread(feed.replay, start)
        while True:
            sent = await _send(messages.of_replay(replay), context, start - 1)
            while not waiting.has_lost:
                for batch in await waiting.take():
                    if batch.sequence > sent:  # otherwise the replay contained it
                        sent = await _send([messages.of_batch(batch)], context, sent)
            waiting.restart()
            replay = await asyncio.to_thread(feed.replay, 0)
    finally:
        feed.remove_reader(waiting.read)


async def _send(messages: list[Any], context: Any, sent: int) -> int:
    """Sends messages and returns the last sequence number that the gateway has; `sent` if there are none."""
    for message in messages:
        await context.write(message)
        sent = message.sequence_number
    return sent


class _Messages:
    """Builds the protocol's messages."""

    def __init__(self, pb: Any, page_size: int):
        self._pb = pb
        self._page_size = page_size
        self._num_events = 0

    def of_replay(self, replay: Replay) -> list[Any]:
        if replay.is_snapshot:
            return self._of_snapshot(replay.batches[0])
        return [self.of_batch(batch) for batch in replay.batches]

    def of_batch(self, batch: EventBatch) -> Any:
        message = self._pb.KvEventBatch(sequence_number=batch.sequence, timestamp=batch.unix_seconds, dp_rank=0)
        if batch.is_cleared:
            self._add(message, cleared=self._pb.KvCacheCleared())
        if batch.removed:
            hashes = list(map(signed, batch.removed))
            device = self._pb.KV_CACHE_TIER_DEVICE
            self._add(message, removed=self._pb.KvBlocksRemoved(block_hashes=hashes, tier=device))
        for run in batch.stored:
            self._add(message, stored=self._stored(run))
        return message

    def _add(self, message: Any, **event: Any) -> None:
        self._num_events += 1
        message.events.append(self._pb.KvCacheEvent(event_id=self._num_events, **event))

    def _of_snapshot(self, batch: EventBatch) -> list[Any]:
        """Splits the state into messages, whose sequence numbers end with that of the state."""
        parts: list[list[BlockRun]] = [[]]
        num_blocks, most = 0, max(_SNAPSHOT_BLOCKS, batch.num_blocks // (batch.sequence + 1) + 1)
        for run in batch.stored:
            num_blocks += len(run.hashes)
            if num_blocks > most and parts[-1] and len(parts) <= batch.sequence:
                parts.append([])
                num_blocks = len(run.hashes)
            parts[-1].append(run)
        messages = []
        for index, part in enumerate(parts):
            sequence = batch.sequence - len(parts) + 1 + index
            message = self.of_batch(EventBatch(sequence, batch.unix_seconds, index == 0, (), tuple(part)))
            message.snapshot.CopyFrom(
                self._pb.KvSnapshotChunk(index=index, count=len(parts), blocks=batch.num_blocks, unknown_before=0)
            )
            messages.append(message)
        return messages

    def _stored(self, run: BlockRun) -> Any:
        pb, size = self._pb, self._page_size
        blocks = [
            pb.KvBlock(
                block_hash=signed(number),
                token_ids=run.token_ids[index * size : (index + 1) * size],
                block_size=size,
                extra_keys=[pb.KvBlockExtraKey(text=text) for text in _extra_keys(run, index)],
            )
            for index, number in enumerate(run.hashes)
        ]
        stored = pb.KvBlocksStored(blocks=blocks, tier=pb.KV_CACHE_TIER_DEVICE, medium="GPU")
        if run.parent is not None:
            stored.parent_block_hash = signed(run.parent)
        if run.cache_salt:
            stored.cache_salt = run.cache_salt
        if run.adapter:
            stored.lora_name = run.adapter
        return stored


def _extra_keys(run: BlockRun, index: int) -> list[str]:
    """Returns what entered the hash of a block besides its tokens: its adapter and, in the first one, the salt."""
    salts = [run.cache_salt] if run.cache_salt and run.parent is None and index == 0 else []
    return [*([run.adapter] if run.adapter else []), *salts]
