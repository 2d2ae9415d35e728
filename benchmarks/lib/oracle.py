"""A drafter that knows what will be sampled, and errs as often as it is told to."""

import random
from collections.abc import Sequence
from typing import Self

from meshserve.runtime.api.request import Request
from meshserve.runtime.drafting.draft_counts import Acceptance

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
      chance: That a draft token is the right one.
    """

    def __init__(self, works: Sequence[Sequence[Work]], outputs: Sequence[Sequence[int]], chance: float):
        flat = [(index, work) for batch in works for index, work in enumerate(batch)]
        self._outputs = {
            (index, tuple(work.prompt_token_ids)): output for (index, work), output in zip(flat, outputs, strict=True)
        }
        self._chance = chance

    def drafter(self, request: Request) -> "OracleDrafter":
        """Returns the drafter of a request, whose seed is its place in its batch."""
        output = self._outputs[request.seed, request.prompt_token_ids]
        return OracleDrafter(output, self._chance, random.Random(request.seed))


class OracleDrafter:
    """Implements `drafter.Drafter`. Like a draft model, it needs the request's last token."""

    waits_for_tokens = True

    def __init__(self, output: Sequence[int], chance: float, draw: random.Random):
        self.acceptance = Acceptance()
        self._output = output
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
        right = self._output[self._num_known : self._num_known + num_tokens]
        return [token_id if self._draw.random() < self._chance else token_id ^ 1 for token_id in right]

    def judge(self, num_drafts: int, num_accepted: int) -> None:
        """Does nothing; its chance is given."""
