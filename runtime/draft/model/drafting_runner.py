"""Runs a draft model beside the served model, on the same devices and pages.

Serves step 6 of 10. In: the packed vectors of steps. Out: the same tokens as without a draft model, and draft tokens.

The draft model has a `StepRunner` like the served one, with a KV cache of its own that is indexed by the same pages, so
that one allocator and one prefix cache serve both. While there are drafts, each step is run by both, so that the draft
model knows every token; its samples in these steps are ignored. What it has missed before, it computes when it is asked
for drafts. Draft tokens come from its multi-step decode: one dispatch in which each sampled token is the next step's
input. It draws with the noise of the request's seed and position, as the served model will, so that the two agree as
often as their distributions allow (docs/decisions/058).
"""

import abc
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx

from ...adapters.changes import AdapterChanges
from ...api.request import Request
from ...program.batch import BatchBuilder, Bucket
from ...program.device_figures import DeviceFigures
from ...program.processors.processor_batch import Logprobs, Sampled
from ...program.readback_runner import ReadbackRunner
from ...program.step_runner import StepRunner
from ...scheduler.drafts.coverage import DraftCoverage, in_steps
from ...scheduler.step_plan import ScheduledChunk, StepPlan
from .draft_filling import DraftFilling


class RunnerBeside(abc.ABC):
    """Implements `runner.Runner` and `ProposingRunner` by the runner of the served model, and what drafts.

    Args:
      served: The runner, started.
      fill: Moves proposed draft tokens into steps.
    """

    def __init__(self, served: StepRunner, fill: DraftFilling):
        self.served = served
        self._fill = fill
        self._proposed: jax.Array  # the last draft tokens

    @abc.abstractmethod
    def prepare(self, plan: StepPlan, chain: StepPlan | None, batches: BatchBuilder, *, is_drafting: bool) -> bool:
        """See `ProposingRunner`."""

    @abc.abstractmethod
    def _propose(self, bucket: Bucket, packed: np.ndarray) -> jax.Array:
        """Dispatches what proposes draft tokens, and returns them [bucket.num_steps, B]."""

    def propose(self, bucket: Bucket, packed: np.ndarray) -> jax.Array:
        self._proposed = self._propose(bucket, packed)
        self._proposed.copy_to_host_async()
        return self._proposed

    def run_drafted(self, bucket: Bucket, packed: np.ndarray, places: np.ndarray) -> jax.Array:
        if isinstance(self.served, ReadbackRunner):
            self.served.set_step_number(bucket, packed)
        return self.run(bucket, self._fill(packed, self._proposed, places))

    def set_page_row(self, page_row: np.ndarray) -> None:
        self.served.set_page_row(page_row)

    def run(self, bucket: Bucket, packed: np.ndarray | jax.Array) -> jax.Array:
        return self.served.run(bucket, packed)

    def set_slot_adjustments(self, slot: int, history: np.ndarray, bias: np.ndarray) -> None:
        self.served.set_slot_adjustments(slot, history, bias)

    def sample(self, packed: np.ndarray, masks: np.ndarray | None = None) -> Sampled[jax.Array]:
        return self.served.sample(packed, masks)

    def prompt_logprobs(self, targets: np.ndarray) -> Logprobs[jax.Array]:
        return self.served.prompt_logprobs(targets)

    def change_adapters(self, changes: AdapterChanges) -> None:
        self.served.change_adapters(changes)

    def adapter_calls(self, changes: AdapterChanges) -> Iterator[tuple[str, Any]]:
        return self.served.adapter_calls(changes)

    def stage_adapter(self, part: np.ndarray) -> None:
        self.served.stage_adapter(part)

    def load_staged_adapter(self, slot: int) -> None:
        self.served.load_staged_adapter(slot)

    def set_adapter_slots(self, pairs: np.ndarray) -> None:
        self.served.set_adapter_slots(pairs)

    def copy_pages(self, command: np.ndarray) -> None:
        raise AssertionError("a server with a draft model has no host cache; see `options.combinations`")

    def release(self) -> nnx.State:
        """Frees the device state at once and returns the parameters of the served model."""
        return self.served.release()

    @property
    def figures(self) -> DeviceFigures:
        """The memory used on each device by the served model."""
        return self.served.figures

    @property
    def device_bytes(self) -> int:
        """The bytes of the served model's parameters and state on each device."""
        return self.served.device_bytes

    @property
    def num_pages(self) -> int:
        return self.served.num_pages


