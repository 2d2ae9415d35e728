"""The results of a pooling step, by request. Serves step 8 of 10. numpy only."""

import numpy as np

from ..api.request import NO_TOKEN, Request
from ..api.sampling_params import SamplingParams
from ..scheduler.step_plan import StepPlan

# Parameters of a request for a pooled result. Its single output token stands for the result, so that the scheduler,
# which counts tokens, treats it like a request for one token: the pages are freed as soon as the prompt's last chunk is
# dispatched.
POOLING_PARAMS = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
_RESULT = 0  # the output token


class PooledRows:
    """The rows that a pooling step computed, and the tokens that stand for them.

    Args:
      plan: The plan of the step.
      rows: [B, N] float32, in the order of the plan's requests; those of unfinished prompts have no meaning.
    """

    def __init__(self, plan: StepPlan, rows: np.ndarray):
        self._rows = rows
        self._indices = {chunk.request: index for index, chunk in enumerate(plan.prefills) if chunk.is_sampling}
        is_finite = np.isfinite(rows).all(axis=1)
        self.tokens = np.where(is_finite, _RESULT, NO_TOKEN)  # [B]; NO_TOKEN ends a request with an error

    def row(self, request: Request) -> np.ndarray | None:
        """Returns the result [N] of a request, a copy; None if the step did not finish its prompt."""
        index = self._indices.get(request)
        return None if index is None else self._rows[index].copy()
