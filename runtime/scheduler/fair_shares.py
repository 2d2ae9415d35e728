"""Compares tenants by what they hold, in proportion to their weights. Serves step 4 of 10, the scheduler.

In: requests that are queued, placed, released and prefilled. Out: whose turn it is, and what may be preempted.

A tenant's share is its weight divided by the weights of all tenants with unfinished requests. Its load is the larger of
its fraction of the slots and its fraction of the pages, where a shared page counts for each request that holds it. The
turns of prefill follow start-time fair queueing (Goyal, Vin, Cheng, 1996). With a single tenant the rank alone decides.
docs/scheduling.md states the rules and why no tenant starves.
"""

import itertools
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import attrgetter

from ..api.request import Request
from .adapter_slots import Adapters
from .limits import SchedulerLimits
from .page_allocator import PageAllocator
from .ranked_queue import RankedQueue

rank_of = attrgetter("rank")


@dataclass(eq=False, slots=True)
class Account:
    """A tenant with unfinished requests."""

    weight: float
    next_turn: float  # virtual time at which its next prefill tokens are due
    num_requests: int = 0  # unfinished
    num_pages: int = 0  # held by `running`
    running: list[Request] = field(default_factory=list)  # in ascending order of rank
    waiting: RankedQueue[tuple[float, int]] = field(default_factory=RankedQueue)
    num_lacking: int = 0  # further ones that wait for an adapter slot


