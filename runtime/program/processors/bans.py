"""Allowed and bad tokens: excludes all tokens but the allowed ones, and the bad ones.

It writes a bias of minus infinity, which `Bias` applies.
"""

import numpy as np

from ...api.request import Request
from .contract import HostState, LogitsProcessor


class Bans(LogitsProcessor):
    params = ("allowed_token_ids", "bad_token_ids")

    def write_slot(self, request: Request, state: HostState, eos_token_ids: frozenset[int]) -> None:
        allowed = list(request.params.allowed_token_ids)
        if allowed:
            kept = state.bias[allowed]
            state.bias[:] = -np.inf
            state.bias[allowed] = kept
        state.bias[list(request.params.bad_token_ids)] = -np.inf
