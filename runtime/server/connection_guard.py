"""Closes connections on which calls only cost: calls that are reset before their message came.

gRPC accepts every call before Python sees it, and keeps it until Python has taken it, also if it has been reset
meanwhile. Taking one costs the event loop 40 us, so whoever resets calls as fast as a connection carries them would
delay all other callers by seconds. gRPC itself has no limit of resets and gives no access to its connections. But their
sockets belong to this process, and one that is shut down here looks to gRPC as if the caller had closed it.
"""

import contextlib
import ctypes
import functools
import logging
import queue
import threading
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from . import peer_sockets
from .packet_filter import Network, drop_packets

_WINDOW_SECONDS = 1.0
# Wasted calls that are allowed within a window: on one connection, on one over which proper calls have come (a proxy's
# may carry those of many callers), and on all connections of one address that have had no proper call. When the server
# pauses, every call on a connection may expire before it is seen: a proxy's then has at most 2,048 wasted ones.
_MAX_WASTED, _MAX_WASTED_AMONG_PROPER, _MAX_WASTED_OF_ADDRESS = 100, 5_000, 200
_MAX_PROPER = 65_536  # connections that are remembered
_BAN_SECONDS = 10.0  # for which an address without any proper call cannot connect again
_MAX_BANNED = 256  # addresses
_QUIET_SECONDS = 5.0  # without anything to close, before memory is given back
_LOG_SECONDS = 10.0  # between two lines about closed connections

_log = logging.getLogger(__name__)
_network_of = functools.lru_cache(4_096)(peer_sockets.network_of)


@dataclass(frozen=True)
class _Order:
    """What to close: the connections of these peers.

    With `is_ban` also all others of their network, from which no proper call has come, and it cannot connect again for
    a while.
    """

    network: Network | None
    peers: frozenset[str]
    is_ban: bool


class ConnectionGuard:
    """Counts the wasted calls of each peer, and closes connections over which too many come.

    `proper` and `wasted` are called on the event loop, with `context.peer()` of a call; `run` is a background task.

    Args:
      count_closed: Receives how many connections have been closed.
      now: The time in seconds.
    """

    def __init__(self, count_closed: Callable[[int], None] = lambda _: None, now: Callable[[], float] = time.monotonic):
        self.port: int | None = None  # whose connections are guarded; set once it is bound
        self.is_stopping = threading.Event()
        self._count_closed, self._now = count_closed, now
        self._orders: queue.SimpleQueue[_Order | None] = queue.SimpleQueue()
        self._proper: OrderedDict[str, Network | None] = OrderedDict()  # by peer, the one of the last call last
        self._num_proper: Counter[Network | None] = Counter()  # how many of these a network has
        self._window_end = 0.0
        self._wasted: Counter[str] = Counter()  # in this window, by peer
        self._wasted_of: defaultdict[Network | None, list[str]] = defaultdict(list)  # likewise, the peer of each call
        self._ban_ends: dict[Network, float] = {}
        self._trim_at: float | None = None  # when to give memory back
        self._quiet_until = 0.0  # no line is logged before
        self._num_unlogged = 0

    def proper(self, peer: str) -> None:
        """Notes that a call has come with its message, and a valid token if one is needed."""
        if peer in self._proper:
            self._proper.move_to_end(peer)
            return
        self._proper[peer] = network = _network_of(peer)
        self._num_proper[network] += 1
        if len(self._proper) > _MAX_PROPER:
            _, network = self._proper.popitem(last=False)
            self._num_proper[network] -= 1
            if not self._num_proper[network]:
                del self._num_proper[network]

    def wasted(self, peer: str) -> None:
        """Notes that a call was reset or closed before its message came, or before it was refused."""
        if self._now() >= self._window_end:
            self._wasted.clear()
            self._wasted_of.clear()
            self._window_end = self._now() + _WINDOW_SECONDS
        network, is_proper = _network_of(peer), peer in self._proper
        self._wasted[peer] += 1
        if self._wasted[peer] > (_MAX_WASTED_AMONG_PROPER if is_proper else _MAX_WASTED):
            self._wasted[peer] = 0
            self._close(network, [peer])
        if not is_proper:
            self._wasted_of[network].append(peer)
            if len(self._wasted_of[network]) > _MAX_WASTED_OF_ADDRESS:
                self._close(network, self._wasted_of.pop(network))

    def run(self) -> None:
        """Closes what has to be closed until `stop`."""
        while True:
            try:
                order = self._orders.get(timeout=self._seconds_to_wait())
            except queue.Empty:
                self._end_bans()
                self._give_back_memory()
                continue
            if order is None:
                return
            self._carry_out(order)

    def stop(self) -> None:
        """Ends `run`."""
        self.is_stopping.set()
        self._orders.put(None)

    def _close(self, network: Network | None, peers: Sequence[str]) -> None:
        is_ban = network is not None and network not in self._num_proper
        self._orders.put(_Order(network, frozenset(peers), is_ban))

    def _carry_out(self, order: _Order) -> None:
        if order.is_ban and order.network is not None and len(self._ban_ends) < _MAX_BANNED:
            is_new = order.network not in self._ban_ends
            self._ban_ends[order.network] = self._now() + _BAN_SECONDS
            if is_new:
                self._set_filters()
        num_closed = 0
        for connection, peer in peer_sockets.connections(self.port or 0):
            is_banned = order.is_ban and _network_of(peer) == order.network and peer not in self._proper
            if peer in order.peers or is_banned:
                num_closed += peer_sockets.close(connection)
        if num_closed:
            self._trim_at = self._now() + _QUIET_SECONDS
            self._count_closed(num_closed)
        self._log(order, num_closed)

    def _log(self, order: _Order, num_closed: int) -> None:
        self._num_unlogged += num_closed
        if self._num_unlogged and self._now() >= self._quiet_until:
            _log.warning(
                "closed %d connections, the last of %s: calls on them were reset before their message came",
                self._num_unlogged,
                order.network,
            )
            self._num_unlogged, self._quiet_until = 0, self._now() + _LOG_SECONDS

    def _seconds_to_wait(self) -> float | None:
        """Returns how long there is nothing to do without an order; None without end."""
        times = [*self._ban_ends.values(), *([] if self._trim_at is None else [self._trim_at])]
        return max(0.0, min(times) - self._now()) if times else None

    def _end_bans(self) -> None:
        if over := [network for network, end in self._ban_ends.items() if end <= self._now()]:
            for network in over:
                del self._ban_ends[network]
            self._set_filters()

    def _set_filters(self) -> None:
        for listener in peer_sockets.listeners(self.port or 0):
            with contextlib.suppress(OSError):  # then its connections are closed again and again
                drop_packets(listener, [*self._ban_ends])

    def _give_back_memory(self) -> None:
        """Returns to the system what the calls have taken: glibc keeps it otherwise. Takes some 60 ms after a flood."""
        if self._trim_at is not None and self._trim_at <= self._now():
            self._trim_at = None
            with contextlib.suppress(OSError, AttributeError):  # another C library
                ctypes.CDLL(None).malloc_trim(0)
