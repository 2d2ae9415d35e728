"""Dispatches steps with draft tokens that a draft model or a head proposes. Serves step 8 of 10, the engine."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import jax
import numpy as np

from ...program.batch import BatchBuilder, Bucket, StepBatch
from ...scheduler.drafts.model_drafter import UNKNOWN_DRAFT, fill_unknown
from ...scheduler.step_plan import StepPlan

Tokens = jax.Array | np.ndarray


@runtime_checkable
class ProposingRunner(Protocol):
    """What a `runner.Runner` has in addition, if there is a draft model; see `drafting_runner.RunnerBeside`."""

    def prepare(self, plan: StepPlan, chain: StepPlan | None, batches: BatchBuilder, *, is_drafting: bool) -> bool:
        """Prepares for a step, and for `chain`, whose draft tokens it gets, if any. Called before its dispatches.

        `is_drafting` tells whether steps get draft tokens now. Returns whether it took an additional dispatch.
        """

    def run(self, bucket: Bucket, packed: np.ndarray) -> Tokens:
        """See `runner.Runner`."""

    def propose(self, bucket: Bucket, packed: np.ndarray) -> Tokens:
        """Dispatches steps of the draft model, and returns the draft tokens [bucket.num_steps, B]."""

    def run_drafted(self, bucket: Bucket, packed: np.ndarray, places: np.ndarray) -> Tokens:
        """Runs a step with the draft tokens of the last `propose` at `places` of `packed`; see `draft_places`."""


def propose_and_run(
    runner: ProposingRunner, plan: StepPlan, proposing: StepBatch, batch: StepBatch
) -> tuple[Tokens, Tokens | None]:
    """Dispatches what proposes the draft tokens of a step, and the step itself.

    Returns:
      The step's tokens, and the draft tokens if they have yet to be filled into the plan. Logits processors need to
      know them, so that a step with some waits for them here.
    """
    proposed = runner.propose(proposing.bucket, proposing.packed)
    if batch.processors is None:
        first_place = batch.bucket.fields["token_ids"].start
        places = draft_places(plan.drafts, proposed.shape, first_place, len(batch.packed))
        return runner.run_drafted(batch.bucket, batch.packed, places), proposed
    fill_unknown(plan.drafts, np.asarray(proposed).tolist())
    batch.fill_drafts(plan)
    return runner.run(batch.bucket, batch.packed), None


def draft_places(drafts: Sequence[list[int]], shape: tuple[int, ...], first_place: int, no_place: int) -> np.ndarray:
    """Returns where in a step's vector each proposed draft token belongs.

    Args:
      drafts: The plan's, with places for those that are proposed.
      shape: The shape of the proposed tokens: [draft steps, decodes], see `fill_unknown`.
      first_place: Where the vector has the token of the first decode; each has its draft tokens behind its own.
      no_place: What to return where the plan has no draft token.
    """
    places = np.full(shape, no_place, np.int32)
    index, place = 0, first_place
    for its_drafts in drafts:
        if UNKNOWN_DRAFT in its_drafts:
            places[: len(its_drafts), index] = place + 1 + np.arange(len(its_drafts))
            index += 1
        place += 1 + len(its_drafts)
    return places
