"""Tracks samples with a grammar constraint and fetches their token masks. Serves step 8 of 10.

In: the engine's samples, and their tokens as they become known. Out: masks of the tokens that each sample may take
next; the samples whose mask is late, which sit out steps until it comes; and those whose grammar is complete.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from ..api.request import FinishReason, Request
from .grammar import Grammar
from .mask_exchange import MaskExchange, Matcher

_CONFLICT = "no token was left that the constraint and the other sampling parameters both allow"
PATIENCE_SECONDS = 0.02  # that a step waits for masks; samples that have none by then sit it out

# How a constrained sample ends, and the message if that is an ERROR.
End = tuple[FinishReason, str]


class Renewal(NamedTuple):
    """What has become of the samples that waited for a mask."""

    ended: Sequence[tuple[Request, End]] = ()
    ready: Sequence[Request] = ()
    late: Sequence[Request] = ()


class ConstrainedSamples:
    """The constrained samples of one engine. `renew_masks` runs on its thread, the rest with its lock held.

    Args:
      foresee: Returns the draft tokens that the next step of a sample is expected to have, if any.
    """

    def __init__(self, foresee: Callable[[Request], Sequence[int]]) -> None:
        self._foresee = foresee
        self._matchers: dict[Request, Matcher] = {}
        self._masks: dict[Request, np.ndarray] = {}  # masks of the same samples
        self._requests: dict[Matcher, Request] = {}  # those that wait for a mask
        self._complete: list[Request] = []  # end without sampling, because their resumed tokens were complete
        self._exchange = MaskExchange()

    @property
    def has_work(self) -> bool:
        """Whether any sample waits for a mask."""
        return bool(self._requests or self._complete)

    def open(self, request: Request, grammar: Grammar) -> None:
        """Starts tracking a new sample."""
        matcher = self._matchers[request] = Matcher(grammar)
        self._set_mask(request, matcher)
        if matcher.is_complete:
            self._complete.append(request)

    def close(self, request: Request) -> None:
        """Stops tracking a sample that has ended. Does nothing for one without a constraint."""
        matcher = self._matchers.pop(request, None)
        self._masks.pop(request, None)
        if matcher is not None:
            self._requests.pop(matcher, None)
            self._exchange.close(matcher)

    def token_masks(
        self, requests: Sequence[Request], drafts: Sequence[Sequence[int]]
    ) -> tuple[np.ndarray | None, dict[int, int]]:
        """Returns the token masks of a step's samples, and how many samples count of the requests that lack some.

        The masks are [n, W] uint32, of each request and then of each draft token, or None if no request is masked. May
        be called without the engine's lock: the tokens of a sample that is closed meanwhile are never used.

        Args:
          drafts: The draft tokens of each of the first requests.
        """
        masks = [self._masks.get(request) for request in requests]
        known = next((mask for mask in masks if mask is not None), None)
        if known is None:
            return None, {}
        num_valid: dict[int, int] = {}
        for index, (request, its_drafts) in enumerate(zip(requests, drafts, strict=False)):
            ahead = self._ahead(request, its_drafts)
            masks += [*ahead, *[None] * (len(its_drafts) - len(ahead))]
            if masks[index] is not None and len(ahead) < len(its_drafts):
                num_valid[index] = 1 + len(ahead)
        everything = np.full_like(known, np.iinfo(known.dtype).max)
        return np.stack([everything if mask is None else mask for mask in masks]), num_valid

    def _ahead(self, request: Request, drafts: Sequence[int]) -> list[np.ndarray]:
        """Returns the masks after each of a sample's draft tokens, as far as they are known."""
        matcher = self._matchers.get(request)
        masks: list[np.ndarray] = []
        if matcher is not None:
            for token_id, (known_id, mask, _) in zip(drafts, matcher.ahead, strict=False):
                if token_id != known_id:
                    break
                masks.append(_usable(request, matcher, mask))
        return masks

    def is_slow(self, request: Request) -> bool:
        """Returns whether a sample's masks take longer than a step should wait."""
        matcher = self._matchers.get(request)
        return matcher is not None and matcher.is_slow

    def advance(self, request: Request, token_id: int | None) -> End | None:
        """Advances a sample by its new token, None for an end token. Returns how it ends if that is certain already."""
        matcher = self._matchers[request]
        if token_id is None:  # stop tokens are valid anywhere, end tokens only where the mask allowed them
            may_end = matcher.may_end or request.params.stop_token_ids
            return None if may_end else (FinishReason.ERROR, _CONFLICT)
        params = request.params
        if token_id in params.bad_token_ids or (params.allowed_token_ids and token_id not in params.allowed_token_ids):
            return FinishReason.ERROR, _CONFLICT  # the device samples token 0 if no token is left
        if not matcher.allows(token_id):
            return FinishReason.ERROR, _CONFLICT
        self._exchange.advance(matcher, token_id)
        self._requests[matcher] = request
        return None

    def renew_masks(self, *, is_idle: bool = False) -> Renewal:
        """Fetches the masks of samples that have advanced. Called without the engine's lock.

        Args:
          is_idle: Nothing else is to be done, so wait until some sample is ready.
        """
        ended: list[tuple[Request, End]] = []
        ready: list[Request] = []
        complete, self._complete = self._complete, []
        ended += [(request, (FinishReason.STOP, "")) for request in complete]
        if not self._requests:
            return Renewal(ended)
        for matcher, its_request in self._requests.items():
            if matcher.num_sent < len(matcher.token_ids):  # not sent yet
                matcher.drafts = self._foresee(its_request)
        for matcher in self._exchange.renew(PATIENCE_SECONDS, for_any=is_idle):
            request = self._requests.pop(matcher, None)
            if request is None:
                continue  # it was cancelled meanwhile
            self._set_mask(request, matcher)
            if matcher.failure is not None and not request.is_finished:
                ended.append(
                    (request, (FinishReason.ERROR, f"the constraint could not be followed: {matcher.failure}"))
                )
            elif matcher.is_complete:
                ended.append((request, (FinishReason.STOP, "")))
            elif request.is_finished:
                ended.append((request, (FinishReason.LENGTH, "")))
            else:
                ready.append(request)
        return Renewal(ended, ready, list(self._requests.values()))

    def _set_mask(self, request: Request, matcher: Matcher) -> None:
        self._masks[request] = _usable(request, matcher, matcher.mask)


def _usable(request: Request, matcher: Matcher, mask: np.ndarray) -> np.ndarray:
    """Returns a mask as it applies to a sample. With `ignore_eos`, end tokens are excluded while others are allowed."""
    going_on = mask & ~matcher.grammar.grammars.eos_mask if request.params.ignore_eos else mask
    return going_on if going_on.any() else mask
