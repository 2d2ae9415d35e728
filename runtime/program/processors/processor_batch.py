"""Step 5 of 10, for the logits processors: packs what they need to know about the requests of a step.

In: StepPlan, and the packed step. Out: one more packed vector, the state of slots that were newly assigned, and the
prompt tokens whose log-probabilities are requested. Uses numpy only.
"""

import itertools
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from ...api.request import Request
from ...api.sampling_params import SamplingMode
from ...scheduler.step_plan import StepPlan
from ..draft_rows import draft_row_fields, fill_draft_rows, fill_draft_tokens
from ..packing import PARAM_FIELDS, consecutive, packed_values
from . import PROCESSORS
from .contract import ProcessorState

# Flags of a request in a step:
SAMPLES = 1  # the sampled token counts; otherwise it has no meaning
ADJUSTS = 2  # logits processors apply: the request's slot holds its history and bias
REPORTS_PROCESSED = 4  # log-probabilities are those of the distribution that is sampled from

_PROCESSOR_FIELDS = tuple(name for processor in PROCESSORS for name in processor.fields)
_REQUEST_FIELDS = ("slots", "flags", "sample_position", *PARAM_FIELDS, *_PROCESSOR_FIELDS)
_STEP_FIELDS = ("mode", "has_logprobs")
_SIZE_RATIO = 8

WORD_BITS = 32  # bits per word of a mask

Leaf = TypeVar("Leaf")


@dataclass(frozen=True, order=True)
class ProcessorShape:
    """The shape of the packed vector; each shape has one compiled program."""

    num_requests: int
    num_drafts: int = 0  # maximum draft tokens of a request

    @cached_property
    def fields(self) -> dict[str, slice]:
        """Returns where each field lies in the packed vector."""
        names = (*_REQUEST_FIELDS, *draft_row_fields(self.num_drafts))
        by_request = ((name, self.num_requests) for name in names)
        return consecutive(itertools.chain(by_request, ((name, 1) for name in _STEP_FIELDS)))

    @cached_property
    def size(self) -> int:
        """Returns the length of the packed vector."""
        return max(place.stop for place in self.fields.values())


def processor_sizes(largest: int, smallest: int = 1) -> tuple[int, ...]:
    """Returns the sizes that the programs are compiled for, ascending: few, because each takes time to compile."""
    sizes = [smallest]
    while sizes[-1] * _SIZE_RATIO < largest:
        sizes.append(sizes[-1] * _SIZE_RATIO)
    return tuple(sorted({*(size for size in sizes if size < largest), largest}))


def next_size(sizes: Sequence[int], needed: int) -> int:
    """Returns the smallest of the ascending `sizes` that is at least `needed`."""
    return sizes[bisect_left(sizes, needed)]


class SlotAdjustments(NamedTuple):
    """The state of a slot whose request has its logits changed, for each token of the vocabulary."""

    slot: int
    history: np.ndarray  # [V] int32
    bias: np.ndarray  # [V] float32, -inf for excluded tokens


class ProcessorBatch(NamedTuple):
    """The input of a step's logits processors, in the order of dispatch."""

    slots: Sequence[SlotAdjustments]
    packed: np.ndarray | None  # int32, see `ProcessorShape`; None: the step's own sample is used
    prompt_targets: np.ndarray | None  # [T] int32: the prompt token after each token of the step, or -1
    fields: Mapping[str, np.ndarray] = MappingProxyType({})  # views of `packed`

    def withdraw(self, rows: Sequence[int]) -> None:
        """Makes some of the step's samples count for nothing. Called before the dispatch."""
        if self.fields:
            self.fields["flags"][list(rows)] &= ~SAMPLES

    def fill_drafts(self, plan: StepPlan) -> None:
        """Fills in draft tokens that were not known when the batch was built. Called before the dispatch."""
        if self.fields:
            fill_draft_tokens(self.fields, plan.num_requests, plan.drafts)


class Logprobs(NamedTuple, Generic[Leaf]):
    """Log-probabilities in the model's unchanged distribution, at each of [...] positions.

    Those of samples whose request asks for it are of the distribution that is sampled from; -inf is a token that cannot
    be sampled.
    """

    token: Leaf  # [...] float32, of the token at the position
    top_ids: Leaf  # [..., N] int32, most likely first, the lowest id first among equals
    top: Leaf  # [..., N] float32


class Sampled(NamedTuple, Generic[Leaf]):
    """The result of `logits_processors.sample_processed`. Log-probabilities that no request asked for are zeros."""

    tokens: Leaf  # [B] int32
    logprobs: Logprobs[Leaf]


