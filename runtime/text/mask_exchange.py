"""Follows the outputs of constrained samples in worker processes, and fetches the token masks from there.

Accompanies step 8 of 10. In: the tokens of each sample. Out: for each, the mask of its next token, as soon as a worker
has computed it. Nothing here waits for a worker for longer than it is told to: a sample whose mask takes long has
none for a while, and the others go on.

The fast constraints of a tenant share a few workers, which other tenants do not wait for. A constraint whose masks turn
out slow moves to a worker of its own, which runs at low priority; of these only some compute at the same time, those
whose tenants have used the least. When a shared worker crashes, the sample that it was busy with goes on in a
worker of its own, where a second crash ends it with an error. All others start again in another worker.
"""

import os
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence

import numpy as np

from ..api.errors import QuotaExceededError
from .grammar import FIRST_NUMBER, Compiled, Grammar, Grammars, one_line
from .worker_processes import WorkerLostError, WorkerProcess, wait_for_any
from .worker_protocol import HAS_FAILED, IS_COMPLETE, MAY_END, MUST_END

_SLOW_SECONDS = 0.01  # steps do not wait for samples whose masks take longer
_VERY_SLOW_SECONDS = 0.1  # constraints with a mask that takes longer do not stay in a shared worker,
_MAX_SLOW_MASKS = 3  # nor do those with more slow masks
_STUCK_SECONDS = 0.25  # a shared worker that computes for so long without an answer is replaced
_RESTART_SECONDS = 0.05  # constraints that compile within this may be compiled again for one sample
_NUM_ROWS_PER_WORKER = 16  # from which on another shared worker is started, if there may be one
_MAX_SHARED = 16  # shared workers of all tenants; with more tenants, some share one
_MAX_MOVES = 8  # moves of a sample between workers without a mask in between
_MAX_CONSTRAINTS = 64  # without samples that a shared worker keeps compiled
_FADE = 0.9


class Matcher:
    """Position of one sample in its grammar.

    Attributes:
      mask: As in `Grammar`, for the next token. Meaningless while `is_waiting`.
      is_waiting: Whether the mask has not come yet.
      failure: Why the sample cannot go on, or None.
      drafts: The draft tokens that may follow, for whose positions masks are asked for together with the next mask.
      ahead: The first of these, each with the mask and the state after it.
    """

    def __init__(self, grammar: Grammar):
        self.grammar = grammar
        self.mask = grammar.mask
        self.is_waiting = False
        self.failure: str | None = None
        self._state = grammar.state
        self.compiled: Compiled = grammar.compiled
        self.token_ids = list(grammar.resumed)
        self.drafts: Sequence[int] = ()
        self.ahead: list[tuple[int, np.ndarray, int]] = []
        self.num_sent = 0  # `token_ids` sent to the worker that follows the sample
        self.place: tuple[_Followers, int] | None = None  # the worker, and the sample's row there
        self.num_moves = 0
        self.has_restarted = False
        self.is_closed = False

    def answer(self, masks: np.ndarray, state: int, states_ahead: Sequence[int]) -> None:
        """Sets what a worker has found: the masks and states of the next token and after the draft tokens."""
        self.mask, self._state, self.is_waiting = masks[0], state, False
        self.ahead = list(zip(self.drafts, masks[1:], states_ahead, strict=False))

    def advance(self, token_id: int) -> None:
        """Goes to the next position. If the token is not the first of `ahead`, its mask has yet to come."""
        self.token_ids.append(token_id)
        self.is_waiting = True
        if self.ahead and self.ahead[0][0] == token_id:
            _, self.mask, self._state = self.ahead.pop(0)
        else:
            self.ahead.clear()

    def start_over(self) -> None:
        """Goes on with a compiled constraint that no other sample has."""
        shared = self.compiled
        self.compiled = Compiled(shared.constraint, shared.seconds)
        self.compiled.is_fast, self.compiled.worker = shared.is_fast, shared.worker
        self.num_sent = 0
        self.grammar.grammars.forget(shared)

    def fail(self, reason: str) -> None:
        """Gives the sample up."""
        self.failure, self.is_waiting = reason, False

    def allows(self, token_id: int) -> bool:
        """Returns whether the mask allows a token."""
        word, bit = divmod(token_id, 32)
        return bool(int(self.mask[word]) >> bit & 1)

    @property
    def is_complete(self) -> bool:
        """Whether no further token is allowed, except an end token."""
        return bool(self._state & (IS_COMPLETE | MUST_END))

    @property
    def may_end(self) -> bool:
        """Whether the output may end here."""
        return bool(self._state & (MAY_END | IS_COMPLETE))

    @property
    def is_slow(self) -> bool:
        """Whether its masks have taken long lately."""
        return self.place is not None and self.place[0].is_slow