class FairShares:
    """The tenants that have unfinished requests, with their queues."""

    def __init__(self, limits: SchedulerLimits, pages: PageAllocator, adapters: Adapters = None):
        self.num_waiting = 0
        self.adapters = adapters
        self._lacking: dict[str, RankedQueue[tuple[float, int]]] = {}  # requests whose adapter lacks a slot, by adapter
        self._limits = limits
        self._pages = pages
        self._accounts: dict[str, Account] = {}
        self._held: set[Request] = set()  # new requests that wait until earlier ones have ended
        self._parked: set[Request] = set()  # requests that would wait, but are blocked or await a page
        self._awaiting: dict[Request, bytes] = {}  # the key of the page that a request awaits
        self._total_weight = 0.0
        self._virtual_time = 0.0  # the turn of the last prefill
        self._left_turns: dict[str, float] = {}  # next turns of tenants without requests, if later than that

    def of(self, request: Request) -> Account:
        """Returns the account of an unfinished request's tenant."""
        return self._accounts[request.tenant]

    def open(self, request: Request) -> None:
        """Adds a new request to the queue of its tenant, whose weight is that of its latest request."""
        account = self._accounts.get(request.tenant)
        if account is None:
            turn = self._left_turns.pop(request.tenant, 0.0)
            account = self._accounts[request.tenant] = Account(request.weight, turn)
        account.num_requests += 1
        account.weight = request.weight
        self._total_weight = sum(each.weight for each in self._accounts.values())
        self.queue(request)

    def close(self, request: Request) -> None:
        """Forgets a request that has ended; it must not run any more."""
        self.unqueue(request)
        account = self.of(request)
        account.num_requests -= 1
        if not account.num_requests:
            del self._accounts[request.tenant]
            self._total_weight = sum(each.weight for each in self._accounts.values())
            if account.next_turn > self._virtual_time:
                self._left_turns[request.tenant] = account.next_turn

    @property
    def num_held(self) -> int:
        """Requests, among those that wait, that are in no plan until `release_held`."""
        return len(self._held)

    def release_held(self) -> None:
        """Queues the requests again that `is_held` kept out of all plans."""
        for request in tuple(self._held):
            self.unqueue(request)
            request.is_held = False
            self.queue(request)

    def queue(self, request: Request) -> None:
        if request.is_held:
            self._held.add(request)
            self.num_waiting += 1
            return
        if request.is_blocked or request.is_fetching:
            self._parked.add(request)
            return
        self.of(request).waiting.push(request.rank, request)
        self.num_waiting += 1

    def unqueue(self, request: Request) -> bool:
        """Removes a request from its queue. Returns False if it does not wait."""
        waiting = self.of(request).waiting
        if request in self._parked:
            self._parked.remove(request)
        elif request in self._held:
            self._held.remove(request)
            self.num_waiting -= 1
        elif request in self._lacking.get(request.adapter_digest, ()):
            self._end_lacking(request)
            self.num_waiting -= 1
        elif request in waiting:
            waiting.discard(request)
            self.num_waiting -= 1
        else:
            return False
        return True

    def set_blocked(self, request: Request, is_blocked: bool) -> None:
        """Blocks a request, whose next token mask is late, or ends that. Others are admitted past blocked requests."""
        is_queued = self.unqueue(request)
        request.is_blocked = is_blocked
        if is_queued:
            self.queue(request)

    def await_page(self, request: Request, key: bytes) -> None:
        """Parks a waiting request while the page of this key is copied from host memory for another one."""
        self.unqueue(request)
        request.is_fetching = True
        self._awaiting[request] = key
        self.queue(request)

    def lacks_adapter(self, request: Request) -> bool:
        """Returns whether the adapter of a waiting request can have no slot now. The request then lets others pass."""
        if self.adapters is None or self.adapters.may_hold(request):
            return False
        account = self.of(request)
        account.waiting.discard(request)
        account.num_lacking += 1
        self._lacking.setdefault(request.adapter_digest, RankedQueue()).push(request.rank, request)
        return True

    def _end_lacking(self, request: Request) -> None:
        self.of(request).num_lacking -= 1
        self._lacking[request.adapter_digest].discard(request)
        if not self._lacking[request.adapter_digest]:
            del self._lacking[request.adapter_digest]

    def _queue_for_slots(self) -> None:
        """Queues requests again whose adapters can have a slot now, by rank; at most as many of each as can run."""
        if self.adapters is None:
            return
        firsts = {digest: first.rank for digest, lacking in self._lacking.items() if (first := lacking.first)}
        self.adapters.drain(firsts)
        num_available = self.adapters.num_available
        for digest in sorted(firsts, key=firsts.__getitem__):
            is_new = not self.adapters.holds(digest)
            if is_new and not num_available:
                continue
            num_available -= is_new
            for _ in range(self._limits.max_running):
                request = self._lacking[digest].first if digest in self._lacking else None
                if request is None or not self.adapters.may_hold(request):
                    break
                self._end_lacking(request)
                self.of(request).waiting.push(request.rank, request)

    def end_awaiting(self) -> None:
        """Queues the requests again whose page is no longer being copied for another one, or that can have a slot."""
        self._queue_for_slots()
        for request, key in tuple(self._awaiting.items()):
            if request.is_finished:
                del self._awaiting[request]
            elif self._pages.host is None or not self._pages.host.is_coming(key):
                del self._awaiting[request]
                self.unqueue(request)
                request.is_fetching = False
                self.queue(request)

    def waiting(self) -> Iterator[Request]:
        """Iterates over the waiting requests in no particular order."""
        yield from self._held
        yield from self._parked
        for lacking in self._lacking.values():
            yield from lacking
        for account in self._accounts.values():
            yield from account.waiting

    def mean_prompt_tokens(self) -> int:
        """Returns the mean length of some of the waiting prompts; 0 if there is none."""
        some = itertools.islice(self.waiting(), 32)  # not all, because many callers may be refused in a second
        lengths = [len(request.prompt_token_ids) for request in some]
        return sum(lengths) // len(lengths) if lengths else 0

    @property
    def first(self) -> Request | None:
        """The waiting request to admit next: the first in rank of the tenant with the least load for its weight."""
        firsts = [first for account in self._accounts.values() if (first := account.waiting.first) is not None]
        return min(firsts, key=self._admission_key) if len(firsts) > 1 else firsts[0] if firsts else None

    def _admission_key(self, request: Request) -> tuple[float, float, tuple[float, int]]:
        account = self.of(request)
        return self._load(account) / account.weight, *self.turn(request)

    def turn(self, request: Request) -> tuple[float, tuple[float, int]]:
        """Returns the sort key that orders prefill: by the turns of the tenants, then by rank."""
        return max(self.of(request).next_turn, self._virtual_time), request.rank

    def prefilled(self, request: Request, num_tokens: int) -> None:
        """Charges planned prefill tokens to the request's tenant."""
        account = self.of(request)
        self._virtual_time = max(account.next_turn, self._virtual_time)
        account.next_turn = self._virtual_time + num_tokens / account.weight

    def may_queue(self, tenant: str, weight: float, num_requests: int) -> bool:
        """Returns whether the queue has room for new requests. A full queue has room for tenants within their share."""
        max_waiting = self._limits.max_waiting
        if self.num_waiting + num_requests <= max_waiting:
            return True
        account = self._accounts.get(tenant)
        others = self._total_weight - (account.weight if account is not None else 0.0)
        num_waiting = len(account.waiting) + account.num_lacking if account is not None else 0
        return others > 0 and num_waiting + num_requests <= max_waiting * weight / (weight + others)

    def victims(self, request: Request) -> list[Request]:
        """Returns the running requests that may be preempted to admit a waiting one, in the order of preemption.

        These are requests of other tenants, if this request keeps its tenant within its share or is the only one that
        its tenant runs, and if those tenants keep their shares without them; then later ones of its own tenant.
        """
        account = self.of(request)
        own = account.running[bisect_left(account.running, request.rank, key=rank_of) :]
        if len(self._accounts) == 1:
            return own[::-1]
        num_pages = self._limits.num_pages_for(request.num_known_tokens)
        is_entitled = not account.running or self._load(account, 1, num_pages) <= self._share(account)
        return [*(self._surplus(account) if is_entitled else ()), *reversed(own)]

    def _surplus(self, account: Account) -> Iterator[Request]:
        """Yields the requests that other tenants run beyond their shares, those of the most loaded tenant first."""
        others = [other for other in self._accounts.values() if other is not account]
        left = {other: (len(other.running), other.num_pages) for other in others}
        while True:
            found: tuple[float, Account, int, int] | None = None
            for other, (num_running, num_pages) in left.items():
                if num_running < 2:
                    continue
                num_pages -= len(other.running[num_running - 1].pages)
                load = max((num_running - 1) / self._limits.max_running, num_pages / self._pages.num_pages)
                if load >= self._share(other) and (found is None or load / other.weight > found[0]):
                    found = load / other.weight, other, num_running - 1, num_pages
            if found is None:
                return
            _, other, num_running, num_pages = found
            left[other] = num_running, num_pages
            yield other.running[num_running]

    def victim_of_growth(self, request: Request) -> Request | None:
        """Returns the request to preempt for one more page of a running one, or None if that one must wait."""
        account = self.of(request)
        if len(self._accounts) > 1 and self._load(account, 0, 1) <= self._share(account):
            others = [
                other
                for other in self._accounts.values()
                if other is not account and len(other.running) > 1 and self._load(other) > self._share(other)
            ]
            if others:
                return max(others, key=lambda other: self._load(other) / other.weight).running[-1]
        return account.running[-1] if account.running[-1] is not request else None

    def _share(self, account: Account) -> float:
        return account.weight / self._total_weight

    def _load(self, account: Account, num_more_slots: int = 0, num_more_pages: int = 0) -> float:
        num_running = len(account.running) + num_more_slots
        num_pages = account.num_pages + num_more_pages
        return max(num_running / self._limits.max_running, num_pages / self._pages.num_pages)

    def audit(self) -> None:
        """Checks the books of every tenant. Raises AssertionError with the violation. O(requests)."""
        num_waiting = sum(len(each.waiting) + each.num_lacking for each in self._accounts.values())
        assert self.num_waiting == num_waiting + len(self._held), "the queue is miscounted"
        num_lacking = sum(each.num_lacking for each in self._accounts.values())
        assert num_lacking == sum(map(len, self._lacking.values())), "the requests that lack a slot are miscounted"
        awaiting = {request for request in self._awaiting if not request.is_finished}
        assert awaiting == {each for each in self.waiting() if each.is_fetching}, "a waiting request awaits no page"
        for tenant, account in self._accounts.items():
            name = f"tenant {tenant!r}"
            assert account.num_requests > 0 < account.weight, f"{name} has {account.num_requests} requests"
            assert account.num_pages == sum(len(each.pages) for each in account.running), f"{name} miscounts its pages"
            ranks = [each.rank for each in account.running]
            assert ranks == sorted(set(ranks)), f"{name}: its running requests are not in order of rank"
            assert all(each.tenant == tenant for each in (*account.running, *account.waiting)), f"{name} has others'"