class ProcessorBatchBuilder:
    """Packs steps, and keeps the parameters of the running requests by slot.

    Args:
      vocab_size: the model's, without padding.
      eos_token_ids: the tokens that end every request that does not ignore them.
      num_drafts: maximum draft tokens of a request.
    """

    def __init__(self, *, max_running: int, vocab_size: int, eos_token_ids: frozenset[int], num_drafts: int = 0):
        self._vocab_size = vocab_size
        self._num_drafts = num_drafts
        self._eos_token_ids = eos_token_ids
        self._sizes, self._no_slot = processor_sizes(max_running), max_running
        self._needs_processors = np.zeros(max_running, bool)
        self._values = np.zeros((len(_PROCESSOR_FIELDS), max_running), np.int32)
        self._flags = np.zeros(max_running, np.int32)
        self._modes = np.zeros(max_running, np.int32)
        self._has_logprobs = np.zeros(max_running, bool)

    def admit(self, request: Request) -> SlotAdjustments | None:
        """Records a request that was assigned a slot. Returns the state that the device needs for it, if any."""
        slot, params = request.slot, request.params
        self._needs_processors[slot] = request.needs_processors
        self._modes[slot] = params.mode
        # Steps that need processors read these for all of their slots, so those of the slot's last request must go.
        self._flags[slot], self._has_logprobs[slot] = 0, False
        if not request.needs_processors:
            return None
        self._has_logprobs[slot] = params.logprobs is not None
        reports = REPORTS_PROCESSED if params.processed_logprobs and params.logprobs is not None else 0
        self._flags[slot] = reports
        if not params.has_adjustments:
            return None
        assert slot is not None, request.request_id
        self._flags[slot] = ADJUSTS | reports
        values = [value for processor in PROCESSORS for value in processor.values(request)]
        self._values[:, slot] = packed_values(_PROCESSOR_FIELDS, values)
        state = ProcessorState(np.zeros(self._vocab_size, np.int32), np.zeros(self._vocab_size, np.float32))
        for processor in PROCESSORS:
            processor.write_slot(request, state, self._eos_token_ids)
        return SlotAdjustments(slot, *state)

    def mode(self, slots: np.ndarray, *, is_final: bool = False) -> int:
        """Returns the mode of the step's own sampler, which is the cheapest one if its sample is replaced.

        `is_final` says that it never is.
        """
        is_replaced = not is_final and self._needs_processors[slots].any()
        return SamplingMode.GREEDY if is_replaced else int(self._modes[slots].max(initial=0))

    def build(
        self, plan: StepPlan, step: dict[str, np.ndarray], slots: np.ndarray, changed: Sequence[SlotAdjustments]
    ) -> ProcessorBatch | None:
        """Returns the input for a plan whose step is packed in `step`, or None if no request needs it.

        Records that the log-probabilities of the step's prompt tokens were requested.

        Args:
          slots: The slot of each sample of the plan.
          changed: The state of newly assigned slots.
        """
        targets = self._prompt_targets(plan, step)
        packed, fields = None, {}
        if self._needs_processors[slots].any():
            shape = ProcessorShape(next_size(self._sizes, len(step["slots"])), self._num_drafts)
            packed = np.zeros(shape.size, np.int32)
            fields = {name: packed[place] for name, place in shape.fields.items()}
            self._fill(plan, fields, step, slots)
        return (
            ProcessorBatch(changed, packed, targets, fields)
            if changed or packed is not None or targets is not None
            else None
        )

    def _fill(
        self, plan: StepPlan, fields: dict[str, np.ndarray], step: dict[str, np.ndarray], slots: np.ndarray
    ) -> None:
        fields["slots"][:] = self._no_slot
        for name in ("slots", "sample_position", *PARAM_FIELDS):
            fields[name][: len(step[name])] = step[name]
        samples = np.ones(len(slots), np.int32)
        samples[len(plan.decodes) : plan.num_requests] = [chunk.is_sampling for chunk in plan.prefills]
        fields["flags"][: len(slots)] = self._flags[slots] | SAMPLES * samples
        for name, values in zip(_PROCESSOR_FIELDS, self._values, strict=True):
            fields[name][: len(slots)] = values[slots]
        fields["mode"][0] = self._modes[slots].max()
        fields["has_logprobs"][0] = self._has_logprobs[slots].any()
        if self._num_drafts:
            fill_draft_rows(fields, slots, plan.drafts)

    @staticmethod
    def _prompt_targets(plan: StepPlan, step: dict[str, np.ndarray]) -> np.ndarray | None:
        targets, place = None, len(plan.decodes) + plan.num_drafts
        for request, start, num_tokens, _ in plan.prefills:
            if (first := plan.prompt_logprob_starts.get(request)) is not None:  # position t gives that of token t + 1
                last = min(start + num_tokens, len(request.prompt_token_ids) - 1)
                if first < last:
                    if targets is None:
                        targets = np.full(len(step["positions"]), -1, np.int32)
                    wanted = request.prompt_token_ids[first + 1 : last + 1]
                    targets[place + first - start : place + last - start] = wanted
            place += num_tokens
        return targets
