"""An independent reader of KV cache events: knows vLLM's message layout only, and nothing of meshserve.

It decodes strictly, notices gaps by the sequence numbers, asks for what it missed, and rebuilds the index of blocks.
"""

import hashlib
import threading
from array import array
from typing import Any

import msgspec
import zmq


class BlockStored(msgspec.Struct, array_like=True, tag=True, omit_defaults=True):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None = None
    extra_keys: list[tuple[Any, ...] | None] | None = None


class BlockRemoved(msgspec.Struct, array_like=True, tag=True, omit_defaults=True):
    block_hashes: list[int]
    medium: str | None = None


class AllBlocksCleared(msgspec.Struct, array_like=True, tag=True):
    pass


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class Block(msgspec.Struct, frozen=True):
    parent: int | None
    token_ids: tuple[int, ...]
    extra_keys: tuple[Any, ...]


class Index:
    """The blocks that one replica holds, as its events tell."""

    def __init__(self) -> None:
        self.blocks: dict[int, Block] = {}
        self.num_stored = self.num_removed = self.num_cleared = 0
        self._decoder = msgspec.msgpack.Decoder(KVEventBatch)

    def apply(self, payload: bytes) -> None:
        for event in self._decoder.decode(payload).events:
            if isinstance(event, AllBlocksCleared):
                self.blocks.clear()
                self.num_cleared += 1
            elif isinstance(event, BlockRemoved):
                for block_hash in event.block_hashes:
                    del self.blocks[block_hash]
                    self.num_removed += 1
            else:
                self._store(event)

    def _store(self, event: BlockStored) -> None:
        size, parent = event.block_size, event.parent_block_hash
        assert len(event.token_ids) == size * len(event.block_hashes) and event.medium == "GPU"
        extra_keys = event.extra_keys or [None] * len(event.block_hashes)
        for number, (block_hash, extra) in enumerate(zip(event.block_hashes, extra_keys, strict=True)):
            tokens = tuple(event.token_ids[number * size : (number + 1) * size])
            assert block_hash not in self.blocks, "stored twice"
            self.blocks[block_hash] = Block(parent, tokens, tuple(extra or ()))
            self.num_stored += 1
            parent = block_hash

    def prefix(self, block_hash: int) -> tuple[tuple[Any, ...], tuple[int, ...]] | None:
        """Returns the extra keys of a block's first block and all tokens up to its end; None if one is missing."""
        tokens: tuple[int, ...] = ()
        current: int | None = block_hash
        while current is not None:
            if (block := self.blocks.get(current)) is None:
                return None
            tokens, extra_keys, current = block.token_ids + tokens, block.extra_keys, block.parent
        return extra_keys, tokens


def expected_hash(salt: str, tokens: tuple[int, ...], block_size: int) -> int:
    """Returns the hash of the block that ends with `tokens`, as docs/fleet.md defines it."""
    key = hashlib.sha256(salt.encode()).digest()
    for start in range(0, len(tokens), block_size):
        key = hashlib.sha256(key + array("q", tokens[start : start + block_size]).tobytes()).digest()
    return int.from_bytes(key[-8:], "big")


def check_prefixes(index: Index, block_size: int) -> int:
    """Checks that parents, tokens and salts of the index give its hashes. Returns how many blocks could be checked."""
    num_checked = 0
    for block_hash in index.blocks:
        if (found := index.prefix(block_hash)) is not None:
            extra_keys, tokens = found
            salt = extra_keys[0] if extra_keys else ""
            assert expected_hash(salt, tokens, block_size) == block_hash
            num_checked += 1
    return num_checked


class Subscriber:
    """Follows one publisher on a thread of its own, from its first event on."""

    def __init__(self, endpoint: str, replay_endpoint: str = "", topic: str = "kv@"):
        self.index = Index()
        self.lock = threading.Lock()  # guards `index`
        self.error: BaseException | None = None
        self.topics: set[str] = set()
        self.num_replayed = 0
        self.next_sequence = 0
        self._endpoints = endpoint, replay_endpoint
        self._topic = topic
        self._is_stopping = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "Subscriber":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_stopping.set()
        self._thread.join()

    def hashes(self) -> set[int]:
        assert self.error is None, self.error
        with self.lock:
            return set(self.index.blocks)

    def _run(self) -> None:
        context = zmq.Context()
        try:
            socket = context.socket(zmq.SUB)
            socket.setsockopt_string(zmq.SUBSCRIBE, self._topic)
            socket.connect(self._endpoints[0])
            self.replay(context)
            while not self._is_stopping.is_set():
                if socket.poll(20):
                    self._take(context, *socket.recv_multipart())
        except BaseException as error:
            self.error = error
            raise
        finally:
            context.destroy(linger=0)

    def _take(self, context: zmq.Context, topic: bytes, number: bytes, payload: bytes) -> None:
        self.topics.add(topic.decode())
        sequence = int.from_bytes(number, "big")
        if sequence > self.next_sequence:
            self.replay(context)
        if sequence == self.next_sequence:
            self._apply(sequence, payload)

    def _apply(self, sequence: int, payload: bytes) -> None:
        with self.lock:
            self.index.apply(payload)
        self.next_sequence = sequence + 1

    def replay(self, context: zmq.Context) -> None:
        """Asks for everything from the next sequence number on."""
        if not self._endpoints[1]:
            return
        socket = context.socket(zmq.DEALER)
        try:
            socket.connect(self._endpoints[1])
            socket.send_multipart([b"", self.next_sequence.to_bytes(8, "big")])
            while not self._is_stopping.is_set():
                if not socket.poll(20):
                    continue
                empty, topic, number, payload = socket.recv_multipart()
                assert not empty
                if not payload:
                    assert number == b"\xff" * 8 and not topic
                    return
                self._apply(int.from_bytes(number, "big"), payload)
                self.num_replayed += 1
        finally:
            socket.close(linger=0)
