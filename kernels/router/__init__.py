"""Which experts does each token go through?

A router scores all experts for each token, and the token goes through the few best; their shares are weights of the
experts' outputs. `reference.py` is the only definition in Python: the model and the reference layers use it. The fused
decode layers have one in CUDA (kernels/decode_layers/sm90.py names the options that it takes). This module imports no
jax, because config.json is read into `RouterOptions`.
"""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class RouterOptions:
    """How a router chooses. Scores of all experts become shares by a softmax."""

    num_chosen: int  # experts that each token goes through
    is_normalized: bool  # the shares of a token's experts add up to 1
