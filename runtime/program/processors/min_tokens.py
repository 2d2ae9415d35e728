"""Minimum output length: excludes the tokens that end a request until its output has `min_tokens` tokens."""

from collections.abc import Mapping

from ...api.request import Request
from .contract import ENDS, Array, HostState, LogitsProcessor, ProcessorState


class MinTokens(LogitsProcessor):
    params = ("min_tokens",)
    fields = ("first_end",)  # position from which on the request may end

    def values(self, request: Request) -> list[int]:
        num_fresh_tokens = len(request.prompt_token_ids) - request.params.num_resumed_tokens
        return [num_fresh_tokens + request.params.min_tokens]

    def write_slot(self, request: Request, state: HostState, eos_token_ids: frozenset[int]) -> None:
        params = request.params
        ends = params.stop_token_ids if params.ignore_eos else {*eos_token_ids, *params.stop_token_ids}
        state.history[list(ends)] |= ENDS

    def apply(self, logits: Array, state: ProcessorState[Array], fields: Mapping[str, Array]) -> Array:
        xp = logits.__array_namespace__()
        is_early = fields["sample_position"] < fields["first_end"]
        return xp.where(is_early & (state.history & ENDS != 0), -xp.inf, logits)
