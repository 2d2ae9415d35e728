"""Runs steps whose tokens are read from pinned host memory, for steps with drafts. Serves step 6 of 10.

The next step with drafts depends on these tokens, so the device waits from a step's end until the host has them and has
dispatched the next. See `kernels.readback`.
"""

from typing import Any

import jax
import numpy as np

from meshserve.kernels.readback.cuda import PendingTokens, PinnedTokens

from .batch import Bucket
from .step_runner import StepRunner


class ReadbackRunner(StepRunner):
    """A `StepRunner` of one GPU, whose programs for steps with drafts write their tokens to pinned host memory.

    Args:
      pinned: That memory.
      arguments: Those of `StepRunner`.
    """

    def __init__(self, pinned: PinnedTokens, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self._pinned = pinned
        self._step_number = 0  # number of the next step; 0 if its tokens are copied

    def set_step_number(self, bucket: Bucket, packed: np.ndarray) -> None:
        """Gives a step its number. `run` does so itself if it is given the vector of the host."""
        if bucket.has_drafts:
            self._step_number = self._pinned.next_step_number()
            packed[bucket.fields["step_number"]] = self._step_number

    def run(self, bucket: Bucket, packed: np.ndarray | jax.Array) -> Any:
        """See `StepRunner`. The result may be `PendingTokens`, which are an array for `np.asarray` only."""
        if isinstance(packed, np.ndarray):
            self.set_step_number(bucket, packed)
        step_number, self._step_number = self._step_number, 0
        sampled = super().run(bucket, packed)
        return PendingTokens(self._pinned, step_number, sampled) if step_number else sampled
