"""Models the protocol of p2p.cuh and two_shot.cuh and checks every possible order of its steps.

A rank that has ended a round sends one word of the next round to every inbox; a word arrives at any later time. The
kernel of a round takes one word from each of its rank's slots, its own first and the others in any order. Kernels of
later rounds may already have started and take the words they find. A slot whose word was taken is guaranteed to be
empty only when the kernel that took it ends; the model assumes this worst case. No word may arrive in a slot that is
not empty, and no kernel may take a word of another round.
"""

import itertools
from collections.abc import Iterator

import pytest

EMPTY = -1
_TAKEN = -2  # minus the round of the word: the slot is not empty yet


class BrokenError(AssertionError):
    """The protocol lost or confused a word."""


class Protocol:
    """The protocol's states: each rank's round and the ranks its kernels took from, the slots, and words in transit."""

    def __init__(self, num_ranks: int, num_rounds: int, num_buffers: int, num_kernels: int, rounds_of_a_kernel: int):
        self.num_ranks, self.num_rounds, self.num_buffers = num_ranks, num_rounds, num_buffers
        self.num_kernels = num_kernels  # kernels of consecutive rounds that may run at the same time
        self.rounds_of_a_kernel = rounds_of_a_kernel

    def slot(self, to: int, number: int, by: int) -> int:
        return (to * self.num_buffers + number % self.num_buffers) * self.num_ranks + by

    def words(self, by: int, number: int) -> frozenset[tuple[int, int, int]]:
        return frozenset((by, to, number) for to in range(self.num_ranks) if number < self.num_rounds)

    def start(self) -> tuple:
        words = frozenset().union(*(self.words(by, 0) for by in range(self.num_ranks)))
        ranks = ((0, (0,) * self.num_kernels),) * self.num_ranks
        return ranks, (EMPTY,) * (self.num_ranks**2 * self.num_buffers), words

    def arrivals(self, ranks: tuple, slots: tuple, flying: frozenset) -> Iterator[tuple]:
        for by, to, number in flying:
            place = self.slot(to, number, by)
            if slots[place] <= _TAKEN:
                raise BrokenError(f"a word of round {number} fell on what round {_TAKEN - slots[place]} was to empty")
            if slots[place] != EMPTY:
                raise BrokenError(f"a word of round {number} fell on one of round {slots[place]}")
            yield ranks, replaced(slots, place, number), flying - {(by, to, number)}

    def takings(self, ranks: tuple, slots: tuple, flying: frozenset) -> Iterator[tuple]:
        places = itertools.product(range(self.num_ranks), range(self.num_kernels), range(self.num_ranks))
        for rank, kernel, other in places:
            first, taken = ranks[rank]
            number, mine = first + kernel, taken[kernel]
            place = self.slot(rank, number, other)
            has_own = mine >> rank & 1 or slots[self.slot(rank, number, rank)] > EMPTY
            if mine >> other & 1 or slots[place] <= EMPTY or not has_own:
                continue
            if slots[place] != number:
                raise BrokenError(f"rank {rank} took a word of round {slots[place]} in round {number}")
            taken = replaced(taken, kernel, mine | 1 << other)
            is_done = taken[0] == (1 << self.num_ranks) - 1
            after = (first + 1, (*taken[1:], 0)) if is_done else (first, taken)
            sent = self.words(rank, first + 1) if is_done else frozenset()
            slots_after = replaced(slots, place, _TAKEN - number)
            if is_done and (first + 1) % self.rounds_of_a_kernel == 0:
                slots_after = self.emptied(slots_after, rank, first)
            yield replaced(ranks, rank, after), slots_after, flying | sent

    def emptied(self, slots: tuple, rank: int, number: int) -> tuple:
        """Empties those of the rank's slots that it took from in this round or before."""
        width = self.num_ranks * self.num_buffers
        own = slots[rank * width : (rank + 1) * width]
        own = tuple(EMPTY if _TAKEN - number <= word <= _TAKEN else word for word in own)
        return (*slots[: rank * width], *own, *slots[(rank + 1) * width :])


def explore(
    num_ranks: int, num_rounds: int, num_buffers: int, num_kernels: int = 1, rounds_of_a_kernel: int = 1
) -> int:
    """Visits every state and returns the number of states."""
    protocol = Protocol(num_ranks, num_rounds, num_buffers, num_kernels, rounds_of_a_kernel)
    seen, open_states = {protocol.start()}, [protocol.start()]
    while open_states:
        state = open_states.pop()
        nexts = {*protocol.arrivals(*state), *protocol.takings(*state)}
        if not nexts and any(number < num_rounds for number, _ in state[0]):
            raise BrokenError("deadlock: no rank can continue")
        open_states += nexts - seen
        seen |= nexts
    return len(seen)


def replaced(values: tuple, index: int, value: object) -> tuple:
    return (*values[:index], value, *values[index + 1 :])


@pytest.mark.parametrize(("num_ranks", "num_rounds"), [(2, 6), (3, 3)])
def test_two_slots_per_rank_suffice(num_ranks: int, num_rounds: int) -> None:
    assert explore(num_ranks, num_rounds, 2) > 100


def test_one_slot_per_rank_does_not_suffice() -> None:
    with pytest.raises(BrokenError, match=r"round"):
        explore(2, 3, 1)


@pytest.mark.parametrize(("num_ranks", "num_rounds"), [(2, 6), (3, 3)])
def test_two_slots_suffice_if_the_next_rounds_kernel_has_started(num_ranks: int, num_rounds: int) -> None:
    """Both gathers of a layer may run at the same time."""
    assert explore(num_ranks, num_rounds, 2, num_kernels=2) > 100


def test_two_slots_do_not_suffice_if_a_kernel_two_rounds_ahead_has_started() -> None:
    """This is why the QKV projection lets no kernel start before the preceding gather has ended."""
    with pytest.raises(BrokenError, match=r"took a word of round 0 in round 2"):
        explore(2, 6, 2, num_kernels=3)


@pytest.mark.parametrize("num_buffers", [2, 3, 4])
def test_no_number_of_slots_suffices_for_several_rounds_per_kernel(num_buffers: int) -> None:
    """This is why a two-shot call uses no slot twice."""
    with pytest.raises(BrokenError, match=r"was to empty"):
        explore(2, 6, num_buffers, rounds_of_a_kernel=6)