class _Followers:
    """A worker and the samples that it follows."""

    def __init__(self, worker: WorkerProcess, is_shared: bool):
        self.worker = worker
        self.is_shared = is_shared
        self.rows: dict[int, Matcher] = {}
        self.numbers: dict[Compiled, int] = {}  # the constraints that it has compiled
        self.asked: list[tuple[Matcher, int]] = []  # samples, and how many of their tokens it had before
        self.seconds = 0.0  # that its answers have taken lately
        self.is_late = False  # it was not there when the wait ended
        self._num_numbers = 0
        self._free: list[int] = []  # rows that it has not been told of

    @property
    def is_slow(self) -> bool:
        return self.seconds > _SLOW_SECONDS

    def take(self, matcher: Matcher) -> None:
        """Takes a sample in, which there is a row for."""
        row = self.worker.free_rows.pop()
        self.rows[row] = matcher
        matcher.place, matcher.num_sent = (self, row), 0
        matcher.num_moves += 1

    def release(self, row: int) -> None:
        """Forgets a sample."""
        del self.rows[row]
        self._free.append(row)
        self.worker.free_rows.append(row)

    def ask(self, matchers: Iterable[Matcher]) -> None:
        """Sends the tokens of samples that have advanced."""
        sources, rows, ahead = {}, [], []
        for matcher in matchers:
            assert matcher.place is not None
            row, compiled = matcher.place[1], matcher.compiled
            if compiled not in self.numbers:
                self._num_numbers += 1
                self.numbers[compiled] = self._num_numbers
                constraint = compiled.constraint
                sources[self._num_numbers] = [constraint.kind, constraint.text, constraint.choices]
            token_ids = matcher.token_ids[matcher.num_sent :]
            rows.append([row, self.numbers[compiled], matcher.num_sent == 0, token_ids])
            ahead.append(list(matcher.drafts))
            self.asked.append((matcher, matcher.num_sent))
            matcher.num_sent = len(matcher.token_ids)
        message = {"rows": rows, "ahead": ahead, "sources": sources, "free": self._free, "drop": self._unused()}
        self._free = []
        self.worker.send(message)

    def _unused(self) -> list[int]:
        """Removes constraints without samples, if there are many, and returns their numbers."""
        if len(self.numbers) <= _MAX_CONSTRAINTS + len(self.rows):
            return []
        used = {matcher.compiled for matcher in self.rows.values()}
        return [self.numbers.pop(compiled) for compiled in tuple(self.numbers) if compiled not in used]


