"""The samples that are held to a grammar, and how far each has come. Serves step 8 of 10.

In: the engine's samples, and their tokens as they become known. Out: `Request.token_mask`, what each may sample next,
ready before its next step is sampled; and who has reached the end of its grammar.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..api.request import FinishReason, Request

if TYPE_CHECKING:
    from ..text.grammar import Matcher

_CONFLICT = "no token was left that the constraint and the other sampling parameters both allow"

# How a sample ends here, and a message where that is an ERROR.
End = tuple[FinishReason, str]
_COMPLETE: End = (FinishReason.STOP, "")


def _too_complex(matcher: "Matcher") -> str:
    """The message for a grammar that llguidance gave up."""
    return f"the constraint became too complex: {matcher.failure}"


def _has_begun_anew(request: Request, matcher: "Matcher") -> bool:
    prompt, params = request.prompt_token_ids, request.params
    assert params.constraint is not None
    resumed = prompt[len(prompt) - params.num_resumed_tokens :]
    return matcher.begin_anew(params.constraint, [*resumed, *request.output_token_ids])


def token_masks(requests: Sequence[Request]) -> np.ndarray | None:
    """What each of a step's requests may sample, as far as the host knows: [n, W] uint32. None if all may take all."""
    masks = [request.token_mask for request in requests]
    known = next((mask for mask in masks if mask is not None), None)
    if known is None:
        return None
    everything = np.full_like(known, np.iinfo(known.dtype).max)
    return np.stack([everything if mask is None else mask for mask in masks])


class ConstrainedSamples:
    """Of one engine. `renew_masks` belongs to the engine's thread, the rest to whoever holds its lock."""

    def __init__(self) -> None:
        self._matchers: dict[Request, Matcher] = {}
        self._stale: list[tuple[Request, Matcher]] = []  # their masks are of a token that is not the next any more

    def open(self, request: Request, matcher: "Matcher") -> None:
        """A new sample."""
        self._matchers[request] = matcher
        self._set_mask(request, matcher)
        if not (matcher.mask & ~matcher.grammar.grammars.eos_mask).any():
            self._stale.append((request, matcher))  # complete, with resumed tokens: ends before it samples any

    def close(self, request: Request) -> None:
        """The sample has ended. Does nothing for one that is not held to anything."""
        self._matchers.pop(request, None)

    def advance(self, request: Request, token_id: int | None) -> End | None:
        """Takes a sample's new token, or its end token as None. Returns how the sample ends if it ends with this."""
        matcher = self._matchers[request]
        if token_id is None:  # a stop token may come anywhere, an end token where the mask allowed it
            may_end = matcher.may_end or request.params.stop_token_ids
            return None if may_end else (FinishReason.ERROR, _CONFLICT)
        params = request.params
        if token_id in params.bad_token_ids or (params.allowed_token_ids and token_id not in params.allowed_token_ids):
            return FinishReason.ERROR, _CONFLICT  # the device takes token 0 where none is left
        was_allowed = matcher.allows(token_id)
        if not matcher.advance([token_id]):
            if not was_allowed:
                return FinishReason.ERROR, _CONFLICT
            if not _has_begun_anew(request, matcher):
                return FinishReason.ERROR, _too_complex(matcher)
        if matcher.is_complete:
            return _COMPLETE
        self._stale.append((request, matcher))
        return None

    def renew_masks(self) -> list[tuple[Request, End]]:
        """Masks for all that have advanced since the last call and still go on. Returns those that end instead.

        Without the engine's lock: a sample that ends meanwhile gets a mask that nobody reads.
        """
        stale = [(request, matcher) for request, matcher in self._stale if not request.is_finished]
        self._stale.clear()
        if not stale:
            return []
        grammars = stale[0][1].grammar.grammars  # an engine has one vocabulary
        grammars.renew_masks([matcher for _, matcher in stale])
        ended: list[tuple[Request, End]] = []
        for request, matcher in stale:
            is_lost = matcher.failure is not None and not _has_begun_anew(request, matcher)
            self._set_mask(request, matcher)
            if is_lost:
                ended.append((request, (FinishReason.ERROR, _too_complex(matcher))))
            elif not (matcher.mask & ~grammars.eos_mask).any():
                ended.append((request, _COMPLETE))
        return ended

    @staticmethod
    def _set_mask(request: Request, matcher: "Matcher") -> None:
        """With `ignore_eos` the output goes on for as long as its grammar lets it."""
        request.token_mask = matcher.mask
        if request.params.ignore_eos and (going_on := matcher.mask & ~matcher.grammar.grammars.eos_mask).any():
            request.token_mask = going_on
