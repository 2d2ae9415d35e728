"""Logit bias: adds a number to the logits of listed tokens."""

from collections.abc import Mapping

from ...api.request import Request
from .contract import Array, HostState, LogitsProcessor, ProcessorState


class Bias(LogitsProcessor):
    params = ("logit_bias",)

    def write_slot(self, request: Request, state: HostState, eos_token_ids: frozenset[int]) -> None:
        bias = request.params.logit_bias
        state.bias[list(bias)] += list(bias.values())

    def apply(self, logits: Array, state: ProcessorState[Array], fields: Mapping[str, Array]) -> Array:
        return logits + state.bias
