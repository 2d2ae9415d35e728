"""Runs a draft model beside the served model, on the same devices and pages.

Serves step 6 of 10. In: the packed vectors of steps. Out: the same tokens as without a draft model, and draft tokens.

The draft model has a `StepRunner` like the served one, with a KV cache of its own that is indexed by the same pages, so
that one allocator and one prefix cache serve both. Each step is run by both, so that the draft model knows every token;
its samples in these steps are ignored. Draft tokens come from its multi-step decode: one dispatch in which each sampled
token is the next step's input. It draws with the noise of the request's seed and position, as the served model will, so
that the two agree as often as their distributions allow (docs/decisions/058).
"""

import dataclasses
from collections.abc import Mapping

import jax
import numpy as np
from flax import nnx

from ..program.batch import Bucket
from ..program.device_figures import DeviceFigures
from ..program.processor_batch import Logprobs, Sampled
from ..program.step_runner import StepRunner


class DraftingRunner:
    """Implements `engine.Runner` by two runners.

    Args:
      served, draft: The runners, started, with equally many pages.
      followed_by: For each bucket of the served model's steps, the bucket of the draft model's with the same fields.
      copy: The compiled program that copies the table of last tokens, which each runner consumes.
    """

    def __init__(
        self, served: StepRunner, draft: StepRunner, followed_by: Mapping[Bucket, Bucket], copy: jax.stages.Compiled
    ):
        self.served, self.draft = served, draft
        self._followed_by = dict(followed_by)
        self._copy = copy

    def set_page_row(self, page_row: np.ndarray) -> None:
        self.served.set_page_row(page_row)
        self.draft.set_page_row(page_row)

    def run(self, bucket: Bucket, packed: np.ndarray) -> jax.Array:
        self.draft.last_tokens = self._copy(self.served.last_tokens)
        sampled = self.served.run(bucket, packed)
        self.draft.run(self._followed_by[bucket], packed)
        return sampled

    def propose(self, bucket: Bucket, packed: np.ndarray) -> jax.Array:
        return self.draft.run(bucket, packed)

    def set_slot_adjustments(self, slot: int, history: np.ndarray, bias: np.ndarray) -> None:
        self.served.set_slot_adjustments(slot, history, bias)

    def sample(self, packed: np.ndarray, masks: np.ndarray | None = None) -> Sampled[jax.Array]:
        return self.served.sample(packed, masks)

    def prompt_logprobs(self, targets: np.ndarray) -> Logprobs[jax.Array]:
        return self.served.prompt_logprobs(targets)

    def copy_pages(self, command: np.ndarray) -> None:
        raise AssertionError("a server with a draft model has no host cache; see `options.combinations`")

    def release(self) -> nnx.State:
        """Frees the device state of both at once and returns the parameters of the served model."""
        self.draft.release()
        return self.served.release()

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
    def num_pages(self) -> int:
        return self.served.num_pages

    @property
    def device_bytes(self) -> int:
        """The bytes of parameters and state on each device."""
        return self.served.device_bytes + self.draft.device_bytes
