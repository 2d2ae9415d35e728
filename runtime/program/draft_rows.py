"""Packs the draft tokens that precede each row of a sampler's batch. Serves step 5 of 10; numpy only.

A sampler's batch has one row for each request and one for each draft token, in this order. The row of a draft token
must count it and the drafts before it as output, but the state of the slot may count a sampled token only if all drafts
before it hold. The host packs which drafts precede each row; the device decides which hold, because the host learns
the tokens only after the next step is dispatched; see `accepted_drafts`.
"""

from collections.abc import Mapping, Sequence

import numpy as np

_FIELDS = ("state_slots", "first_row", "first_draft_row")


def draft_row_fields(num_drafts: int) -> tuple[str, ...]:
    """Returns the names of the packed fields, for at most `num_drafts` draft tokens of a request; none for 0."""
    return (*_FIELDS, *(f"draft_{index}" for index in range(num_drafts))) if num_drafts else ()


def fill_draft_rows(fields: Mapping[str, np.ndarray], slots: np.ndarray, drafts: Sequence[Sequence[int]]) -> None:
    """Fills the packed fields, which are zeros.

    Args:
      slots: The slot of each row: first the requests, then the draft tokens.
      drafts: The draft tokens of each of the first requests.
    """
    num_requests = len(slots) - sum(map(len, drafts))
    fields["state_slots"][:] = fields["slots"]
    fields["state_slots"][: len(slots)] = slots
    row = num_requests
    for first_row, its_drafts in enumerate(drafts):
        rows = slice(row, row + len(its_drafts))
        fields["first_row"][rows], fields["first_draft_row"][rows] = first_row, row
        row = rows.stop
    fill_draft_tokens(fields, num_requests, drafts)


def fill_draft_tokens(fields: Mapping[str, np.ndarray], num_requests: int, drafts: Sequence[Sequence[int]]) -> None:
    """Fills the draft tokens, the only fields that depend on which tokens they are."""
    row = num_requests
    for its_drafts in drafts:
        end = row + len(its_drafts)
        for index, token_id in enumerate(its_drafts):
            fields[f"draft_{index}"][row + index : end] = token_id + 1  # 0 means that there is none
        row = end
