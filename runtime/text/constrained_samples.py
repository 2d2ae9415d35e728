"""Tracks samples with a grammar constraint and fetches their token masks. Serves step 8 of 10.

In: the engine's samples, and their tokens as they become known. Out: masks of the tokens that each sample may take
next; the samples whose mask is late, which sit out steps until it comes; and those whose grammar is complete.
"""

from collections.abc import Sequence
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
    """The constrained samples of one engine. `renew_masks` runs on its thread, the rest with its lock held."""

    def __init__(self) -> None:
        self._matchers: dict[Request, Matcher] = {}
        self._masks: dict[Request, np.ndarray] = {}  # of the same samples
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

    def token_masks(self, requests: Sequence[Request]) -> np.ndarray | None:
        """Returns the token masks of a step's requests, [n, W] uint32, or None if none of them is masked.

        May be called without the engine's lock: the tokens of a sample that is closed meanwhile are never used.
        """
        masks = [self._masks.get(request) for request in requests]
        known = next((mask for mask in masks if mask is not None), None)
        if known is None:
            return None
        everything = np.full_like(known, np.iinfo(known.dtype).max)
        return np.stack([everything if mask is None else mask for mask in masks])

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
        for matcher in self._exchange.renew(PATIENCE_SECONDS, for_any=is_idle):
            request = self._requests.pop(matcher, None)
            if request is None:
                continue  # it was cancelled meanwhile
            self._set_mask(request, matcher)
            if matcher.failure is not None and not request.is_finished:
                ended.append((request, (FinishReason.ERROR, f"the constraint became too complex: {matcher.failure}")))
            elif matcher.is_complete:
                ended.append((request, (FinishReason.STOP, "")))
            elif request.is_finished:
                ended.append((request, (FinishReason.LENGTH, "")))
            else:
                ready.append(request)
        return Renewal(ended, ready, list(self._requests.values()))

    def _set_mask(self, request: Request, matcher: Matcher) -> None:
        """Sets the sample's mask. With `ignore_eos`, end tokens are excluded while the grammar allows other tokens."""
        self._masks[request] = matcher.mask
        if request.params.ignore_eos and (going_on := matcher.mask & ~matcher.grammar.grammars.eos_mask).any():
            self._masks[request] = going_on
