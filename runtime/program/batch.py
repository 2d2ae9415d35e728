"""Packs a StepPlan into one padded host array of a declared shape.

Step 5 of 10. In: StepPlan. Out: int32 vectors. numpy only.

Everything that a step needs from the host is packed into one vector and sent in one transfer; floats are packed as
their bits. `Bucket.fields` alone defines the order of the fields, and `step.py` uses it to unpack them on the device. A
request that starts from cached pages has many pages at once; a separate vector sets its row of the device's page table
before the step.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from ..api.request import Request
from ..api.sampling_params import SamplingMode
from ..scheduler.step_plan import StepPlan
from .packing import PARAM_FIELDS, SAMPLER_PARAMS, consecutive, packed_params
from .processors.processor_batch import ProcessorBatch, ProcessorBatchBuilder

ProgramKey = tuple[str, int]  # the kind of a program and its size, such as the number of tokens; 0 if it has none

ON_DEVICE = -1  # in place of a token id: the device uses its table of last tokens
ANY_MODE = -1  # in place of a SamplingMode: the step's vector contains it

_TOKEN_FIELDS = ("token_ids", "positions", "token_request")
_REQUEST_FIELDS = (
    "slots",
    "last_index",  # index of the request's last token among the step's tokens
    *PARAM_FIELDS,
    "sample_position",
)
_PARAMS_START = _REQUEST_FIELDS.index(PARAM_FIELDS[0])
_PAGE_FIELDS = ("page_slot", "page_index", "page")
_STEP_FIELDS = ("mode", "step_number")  # a SamplingMode; see `kernels.readback`
_MULTI_STEP_FIELDS = ("num_steps",)  # per request, in buckets of multi-step decode


@dataclass(frozen=True, order=True)
class Bucket:
    """A shape to which steps are padded. Each has one compiled program."""

    num_tokens: int
    num_requests: int
    num_new_pages: int
    num_steps: int = 1  # decode steps in one dispatch
    is_decode: bool = False  # for decodes only: every token is sampled after, and belongs to a request of its own
    mode: int = ANY_MODE  # the SamplingMode for which it is compiled
    has_drafts: bool = False  # only decodes, which may have draft tokens behind them
    is_pooling: bool = False  # computes `ModelConfig.pooling` and samples nothing
    num_adapters: int = 0  # how many different adapters its tokens may have; 0: it multiplies without any

    @property
    def kind(self) -> str:
        """The kind of its program. Buckets of one kind have different numbers of tokens."""
        kind = "pooling" if self.is_pooling else "decode" if self.is_decode else "step"
        kind += f" {SamplingMode(self.mode).name.lower()}" if self.mode != ANY_MODE else ""
        kind += f" x {self.num_steps}" if self.num_steps > 1 else ""
        return f"{kind} with adapters, {self.num_adapters}" if self.num_adapters else kind

    @property
    def key(self) -> ProgramKey:
        """The key of its program; see `step.ServerPrograms`."""
        return self.kind, self.num_tokens

    @cached_property
    def fields(self) -> dict[str, slice]:
        """The slice of each field in the packed vector."""
        sizes = itertools.chain(
            ((name, self.num_tokens) for name in _TOKEN_FIELDS),
            ((name, self.num_requests) for name in _REQUEST_FIELDS),
            ((name, self.num_new_pages) for name in _PAGE_FIELDS),
            ((name, 1) for name in _STEP_FIELDS),
            ((name, self.num_requests) for name in (_MULTI_STEP_FIELDS if self.num_steps > 1 else ())),
        )
        return consecutive(sizes)

    @cached_property
    def size(self) -> int:
        """The length of the packed vector."""
        return max(place.stop for place in self.fields.values())


class StepBatch(NamedTuple):
    """A dispatch in the device's order: rows of the page table, the step, then logits processors if it has any."""

    bucket: Bucket
    packed: np.ndarray  # [bucket.size] int32
    page_table_rows: list[np.ndarray]  # each [1 + max_request_pages] int32: a slot, then its pages
    processors: ProcessorBatch | None = None

    def fill_drafts(self, plan: StepPlan) -> None:
        """Fills in draft tokens that were not known when the batch was built. Called before the dispatch."""
        token_ids = self.packed[self.bucket.fields["token_ids"]]
        token_ids[_DecodeTokens.of(plan).drafts] = list(itertools.chain(*plan.drafts))
        if self.processors is not None:
            self.processors.fill_drafts(plan)


