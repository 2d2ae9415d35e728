"""Fills draft tokens into the vector of the step that verifies them, on the device. Serves step 6 of 10.

The step is planned and packed before its draft tokens are known, and is dispatched right behind the dispatch that
proposes them. So the device does not wait for the host between the two, and the host learns the draft tokens together
with what the step sampled.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from meshserve.sharding.mesh import named_sharding

from ...program.batch import Bucket
from ...program.compile_cache import compile_all


class DraftFilling:
    """The compiled programs that move proposed draft tokens into a step's vector.

    There is one for each number of requests that drafts are proposed for, and one for each length of a vector.

    Args:
      chains: The shapes of the dispatches that propose; all have the same number of steps.
      buckets: The shapes of steps that verify.
      mesh: The devices.
      num_threads: See `compile_all`.
    """

    def __init__(self, chains: Sequence[Bucket], buckets: Iterable[Bucket], mesh: Mesh, num_threads: int = 0):
        shape_of = partial(jax.ShapeDtypeStruct, dtype=jnp.int32, sharding=named_sharding(mesh, ()))
        num_steps, counts = chains[0].num_steps, sorted({chain.num_requests for chain in chains})
        sizes = sorted({bucket.size for bucket in buckets if bucket.num_steps == 1})
        self._num_requests = counts[-1]
        widest = shape_of((num_steps, counts[-1]))

        def lower(function: Callable[..., jax.Array], *shapes: jax.ShapeDtypeStruct) -> jax.stages.Lowered:
            return jax.jit(function, out_shardings=widest.sharding).lower(*shapes)

        lowered = [lower(self._widened, shape_of((num_steps, count))) for count in counts]
        lowered += [lower(_filled, shape_of((size,)), widest, widest) for size in sizes]
        programs = compile_all(lowered, len(lowered), num_threads)
        self._widen = dict(zip(counts, programs, strict=False))
        self._fill = dict(zip(sizes, programs[len(counts) :], strict=True))

    def _widened(self, proposed: jax.Array) -> jax.Array:
        return jnp.pad(proposed, ((0, 0), (0, self._num_requests - proposed.shape[1])))

    def __call__(self, packed: np.ndarray, proposed: jax.Array, places: np.ndarray) -> jax.Array:
        """Returns the vector `packed` with draft tokens at their places; see `proposing_runner.draft_places`."""
        num_missing = self._num_requests - places.shape[1]
        places = np.pad(places, ((0, 0), (0, num_missing)), constant_values=packed.size)
        return self._fill[packed.size](packed, self._widen[proposed.shape[1]](proposed), places)


def _filled(packed: jax.Array, drafts: jax.Array, places: jax.Array) -> jax.Array:
    """Draft tokens are negative where logits were not finite; any token will do there."""
    return packed.at[places].set(jnp.maximum(drafts, 0), mode="drop")
