"""Runs steps whose tokens reach the host as soon as they are sampled, for steps with drafts. Serves step 6 of 10.

The next step with drafts depends on these tokens, so the device waits from a step's end until the host has them and has
dispatched the next. See `kernels.mail`.
"""

from typing import Any

import jax
import numpy as np

from meshserve.kernels.mail.gpu import Letter, Mailbox

from ..program.batch import Bucket
from ..program.step_runner import StepRunner


class MailingRunner(StepRunner):
    """A `StepRunner` of one GPU, whose programs for steps with drafts mail their tokens.

    Args:
      mailbox: Receives them.
      arguments: Those of `StepRunner`.
    """

    def __init__(self, mailbox: Mailbox, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self._mailbox = mailbox
        self._number = 0  # of the next step; 0 if its tokens do not come by mail

    def number(self, bucket: Bucket, packed: np.ndarray) -> None:
        """Gives a step its number. `run` does so itself if it is given the vector of the host."""
        if bucket.has_drafts:
            self._number = self._mailbox.next_number()
            packed[bucket.fields["number"]] = self._number

    def run(self, bucket: Bucket, packed: np.ndarray | jax.Array) -> Any:
        """See `StepRunner`. The result may be a `Letter`, which is an array for `np.asarray` only."""
        if isinstance(packed, np.ndarray):
            self.number(bucket, packed)
        number, self._number = self._number, 0
        sampled = super().run(bucket, packed)
        return Letter(self._mailbox, number, sampled) if number else sampled
