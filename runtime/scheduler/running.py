"""Assigns slots and pages to running requests. Serves step 4 of 10: the scheduler decides which requests run.

In: requests that are placed, grow, shrink or are released. Out: their `slot` and `pages`, and pages published for
sharing.
"""

import heapq
from bisect import bisect_left, insort
from collections.abc import Collection, Iterator, Sequence

from ..api.request import Request
from .fair_shares import FairShares, rank_of
from .limits import SchedulerLimits
from .page_allocator import PageAllocator
from .page_keys import extend_page_keys
from .step_plan import ScheduledChunk

NEVER = 2**62  # tokens


class Running:
    """The running requests, in ascending order of rank."""

    def __init__(self, limits: SchedulerLimits, pages: PageAllocator, shares: FairShares):
        self._limits = limits
        self._pages = pages
        self._shares = shares
        self._requests: list[Request] = []
        self._free_slots = list(range(limits.max_running))  # a heap

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        """Iterates over a snapshot, so the caller may place and release requests meanwhile."""
        return iter(tuple(self._requests))

    @property
    def first(self) -> Request:
        return self._requests[0]

    @property
    def last(self) -> Request:
        return self._requests[-1]

    @property
    def has_free_slot(self) -> bool:
        return bool(self._free_slots)

    def _num_reusable(self, request: Request) -> int:
        """Returns how many pages a waiting request can start from if they are cached, and extends its keys to them.

        The page of its last known token is excluded, because that token must be computed to sample the next one. The
        result is 0 if prompt log-probabilities are requested, because they require computing the whole prompt.
        """
        if not self._limits.has_prefix_cache or request.num_prompt_logprobs_left:
            return 0
        num_pages = (request.num_known_tokens - 1) // self._limits.page_size
        extend_page_keys(request, self._limits.page_size, num_pages)
        return num_pages

    def found_pages(self, request: Request) -> tuple[list[int], list[bytes], int]:
        """Returns the cached pages of a waiting request, the keys of the others, and how many pages either tier has."""
        keys, host = request.page_keys[: self._num_reusable(request)], self._pages.host
        cached = self._pages.match(keys)
        missing = keys[len(cached) :]
        return cached, missing, len(cached) + (host.num_found(missing) if host is not None else 0)

    def num_left(self, request: Request) -> int:
        """Returns how many tokens of a waiting request neither tier has; not exact if a page left before later ones."""
        keys, num_pages = request.page_keys, self._num_reusable(request)
        is_all = num_pages and not self._is_missing(keys[num_pages - 1])
        num_found = num_pages if is_all else bisect_left(keys, True, hi=num_pages, key=self._is_missing)
        return request.num_known_tokens - num_found * self._limits.page_size

    def is_load_low(self, prefilling: list[Request], num_decodes: int) -> bool:
        """Returns whether few requests have prompt tokens left, at most twice `max_prefill_tokens`, for short steps."""
        if not self._limits.has_few_new(len(prefilling) + self._shares.num_waiting, num_decodes):
            return False
        num_left = sum(request.num_prefill_tokens - request.num_computed_tokens for request in prefilling)
        for request in self._shares.waiting():
            if num_left > 2 * self._limits.max_prefill_tokens:
                break
            num_left += self.num_left(request)  # in O(log pages): all may be long, and cached
        return num_left <= 2 * self._limits.max_prefill_tokens

    def _is_missing(self, key: bytes) -> bool:
        return not (self._pages.match([key]) or (self._pages.host is not None and self._pages.host.num_found([key])))

    def has_room(self, request: Request, cached: Collection[int]) -> bool:
        """Returns whether a slot and pages for all known tokens of the request are free.

        One page per running request is kept in reserve; otherwise their next tokens would soon preempt the new request.
        """
        num_taken = self._num_new_pages(request, cached) + self._pages.num_evictable_of(cached)
        return bool(self._free_slots) and num_taken + len(self._requests) <= self._pages.num_free_pages

    def could_have_room(self, request: Request, cached: Collection[int], victims: Collection[Request]) -> bool:
        """Returns whether there would be room if all of `victims` were preempted."""
        num_left = len(self._requests) - len(victims)
        if not victims:
            return False
        num_needed = self._num_new_pages(request, cached) + num_left
        if num_needed > self._pages.num_free_pages + sum(len(victim.pages) for victim in victims):
            return False  # even without sharing; avoids the sets below, which take milliseconds
        gone = set(victims)
        untouchable = set(cached).union(*(other.pages for other in self._requests if other not in gone))
        return num_needed + len(untouchable) <= self._pages.num_pages

    def place(self, request: Request, cached: Sequence[int]) -> None:
        """Assigns a slot and pages to a waiting request for which `has_room` holds; its first pages are `cached`."""
        num_new_pages = self._num_new_pages(request, cached)
        self._pages.hold(cached)
        self.assign(request, cached)
        self.assign(request, self._pages.allocate(num_new_pages))
        request.slot = heapq.heappop(self._free_slots)
        if self._shares.adapters is not None:
            self._shares.adapters.hold(request)
        request.num_prefill_tokens = request.num_known_tokens
        request.num_computed_tokens = len(cached) * self._limits.page_size
        request.num_published_pages = len(cached)
        request.is_admitted = False
        has_cache = self._limits.has_prefix_cache
        if has_cache:
            extend_page_keys(request, self._limits.page_size, request.num_known_tokens // self._limits.page_size)
        request.publish_at_tokens = (len(cached) + 1) * self._limits.page_size if has_cache else NEVER
        insort(self._requests, request, key=rank_of)
        insort(self._shares.of(request).running, request, key=rank_of)

    def assign(self, request: Request, pages: Sequence[int]) -> None:
        """Adds pages to a running request."""
        request.pages += pages
        self._shares.of(request).num_pages += len(pages)
        request.num_page_positions = len(request.pages) * self._limits.page_size

    def shrink(self, request: Request) -> None:
        """Frees the last pages of a running request, which rejected draft tokens had needed."""
        num_pages = self._limits.num_pages_for(max(request.num_computed_tokens, request.num_prefill_tokens))
        if num_pages < len(request.pages):
            self._free(request, num_pages)
            request.num_page_positions = num_pages * self._limits.page_size

    def _free(self, request: Request, num_kept: int) -> None:
        """Frees all pages of a running request but the first `num_kept`."""
        freed = request.pages[num_kept:]
        self._pages.free(freed)
        del request.pages[num_kept:]
        self._shares.of(request).num_pages -= len(freed)

    def release(self, request: Request) -> None:
        """Frees the pages and the slot of a running request. Its full pages stay in the prefix cache until evicted."""
        if request.is_fetching and self._pages.host is not None:
            self._pages.host.abort(request)
            request.is_fetching = False
        self.publish(request)
        for requests in (self._requests, self._shares.of(request).running):
            del requests[bisect_left(requests, request.rank, key=rank_of)]
        self._free(request, 0)
        request.num_page_positions = request.num_published_pages = 0
        request.num_computed_tokens = request.num_prefill_tokens = 0
        assert request.slot is not None, request.request_id
        heapq.heappush(self._free_slots, request.slot)
        if self._shares.adapters is not None:
            self._shares.adapters.release(request)
        request.slot = None

    def arrived(self, request: Request, num_pages: int) -> None:
        """Books and publishes the next pages of a fetching request, which have been copied from host memory."""
        request.num_computed_tokens += num_pages * self._limits.page_size
        self.publish(request)

    def withdraw(self, request: Request) -> bool:
        """Undoes the computation of a request's last known token, which is planned with its successor in flight.

        Its draft tokens are undone with it. A chunk without a successor, before the last known token, stays computed.
        Returns whether it can be computed again in place. It cannot if its page is published, and not to be written.
        """
        if not request.num_pending_tokens:
            return True
        request.num_pending_tokens -= 1 + request.num_drafts
        request.num_drafts = 0
        request.num_prefill_tokens = request.num_known_tokens
        if request.num_published_pages * self._limits.page_size == request.num_known_tokens:
            return False
        request.num_computed_tokens = request.num_known_tokens - 1
        self.shrink(request)
        return True

    def publish(self, request: Request) -> None:
        """Publishes the full pages whose tokens are known and whose computation is done or planned."""
        num_tokens = min(request.num_computed_tokens, request.num_known_tokens)
        if num_tokens < request.publish_at_tokens:
            return
        page_size = self._limits.page_size
        num_pages = num_tokens // page_size
        extend_page_keys(request, page_size, num_pages)
        for index in range(request.num_published_pages, num_pages):
            is_new = self._pages.publish(request.pages[index], request.page_keys[index])
            if is_new and self._pages.changes is not None:
                self._pages.changes.stored(request, index)
        request.num_published_pages = num_pages
        request.publish_at_tokens = (num_pages + 1) * page_size

    def audit(self) -> None:
        """Checks the invariants of slots and pages. Raises AssertionError with the violation. O(requests + pages)."""
        ranks = [request.rank for request in self._requests]
        assert ranks == sorted(set(ranks)), "running requests are not in order of rank"
        slots = sorted([request.slot for request in self._requests if request.slot is not None] + self._free_slots)
        assert slots == list(range(self._limits.max_running)), f"slots in use and free together are {slots}"
        for request in self._requests:
            name = f"request {request.request_id}"
            num_pages = self._limits.num_pages_for(max(request.num_computed_tokens, request.num_prefill_tokens))
            assert len(request.pages) == num_pages, f"{name} holds {len(request.pages)} pages, needs {num_pages}"
            assert request.num_page_positions == num_pages * self._limits.page_size, f"{name} miscounts its pages"
            num_left = request.num_tokens - request.num_computed_tokens
            num_prefill_left = request.num_prefill_tokens - request.num_computed_tokens
            assert num_left == max(num_prefill_left, 1), f"{name}: {num_left} tokens left, {num_prefill_left} prefill"
            num_safe_tokens = min(request.num_computed_tokens, request.num_known_tokens)
            is_safe = request.num_published_pages * self._limits.page_size <= num_safe_tokens
            assert is_safe, f"{name} shares {request.num_published_pages} pages, but has {num_safe_tokens} safe tokens"
        if self._shares.adapters is not None:
            self._shares.adapters.audit(self._requests)
        self._pages.audit(request.pages for request in self._requests)
        if self._pages.host is not None:
            self._pages.host.audit()

    def _num_new_pages(self, request: Request, cached: Collection[int]) -> int:
        return self._limits.num_pages_for(request.num_known_tokens) - len(cached)


def book_prompt_logprobs(chunk: ScheduledChunk) -> int:
    """Books the log-probabilities that a chunk computes. Returns the first position; it gives that of the next."""
    request, start, num_tokens, _ = chunk
    first = max(start, request.num_prompt_logprobs)
    last = min(start + num_tokens, len(request.prompt_token_ids) - 1)
    request.num_prompt_logprobs = max(request.num_prompt_logprobs, last)
    return first
