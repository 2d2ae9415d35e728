"""The contract of the search for sampling thresholds, and how an implementation is described."""

import dataclasses
from typing import Protocol

import jax

from meshserve.kernels.implementation import Implementation


class FindThreshold(Protocol):
    """The interface of an implementation."""

    def __call__(
        self, logits: jax.Array, *, temperature: jax.Array, top_k: jax.Array, top_p: jax.Array, min_p: jax.Array
    ) -> jax.Array:
        """Returns each request's threshold. `runtime.api.sampling_params.SamplingParams` describes the parameters.

        Args:
          logits: [B, V] float32.
          temperature: [B] float32.
          top_k: [B] int32; 0 is off.
          top_p: [B] float32; 1 is off.
          min_p: [B] float32; 0 is off.

        Returns:
          [B] uint32. Tokens with this key or a larger one are kept; 0 keeps all, as for requests of temperature 0.
        """
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingImplementation(Implementation[int]):
    """An implementation for vocabularies of a size, in tokens."""

    find_threshold: FindThreshold