class DraftingRunner(RunnerBeside):
    """Runs the draft model beside the served one.

    Args:
      served, draft: The runners, started, with equally many pages.
      fill: See `RunnerBeside`.
      followed_by: For each bucket of the served model's steps, the bucket of the draft model's with the same fields.
      copy: The compiled program that copies the table of last tokens, which each runner consumes.
    """

    def __init__(
        self,
        served: StepRunner,
        draft: StepRunner,
        fill: DraftFilling,
        followed_by: Mapping[Bucket, Bucket],
        copy: jax.stages.Compiled,
    ):
        super().__init__(served, fill)
        self.draft = draft
        self.is_following = True  # whether the draft model also runs each step
        self._followed_by = dict(followed_by)
        self._copy = copy
        self._largest = max(self._followed_by, key=lambda bucket: bucket.num_tokens)
        self._page_size = served.state.cache.shape[4]
        self._coverage = DraftCoverage(served.num_pages, self._page_size)
        self._stale_slots: set[int] = set()  # those that got pages while the draft model did not follow

    def set_page_row(self, page_row: np.ndarray) -> None:
        super().set_page_row(page_row)
        self.draft.set_page_row(page_row)

    def run(self, bucket: Bucket, packed: np.ndarray | jax.Array) -> jax.Array:
        if not self.is_following:
            return self.served.run(bucket, packed)
        self.draft.last_tokens = self._copy(self.served.last_tokens)
        sampled = self.served.run(bucket, packed)
        self.draft.run(self._followed_by[bucket], packed)
        return sampled

    def prepare(self, plan: StepPlan, chain: StepPlan | None, batches: BatchBuilder, *, is_drafting: bool) -> bool:
        """Lets the draft model compute what it has missed, if it is to propose."""
        coverage = self._coverage
        missed = coverage.missed(zip(chain.decodes, chain.starts, strict=True)) if chain is not None else []
        for request, _, _ in missed:
            self._renew_pages(request, batches)
        for part in in_steps(missed, self._largest.num_tokens, self._largest.num_requests):
            chunks = [ScheduledChunk(request, start, num_tokens, False) for request, start, num_tokens in part]
            chunks.sort(key=lambda chunk: chunk.num_tokens > 1)
            batch = batches.build(StepPlan(decodes=[], starts=[], prefills=chunks, is_of_drafter=True))
            self.draft.run(self._followed_by[batch.bucket], batch.packed)
        for request, start, num_tokens in missed:
            coverage.note(request.pages, start, num_tokens, is_followed=True)
        self.is_following = is_drafting or chain is not None
        for request, start, num_tokens, _ in plan.chunks:
            coverage.note(request.pages, start, num_tokens, is_followed=self.is_following)
            if self.is_following:
                self._renew_pages(request, batches)
            elif -start % self._page_size < num_tokens and request.slot is not None:  # begins a page
                self._stale_slots.add(request.slot)
        return bool(missed)

    def _renew_pages(self, request: Request, batches: BatchBuilder) -> None:
        """Gives the draft model the pages of a request, some of which it got while the draft model did not follow.

        Else the draft model would write into the pages that the slot's last request had there, which may be another's
        by now.
        """
        if request.slot in self._stale_slots:
            self._stale_slots.remove(request.slot)
            self.draft.set_page_row(batches.page_table_row(request, len(request.pages)))

    def _propose(self, bucket: Bucket, packed: np.ndarray) -> jax.Array:
        return self.draft.run(bucket, packed)

    def release(self) -> nnx.State:
        """Frees the device state of both at once and returns the parameters of the served model."""
        self.draft.release()
        return super().release()

    @property
    def figures(self) -> DeviceFigures:
        """The memory used on each device by both models. Their programs run one after another."""
        served, draft = self.served.figures, self.draft.figures
        return dataclasses.replace(
            served,
            weight_bytes=served.weight_bytes + draft.weight_bytes,
            scratch_bytes=max(served.scratch_bytes, draft.scratch_bytes),
            page_bytes=served.page_bytes + draft.page_bytes,
            num_programs=served.num_programs + draft.num_programs,
        )

    @property
    def device_bytes(self) -> int:
        """The bytes of parameters and state on each device."""
        return self.served.device_bytes + self.draft.device_bytes
