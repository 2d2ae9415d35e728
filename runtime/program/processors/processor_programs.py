"""Compiles the programs of `logits_processors` and holds their state. Serves step 7 of 10.

Steps come in many shapes, and compiling a sampler takes about as long as compiling a step of a small model. These
programs are therefore compiled for few sizes, and the logits and hidden states of a step are padded to the next one.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from meshserve.sharding.chips import compiler_options
from meshserve.sharding.memory import added_bytes, shard_bytes
from meshserve.sharding.mesh import named_sharding, partition_spec

from ...adapters.bank import AdapterBank
from ...backend.kernels import Kernels
from ...backend.step_context import MLPContext
from ...model.partitioning import specs_of
from ..batch import Bucket, ProgramKey
from ..output_buffers import hidden_shape, logits_shape
from ..program_store import ProgramStore, compile_programs
from ..sampling import sample
from .contract import ProcessorState
from .logits_processors import prompt_logprobs, sample_processed, set_slot_adjustments
from .processor_batch import WORD_BITS, Logprobs, ProcessorShape, Sampled, next_size, processor_sizes

_VOCAB_AXES = (None, "vocab")
_REPLICATED = PartitionSpec()
_PADDING = ("pad logits", "pad hidden")
_ALLOCATING = ("allocate", "no masks")
_PROMPT, _ADAPTED_PROMPT = "prompt", "prompt with adapters"
_MIN_PROMPT_TOKENS = 64  # fewer cost as much, because the unembedding's weights are read in any case


@dataclass(frozen=True, kw_only=True)
class ProcessorPrograms:
    """Declares the programs and their shapes. `params` may be shapes with shardings."""

    structure: nnx.GraphDef
    params: nnx.State
    mesh: Mesh
    buckets: Sequence[Bucket]  # the buckets of the steps
    max_running: int
    real_vocab_size: int  # without padding to whole shards
    kernels: Kernels
    num_drafts: int = 0  # maximum draft tokens of a request
    adapters: AdapterBank | None = None

    @property
    def vocab_size(self) -> int:
        """Returns the size of the vocabulary padded to whole shards."""
        return self._logits(1).shape[1]

    @cached_property
    def sampler_sizes(self) -> tuple[int, ...]:
        return processor_sizes(self.max_running)

    @cached_property
    def prompt_sizes(self) -> tuple[int, ...]:
        return processor_sizes(max(self._token_counts), _MIN_PROMPT_TOKENS)

    @cached_property
    def _single(self) -> list[Bucket]:
        return [bucket for bucket in self.buckets if bucket.num_steps == 1]

    @cached_property
    def _token_counts(self) -> set[int]:
        return {bucket.num_tokens for bucket in self._single if not bucket.is_decode}

    @cached_property
    def state_shapes(self) -> ProcessorState[jax.ShapeDtypeStruct]:
        """Returns the shapes of the state, with shardings."""
        history = self._shape((self.max_running, self.vocab_size), jnp.int32, _VOCAB_AXES)
        return ProcessorState(history, self._shape(history.shape, jnp.float32, _VOCAB_AXES))

    @property
    def resident_bytes(self) -> int:
        """Returns the memory that `LogitsProcessors.allocate` takes on each device."""
        return shard_bytes((self.state_shapes, [self._masks(size) for size in self.sampler_sizes]))

    @property
    def step_output_bytes(self) -> int:
        """Returns the size of the largest step's outputs on each device, or 0 if these have buffers of their own."""
        if self.kernels.has_output_buffers:
            return 0
        return max(
            shard_bytes((self._logits(bucket.num_requests), self._hidden(0 if bucket.is_decode else bucket.num_tokens)))
            for bucket in self._single
        )

    def scratch_bytes(self, added: Mapping[ProgramKey, int]) -> int:
        """Returns the memory that must be free on each device for any program to run after a step.

        That includes the step's outputs, which may have to be padded first.

        Args:
          added: the bytes that each program needs besides its arguments.
        """
        padding = max((num_bytes for (kind, _), num_bytes in added.items() if kind in _PADDING), default=0)
        others = max(num_bytes for (kind, _), num_bytes in added.items() if kind not in (*_PADDING, *_ALLOCATING))
        return self.step_output_bytes + padding + others

    def to_lower(self) -> dict[ProgramKey, Callable[[], jax.stages.Lowered]]:
        """Returns how to lower each program, by its kind and size."""
        programs: dict[ProgramKey, Callable[[], jax.stages.Lowered]] = {
            ("allocate", 0): self._lower_allocate,
            ("set row", 0): self._lower_set_row,
        }
        for size in self.sampler_sizes:
            programs["no masks", size] = partial(self._lower_no_masks, size)
            programs["sample", size] = partial(self._lower_sampler, size)
        for size in self.prompt_sizes:
            programs[_PROMPT, size] = partial(self._lower_prompt, size)
            if self.adapters is not None:
                programs[_ADAPTED_PROMPT, size] = partial(self._lower_prompt, size, self.adapters)
        for size in sorted({bucket.num_requests for bucket in self._single} - set(self.sampler_sizes)):
            num_rows = next_size(self.sampler_sizes, size)
            programs["pad logits", size] = partial(self._lower_padding, self._logits(size), num_rows)
        for size in sorted(self._token_counts - set(self.prompt_sizes)):
            num_rows = next_size(self.prompt_sizes, size)
            programs["pad hidden", size] = partial(self._lower_padding, self._hidden(size), num_rows)
        return programs

    def _shape(
        self, shape: tuple[int, ...], dtype: Any = jnp.int32, axes: tuple[str | None, ...] = ()
    ) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=named_sharding(self.mesh, axes))

    def _logits(self, num_requests: int) -> jax.ShapeDtypeStruct:
        return logits_shape(self.params, num_requests, self.mesh)

    def _masks(self, num_requests: int) -> jax.ShapeDtypeStruct:
        return self._shape((num_requests, -(-self.real_vocab_size // WORD_BITS)), jnp.uint32)

    def _hidden(self, num_tokens: int) -> jax.ShapeDtypeStruct:
        return hidden_shape(self.params, num_tokens, self.mesh)

    def _sharded(
        self,
        program: Callable[..., Any],
        in_specs: Any,
        out_specs: Any,
        *,
        has_library_gemms: bool = False,
        **options: Any,
    ) -> jax.stages.Wrapped:
        sharded = jax.shard_map(program, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
        compiled_with = compiler_options(self.mesh, has_library_gemms=has_library_gemms)
        return jax.jit(sharded, compiler_options=compiled_with, **options)

    def _lower_allocate(self) -> jax.stages.Lowered:
        def zeros() -> ProcessorState[jax.Array]:
            return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), self.state_shapes)

        return jax.jit(zeros, out_shardings=jax.tree.map(lambda leaf: leaf.sharding, self.state_shapes)).lower()

    def _lower_no_masks(self, num_requests: int) -> jax.stages.Lowered:
        masks = self._masks(num_requests)
        return jax.jit(lambda: ~jnp.zeros(masks.shape, masks.dtype), out_shardings=masks.sharding).lower()

    def _lower_sampler(self, num_requests: int) -> jax.stages.Lowered:
        shape = ProcessorShape(num_requests, self.num_drafts)
        choose = partial(
            sample,
            vocab_size=self.real_vocab_size,
            is_unrolled=self.kernels.is_unrolled,
            find_threshold=self.kernels.find_threshold,
        )
        program = partial(sample_processed, shape=shape, vocab_size=self.real_vocab_size, choose=choose)
        state = ProcessorState(*[partition_spec(_VOCAB_AXES)] * 2)
        sharded = self._sharded(
            program,
            (state, _REPLICATED, partition_spec(_VOCAB_AXES), _REPLICATED, _REPLICATED),
            (state, _REPLICATED, _REPLICATED),
            donate_argnums=(0, 1),
        )
        last_tokens, packed = self._shape((self.max_running,)), self._shape((shape.size,))
        logits, masks = self._logits(num_requests), self._masks(num_requests)
        return sharded.lower(self.state_shapes, last_tokens, logits, packed, masks)

    def _lower_prompt(self, num_tokens: int, adapters: AdapterBank | None = None) -> jax.stages.Lowered:
        context = MLPContext(experts=self.kernels.experts, products=self.kernels.products)
        in_specs: tuple[Any, ...] = (specs_of(self.params), _REPLICATED, _REPLICATED)
        kernels = self.kernels

        def program(params: nnx.State, hidden: jax.Array, targets: jax.Array, *adapted: Any) -> Logprobs[jax.Array]:
            used = context
            if adapters is not None:
                leaves, slots = adapted
                used = context._replace(products=adapters.bound(kernels, leaves).products_of(slots))
            return prompt_logprobs(self.structure, used, params, hidden, targets)

        arguments: tuple[Any, ...] = (self.params, self._hidden(num_tokens), self._shape((num_tokens,)))
        if adapters is not None:
            in_specs, arguments = (*in_specs, adapters.specs, _REPLICATED), (*arguments, adapters.leaves, arguments[2])
        sharded = self._sharded(program, in_specs, _REPLICATED, has_library_gemms=kernels.has_library_gemms)
        return sharded.lower(*arguments)

    def _lower_padding(self, shape: jax.ShapeDtypeStruct, num_rows: int) -> jax.stages.Lowered:
        """Lowers a program that appends zeros up to `num_rows`."""
        padding = (0, num_rows - shape.shape[0])
        return jax.jit(lambda x: jnp.pad(x, (padding, (0, 0))), out_shardings=shape.sharding).lower(shape)

    def _lower_set_row(self) -> jax.stages.Lowered:
        state = ProcessorState(*[partition_spec(_VOCAB_AXES)] * 2)
        program = self._sharded(set_slot_adjustments, (state, *[_REPLICATED] * 3), state, donate_argnums=0)
        history = self._shape((self.vocab_size,))
        bias = self._shape((self.vocab_size,), jnp.float32)
        return program.lower(self.state_shapes, self._shape((1,)), history, bias)


class LogitsProcessors:
    """Runs the programs. Construction compiles them; call `allocate` before any other method.

    Args:
      num_threads: see `compile_cache.compile_all`.
      store: where compiled programs are kept, if they are.
    """

    def __init__(self, declared: ProcessorPrograms, num_threads: int = 0, store: ProgramStore | None = None):
        self._declared = declared
        self._programs = compile_programs(declared, declared.to_lower(), num_threads, store)

    @property
    def device_bytes(self) -> int:
        """Returns the memory that `allocate` takes on each device."""
        return self._declared.resident_bytes

    @property
    def scratch_bytes(self) -> int:
        """Returns the memory that must be free on each device for any program to run after a step."""
        return self._declared.scratch_bytes({key: added_bytes(program) for key, program in self._programs.items()})

    def allocate(self) -> None:
        """Allocates the state and waits until this is done."""
        self._state = self._programs["allocate", 0]()
        # The masks of steps without a grammar stay on the devices, so that they need no transfer.
        self._no_masks = {size: self._programs["no masks", size]() for size in self._declared.sampler_sizes}
        jax.block_until_ready((self._state, self._no_masks))

    def release(self) -> None:
        """Frees the memory."""
        for array in (*self._state, *self._no_masks.values()):
            array.delete()

    def set_row(self, row: int, history: np.ndarray, bias: np.ndarray) -> None:
        """Dispatches the state of a slot; see `processor_batch.SlotAdjustments`."""
        padding = (0, self._declared.vocab_size - len(history))
        history, bias = np.pad(history, padding), np.pad(bias, padding)
        self._state = self._programs["set row", 0](self._state, np.array([row], np.int32), history, bias)

    def sample(
        self, packed: np.ndarray, logits: jax.Array, last_tokens: jax.Array, masks: np.ndarray | None
    ) -> tuple[jax.Array, Sampled[jax.Array]]:
        """Dispatches the sampling of a step. Returns the updated table of last tokens, and the result.

        Args:
          last_tokens: consumed.
          masks: for the plan's first samples, or for all; None allows every token.
        """
        size = next_size(self._declared.sampler_sizes, len(logits))
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

    def prompt_logprobs(
        self,
        params: nnx.State,
        hidden: jax.Array,
        targets: np.ndarray,
        adapters: tuple[jax.Array, ...] = (),
        slots: np.ndarray | None = None,
    ) -> Logprobs[jax.Array]:
        """Dispatches the log-probabilities of `targets` [T], the tokens after a step's; those of -1 are undefined.

        After a step with adapters, `adapters` are the leaves of the bank, and `slots` [T] those of the requests.
        """
        num_tokens = len(targets)
        size = next_size(self._declared.prompt_sizes, num_tokens)
        targets = np.pad(targets, (0, size - num_tokens), constant_values=-1)
        more = () if slots is None else (adapters, np.pad(slots, (0, size - len(slots)), constant_values=-1))
        kind = _PROMPT if slots is None else _ADAPTED_PROMPT
        found = self._programs[kind, size](params, self._padded("pad hidden", hidden), targets, *more)
        _copy_to_host_async(found)
        return found

    def _padded(self, kind: str, x: jax.Array) -> jax.Array:
        """Pads to the next size that the programs are compiled for."""
        program = self._programs.get((kind, len(x)))
        return program(x) if program is not None else x


def _copy_to_host_async(tree: Any) -> None:
    for array in jax.tree.leaves(tree):
        array.copy_to_host_async()
