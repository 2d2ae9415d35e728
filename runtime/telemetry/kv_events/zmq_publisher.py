"""Publishes KV cache events over ZeroMQ, in the layout of vLLM's publisher.

PUB socket, one message a batch: topic, sequence number (8 bytes, big-endian), payload. The payload is msgpack:

    [unix seconds, [event...], 0]                                    the last number is the data-parallel rank
    ["BlockStored", hashes, parent hash, token ids, block size, LoRA id, medium, LoRA name, extra keys]
    ["BlockRemoved", hashes, medium]
    ["AllBlocksCleared"]

Fields at the end that have no value are left out. The extra keys of a block are those that entered its hash besides
the tokens: the name of the adapter (LoRA) and, for the first block of a prompt, the cache salt.

ROUTER socket for readers that missed batches: they send an empty frame and the first sequence number they need, and
get messages of an empty frame, topic, sequence number and payload. The last one has an empty topic and payload.
"""

import logging
from collections.abc import Callable
from typing import Any

from ...api.errors import ConfigError
from .feed import EventBatch, PublisherAddress, Replay

_MEDIUM = "GPU"  # how readers name the memory of the device, of whatever kind
_END = (-1).to_bytes(8, "big", signed=True)
_MAX_QUEUED = 100_000  # messages for one slow reader; later ones are dropped, and the reader notices the gap
_MAX_REPLAYS = 16  # at a time, before the next batch is published
_log = logging.getLogger(__name__)


def payload(batch: EventBatch, page_size: int) -> bytes:
    """Encodes a batch."""
    import msgpack

    events: list[list[Any]] = [["AllBlocksCleared"]] if batch.is_cleared else []
    if batch.removed:
        events.append(["BlockRemoved", batch.removed, _MEDIUM])
    for run in batch.stored:
        event: list[Any] = ["BlockStored", run.hashes, run.parent, run.token_ids, page_size, None, _MEDIUM]
        salt = [run.cache_salt] if run.cache_salt and run.parent is None else []
        if run.adapter:
            event += [run.adapter, [[run.adapter, *salt], *[[run.adapter]] * (len(run.hashes) - 1)]]
        elif salt:
            event += [None, [salt, *[None] * (len(run.hashes) - 1)]]
        events.append(event)
    return msgpack.packb([batch.unix_seconds, events, 0])


class ZmqPublisher:
    """The sockets. Created and closed anywhere; otherwise used by the feed's thread only."""

    def __init__(self, *, endpoint: str, replay_endpoint: str, topic: str, page_size: int):
        """Opens the sockets.

        Raises:
          ConfigError: The extra `kv-events` is not installed, or an endpoint cannot be bound.
        """
        try:
            import msgpack  # noqa: F401  # used by `payload`
            import zmq
        except ImportError as error:
            message = f"--kv-events-endpoint needs meshserve with the extra [kv-events]: {error}."
            raise ConfigError(message) from error
        self._zmq = zmq
        self._topic, self._page_size = topic.encode(), page_size
        self._context = zmq.Context()
        self._pub = self._bound("kv_events_endpoint", endpoint, zmq.PUB, _MAX_QUEUED)
        self._router = None
        if replay_endpoint:
            self._router = self._bound("kv_events_replay_endpoint", replay_endpoint, zmq.ROUTER, 2 * _MAX_QUEUED)
        self._poller = zmq.Poller()
        if self._router is not None:
            self._poller.register(self._router, zmq.POLLIN)
        self.source = self._source()

    def _source(self) -> PublisherAddress:
        ends = [
            "" if socket is None else socket.getsockopt_string(self._zmq.LAST_ENDPOINT)
            for socket in (self._pub, self._router)
        ]
        return PublisherAddress(ends[0], self._topic.decode(), ends[1], _MAX_QUEUED)

    def _bound(self, option: str, endpoint: str, kind: int, max_queued: int) -> Any:
        socket = self._context.socket(kind)
        socket.set_hwm(max_queued)
        socket.linger = 0
        try:
            socket.bind(endpoint)
        except self._zmq.ZMQError as error:
            self._context.destroy()
            raise ConfigError(
                f"{option} is {endpoint!r}, which cannot be bound: {error}. Use tcp://ADDRESS:PORT with an address of "
                "this machine and a free port, or ipc://PATH."
            ) from error
        return socket

    def send(self, batch: EventBatch) -> None:
        """Implements `feed.Publisher.send`."""
        self._pub.send_multipart(self._frames(batch))

    def _frames(self, batch: EventBatch) -> list[bytes]:
        return [self._topic, batch.sequence.to_bytes(8, "big"), payload(batch, self._page_size)]

    def serve(self, seconds: float, replay: Callable[[int], Replay]) -> None:
        """Implements `feed.Publisher.serve`."""
        self._poller.poll(int(seconds * 1000))
        for _ in range(_MAX_REPLAYS):
            if self._router is None or not self._router.poll(0):
                return
            self._replay(self._router.recv_multipart(), replay)

    def _replay(self, frames: list[bytes], replay: Callable[[int], Replay]) -> None:
        if len(frames) != 3 or frames[1] or len(frames[2]) != 8:
            _log.warning("ignored a replay request of %d frames; it must be an empty one and 8 bytes", len(frames) - 1)
            return
        assert self._router is not None
        reader, start = frames[0], int.from_bytes(frames[2], "big")
        for batch in replay(start).batches:
            self._router.send_multipart([reader, b"", *self._frames(batch)])
        self._router.send_multipart([reader, b"", b"", _END, b""])

    def close(self) -> None:
        """Implements `feed.Publisher.close`."""
        self._context.destroy(linger=0)
