"""What a logits processor is: a family of sampling parameters that changes logits before a token is chosen.

Serves steps 5 and 7 of 10. The host calls `values` and `write_slot` once, when a request gets its slot. The device
calls `apply` in every step that has a request with such parameters. The modules import no jax, because the host part
runs without it: `apply` takes its functions from the namespace of its arrays, and can be tested with numpy.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from ...api.request import Request

Array = Any  # jax.Array, or np.ndarray in tests

# Bits of a token's entry in the history; the lower ones count its occurrences in the output.
IN_PROMPT = 1 << 30
ENDS = 1 << 29  # the token ends the request
COUNT = ENDS - 1

Leaf = TypeVar("Leaf")


class ProcessorState(NamedTuple, Generic[Leaf]):
    """What is kept of each token of the vocabulary for each slot, sharded like the vocabulary.

    Leaves are arrays or their descriptions: [max_running, V] on the devices, and [V] for one slot on the host.
    """

    history: Leaf  # int32; the device counts sampled tokens itself
    bias: Leaf  # float32


HostState = ProcessorState[np.ndarray]


class LogitsProcessor:
    """The interface of a family, which keeps and changes nothing."""

    params: tuple[str, ...] = ()  # the sampling parameters that it implements
    fields: tuple[str, ...] = ()  # names of the values that `apply` needs of each request

    def values(self, request: Request) -> Sequence[float]:
        """Returns the values of `fields`: by default, the sampling parameters of these names. Others are integers."""
        return [getattr(request.params, name) for name in self.fields]

    def write_slot(self, request: Request, state: HostState, eos_token_ids: frozenset[int]) -> None:
        """Adds what the family keeps of each token to a slot's state, which starts as zeros."""

    def apply(self, logits: Array, state: ProcessorState[Array], fields: Mapping[str, Array]) -> Array:
        """Returns the changed logits [B, V / shards].

        Args:
          logits: [B, V / shards] float32.
          state: the rows [B, V / shards] of the requests' slots.
          fields: the values of all families and of the sampler, and the position of the token, each [B, 1].
        """
        return logits
