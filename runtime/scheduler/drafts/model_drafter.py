"""Stands for a draft model, whose draft tokens the device computes after the step is planned. Serves step 4 of 10."""

from collections.abc import Sequence

from .draft_counts import Acceptance

UNKNOWN_DRAFT = -1  # in a plan, in place of a draft token that the draft model is about to propose


class ModelDrafter:
    """Reserves places for the tokens that a draft model proposes. Implements `drafter.Drafter`.

    The draft model continues from the request's last token, so that one must be known when the step is planned.
    """

    waits_for_tokens = True

    def __init__(self) -> None:
        self.acceptance = Acceptance()

    def fork(self) -> "ModelDrafter":
        return ModelDrafter()

    def push(self, token_id: int) -> None:
        """Does nothing: the draft model has the request's tokens in a KV cache of its own."""

    def guess(self, num_pending: int, num_tokens: int) -> list[int]:
        """Returns places for draft tokens."""
        return [] if num_pending else [UNKNOWN_DRAFT] * num_tokens

    def judge(self, num_drafts: int, num_accepted: int) -> None:
        """Does nothing: the draft model proposes the same tokens again."""


def fill_unknown(drafts: Sequence[list[int]], proposed: Sequence[Sequence[int]]) -> None:
    """Replaces the places of a plan's draft tokens.

    Args:
      proposed: For each draft step, the tokens of the decodes that have such places, in order; negative if the draft
        model computed logits that are not finite.
    """
    waiting = [its_drafts for its_drafts in drafts if UNKNOWN_DRAFT in its_drafts]
    for index, its_drafts in enumerate(waiting):
        its_drafts[:] = [max(proposed[step][index], 0) for step in range(len(its_drafts))]
