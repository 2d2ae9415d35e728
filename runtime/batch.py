"""Step 5 of 10: a StepPlan becomes one padded host array of a declared shape. In: StepPlan. Out: int32 vector.

All that a step needs from the host travels in one vector, one transfer: floats as their bits. Only `Bucket.fields`
knows the order; `step.py` takes the vector apart with it on the device. numpy only.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from .scheduler import StepPlan

ON_DEVICE = -1  # a token id the host does not know yet: the device takes it from its table of last tokens

_TOKEN_FIELDS = ("token_ids", "positions", "token_request")
_REQUEST_FIELDS = (
    "rows",
    "last_index",  # of the request's last token among the step's tokens
    "temperature",
    "top_p",
    "top_k",
    "seed_low",
    "seed_high",
    "sample_position",
)
_PAGE_FIELDS = ("page_row", "page_index", "page")


@dataclass(frozen=True, order=True)
class Bucket:
    """A shape that steps are padded to: one compiled program."""

    num_tokens: int
    num_requests: int
    num_new_pages: int

    @property
    def fields(self) -> dict[str, slice]:
        """Where each field lies in the packed vector."""
        sizes = itertools.chain(
            ((name, self.num_tokens) for name in _TOKEN_FIELDS),
            ((name, self.num_requests) for name in _REQUEST_FIELDS),
            ((name, self.num_new_pages) for name in _PAGE_FIELDS),
        )
        fields, start = {}, 0
        for name, size in sizes:
            fields[name] = slice(start, start + size)
            start += size
        return fields

    @property
    def size(self) -> int:
        """Length of the packed vector."""
        return self.fields[_PAGE_FIELDS[-1]].stop


def declare_buckets(*, max_step_tokens: int, max_running: int, page_size: int) -> tuple[Bucket, ...]:
    """The finite set of shapes: token counts are powers of two and the budget itself, smallest first.

    Up to max_running tokens a bucket holds as many requests as tokens, so decodes alone waste no room.
    """
    sizes = [2**power for power in range(max_step_tokens.bit_length()) if 2**power < max_step_tokens]
    sizes = sorted({*sizes, max_running, max_step_tokens})
    buckets = []
    for num_tokens in sizes:
        num_requests = min(num_tokens, max_running)
        # A request's chunk of n tokens begins at most ceil(n / page_size) pages.
        buckets.append(Bucket(num_tokens, num_requests, num_requests + num_tokens // page_size))
    return tuple(buckets)


class BatchBuilder:
    """Packs plans. Buffers are not reused: a step in flight may still read the one before."""

    def __init__(self, buckets: tuple[Bucket, ...], *, max_running: int, page_size: int):
        self._buckets = buckets
        self._page_size = page_size
        # Writes at this row fall outside the device's tables and are dropped.
        self._no_row = max_running

    def bucket(self, plan: StepPlan) -> Bucket:
        """The smallest bucket that holds the plan."""
        num_tokens, num_requests = plan.num_tokens, len(plan.chunks)
        for bucket in self._buckets:
            if bucket.num_tokens >= num_tokens and bucket.num_requests >= num_requests:
                return bucket
        raise AssertionError(f"no bucket holds {num_tokens} tokens of {num_requests} requests: {self._buckets}")

    def build(self, plan: StepPlan) -> tuple[Bucket, np.ndarray]:
        """The plan's bucket and its packed int32 vector [bucket.size]. Call it before the scheduler moves on."""
        bucket = self.bucket(plan)
        packed = np.zeros(bucket.size, np.int32)
        fields = {name: packed[place] for name, place in bucket.fields.items()}
        fields["positions"][:] = -1
        fields["rows"][:] = self._no_row
        fields["page_row"][:] = self._no_row
        self._fill_tokens(plan, fields)
        self._fill_requests(plan, fields)
        new_pages = list(self._new_pages(plan))
        if new_pages:
            row, index, page = zip(*new_pages, strict=True)
            count = len(new_pages)
            fields["page_row"][:count], fields["page_index"][:count], fields["page"][:count] = row, index, page
        return bucket, packed

    def _fill_tokens(self, plan: StepPlan, fields: dict[str, np.ndarray]) -> None:
        token_ids: list[int] = []
        positions: list[int] = []
        token_request: list[int] = []
        for index, (request, start, num_tokens, _) in enumerate(plan.chunks):
            num_known = request.num_known_tokens
            if num_tokens == 1:
                token_ids.append(request.token_at(start) if start < num_known else ON_DEVICE)
                positions.append(start)
                token_request.append(index)
                continue
            # All of a longer chunk is known but for the last token, which a step in flight may be sampling.
            known_end = min(start + num_tokens, num_known)
            token_ids += request.tokens(start, known_end)
            token_ids += [ON_DEVICE] * (start + num_tokens - known_end)
            positions += range(start, start + num_tokens)
            token_request += [index] * num_tokens
        count = len(token_ids)
        fields["token_ids"][:count] = token_ids
        fields["positions"][:count] = positions
        fields["token_request"][:count] = token_request

    def _fill_requests(self, plan: StepPlan, fields: dict[str, np.ndarray]) -> None:
        requests = [chunk.request for chunk in plan.chunks]
        count = len(requests)
        fields["rows"][:count] = [request.row for request in requests]
        fields["last_index"][:count] = np.cumsum([chunk.num_tokens for chunk in plan.chunks]) - 1
        floats = np.array([(request.params.temperature, request.params.top_p) for request in requests], np.float32)
        fields["temperature"][:count], fields["top_p"][:count] = floats.view(np.int32).T
        fields["top_k"][:count] = [min(request.params.top_k, np.iinfo(np.int32).max) for request in requests]
        seeds = np.array([request.seed for request in requests], np.uint64)
        fields["seed_low"][:count], fields["seed_high"][:count] = seeds.view(np.int32).reshape(-1, 2).T
        fields["sample_position"][:count] = [chunk.start + chunk.num_tokens for chunk in plan.chunks]

    def _new_pages(self, plan: StepPlan) -> Iterator[tuple[int | None, int, int]]:
        """(row, index in the request's list, page) of the pages that the plan has assigned."""
        for request, start, num_tokens, _ in plan.chunks:
            first = -(-start // self._page_size)  # of the pages that cover positions from `start` on
            last = -(-(start + num_tokens) // self._page_size)
            for index in range(first, last):
                yield request.row, index, request.pages[index]