class MaskExchange:
    """The constrained samples of one engine and the workers that follow them.

    Used by the engine's thread, except for `close`, which any thread may call.
    """

    def __init__(self) -> None:
        self.num_restarts = 0  # restarts of samples whose lexer others had filled
        self._queued: list[Matcher] = []  # have advanced, and are not with a worker
        self._shared: list[_Followers] = []
        self._own: dict[WorkerProcess, _Followers] = {}
        self._busy: list[_Followers] = []
        self._closed: deque[Matcher] = deque()
        self._used_seconds: Counter[str] = Counter()  # by tenant, in the tenant's own workers
        num_cpus = os.cpu_count() or 1
        self._max_shared = max(1, min(4, num_cpus // 2))  # per tenant
        self._max_busy_slow = max(1, num_cpus // 4)

    @property
    def has_work(self) -> bool:
        """Whether any sample waits for its mask."""
        return bool(self._queued or self._busy)

    def advance(self, matcher: Matcher, token_id: int) -> None:
        """Adds the next token of a sample. `renew` fetches the mask."""
        if not matcher.is_waiting:
            self._queued.append(matcher)
        matcher.advance(token_id)

    def close(self, matcher: Matcher) -> None:
        """Forgets a sample that has ended."""
        matcher.is_closed = True
        self._closed.append(matcher)

    def renew(self, patience_seconds: float, *, for_any: bool = False) -> list[Matcher]:
        """Sends what is queued and returns the samples whose masks have come, or that have failed.

        Waits until all workers that are not known to be slow have answered, but no longer than `patience_seconds`; with
        `for_any`, until any worker has.
        """
        self._release_closed()
        answered: list[Matcher] = []
        end = time.monotonic() + patience_seconds
        self._read(wait_for_any([each.worker for each in self._busy], 0.0), answered)
        self._send(answered)
        while awaited := [each for each in self._busy if for_any or not (each.is_slow or each.is_late)]:
            left = end - time.monotonic()
            ready = wait_for_any([each.worker for each in awaited], left)
            self._read(ready, answered)
            self._send(answered)  # those that start again
            if left <= 0 or (for_any and ready):
                break
        for followers in self._busy:
            followers.is_late = True
        self._end_stuck(answered)
        return [matcher for matcher in answered if not matcher.is_closed]

    def _release_closed(self) -> None:
        """Frees the rows of samples that have ended."""
        while self._closed:
            matcher = self._closed.popleft()
            place, matcher.place = matcher.place, None
            if place is not None and place[0].rows.get(place[1]) is matcher:
                place[0].release(place[1])
                self._forget_unused(place[0])

    def _forget_unused(self, followers: _Followers) -> None:
        """Forgets an idle worker of a constraint without samples; the constraint keeps it, as long as that is used."""
        if not (followers.is_shared or followers.rows or followers.asked):
            self._own.pop(followers.worker, None)

    def _send(self, answered: list[Matcher]) -> None:
        """Sends queued samples to idle workers."""
        queued, self._queued = self._queued, []
        by_worker: dict[_Followers, list[Matcher]] = defaultdict(list)
        for matcher in queued:
            if matcher.is_closed:
                continue
            try:
                by_worker[self._followers_of(matcher)].append(matcher)
            except (QuotaExceededError, WorkerLostError) as error:
                matcher.fail(str(error))
                answered.append(matcher)
        num_slow = sum(not each.is_shared and each.is_slow for each in self._busy)
        by_use = sorted(by_worker, key=lambda each: self._used_seconds[each.worker.tenant] if each.is_slow else -1.0)
        for followers in by_use:
            is_slow = not followers.is_shared and followers.is_slow
            if followers.asked or (is_slow and num_slow >= self._max_busy_slow):
                self._queued += by_worker[followers]
                continue
            num_slow += is_slow
            followers.ask(by_worker[followers])
            self._busy.append(followers)

    def _followers_of(self, matcher: Matcher) -> _Followers:
        """Returns the worker of a sample, after finding one if it has none.

        Raises:
          QuotaExceededError, WorkerLostError: There is none.
        """
        place, compiled, grammars = matcher.place, matcher.compiled, matcher.grammar.grammars
        if place is not None and not place[0].worker.is_lost:
            if compiled.is_fast or not place[0].is_shared:
                return place[0]
            matcher.place = None
            place[0].release(place[1])
        if matcher.num_moves >= _MAX_MOVES:
            raise WorkerLostError("its workers were lost too often")
        followers = self._shared_one(grammars, matcher.grammar.tenant) if compiled.is_fast else self._own_one(matcher)
        followers.take(matcher)
        return followers

    def _shared_one(self, grammars: Grammars, tenant: str) -> _Followers:
        """Returns a tenant's shared worker with the fewest samples, a new one if they are many."""
        if all(each.rows for each in self._shared) and len(self._shared) >= _MAX_SHARED:
            candidates = self._shared
        else:
            candidates = [each for each in self._shared if each.worker.tenant == tenant]
        found = min(candidates, key=lambda each: len(each.rows), default=None)
        has_room = len(candidates) < self._max_shared
        if found is None or not found.worker.free_rows or (len(found.rows) >= _NUM_ROWS_PER_WORKER and has_room):
            found = _Followers(grammars.shared_worker(tenant), is_shared=True)
            self._shared.append(found)
            self._end_idle()
        return found

    def _end_idle(self) -> None:
        """Ends the shared worker that has had no samples for longest, if there are too many."""
        idle = [each for each in self._shared[:-1] if not (each.rows or each.asked)]
        if len(self._shared) > _MAX_SHARED and idle:
            self._shared.remove(idle[0])
            idle[0].worker.kill()

    def _own_one(self, matcher: Matcher) -> _Followers:
        worker = matcher.grammar.grammars.own_worker(matcher.compiled, matcher.grammar.tenant)
        if worker not in self._own:
            self._own[worker] = _Followers(worker, is_shared=False)
            self._own[worker].seconds = 2 * _SLOW_SECONDS if matcher.compiled.num_slow_masks else 0.0
            if matcher.compiled.is_in_worker:
                self._own[worker].numbers[matcher.compiled] = FIRST_NUMBER
        if not worker.free_rows:
            raise WorkerLostError("too many samples use the constraint")
        return self._own[worker]

    def _read(self, ready: list[WorkerProcess], answered: list[Matcher]) -> None:
        """Reads the answers of workers."""
        for followers in [each for each in self._busy if each.worker in ready or each.worker.is_lost]:
            self._busy.remove(followers)
            try:
                answer = followers.worker.receive()
            except WorkerLostError:
                self._recover(followers, answered)
                continue
            asked, followers.asked, followers.is_late = followers.asked, [], False
            seconds = answer["seconds"]
            followers.seconds = max(seconds, followers.seconds * _FADE)
            if followers.is_shared:
                if len({each.worker.tenant for each in self._shared if each.rows}) < 2:
                    followers.seconds = 0.0  # only its own tenant waits for it
                for index, its_seconds in answer["slow"]:
                    compiled = asked[index][0].compiled
                    compiled.num_slow_masks += 1
                    if its_seconds > _VERY_SLOW_SECONDS or compiled.num_slow_masks > _MAX_SLOW_MASKS:
                        compiled.is_fast = False  # its samples move with their next tokens
            else:
                self._used_seconds[followers.worker.tenant] += seconds
            self._forget_unused(followers)
            rows = answer["rows"]
            for matcher, num_sent in asked[len(rows) :]:
                matcher.num_sent = num_sent
                self._queued.append(matcher)
            none_ahead: list[list[int]] = [[]] * len(rows)  # for an answer that lacks some
            for (matcher, _), row, ahead in zip(asked, rows, [*answer["ahead"], *none_ahead], strict=False):
                if not matcher.is_closed and matcher.place is not None and self._settle(matcher, followers, row, ahead):
                    answered.append(matcher)

    def _settle(self, matcher: Matcher, followers: _Followers, row: tuple[int, str], ahead: Sequence[int]) -> bool:
        """Handles the answer for one sample. Returns whether it has its mask or has failed."""
        state, error = row
        assert matcher.place is not None
        if state & HAS_FAILED:
            # Other samples may have filled the lexer, which all samples of a constraint share in a worker.
            may_restart = not matcher.has_restarted and matcher.compiled.seconds <= _RESTART_SECONDS
            if not may_restart:
                matcher.fail(one_line(error) or "its tokens were refused")
                return True
            matcher.has_restarted = True
            self.num_restarts += 1
            matcher.start_over()
            self._queued.append(matcher)
            return False
        matcher.num_moves = 0
        matcher.answer(followers.worker.masks[matcher.place[1]], state, ahead)
        return True

    def _end_stuck(self, answered: list[Matcher]) -> None:
        """Kills the workers that exceed their time."""
        for followers in tuple(self._busy):
            worker = followers.worker
            grammars = followers.asked[0][0].grammar.grammars
            limit = _STUCK_SECONDS if followers.is_shared else grammars.limits.seconds
            if worker.has_used(limit, grammars.limits.seconds):
                culprit = followers.rows.get(worker.progress if worker.progress is not None else -1)
                if followers.is_shared:
                    if culprit is not None:
                        culprit.compiled.is_fast = False
                        culprit.compiled.num_slow_masks += 1
                else:
                    for matcher in followers.rows.values():
                        matcher.fail(f"a token mask takes longer than {limit:g} s (constraint_seconds)")
                    answered += [matcher for matcher in followers.rows.values() if matcher not in answered]
                self._busy.remove(followers)
                self._recover(followers, answered, is_crash=False)

    def _recover(self, followers: _Followers, answered: list[Matcher], *, is_crash: bool = True) -> None:
        """Moves the samples of a worker that has ended, or fails them if it crashed with a single constraint.

        The sample that a shared worker was busy with may be the cause of a crash, or may only have come when others had
        used up the memory. A worker of its own will show.
        """
        worker, rows = followers.worker, followers.rows
        if not rows and not followers.asked:
            worker.kill()
        else:
            next(iter([*rows.values(), *(each for each, _ in followers.asked)])).grammar.grammars.lost(worker)
        if followers in self._shared:
            self._shared.remove(followers)
        self._own.pop(worker, None)
        culprit = rows.get(worker.progress if worker.progress is not None else -1) if is_crash else None
        for matcher in rows.values():
            if matcher.failure is not None:
                continue
            if is_crash and not followers.is_shared:
                matcher.grammar.grammars.forget(matcher.compiled)
                matcher.fail("its parser has crashed or has exceeded constraint_memory_mib")
                answered.append(matcher)
                continue
            matcher.place, matcher.num_sent = None, 0
            if matcher is culprit:
                matcher.start_over()
                matcher.compiled.is_fast = False
            if matcher.is_waiting and matcher not in self._queued:
                self._queued.append(matcher)
        followers.rows, followers.asked = {}, []
