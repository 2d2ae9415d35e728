"""Tracks samples with a grammar constraint and computes their token masks. Serves step 8 of 10.

In: the engine's samples, and their tokens as they become known. Out: the mask of the tokens that each sample may take
next, ready before its next step is sampled; and the samples whose grammar is complete.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..api.request import FinishReason, Request

if TYPE_CHECKING:
    from ..text.grammar import Matcher

_CONFLICT = "no token was left that the constraint and the other sampling parameters both allow"

# How a constrained sample ends, and the message if that is an ERROR.
End = tuple[FinishReason, str]
_COMPLETE: End = (FinishReason.STOP, "")


def _too_complex(matcher: "Matcher") -> str:
    """Returns the error message for a grammar that exceeded llguidance's limits."""
    return f"the constraint became too complex: {matcher.failure}"


def _has_begun_anew(request: Request, matcher: "Matcher") -> bool:
    """Restarts a failed matcher with a newly compiled grammar and the tokens so far; returns whether that works."""
    prompt, params = request.prompt_token_ids, request.params
    assert params.constraint is not None
    resumed = prompt[len(prompt) - params.num_resumed_tokens :]
    return matcher.begin_anew(params.constraint, [*resumed, *request.output_token_ids])


@dataclass(eq=False)
class _Sample:
    """A constrained sample. With `ignore_eos`, its mask excludes end tokens while the grammar allows other tokens."""

    request: Request
    matcher: "Matcher"

    def __post_init__(self) -> None:
        self.renew_mask()

    def renew_mask(self) -> None:
        """Copies the mask of the matcher, [W] uint32 with a bit per token."""
        matcher, self.mask = self.matcher, self.matcher.mask
        if self.request.params.ignore_eos and (going_on := matcher.mask & ~matcher.grammar.grammars.eos_mask).any():
            self.mask = going_on


class ConstrainedSamples:
    """The constrained samples of one engine. `renew_masks` runs on its thread, the rest with its lock held."""

    def __init__(self) -> None:
        self._samples: dict[Request, _Sample] = {}
        self._stale: list[_Sample] = []  # samples that have advanced since their mask was computed

    def open(self, request: Request, matcher: "Matcher") -> None:
        """Starts tracking a new sample."""
        sample = self._samples[request] = _Sample(request, matcher)
        if not (matcher.mask & ~matcher.grammar.grammars.eos_mask).any():
            self._stale.append(sample)  # already complete with its resumed tokens: ends without sampling

    def close(self, request: Request) -> None:
        """Stops tracking a sample that has ended. Does nothing for one without a constraint."""
        self._samples.pop(request, None)

    def token_masks(self, requests: Sequence[Request]) -> np.ndarray | None:
        """Returns the token masks of a step's requests, [n, W] uint32, or None if none of them is masked.

        May be called without the engine's lock: the tokens of a sample that is closed meanwhile are never used.
        """
        samples = [self._samples.get(request) for request in requests]
        known = next((sample.mask for sample in samples if sample is not None), None)
        if known is None:
            return None
        everything = np.full_like(known, np.iinfo(known.dtype).max)
        return np.stack([everything if sample is None else sample.mask for sample in samples])

    def advance(self, request: Request, token_id: int | None) -> End | None:
        """Advances a sample by its new token, None for an end token. Returns how it ends, None if it continues."""
        sample = self._samples[request]
        matcher = sample.matcher
        if token_id is None:  # stop tokens are valid anywhere, end tokens only where the mask allowed them
            may_end = matcher.may_end or request.params.stop_token_ids
            return None if may_end else (FinishReason.ERROR, _CONFLICT)
        params = request.params
        if token_id in params.bad_token_ids or (params.allowed_token_ids and token_id not in params.allowed_token_ids):
            return FinishReason.ERROR, _CONFLICT  # the device samples token 0 if no token is left
        was_allowed = matcher.allows(token_id)
        if not matcher.advance([token_id]):
            if not was_allowed:
                return FinishReason.ERROR, _CONFLICT
            if not _has_begun_anew(request, matcher):
                return FinishReason.ERROR, _too_complex(matcher)
        if matcher.is_complete:
            return _COMPLETE
        self._stale.append(sample)
        return None

    def renew_masks(self) -> list[tuple[Request, End]]:
        """Computes the masks of all samples that have advanced since the last call. Returns those that end instead.

        Called without the engine's lock: the mask of a sample that ends meanwhile is never read.
        """
        stale = [sample for sample in self._stale if not sample.request.is_finished]
        self._stale.clear()
        if not stale:
            return []
        grammars = stale[0].matcher.grammar.grammars  # an engine has one vocabulary
        grammars.renew_masks([sample.matcher for sample in stale])
        ended: list[tuple[Request, End]] = []
        for sample in stale:
            request, matcher = sample.request, sample.matcher
            is_lost = matcher.failure is not None and not _has_begun_anew(request, matcher)
            sample.renew_mask()
            if is_lost:
                ended.append((request, (FinishReason.ERROR, _too_complex(matcher))))
            elif not (matcher.mask & ~grammars.eos_mask).any():
                ended.append((request, _COMPLETE))
        return ended
