"""Assigns the adapter slots of the devices to the adapters of running requests. Serves step 4 of 10.

In: requests that are placed and released. Out: which adapters are copied to which slots before the next step.

An adapter keeps its slot while a request with it runs, and afterwards until another one needs it: the one that was used
least recently leaves first. A request whose adapter can have no slot waits, and others are admitted past it, but no
stream of them keeps it out: as many adapters as wait for a slot are drained, which admit no requests behind the waiting
ones any more until their slots are free.
"""

from collections.abc import Mapping, Sequence

from ..api.adapters import AdapterInfo
from ..api.request import Request

Rank = tuple[float, int]


class AdapterSlots:
    """The adapter slots of the devices, by the contents of the adapters (`AdapterInfo.digest`).

    Args:
      num_slots: How many adapters the devices hold.
    """

    def __init__(self, num_slots: int):
        assert num_slots >= 1, num_slots
        self.num_slots = num_slots
        self.num_loads = 0  # from the start
        self._slot_of: dict[str, int] = {}  # from the least to the most recently used
        self._num_running: dict[str, int] = {}  # requests that hold each adapter; none has an entry without any
        self._free = list(reversed(range(num_slots)))
        self._draining: dict[str, Rank] = {}  # admit no request behind this one
        self._loads: list[tuple[int, AdapterInfo]] = []

    def holds(self, digest: str) -> bool:
        """Returns whether an adapter has a slot. May be called from any thread."""
        return digest in self._slot_of

    def may_hold(self, request: Request) -> bool:
        """Returns whether a waiting request may be placed: its adapter, if any, has a slot or can have one."""
        digest = request.adapter_digest
        if not digest:
            return True
        if digest in self._slot_of:
            return digest not in self._draining or request.rank < self._draining[digest]
        return self.num_available > 0

    @property
    def num_available(self) -> int:
        """How many slots no running request holds."""
        return self.num_slots - len(self._num_running)

    def drain(self, waiting: Mapping[str, Rank]) -> None:
        """Renews which adapters are drained.

        Args:
          waiting: The adapters that wait for a slot, and the rank of the first request of each.
        """
        self._draining.clear()
        ranks = sorted(rank for digest, rank in waiting.items() if digest not in self._slot_of)[self.num_available :]
        held = (digest for digest in self._slot_of if digest in self._num_running)
        self._draining.update(zip(held, ranks, strict=False))

    def hold(self, request: Request) -> None:
        """Gives the adapter of a request a slot, which it keeps until `release`. `may_hold` is true."""
        digest = request.adapter_digest
        if not digest:
            return
        assert request.adapter_info is not None, request.request_id
        slot = self._slot_of.pop(digest, None)
        if slot is None:
            slot = self._free.pop() if self._free else self._slot_of.pop(self._least_recent())
            self._loads.append((slot, request.adapter_info))
            self.num_loads += 1
        self._slot_of[digest] = request.adapter_slot = slot
        self._num_running[digest] = self._num_running.get(digest, 0) + 1

    def release(self, request: Request) -> None:
        """Takes note that a request no longer runs. Its adapter keeps the slot until another needs it."""
        if not request.adapter_digest:
            return
        request.adapter_slot = None
        self._num_running[request.adapter_digest] -= 1
        if not self._num_running[request.adapter_digest]:
            del self._num_running[request.adapter_digest]

    def _least_recent(self) -> str:
        return next(digest for digest in self._slot_of if digest not in self._num_running)

    def take_loads(self) -> Sequence[tuple[int, AdapterInfo]]:
        """Returns the slots that were given to adapters since the last call, in order, and what belongs there."""
        loads, self._loads = self._loads, []
        return loads

    def reset(self) -> None:
        """Forgets what the slots hold: the devices have lost it. No request runs."""
        assert not self._num_running, "a request holds an adapter"
        self._slot_of.clear()
        self._loads.clear()
        self._free = list(reversed(range(self.num_slots)))

    def audit(self, running: Sequence[Request]) -> None:
        """Checks the invariants of the slots. Raises AssertionError with the violation."""
        counts: dict[str, int] = {}
        for request in running:
            if request.adapter_digest:
                counts[request.adapter_digest] = counts.get(request.adapter_digest, 0) + 1
                has_slot = request.adapter_slot == self._slot_of.get(request.adapter_digest, -1)
                assert has_slot, f"request {request.request_id} runs without its adapter"
        assert counts == self._num_running, f"running requests hold adapters {counts}, not {self._num_running}"
        slots = sorted([*self._slot_of.values(), *self._free])
        assert slots == list(range(self.num_slots)), f"adapter slots in use and free together are {slots}"


Adapters = AdapterSlots | None  # None if a server has no adapters
