"""Step 5 of 10: a StepPlan becomes one padded host array of a declared shape. In: StepPlan. Out: int32 vectors.

All that a step needs from the host travels in one vector, one transfer: floats as their bits. Only `Bucket.fields`
knows the order; `step.py` takes the vector apart with it on the device. A request that starts from cached pages brings
many pages at once: a vector of its own sets its row of the device's page table before the step. numpy only.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from ..api.config import ServeConfig
from ..api.request import Request
from ..api.sampling_params import SamplingMode
from ..scheduler.limits import MAX_FUSED_TOKENS, SchedulerLimits
from ..scheduler.step_plan import StepPlan
from .packing import PARAM_FIELDS, SAMPLER_PARAMS, consecutive, packed_params
from .processor_batch import ProcessorBatch, ProcessorBatchBuilder

ON_DEVICE = -1  # a token id the host need not know: the device takes it from its table of last tokens
ANY_MODE = -1

_TOKEN_FIELDS = ("token_ids", "positions", "token_request")
_REQUEST_FIELDS = (
    "slots",
    "last_index",  # of the request's last token among the step's tokens
    *PARAM_FIELDS,
    "sample_position",
)
_PARAMS_START = _REQUEST_FIELDS.index(PARAM_FIELDS[0])
_PAGE_FIELDS = ("page_slot", "page_index", "page")
_MIN_MIXED_TOKENS = 64
_FREE_TOKENS = 256  # up to so many, or nearly, a step takes as long as for one: it reads all weights
_STEP_FIELDS = ("mode",)  # a SamplingMode
_WINDOW_FIELDS = ("num_steps",)  # of each request, where the bucket has more than one


@dataclass(frozen=True, order=True)
class Bucket:
    """A shape that steps are padded to: one compiled program."""

    num_tokens: int
    num_requests: int
    num_new_pages: int
    num_steps: int = 1  # decode steps in one dispatch
    is_decode: bool = False  # holds no prefill chunk: every token is the only one of its request
    mode: int = ANY_MODE  # the `SamplingMode` of its sampler; ANY_MODE: each step's vector says which

    @property
    def kind(self) -> str:
        """Which programs it is one of; among these it is known by its number of tokens."""
        kind = "decode" if self.is_decode else "step"
        kind += f" {SamplingMode(self.mode).name.lower()}" if self.mode != ANY_MODE else ""
        return f"{kind} x {self.num_steps}" if self.num_steps > 1 else kind

    @cached_property
    def fields(self) -> dict[str, slice]:
        """Where each field lies in the packed vector."""
        sizes = itertools.chain(
            ((name, self.num_tokens) for name in _TOKEN_FIELDS),
            ((name, self.num_requests) for name in _REQUEST_FIELDS),
            ((name, self.num_new_pages) for name in _PAGE_FIELDS),
            ((name, 1) for name in _STEP_FIELDS),
            ((name, self.num_requests) for name in (_WINDOW_FIELDS if self.num_steps > 1 else ())),
        )
        return consecutive(sizes)

    @cached_property
    def size(self) -> int:
        """Length of the packed vector."""
        return max(place.stop for place in self.fields.values())


class Batch(NamedTuple):
    """A dispatch as the device takes it, in this order: page rows, the step, then its controls if it has any."""

    bucket: Bucket
    packed: np.ndarray  # [bucket.size] int32
    page_table_rows: list[np.ndarray]  # each [1 + max_request_pages] int32: a row, then its pages
    processors: ProcessorBatch | None = None


def declare_buckets(
    *,
    max_step_tokens: int,
    max_running: int,
    page_size: int,
    max_decode_steps: int = 1,
    has_decode_kernels: bool = False,
) -> tuple[Bucket, ...]:
    """The finite set of shapes: token counts are powers of two and the budget itself, smallest first. Where decodes are
    more than the fused layers take, there is a size between two powers, too.

    Up to max_running tokens a bucket holds as many requests as tokens, so decodes alone waste no room; each of these
    shapes also exists with `max_decode_steps` steps, if that is more than one. Where there are kernels for so many
    decodes, the shapes of decodes alone, of one step and of several, have a program for each sampling mode: a choice on
    the device would cost as much as a layer.
    Steps with prefill then have no shapes below 64 tokens: where such kernels are, a step of 64 takes as long as one of
    8, and each shape takes a compile.
    """
    sizes = [2**power for power in range(max_step_tokens.bit_length()) if 2**power < max_step_tokens]
    if has_decode_kernels:  # decodes that are not fused are padded less
        sizes += [3 * size // 2 for size in sizes if size > MAX_FUSED_TOKENS and 3 * size // 2 < max_running]
    sizes = sorted({*sizes, max_running, max_step_tokens})
    buckets = []
    for num_tokens in sizes:
        num_requests = min(num_tokens, max_running)
        # A request's chunk of n tokens begins at most ceil(n / page_size) pages, a window at most one.
        num_new_pages = num_requests + num_tokens // page_size
        shape = (num_tokens, num_requests, num_new_pages)
        is_fused = has_decode_kernels and num_tokens <= min(max_running, MAX_FUSED_TOKENS)
        if is_fused:  # before the general: found first
            buckets += [Bucket(*shape, is_decode=True, mode=mode) for mode in SamplingMode]
        if not has_decode_kernels or num_tokens >= min(_MIN_MIXED_TOKENS, max_step_tokens):
            buckets.append(Bucket(*shape))
        if max_decode_steps > 1 and num_tokens <= max_running:
            modes = SamplingMode if is_fused else (ANY_MODE,)
            buckets += [Bucket(*shape, max_decode_steps, has_decode_kernels, mode) for mode in modes]
    return tuple(buckets)


def server_buckets(config: ServeConfig) -> tuple[Bucket, ...]:
    """The shapes of a server. With kernels that are not named yet, "auto", as without decode kernels."""
    return declare_buckets(
        max_step_tokens=config.max_step_tokens,
        max_running=config.max_running,
        page_size=config.page_size,
        max_decode_steps=config.max_decode_steps,
        has_decode_kernels=config.decode_layers not in ("auto", "off"),
    )


def server_limits(config: ServeConfig, max_context: int) -> SchedulerLimits:
    """What the scheduler of a server keeps to."""
    sizes = sorted({bucket.num_tokens for bucket in server_buckets(config) if not bucket.is_decode})
    return SchedulerLimits(
        page_size=config.page_size,
        max_running=config.max_running,
        max_step_tokens=config.max_step_tokens,
        max_waiting=config.max_waiting,
        max_context=max_context,
        max_prefill_tokens=config.max_prefill_tokens,
        max_decode_steps=config.max_decode_steps,
        priority_seconds=config.priority_seconds,
        has_prefix_cache=config.prefix_cache,
        draft_tokens=config.draft_tokens,
        draft_min_match=config.draft_min_match,
        step_sizes=tuple(size for size in sizes if size >= _FREE_TOKENS),
    )


class _DecodeTokens(NamedTuple):
    """Where decodes and their drafts lie among a step's tokens: each decode, then its drafts."""

    request: np.ndarray  # of each token, the index of its decode
    first: np.ndarray  # of each decode, its token that is no draft

    @classmethod
    def of(cls, plan: StepPlan) -> "_DecodeTokens":
        lengths = np.array(plan.decode_lengths if plan.drafts else [1] * len(plan.decodes), int)
        return cls(np.repeat(np.arange(len(lengths)), lengths), np.cumsum(lengths) - lengths)

    @property
    def drafts(self) -> np.ndarray:
        return np.delete(np.arange(len(self.request)), self.first)

    def fill_tokens(self, plan: StepPlan, fields: dict[str, np.ndarray]) -> None:
        """The host names the token of a decode where it knows it: the device's table of last tokens is out of date
        after drafts, as the device does not see how many of them hold."""
        token_ids: list[int] = []
        all_drafts = plan.drafts or [()] * len(plan.decodes)
        for request, start, drafts in zip(plan.decodes, plan.starts, all_drafts, strict=True):
            token_ids += [*(request.tokens(start, start + 1) or [ON_DEVICE]), *drafts]
        count = len(token_ids)
        fields["token_ids"][:count] = token_ids
        fields["positions"][:count] = (np.array(plan.starts, int) - self.first)[self.request] + np.arange(count)
        fields["token_request"][:count] = self.request

    def fill_samples(self, plan: StepPlan, fields: dict[str, np.ndarray]) -> None:
        """Each draft is sampled from in a place of its own, behind those of all requests."""
        fields["last_index"][: len(self.first)] = self.first
        samples = slice(plan.num_requests, plan.num_samples)
        fields["last_index"][samples] = self.drafts
        fields["sample_position"][samples] = fields["positions"][self.drafts] + 1