class _DecodeTokens(NamedTuple):
    """The places of decodes and their draft tokens among a step's tokens: each decode, then its drafts."""

    request: np.ndarray  # for each token, the index of its decode
    first: np.ndarray  # for each decode, the index of its token that is not a draft

    @classmethod
    def of(cls, plan: StepPlan) -> "_DecodeTokens":
        lengths = np.array(plan.decode_lengths if plan.drafts else [1] * len(plan.decodes), int)
        return cls(np.repeat(np.arange(len(lengths)), lengths), np.cumsum(lengths) - lengths)

    @property
    def drafts(self) -> np.ndarray:
        return np.delete(np.arange(len(self.request)), self.first)


class _Layout(NamedTuple):
    """What steps of the same requests, decodes with as many draft tokens each, have in common."""

    bucket: Bucket
    slots: np.ndarray  # slot of each sample
    packed: np.ndarray  # [bucket.size] int32, with positions of decodes from 0 on, and without new pages
    moving: np.ndarray  # the places in `packed` of those positions
    decode: np.ndarray  # for each of them, the index of its decode


class BatchBuilder:
    """Packs plans into new arrays, because a step in flight may still read those of the previous one.

    Stores the sampling parameters by slot from a request's admission on, so that packing a decode takes only a few
    copies of whole arrays.
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
        # Writes to this slot fall outside the device's tables and are dropped.
        self._no_slot = max_running
        self._params = np.zeros((len(PARAM_FIELDS), max_running), np.int32)
        self._layouts: dict[int, tuple[object, _Layout]] = {}  # the last layout by steps, and what it was made for

    def bucket(self, plan: StepPlan, mode: int) -> Bucket:
        """Returns the smallest bucket that holds the plan and samples in this mode.

        Plans without adapters have the buckets of a server without any.
        """
        num_tokens, num_samples, num_adapters = plan.num_batch_tokens, plan.num_samples, plan.num_adapters
        for bucket in self._buckets:
            fits = bucket.num_tokens >= num_tokens and bucket.num_requests >= num_samples
            fits = fits and bucket.num_steps == plan.num_steps and bucket.mode in (ANY_MODE, mode)
            fits = fits and num_adapters <= bucket.num_adapters and bool(num_adapters) == bool(bucket.num_adapters)
            if fits and not (bucket.is_decode and (plan.prefills or (plan.drafts and not bucket.has_drafts))):
                return bucket
        raise AssertionError(
            f"no bucket holds {num_tokens} tokens, {num_samples} samples and {num_adapters} adapters: {self._buckets}"
        )

    def build(self, plan: StepPlan) -> StepBatch:
        """Packs a plan. Call it before the next call of the scheduler."""
        page_table_rows, changed_slots = [], []
        for request, num_cached_pages, _ in plan.admitted:
            self._params[:, request.slot] = _params(request)
            if (changed_slot := self._processors.admit(request)) is not None:
                changed_slots.append(changed_slot)
            if num_cached_pages:
                page_table_rows.append(self.page_table_row(request, num_cached_pages))
        layout = self._layout(plan)
        bucket, slots, packed = layout.bucket, layout.slots, layout.packed.copy()
        fields = {name: packed[place] for name, place in bucket.fields.items()}
        starts = np.array(plan.starts, np.int32)
        packed[layout.moving] += starts[layout.decode]
        if self._has_drafts:
            token_ids = self._known_tokens(plan)
            fields["token_ids"][: len(token_ids)] = token_ids
        self._fill_pages(plan, starts, fields)
        processors = self._processors.build(plan, fields, slots, changed_slots) if plan.num_steps == 1 else None
        return StepBatch(bucket, packed, page_table_rows, processors)

    @staticmethod
    def _known_tokens(plan: StepPlan) -> list[int]:
        """Returns the token ids of the decodes and their draft tokens, as far as the host knows them.

        The device's table of last tokens is out of date after drafts, because the device does not know how many of them
        were accepted.
        """
        token_ids: list[int] = []
        all_drafts: Sequence[Sequence[int]] = plan.drafts or [()] * len(plan.decodes)
        for request, start, drafts in zip(plan.decodes, plan.starts, all_drafts, strict=True):
            token_ids += [*(request.tokens(start, start + 1) or [ON_DEVICE]), *drafts]
        return token_ids

    def _layout(self, plan: StepPlan) -> _Layout:
        """Returns the layout of a plan, that of the last one if it fits: the device waits while drafts are packed."""
        slots = [_slot(request) for request in plan.requests]
        if plan.prefills or plan.admitted:
            self._layouts.clear()  # a slot may have another request from now on
            return self._new_layout(plan, np.array(slots))
        shape = slots, list(plan.decode_lengths)
        made_for, layout = self._layouts.get(plan.num_steps, (None, None))
        if layout is None or made_for != shape:
            layout = self._new_layout(plan, np.array(slots))
            self._layouts[plan.num_steps] = shape, layout
        return layout

    def _new_layout(self, plan: StepPlan, slots: np.ndarray) -> _Layout:
        mode = self._processors.mode(slots, is_final=plan.num_steps > 1)
        bucket = self.bucket(plan, mode)
        packed = np.zeros(bucket.size, np.int32)
        fields = {name: packed[place] for name, place in bucket.fields.items()}
        tokens = _DecodeTokens.of(plan)
        drafts = tokens.drafts
        self._fill_tokens(plan, tokens, fields)
        self._fill_requests(plan, slots, tokens, fields)
        slots = np.concatenate([slots, slots[tokens.request[drafts]]])
        first = bucket.fields[_REQUEST_FIELDS[0]].start
        by_request = packed[first : first + len(_REQUEST_FIELDS) * bucket.num_requests].reshape(-1, bucket.num_requests)
        by_request[_PARAMS_START : _PARAMS_START + len(PARAM_FIELDS), : len(slots)] = self._params[:, slots]
        fields["page_slot"][:] = self._no_slot
        fields["mode"][0] = mode
        decodes, behind = np.arange(len(plan.decodes)), plan.num_requests + np.arange(len(drafts))
        position, sample = (bucket.fields[name].start for name in ("positions", "sample_position"))
        moving = np.concatenate([position + np.arange(len(tokens.request)), sample + decodes, sample + behind])
        decode = np.concatenate([tokens.request, decodes, tokens.request[drafts]])
        return _Layout(bucket, slots, packed, moving, decode)

    def page_table_row(self, request: Request, num_pages: int) -> np.ndarray:
        """Returns the row of a running request's first pages; see `StepBatch.page_table_rows`."""
        row = np.zeros(1 + self._max_request_pages, np.int32)
        row[0] = _slot(request)
        row[1 : 1 + num_pages] = request.pages[:num_pages]
        return row

    @staticmethod
    def _fill_tokens(plan: StepPlan, tokens: _DecodeTokens, fields: dict[str, np.ndarray]) -> None:
        count = len(tokens.request)
        fields["token_ids"][:count] = ON_DEVICE
        fields["positions"][:count] = np.arange(count) - tokens.first[tokens.request]
        fields["token_request"][:count] = tokens.request
        for index, (request, start, num_tokens, _) in enumerate(plan.prefills, start=len(plan.decodes)):
            place = slice(count, count + num_tokens)
            fields["token_ids"][place] = request.tokens(start, start + num_tokens)
            fields["positions"][place] = np.arange(start, start + num_tokens)
            fields["token_request"][place] = index
            count += num_tokens
        fields["positions"][count:] = -1

    def _fill_requests(
        self, plan: StepPlan, slots: np.ndarray, tokens: _DecodeTokens, fields: dict[str, np.ndarray]
    ) -> None:
        """Fills the fields of the requests except the sampling parameters, and of the draft tokens behind them."""
        num_decodes, num_requests = len(plan.decodes), plan.num_requests
        fields["slots"][:num_requests] = slots
        fields["slots"][num_requests:] = self._no_slot
        fields["last_index"][:num_decodes] = tokens.first
        fields["sample_position"][:num_decodes] = 1
        if plan.prefills:
            prefills = slice(num_decodes, num_requests)
            num_before = num_decodes + plan.num_drafts
            fields["last_index"][prefills] = np.cumsum([chunk.num_tokens for chunk in plan.prefills]) + num_before - 1
            fields["sample_position"][prefills] = [chunk.start + chunk.num_tokens for chunk in plan.prefills]
        samples, drafts = slice(num_requests, plan.num_samples), tokens.drafts
        fields["last_index"][samples] = drafts
        fields["sample_position"][samples] = fields["positions"][drafts] + 1
        if plan.num_steps > 1:
            fields["num_steps"][:num_decodes] = plan.decode_lengths

    def _fill_pages(self, plan: StepPlan, starts: np.ndarray, fields: dict[str, np.ndarray]) -> None:
        new_pages = list(self._new_pages(plan, starts))
        if new_pages:
            slot, index, page = zip(*new_pages, strict=True)
            count = len(new_pages)
            fields["page_slot"][:count], fields["page_index"][:count], fields["page"][:count] = slot, index, page

    def _new_pages(self, plan: StepPlan, starts: np.ndarray) -> Iterator[tuple[int, int, int]]:
        """Yields (slot, index in the request's pages, page) of the pages whose first position the step computes."""
        # A decode begins a page if the distance to the next multiple of the page size is less than its length.
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
    """Returns a request's sampling parameters as int32, in the order of PARAM_FIELDS."""
    seed = np.array([request.seed], np.uint64).view(np.int32)
    return np.array([*packed_params(request.params, SAMPLER_PARAMS), *seed], np.int32)
