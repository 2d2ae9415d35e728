"""A drafter that knows what will be sampled, and errs as often as it is told to."""

import random
from collections.abc import Sequence
from typing import Self

import jax
import numpy as np

from meshserve.runtime.api.request import Request
from meshserve.runtime.draft_model.drafting_runner import RunnerBeside
from meshserve.runtime.drafting.draft_counts import Acceptance
from meshserve.runtime.drafting.model_drafter import UNKNOWN_DRAFT
from meshserve.runtime.engine.engine import ProposingRunner
from meshserve.runtime.program.batch import BatchBuilder, Bucket
from meshserve.runtime.scheduler.step_plan import StepPlan

from .workloads import Work


def chance_of(acceptance: float, num_drafts: int) -> float:
    """Returns the chance of each draft token with which a step brings `acceptance` tokens of a request on average.

    Raises:
      ValueError: `num_drafts` draft tokens cannot bring so many, or so few.
    """
    if not 1.0 <= acceptance <= 1.0 + num_drafts:
        raise ValueError(f"--acceptance {acceptance:g}: allowed is 1 to 1 + draft tokens, {1 + num_drafts}.")
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        is_low = sum(middle**place for place in range(num_drafts + 1)) < acceptance
        low, high = (middle, high) if is_low else (low, middle)
    return high


class Oracle:
    """Drafts for requests whose outputs are known.

    Args:
      works: The batches of requests.
      outputs: The tokens of each request of each batch, in order.
      num_drafts: The most draft tokens of a request in a step.
      acceptance: The mean number of tokens of a request in a step that has so many.
      has_draft_model: Whether a draft model proposes first, whose time counts and whose tokens do not; see `Told`.

    Raises:
      ValueError: So many draft tokens cannot bring so many tokens, or so few.
    """

    def __init__(
        self,
        works: Sequence[Sequence[Work]],
        outputs: Sequence[Sequence[int]],
        num_drafts: int,
        acceptance: float,
        *,
        has_draft_model: bool = False,
    ):
        flat = [(index, work) for batch in works for index, work in enumerate(batch)]
        self._outputs = {
            (index, tuple(work.prompt_token_ids)): output for (index, work), output in zip(flat, outputs, strict=True)
        }
        self._num_drafts, self._chance = num_drafts, chance_of(acceptance, num_drafts)
        self._has_draft_model = has_draft_model

    def drafter(self, request: Request) -> "OracleDrafter":
        """Returns the drafter of a request, whose seed is its place in its batch."""
        output = self._outputs[request.seed, request.prompt_token_ids]
        drafter = OracleDrafter(output, self._num_drafts, self._chance, random.Random(request.seed))
        drafter.leaves_places = self._has_draft_model
        return drafter


class OracleDrafter:
    """Implements `drafter.Drafter`. Like a draft model, it needs the request's last token."""

    waits_for_tokens = True

    def __init__(self, output: Sequence[int], num_drafts: int, chance: float, draw: random.Random):
        self.acceptance = Acceptance()
        self.leaves_places = False  # leaves places for the tokens of a draft model, which `Told` fills with its own
        self._output = output
        self._num_drafts = num_drafts
        self._chance = chance
        self._draw = draw
        self._num_known = 0

    def fork(self) -> Self:
        raise AssertionError("the benchmark has one sample of each request")

    def push(self, token_id: int) -> None:
        self._num_known += 1

    def guess(self, num_pending: int, num_tokens: int) -> list[int]:
        if num_pending:
            return []
        num_left = len(self._output) - self._num_known
        num_tokens = min(num_tokens, self._num_drafts, num_left)
        return [UNKNOWN_DRAFT] * num_tokens if self.leaves_places else self.told(num_tokens)

    def told(self, num_tokens: int) -> list[int]:
        """Returns the next tokens, with the errors that are due; fewer at the end of the output."""
        right = self._output[self._num_known : self._num_known + num_tokens]
        return [token_id if self._draw.random() < self._chance else token_id ^ 1 for token_id in right]

    def judge(self, num_drafts: int, num_accepted: int) -> None:
        """Does nothing; its chance is given."""


class Told(RunnerBeside):
    """Implements `engine.ProposingRunner`: something drafts as always, and the oracle's tokens take the place of its.

    So the time of a draft model is measured together with an acceptance that random weights do not have.

    Args:
      runner: The runner with the draft model or head.
    """

    def __init__(self, runner: RunnerBeside):
        assert isinstance(runner, ProposingRunner), runner
        super().__init__(runner.served)
        self._runner = runner
        self._proposing: ProposingRunner = runner
        self._requests: list[Request] = []  # those that wait for draft tokens, in order

    def set_page_row(self, page_row: np.ndarray) -> None:
        self._runner.set_page_row(page_row)

    def run(self, bucket: Bucket, packed: np.ndarray) -> jax.Array:
        return self._runner.run(bucket, packed)

    def prepare(self, plan: StepPlan, chain: StepPlan | None, batches: BatchBuilder, *, is_drafting: bool) -> bool:
        self._requests = list(chain.decodes) if chain is not None else []
        return self._proposing.prepare(plan, chain, batches, is_drafting=is_drafting)

    def propose(self, bucket: Bucket, packed: np.ndarray) -> np.ndarray:
        proposed = np.array(self._proposing.propose(bucket, packed))
        for index, request in enumerate(self._requests):
            assert isinstance(request.drafter, OracleDrafter), request.drafter
            told = request.drafter.told(len(proposed))
            proposed[: len(told), index] = told
        return proposed