class BatchBuilder:
    """Packs plans. Buffers are not reused: a step in flight may still read the one before.

    Sampling parameters are kept by row from a request's admission on, so a decode costs a few copies of whole arrays.
    """

    def __init__(
        self,
        buckets: tuple[Bucket, ...],
        *,
        max_running: int,
        page_size: int,
        max_request_pages: int,
        processors: ProcessorBatchBuilder,
        has_drafts: bool = False,
    ):
        self._buckets = buckets
        self._processors = processors
        self._has_drafts = has_drafts
        self._page_size = page_size
        self._max_request_pages = max_request_pages
        # Writes at this row fall outside the device's tables and are dropped.
        self._no_slot = max_running
        self._params = np.zeros((len(PARAM_FIELDS), max_running), np.int32)

    def bucket(self, plan: StepPlan, mode: int) -> Bucket:
        """The smallest bucket that holds the plan and samples in this mode."""
        num_tokens, num_samples = plan.num_batch_tokens, plan.num_samples
        for bucket in self._buckets:
            fits = bucket.num_tokens >= num_tokens and bucket.num_requests >= num_samples
            fits = fits and bucket.num_steps == plan.num_steps and bucket.mode in (ANY_MODE, mode)
            if fits and not (bucket.is_decode and (plan.prefills or plan.drafts)):
                return bucket
        raise AssertionError(f"no bucket holds {num_tokens} tokens and {num_samples} samples: {self._buckets}")

    def build(self, plan: StepPlan) -> Batch:
        """The plan, packed. Call it before the scheduler moves on."""
        page_table_rows, changed_slots = [], []
        for request, num_cached_pages, _ in plan.admitted:
            self._params[:, request.slot] = _params(request)
            if (changed_slot := self._processors.admit(request)) is not None:
                changed_slots.append(changed_slot)
            if num_cached_pages:
                page_table_rows.append(self._page_row(request, num_cached_pages))
        slots = np.array([_slot(request) for request in plan.requests])
        mode = self._processors.mode(slots)
        bucket = self.bucket(plan, mode)
        packed = np.zeros(bucket.size, np.int32)
        fields = {name: packed[place] for name, place in bucket.fields.items()}
        decodes = _DecodeTokens.of(plan) if self._has_drafts else None
        starts = np.array(plan.starts, np.int32)
        self._fill_tokens(plan, starts, decodes, fields)
        self._fill_requests(plan, slots, starts, fields)
        if decodes is not None:
            decodes.fill_samples(plan, fields)
            slots = np.concatenate([slots, slots[decodes.request[decodes.drafts]]])
        first = bucket.fields[_REQUEST_FIELDS[0]].start
        by_request = packed[first : first + len(_REQUEST_FIELDS) * bucket.num_requests].reshape(-1, bucket.num_requests)
        by_request[_PARAMS_START : _PARAMS_START + len(PARAM_FIELDS), : len(slots)] = self._params[:, slots]
        self._fill_pages(plan, starts, fields)
        fields["mode"][0] = mode
        return Batch(
            bucket, packed, page_table_rows, self._processors.build(plan, bucket.num_requests, fields, changed_slots)
        )

    def _page_row(self, request: Request, num_pages: int) -> np.ndarray:
        page_slot = np.zeros(1 + self._max_request_pages, np.int32)
        page_slot[0] = _slot(request)
        page_slot[1 : 1 + num_pages] = request.pages[:num_pages]
        return page_slot

    @staticmethod
    def _fill_tokens(
        plan: StepPlan, starts: np.ndarray, decodes: _DecodeTokens | None, fields: dict[str, np.ndarray]
    ) -> None:
        count = len(plan.decodes) + plan.num_drafts
        if decodes is not None:
            decodes.fill_tokens(plan, fields)
        else:
            fields["token_ids"][:count] = ON_DEVICE
            fields["positions"][:count] = starts
            fields["token_request"][:count] = np.arange(count)
        for index, (request, start, num_tokens, _) in enumerate(plan.prefills, start=len(plan.decodes)):
            place = slice(count, count + num_tokens)
            fields["token_ids"][place] = request.tokens(start, start + num_tokens)
            fields["positions"][place] = np.arange(start, start + num_tokens)
            fields["token_request"][place] = index
            count += num_tokens
        fields["positions"][count:] = -1

    def _fill_requests(
        self, plan: StepPlan, slots: np.ndarray, starts: np.ndarray, fields: dict[str, np.ndarray]
    ) -> None:
        """All but the sampling parameters."""
        num_decodes, num_requests = len(plan.decodes), plan.num_requests
        fields["slots"][:num_requests] = slots
        fields["slots"][num_requests:] = self._no_slot
        fields["last_index"][:num_decodes] = np.arange(num_decodes)
        fields["sample_position"][:num_decodes] = starts + 1
        if plan.prefills:
            prefills = slice(num_decodes, num_requests)
            num_before = num_decodes + plan.num_drafts
            fields["last_index"][prefills] = np.cumsum([chunk.num_tokens for chunk in plan.prefills]) + num_before - 1
            fields["sample_position"][prefills] = [chunk.start + chunk.num_tokens for chunk in plan.prefills]
        if plan.num_steps > 1:
            fields["num_steps"][:num_decodes] = plan.decode_lengths

    def _fill_pages(self, plan: StepPlan, starts: np.ndarray, fields: dict[str, np.ndarray]) -> None:
        new_pages = list(self._new_pages(plan, starts))
        count = len(new_pages)
        if count:
            slot, index, page = zip(*new_pages, strict=True)
            fields["page_slot"][:count], fields["page_index"][:count], fields["page"][:count] = slot, index, page
        fields["page_slot"][count:] = self._no_slot

    def _new_pages(self, plan: StepPlan, starts: np.ndarray) -> Iterator[tuple[int, int, int]]:
        """(row, index in the request's list, page) of the pages whose first position the step computes."""
        # Positions from a decode's to the next multiple of the page size: below its length, it begins a page.
        begins = -starts % self._page_size < (plan.decode_lengths or 1)
        for decode in np.flatnonzero(begins).tolist():
            request = plan.decodes[decode]
            index = -(-plan.starts[decode] // self._page_size)
            yield _slot(request), index, request.pages[index]
        for request, start, num_tokens, _ in plan.prefills:
            for index in range(-(-start // self._page_size), -(-(start + num_tokens) // self._page_size)):
                yield _slot(request), index, request.pages[index]


def _slot(request: Request) -> int:
    assert request.slot is not None, request.request_id
    return request.slot


def _params(request: Request) -> np.ndarray:
    """A request's sampling parameters as int32, in the order of PARAM_FIELDS."""
    seed = np.array([request.seed], np.uint64).view(np.int32)
    return np.array([*packed_params(request.params, SAMPLER_PARAMS), *seed], np.int32)
