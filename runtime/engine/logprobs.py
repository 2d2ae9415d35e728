"""Distributes the log-probabilities of a step from device arrays to requests. Serves step 8 of 10. numpy only."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from ..api.request import Request, TokenLogprobs
from ..program.processors.processor_batch import Logprobs
from ..scheduler.step_plan import StepPlan


class StepLogprobs:
    """The log-probabilities of one step. Call `wait` before reading them.

    Args:
      plan: The plan of the step.
      sampled: Those of the sampled tokens, one for each of `StepPlan.num_samples`; None if not requested.
      prompt: Those of the tokens that follow each token of the step; None if not requested.
      targets: [T] token ids that `prompt` refers to; -1 where none is requested.
    """

    def __init__(
        self, plan: StepPlan, sampled: Logprobs[Any] | None, prompt: Logprobs[Any] | None, targets: np.ndarray | None
    ):
        self._plan = plan
        is_wanted = sampled is not None and any(request.params.logprobs is not None for request in plan.requests)
        self._sampled, self._prompt, self._targets = sampled if is_wanted else None, prompt, targets
        self._places = dict(zip(plan.requests, map(iter, plan.sample_rows), strict=True)) if is_wanted else {}
        # Log-probabilities of the prompt tokens that the step computed: requests in batch order, tokens in order.
        self.of_prompts: tuple[tuple[Request, tuple[TokenLogprobs, ...]], ...] = ()

    def wait(self) -> None:
        """Copies the arrays to the host. Call it without the engine's lock, because it waits for the device."""
        self._sampled = _on_host(self._sampled)
        self.of_prompts = tuple(self._of_prompts(_on_host(self._prompt)))

    def of_output(self, request: Request, token_id: int) -> TokenLogprobs | None:
        """Returns the log-probabilities of the next token that the step sampled for a request, None if not requested.

        The first call for a request refers to the token sampled after its input token, further calls to the tokens
        sampled after its draft tokens.
        """
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


def _on_host(arrays: Logprobs[Any] | None) -> Logprobs[np.ndarray] | None:
    return None if arrays is None else Logprobs(*map(np.asarray, arrays))


def _at(arrays: Logprobs[np.ndarray], index: int, token_id: int, num_top: int) -> TokenLogprobs:
    top = zip(arrays.top_ids[index, :num_top].tolist(), arrays.top[index, :num_top].tolist(), strict=True)
    possible = tuple((token_id, value) for token_id, value in top if value > -math.inf)
    return TokenLogprobs(token_id, float(arrays.token[index]), possible)
