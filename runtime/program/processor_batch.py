"""Packs what the logits processors of a step need to know of its requests: step 5 of 10.

In: StepPlan, and the packed step. Out: one more packed vector, the rows that its state needs anew, and the prompt
tokens whose log-probabilities are wanted. numpy only.
"""

import itertools
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from ..api.request import Request
from ..api.sampling_params import SamplingMode
from ..processors import PROCESSORS
from ..processors.contract import ProcessorState
from ..scheduler.step_plan import StepPlan
from .packing import PARAM_FIELDS, consecutive, packed_values

# Flags of a request in a step:
SAMPLES = 1  # the sampled token counts; otherwise it has no meaning
ADJUSTS = 2  # logits processors apply: the request's slot holds its history and bias

_PROCESSOR_FIELDS = tuple(name for processor in PROCESSORS for name in processor.fields)
_REQUEST_FIELDS = ("slots", "flags", "sample_position", *PARAM_FIELDS, *_PROCESSOR_FIELDS)
_STEP_FIELDS = ("mode", "has_logprobs")
_SIZE_RATIO = 8

WORD_BITS = 32  # of a mask

Leaf = TypeVar("Leaf")


@dataclass(frozen=True, order=True)
class ProcessorShape:
    """The shape of a control vector: one compiled program."""

    num_requests: int

    @cached_property
    def fields(self) -> dict[str, slice]:
        """Where each field lies in the packed vector."""
        by_request = ((name, self.num_requests) for name in _REQUEST_FIELDS)
        return consecutive(itertools.chain(by_request, ((name, 1) for name in _STEP_FIELDS)))

    @cached_property
    def size(self) -> int:
        """Length of the packed vector."""
        return max(place.stop for place in self.fields.values())


def processor_sizes(largest: int, smallest: int = 1) -> tuple[int, ...]:
    """The sizes that control programs exist in: few, because each is compiled."""
    sizes = [smallest]
    while sizes[-1] * _SIZE_RATIO < largest:
        sizes.append(sizes[-1] * _SIZE_RATIO)
    return tuple(sorted({*(size for size in sizes if size < largest), largest}))


def next_size(sizes: Sequence[int], needed: int) -> int:
    """The smallest of `sizes`, ascending, that is enough."""
    return sizes[bisect_left(sizes, needed)]


class SlotAdjustments(NamedTuple):
    """What the device keeps of a request whose logits are adjusted, token by token of the vocabulary."""

    slot: int
    history: np.ndarray  # [V] int32
    bias: np.ndarray  # [V] float32, -inf for tokens that are out


class ProcessorBatch(NamedTuple):
    """The controls of a dispatch, in this order: rows, then the vector."""

    slots: Sequence[SlotAdjustments]
    packed: np.ndarray | None  # int32, see `ProcessorShape`; None: the step samples for itself
    prompt_targets: np.ndarray | None  # [T] int32: the prompt token after each of the step's, -1 where not wanted


class Logprobs(NamedTuple, Generic[Leaf]):
    """Of the model's own distribution at each of [...] positions."""

    token: Leaf  # [...] float32, of the token that stands there
    top_ids: Leaf  # [..., N] int32, the likeliest first; of equals the lowest id
    top: Leaf  # [..., N] float32


class Sampled(NamedTuple, Generic[Leaf]):
    """What `processors.sample_processed` brings. The log-probabilities are zeros where nobody asked."""

    tokens: Leaf  # [B] int32
    logprobs: Logprobs[Leaf]


