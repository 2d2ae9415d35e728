"""Knows which tokens a draft model has computed, so that it need not run while there are no drafts.

Serves step 4 of 10. A draft model has a KV cache of its own in the pages of the served one. While drafting is switched
off it computes nothing; before it proposes again, it computes what it has missed of the requests that get drafts, in a
few large steps. Pages may be shared, so that this is known of pages, not of requests.
"""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from ...api.request import Request

Missed = tuple[Request, int, int]  # a request, the first position that is missing, and how many


class DraftCoverage:
    """Counts, for each page, the tokens from its beginning that the draft model has computed."""

    def __init__(self, num_pages: int, page_size: int):
        self._num_tokens = np.zeros(num_pages, np.int32)
        self._page_size = page_size

    def note(self, pages: Sequence[int], start: int, num_tokens: int, *, is_followed: bool) -> None:
        """Records that a step computes positions start..start+num_tokens-1 of a request, which may have been computed
        before with other tokens.

        Args:
          pages: The request's.
          start: The first position.
          num_tokens: The number of positions.
          is_followed: Whether the draft model also computes them.
        """
        end = start + num_tokens
        for index in range(start // self._page_size, -(-end // self._page_size)):
            page, first = pages[index], max(start - index * self._page_size, 0)
            known = min(int(self._num_tokens[page]), first)
            if is_followed and known == first:
                known = min(end - index * self._page_size, self._page_size)
            self._num_tokens[page] = known

    def missed(self, requests: Iterable[tuple[Request, int]]) -> list[Missed]:
        """Returns what is missing of requests, given each with the number of tokens that drafts continue from."""
        found = []
        for request, num_tokens in requests:
            pages = np.array(request.pages[: -(-num_tokens // self._page_size)], int)
            needed = np.full(len(pages), self._page_size)
            needed[-1:] = num_tokens - (len(pages) - 1) * self._page_size
            lacking = np.flatnonzero(self._num_tokens[pages] < needed)
            if len(lacking):
                first = int(lacking[0])
                start = first * self._page_size + int(self._num_tokens[pages[first]])
                found.append((request, start, num_tokens - start))
        return found


def in_steps(missed: Sequence[Missed], max_tokens: int, max_requests: int) -> Iterator[list[Missed]]:
    """Yields the parts of what was missed that the draft model computes in one step each, in order."""
    step: list[Missed] = []
    room = max_tokens
    for request, start, num_tokens in missed:
        while num_tokens:
            count = min(num_tokens, room)
            step.append((request, start, count))
            start, num_tokens, room = start + count, num_tokens - count, room - count
            if not room or len(step) == max_requests:
                yield step
                step, room = [], max_tokens
    if step:
        yield step
