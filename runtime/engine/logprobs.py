"""Log-probabilities of a step, from the device's arrays to each request's own. Serves step 8 of 10. numpy only."""

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from ..api.request import Request, TokenLogprobs
from ..program.processor_batch import Logprobs
from ..scheduler.step_plan import StepPlan


class StepLogprobs:
    """Of one step. `wait` before the first look at them.

    Args:
      plan: of the step.
      sampled: of the tokens that the step samples, see `StepPlan.num_samples`; None if nobody asked.
      prompt: of the tokens after each of the step's, likewise.
      targets: [T] which of those were wanted; the others are -1.
    """

    def __init__(
        self, plan: StepPlan, sampled: Logprobs[Any] | None, prompt: Logprobs[Any] | None, targets: np.ndarray | None
    ):
        self._plan = plan
        is_wanted = sampled is not None and any(request.params.logprobs is not None for request in plan.requests)
        self._sampled, self._prompt, self._targets = sampled if is_wanted else None, prompt, targets
        self._places = _places(plan) if is_wanted else {}
        # Of the prompt tokens that the step brought, by request, in order.
        self.of_prompts: tuple[tuple[Request, tuple[TokenLogprobs, ...]], ...] = ()

    def wait(self) -> None:
        """Brings them to the host. With the engine's lock held, everybody would wait for the device, too."""
        self._sampled = _on_host(self._sampled)
        self.of_prompts = tuple(self._of_prompts(_on_host(self._prompt)))

    def of_output(self, request: Request, token_id: int) -> TokenLogprobs | None:
        """Of the next token that the step sampled for the request: first of that behind its own, then of those behind
        its drafts. None unless it asked."""
        if request.params.logprobs is None or self._sampled is None:
            return None
        return _at(self._sampled, next(self._places[request]), token_id, request.params.logprobs)

    def _of_prompts(self, prompt: Logprobs[np.ndarray] | None) -> Iterator[tuple[Request, tuple[TokenLogprobs, ...]]]:
        if prompt is None or self._targets is None:
            return
        place = len(self._plan.decodes) + self._plan.num_drafts
        for request, _, num_tokens, _ in self._plan.prefills:
            targets, num_top = self._targets[place : place + num_tokens].tolist(), request.params.prompt_logprobs
            wanted = [(index, token_id) for index, token_id in enumerate(targets, start=place) if token_id >= 0]
            if wanted and num_top is not None:
                yield request, tuple(_at(prompt, index, token_id, num_top) for index, token_id in wanted)
            place += num_tokens


def _places(plan: StepPlan) -> dict[Request, Iterator[int]]:
    """Where the samples of each request of the plan stand, in order."""
    places: dict[Request, Iterator[int]] = {}
    behind = plan.num_requests
    drafts = itertools.chain(plan.drafts, itertools.repeat(()))  # prefills have none
    for index, (request, its_drafts) in enumerate(zip(plan.requests, drafts, strict=False)):
        places[request] = itertools.chain((index,), range(behind, behind + len(its_drafts)))
        behind += len(its_drafts)
    return places


def _on_host(arrays: Logprobs[Any] | None) -> Logprobs[np.ndarray] | None:
    return None if arrays is None else Logprobs(*map(np.asarray, arrays))


def _at(arrays: Logprobs[np.ndarray], index: int, token_id: int, num_top: int) -> TokenLogprobs:
    ids, values = arrays.top_ids[index, :num_top].tolist(), arrays.top[index, :num_top].tolist()
    return TokenLogprobs(token_id, float(arrays.token[index]), tuple(zip(ids, values, strict=True)))