class ProcessorBatchBuilder:
    """Keeps what the running requests want, by row.

    Args:
      vocab_size: of the model.
      eos_token_ids: end every request that does not ignore them.
    """

    def __init__(self, *, max_running: int, vocab_size: int, eos_token_ids: frozenset[int]):
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._sizes, self._no_slot = processor_sizes(max_running), max_running
        self._needs_processors = np.zeros(max_running, bool)
        self._values = np.zeros((len(_PROCESSOR_FIELDS), max_running), np.int32)
        self._flags = np.zeros(max_running, np.int32)
        self._modes = np.zeros(max_running, np.int32)
        self._has_logprobs = np.zeros(max_running, bool)

    def admit(self, request: Request) -> SlotAdjustments | None:
        """A request got its row. Returns what the device must be told of it before it is next sampled."""
        slot, params = request.slot, request.params
        self._needs_processors[slot] = request.needs_processors
        self._modes[slot] = params.mode
        # Steps that need processors read these for all of their slots, so those of the slot's last request must go.
        self._flags[slot], self._has_logprobs[slot] = 0, False
        if not request.needs_processors:
            return None
        self._has_logprobs[slot] = params.logprobs is not None
        if not params.has_adjustments:
            return None
        assert slot is not None, request.request_id
        self._flags[slot] = ADJUSTS
        values = [value for processor in PROCESSORS for value in processor.values(request)]
        self._values[:, slot] = packed_values(_PROCESSOR_FIELDS, values)
        state = ProcessorState(np.zeros(self._vocab_size, np.int32), np.zeros(self._vocab_size, np.float32))
        for processor in PROCESSORS:
            processor.write_slot(request, state, self._eos_token_ids)
        return SlotAdjustments(slot, *state)

    def mode(self, slots: np.ndarray) -> int:
        """What the step's own sampler must do: nothing much, if `processors` does it again."""
        return SamplingMode.GREEDY if self._needs_processors[slots].any() else int(self._modes[slots].max(initial=0))

    def build(
        self, plan: StepPlan, num_requests: int, step: dict[str, np.ndarray], slots: Sequence[SlotAdjustments]
    ) -> ProcessorBatch | None:
        """The controls of a plan whose step is packed in `step`; None if nobody wants any. Books the prompt tokens."""
        targets = self._prompt_targets(plan, step)
        real = step["slots"][: plan.num_requests]
        packed, shape = None, ProcessorShape(next_size(self._sizes, num_requests))
        if self._needs_processors[real].any():
            packed = np.zeros(shape.size, np.int32)
            self._fill(plan, {name: packed[place] for name, place in shape.fields.items()}, step)
        return ProcessorBatch(slots, packed, targets) if slots or packed is not None or targets is not None else None

    def _fill(self, plan: StepPlan, fields: dict[str, np.ndarray], step: dict[str, np.ndarray]) -> None:
        fields["slots"][:] = self._no_slot
        for name in ("slots", "sample_position", *PARAM_FIELDS):
            fields[name][: len(step[name])] = step[name]
        slots = step["slots"][: plan.num_requests]
        samples = np.ones(len(slots), np.int32)
        samples[len(plan.decodes) :] = [chunk.is_sampling for chunk in plan.prefills]
        fields["flags"][: len(slots)] = self._flags[slots] | SAMPLES * samples
        for name, values in zip(_PROCESSOR_FIELDS, self._values, strict=True):
            fields[name][: len(slots)] = values[slots]
        fields["mode"][0] = self._modes[slots].max()
        fields["has_logprobs"][0] = self._has_logprobs[slots].any()

    @staticmethod
    def _prompt_targets(plan: StepPlan, step: dict[str, np.ndarray]) -> np.ndarray | None:
        targets, place = None, len(plan.decodes) + plan.num_drafts
        for request, start, num_tokens, _ in plan.prefills:
            if request.num_prompt_logprobs_left:
                first = max(start, request.num_prompt_logprobs)  # position t gives the one of token t + 1
                last = min(start + num_tokens, len(request.prompt_token_ids) - 1)
                if first < last:
                    if targets is None:
                        targets = np.full(len(step["positions"]), -1, np.int32)
                    wanted = request.prompt_token_ids[first + 1 : last + 1]
                    targets[place + first - start : place + last - start] = wanted
                    request.num_prompt_logprobs = last
            place += num_tokens
        return targets
