"""The compiled control programs of a server, and their state. Serves step 7 of 10; `controls` is what they compute.

A step comes in many shapes, and compiling a sampler takes about as long as compiling a step of a small model. So these
programs exist in few sizes, and the logits and hidden states of a step are padded to the next one.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from meshserve.sharding.memory import shard_bytes
from meshserve.sharding.mesh import named_sharding, partition_spec
from meshserve.sharding.targets import compiler_options

from .batch import Bucket
from .compiles import compile_all
from .control_batch import WORD_BITS, ControlShape, Logprobs, Sampled, control_sizes, next_size
from .controls import ControlState, prompt_logprobs, sample_controlled, set_control_row

_VOCAB_AXES = (None, "vocab")
_REPLICATED = PartitionSpec()
_Key = tuple[str, int]  # what a program does, and the size it has
_MIN_PROMPT_TOKENS = 64  # fewer cost as much: the head's weights are read in any case


class ControlSizes(NamedTuple):
    """Of the state and the masks."""

    max_running: int
    vocab_size: int  # padded to whole shards
    real_vocab_size: int

    @property
    def num_mask_words(self) -> int:
        return -(-self.real_vocab_size // WORD_BITS)


class Controls:
    """Compiles on construction (`num_threads`: see `compiles.compile_all`); call `allocate` before anything else."""

    def __init__(
        self,
        *,
        structure: nnx.GraphDef,
        params: nnx.State,
        param_specs: nnx.State,
        buckets: Sequence[Bucket],
        sizes: ControlSizes,
        is_unrolled: bool,
        mesh: Mesh,
        num_threads: int = 0,
    ):
        self._sizes, self._mesh, self._options = sizes, mesh, compiler_options(mesh)
        self._state_shapes = control_shapes(sizes, mesh)
        single = [bucket for bucket in buckets if bucket.num_steps == 1]
        token_counts = {bucket.num_tokens for bucket in single if not bucket.is_decode}
        self._sampler_sizes = control_sizes(sizes.max_running)
        self._prompt_sizes = control_sizes(max(token_counts), _MIN_PROMPT_TOKENS)
        to_lower: dict[_Key, Callable[[], jax.stages.Lowered]] = {("set row", 0): self._lower_set_row}
        for size in self._sampler_sizes:
            to_lower["sample", size] = partial(self._lower_sampler, size, is_unrolled)
        for size in self._prompt_sizes:
            to_lower["prompt", size] = partial(self._lower_prompt, structure, params, param_specs, size)
        for size in {bucket.num_requests for bucket in single} - set(self._sampler_sizes):
            to_lower["pad logits", size] = partial(
                self._lower_padding, self._logits(size), next_size(self._sampler_sizes, size)
            )
        for size in token_counts - set(self._prompt_sizes):
            to_lower["pad hidden", size] = partial(
                self._lower_padding, self._hidden(params, size), next_size(self._prompt_sizes, size)
            )
        programs = compile_all((lower() for lower in to_lower.values()), len(to_lower), num_threads)
        self._programs: dict[_Key, jax.stages.Compiled] = dict(zip(to_lower, programs, strict=True))

    def _shape(
        self, shape: tuple[int, ...], dtype: Any = jnp.int32, axes: tuple[str | None, ...] = ()
    ) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=named_sharding(self._mesh, axes))

    def _logits(self, num_requests: int) -> jax.ShapeDtypeStruct:
        return self._shape((num_requests, self._sizes.vocab_size), jnp.float32, _VOCAB_AXES)

    def _hidden(self, params: nnx.State, num_tokens: int) -> jax.ShapeDtypeStruct:
        embedding = params["embedding"].get_value()
        return self._shape((num_tokens, embedding.shape[1]), embedding.dtype)

    def _sharded(
        self, program: Callable[..., Any], in_specs: Any, out_specs: Any, **options: Any
    ) -> jax.stages.Wrapped:
        sharded = jax.shard_map(program, mesh=self._mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
        return jax.jit(sharded, compiler_options=self._options, **options)

    def _lower_sampler(self, num_requests: int, is_unrolled: bool) -> jax.stages.Lowered:
        sizes, shape = self._sizes, ControlShape(num_requests)
        program = partial(sample_controlled, shape=shape, vocab_size=sizes.real_vocab_size, is_unrolled=is_unrolled)
        state = ControlState(*[partition_spec(_VOCAB_AXES)] * 2)
        sharded = self._sharded(
            program,
            (state, _REPLICATED, partition_spec(_VOCAB_AXES), _REPLICATED, _REPLICATED),
            (state, _REPLICATED, _REPLICATED),
            donate_argnums=(0, 1),
        )
        last_tokens, packed = self._shape((sizes.max_running,)), self._shape((shape.size,))
        masks = self._shape((num_requests, sizes.num_mask_words), jnp.uint32)
        return sharded.lower(self._state_shapes, last_tokens, self._logits(num_requests), packed, masks)

    def _lower_prompt(
        self, structure: nnx.GraphDef, params: nnx.State, param_specs: nnx.State, num_tokens: int
    ) -> jax.stages.Lowered:
        program = partial(prompt_logprobs, structure)
        sharded = self._sharded(program, (param_specs, _REPLICATED, _REPLICATED), _REPLICATED)
        return sharded.lower(params, self._hidden(params, num_tokens), self._shape((num_tokens,)))

    def _lower_padding(self, shape: jax.ShapeDtypeStruct, num_rows: int) -> jax.stages.Lowered:
        """Zeros at the end, up to `num_rows`."""
        padding = (0, num_rows - shape.shape[0])
        return jax.jit(lambda x: jnp.pad(x, (padding, (0, 0))), out_shardings=shape.sharding).lower(shape)

    def _padded(self, kind: str, x: jax.Array) -> jax.Array:
        """As it is where its size is one that programs exist in."""
        program = self._programs.get((kind, len(x)))
        return program(x) if program is not None else x

    def _lower_set_row(self) -> jax.stages.Lowered:
        state = ControlState(*[partition_spec(_VOCAB_AXES)] * 2)
        program = self._sharded(set_control_row, (state, *[_REPLICATED] * 3), state, donate_argnums=0)
        history = self._shape((self._sizes.vocab_size,))
        bias = self._shape((self._sizes.vocab_size,), jnp.float32)
        return program.lower(self._state_shapes, self._shape((1,)), history, bias)

    @property
    def device_bytes(self) -> int:
        """What the state takes on each device."""
        return shard_bytes(self._state_shapes)

    def allocate(self) -> None:
        """Takes the memory for the state."""
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self._state_shapes)

        def zeros() -> ControlState[jax.Array]:
            return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), self._state_shapes)

        self._state = jax.jit(zeros, out_shardings=shardings)()
        # What rows without a grammar may take: all. Kept on the devices, so that it need not travel every step.
        replicated = named_sharding(self._mesh, ())
        self._no_masks = {
            size: jax.jit(lambda size=size: ~jnp.zeros((size, self._sizes.num_mask_words), jnp.uint32),
                          out_shardings=replicated)()
            for size in self._sampler_sizes
        }  # fmt: skip

    def release(self) -> None:
        """Gives the memory back."""
        for array in (*self._state, *self._no_masks.values()):
            array.delete()

    def set_row(self, row: int, history: np.ndarray, bias: np.ndarray) -> None:
        """Dispatches what is to be known of an adjusted request."""
        padding = (0, self._sizes.vocab_size - len(history))
        history, bias = np.pad(history, padding), np.pad(bias, padding)
        self._state = self._programs["set row", 0](self._state, np.array([row], np.int32), history, bias)

    def sample(
        self, packed: np.ndarray, logits: jax.Array, last_tokens: jax.Array, masks: np.ndarray | None
    ) -> tuple[jax.Array, Sampled[jax.Array]]:
        """Dispatches the sampling of a step. Returns the next table of last tokens; `last_tokens` is consumed.

        `masks` are of the plan's first requests, or of all; None: every token is allowed.
        """
        size = next_size(self._sampler_sizes, len(logits))
        if masks is not None:
            padding = (0, size - len(masks))
            masks = np.pad(masks, (padding, (0, 0)), constant_values=2**WORD_BITS - 1)
        self._state, last_tokens, sampled = self._programs["sample", size](
            self._state,
            last_tokens,
            self._padded("pad logits", logits),
            packed,
            self._no_masks[size] if masks is None else masks,
        )
        _copy_to_host_async(sampled)
        return last_tokens, sampled

    def prompt_logprobs(self, params: nnx.State, hidden: jax.Array, targets: np.ndarray) -> Logprobs[jax.Array]:
        """Dispatches the log-probabilities of the prompt tokens [T] that follow a step's; those of -1 mean nothing."""
        num_tokens = len(targets)
        size = next_size(self._prompt_sizes, num_tokens)
        targets = np.pad(targets, (0, size - num_tokens), constant_values=-1)
        found = self._programs["prompt", size](params, self._padded("pad hidden", hidden), targets)
        _copy_to_host_async(found)
        return found


def _copy_to_host_async(tree: Any) -> None:
    for array in jax.tree.leaves(tree):
        array.copy_to_host_async()


def control_shapes(sizes: ControlSizes, mesh: Mesh) -> ControlState[jax.ShapeDtypeStruct]:
    """The state as shapes with their shardings."""
    shape, sharding = (sizes.max_running, sizes.vocab_size), named_sharding(mesh, _VOCAB_AXES)
    return ControlState(
        jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding),
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding),
    )
