"""Repeats decode steps over the GPUs of one host and checks that their results are always the same.

    meshserve bench scaling --model qwen3-8b --tp 4 --batch 1 32 --all-reduce p2p --check-seconds 600

All layers of a step run on the same tokens each time, so their result has the same bits each time and on every device,
unless an all-reduce of some layer read a wrong word: the difference then propagates through all later layers.
"""

import dataclasses
import time
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from meshserve.kernels.paged_attention import PagedBatch
from meshserve.runtime.model.qwen3 import Kernels, specs_of
from meshserve.runtime.program.step import CACHE_AXES, weights_of
from meshserve.sharding.mesh import TENSOR_AXIS, partition_spec

_REPEATS = 100  # steps per program
_EACH = PartitionSpec(TENSOR_AXIS)  # one value per device


@dataclasses.dataclass
class Found:
    """The differences found in the steps of one batch."""

    num_steps: int = 0
    num_changed: int = 0  # elements that differ from the first step's
    num_unlike: int = 0  # steps whose result differs between devices


class Repeats:
    """The layers of one batch's decode step, with their own KV cache; compiles on construction.

    Args:
      structure, params: The model, over `mesh`.
      cache: The shape of the cache, [L, batch * pages of a request, K, 2, S, H].
      context: Tokens of each request, of which the step decodes the last.
    """

    def __init__(
        self,
        structure: nnx.GraphDef,
        params: nnx.State,
        kernels: Kernels,
        cache: jax.ShapeDtypeStruct,
        mesh: Mesh,
        *,
        batch: int,
        context: int,
    ):
        self.batch, self.found = batch, Found()
        self._first: np.ndarray | None = None
        self._weights: tuple[jax.Array, ...] = weights_of(params)
        cache_spec = partition_spec(CACHE_AXES)
        zeros = partial(jnp.zeros, cache.shape, cache.dtype)
        self._cache = jax.jit(zeros, out_shardings=jax.sharding.NamedSharding(mesh, cache_spec))()
        tree = jax.tree.structure(params)
        page_table = np.arange(cache.shape[1], dtype=np.int32).reshape(batch, -1)

        def of_shard(
            weights: tuple[jax.Array, ...], cache: jax.Array
        ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
            model = nnx.merge(structure, jax.tree.unflatten(tree, weights))
            rows = jnp.arange(batch, dtype=jnp.int32)
            tokens = PagedBatch(jnp.full(batch, context - 1, jnp.int32), rows, jnp.asarray(page_table))
            first, _, cache, *_ = model(rows, cache, tokens, kernels, wanted=None)

            def again(_: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
                cache, num_changed, num_unlike = carry
                x, _, cache, *_ = model(rows, cache, tokens, kernels, wanted=None)
                num_changed += (_bits(x) != _bits(first)).sum(dtype=jnp.int32)
                checksums = jax.lax.all_gather(_checksum(x), TENSOR_AXIS)
                return cache, num_changed, num_unlike + (checksums != checksums[0]).any().astype(jnp.int32)

            carry = jax.lax.fori_loop(0, _REPEATS, again, (cache, jnp.int32(0), jnp.int32(0)))
            cache, num_changed, num_unlike = carry
            return cache, first[None], num_changed[None], num_unlike[None]

        program = jax.shard_map(
            of_shard,
            mesh=mesh,
            in_specs=(tuple(jax.tree.leaves(specs_of(params))), cache_spec),
            out_specs=(cache_spec, _EACH, _EACH, _EACH),
            check_vma=False,
        )
        self._program = jax.jit(program, donate_argnums=1).lower(self._weights, self._cache).compile()

    def run(self) -> None:
        """Runs about a hundred more steps and compares them with the very first step and among the devices."""
        self._cache, first, num_changed, num_unlike = self._program(self._weights, self._cache)
        bits = np.asarray(first).view(np.uint16)
        self._first = bits[:1] if self._first is None else self._first
        self.found.num_steps += _REPEATS + 1
        self.found.num_changed += int((bits != self._first).sum() + np.asarray(num_changed).sum())
        self.found.num_unlike += int(np.asarray(num_unlike)[0])


def run_for(cases: Sequence[Repeats], seconds: float) -> float:
    """Runs all cases in turn, at least once, for the given time, and returns the seconds that it took."""
    began = time.monotonic()
    while True:
        for case in cases:
            case.run()
        if (passed := time.monotonic() - began) >= seconds:
            return passed


def _bits(x: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(x, jnp.uint16)


def _checksum(x: jax.Array) -> jax.Array:
    """Returns a uint32 checksum in which each element has a different odd weight."""
    bits = _bits(x).reshape(-1).astype(jnp.uint32)
    return (bits * (2 * jnp.arange(bits.size, dtype=jnp.uint32) + 1)).sum(dtype=jnp.uint32)
