"""Penalties on tokens that have occurred: repetition (prompt and output), frequency and presence (output)."""

from collections.abc import Mapping

import numpy as np

from ...api.request import Request
from ...api.sampling_params import Stage, params_at
from .contract import COUNT, IN_PROMPT, Array, HostState, LogitsProcessor, ProcessorState


class Penalties(LogitsProcessor):
    params = fields = params_at(Stage.PENALTY)

    def write_slot(self, request: Request, state: HostState, eos_token_ids: frozenset[int]) -> None:
        """Counts every output token that the host knows, which is all of them when a request gets its slot."""
        prompt = request.prompt_token_ids
        num_fresh_tokens = len(prompt) - request.params.num_resumed_tokens
        output, counts = np.unique([*prompt[num_fresh_tokens:], *request.output_token_ids], return_counts=True)
        state.history[output.astype(np.int32)] += counts.astype(np.int32)
        state.history[np.array(prompt[:num_fresh_tokens], np.int32)] |= IN_PROMPT

    def apply(self, logits: Array, state: ProcessorState[Array], fields: Mapping[str, Array]) -> Array:
        xp = logits.__array_namespace__()
        count, repetition = state.history & COUNT, fields["repetition_penalty"]
        repeated = xp.where(logits > 0.0, logits / repetition, logits * repetition)
        logits = xp.where((state.history & IN_PROMPT != 0) | (count > 0), repeated, logits)
        return logits - fields["frequency_penalty"] * count - fields["presence_penalty"] * (count > 0)
