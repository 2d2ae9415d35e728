"""The compiled program of a bucket, and the state it works on.

Step 6 of 10. In: a packed vector (see `batch.py`). Out: one sampled token a request, still on the device. Its logits
and hidden states stay there, too, until the next step: `processors` samples again from them where a request wants more.

Everything a step needs beyond that vector stays on the devices and is donated to each step: the KV cache, the table of
each row's last token (a sampled token is the next step's input without the host ever seeing it in between), and the
table of each row's pages. A row is the place of a running request in those tables.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from meshserve.kernels.paged_attention import PagedBatch
from meshserve.sharding.chips import compiler_options
from meshserve.sharding.layout import ShardLayout
from meshserve.sharding.memory import added_bytes, is_out_of_memory, shard_bytes
from meshserve.sharding.mesh import named_sharding, partition_spec

from ..api.model_config import ModelConfig
from ..api.sampling_params import SamplingMode
from ..model.qwen3 import LIBRARY_ROWS, LIBRARY_TOKENS, Kernels, specs_of
from .batch import ANY_MODE, ON_DEVICE, Bucket
from .compile_cache import compile_all
from .device_figures import DeviceFigures
from .output_buffers import OutputBufferKey, output_buffer_keys, output_buffer_shapes, written_over
from .processor_batch import Logprobs, Sampled
from .processor_programs import LogitsProcessors
from .sampling import SamplingBatch, sample

# [L, P, K, 2, S, H]: a page holds each KV head's keys, then its values, so one copy fetches a head's page.
CACHE_AXES = (None, None, "kv_heads", None, None, None)


class CacheShape(NamedTuple):
    """The KV cache and the tables beside it."""

    num_pages: int
    page_size: int  # tokens
    max_running: int  # rows
    max_request_pages: int


Leaf = TypeVar("Leaf")


class DeviceState(NamedTuple, Generic[Leaf]):
    """What lives on the devices from step to step; a step consumes it and returns the next.

    Its leaves are arrays, or what describes them: shapes, shardings.
    """

    cache: Leaf  # [L, P, K, 2, S, H], sharded by KV head
    last_tokens: Leaf  # [max_running] int32
    page_table: Leaf  # [max_running, max_request_pages] int32


class StepOutput(NamedTuple, Generic[Leaf]):
    """What a step brings. Logits are None where it was several decode steps; hidden states where it was decodes alone.

    Logits and hidden states are free for the next step as soon as it is dispatched; see `buffers`.
    """

    sampled: Leaf  # [B] int32, or [num_steps, B]
    logits: Leaf | None = None  # [B, V] float32, sharded by vocabulary: after the last token of each request
    hidden: Leaf | None = None  # [T, D], before the last layer's MLP

    @property
    def buffers(self) -> tuple[Leaf, ...]:
        """As `output_buffer_keys` has it."""
        return tuple(leaf for leaf in (self.logits, self.hidden) if leaf is not None)

    def with_buffers(self, buffers: tuple[Leaf, ...]) -> "StepOutput[Leaf]":
        """The same with other arrays in their places."""
        logits, hidden = (*buffers, None)[:2]
        return self._replace(logits=logits, hidden=hidden)


def cache_page_bytes(config: ModelConfig, layout: ShardLayout, page_size: int, dtype: jnp.dtype) -> int:
    """Bytes of one page on one device, all layers together."""
    groups = layout.num_groups // layout.num_shards
    return config.num_layers * groups * 2 * page_size * config.head_dim * dtype.itemsize


def state_shapes(
    config: ModelConfig, layout: ShardLayout, shape: CacheShape, dtype: jnp.dtype
) -> DeviceState[jax.ShapeDtypeStruct]:
    """The device state as shapes."""
    cache = (config.num_layers, shape.num_pages, layout.num_groups, 2, shape.page_size, config.head_dim)
    return DeviceState(
        jax.ShapeDtypeStruct(cache, dtype),
        jax.ShapeDtypeStruct((shape.max_running,), jnp.int32),
        jax.ShapeDtypeStruct((shape.max_running, shape.max_request_pages), jnp.int32),
    )


def step(
    structure: nnx.GraphDef,
    kernels: Kernels,
    bucket: Bucket,
    params: nnx.State,
    state: DeviceState[jax.Array],
    packed: jax.Array,
) -> tuple[DeviceState[jax.Array], StepOutput[jax.Array]]:
    """One step, written per shard. Returns the next state and what the step brought.

    A chunk that does not end with its request's last token gets a token too, without meaning; the host ignores it.
    """
    model = nnx.merge(structure, params)
    fields = {name: packed[place] for name, place in bucket.fields.items()}
    page_table = state.page_table.at[fields["page_slot"], fields["page_index"]].set(fields["page"], mode="drop")
    slots = fields["slots"]
    from_table = state.last_tokens[slots[fields["token_request"]]]
    token_ids = jnp.where(fields["token_ids"] == ON_DEVICE, from_table, fields["token_ids"])
    batch = PagedBatch(fields["positions"], fields["token_request"], page_table[slots])
    num_rows = LIBRARY_ROWS if _has_library_gemms(kernels, bucket) else 0
    wanted = None if bucket.is_decode else _padded(fields["last_index"], num_rows)
    last, hidden, cache = model(token_ids, state.cache, batch, kernels, wanted)
    sampling = SamplingBatch.unpacked(fields)
    logits = model.logits(last)[: bucket.num_requests]
    sampled = sample(
        logits,
        sampling,
        fields["mode"][0] if bucket.mode == ANY_MODE else SamplingMode(bucket.mode),
        vocab_size=model.config.vocab_size,
        is_unrolled=kernels.is_unrolled,
        exchange=kernels.exchange,
        find_threshold=kernels.find_threshold,
    )
    last_tokens = state.last_tokens.at[slots].set(sampled, mode="drop")
    output = StepOutput(sampled, logits, None if bucket.is_decode else hidden)
    return DeviceState(cache, last_tokens, page_table), output


def window(
    structure: nnx.GraphDef,
    kernels: Kernels,
    bucket: Bucket,
    params: nnx.State,
    state: DeviceState[jax.Array],
    packed: jax.Array,
) -> tuple[DeviceState[jax.Array], StepOutput[jax.Array]]:
    """Several decode steps in one dispatch, written per shard. Returns the next state and the tokens.

    Each is the `step` of the same shape: only positions move on, and requests whose own steps are over become padding.
    """
    fields = bucket.fields
    num_steps = packed[fields["num_steps"]]
    no_slot = state.last_tokens.shape[0]

    def one_step(
        index: jax.Array, carry: tuple[DeviceState[jax.Array], jax.Array]
    ) -> tuple[DeviceState[jax.Array], jax.Array]:
        state, sampled = carry
        is_active = index < num_steps
        moved = {
            "slots": jnp.where(is_active, packed[fields["slots"]], no_slot),
            "positions": jnp.where(is_active, packed[fields["positions"]] + index, -1),
            "sample_position": packed[fields["sample_position"]] + index,
            "token_ids": jnp.where(index == 0, packed[fields["token_ids"]], ON_DEVICE),
        }
        vector = packed
        for name, values in moved.items():
            vector = vector.at[fields[name]].set(values)
        state, output = step(structure, kernels, bucket, params, state, vector)
        return state, sampled.at[index].set(output.sampled)

    sampled = jnp.zeros((bucket.num_steps, bucket.num_requests), jnp.int32)
    state, sampled = jax.lax.fori_loop(0, bucket.num_steps, one_step, (state, sampled))
    return state, StepOutput(sampled)


def set_page_row(page_table: jax.Array, page_slot: jax.Array) -> jax.Array:
    """The page table [max_running, max_request_pages] with one row new. `page_slot`: its index, then its pages."""
    return page_table.at[page_slot[0]].set(page_slot[1:])


def sharded_step(
    structure: nnx.GraphDef, abstract: nnx.State, kernels: Kernels, bucket: Bucket, mesh: Mesh
) -> jax.stages.Wrapped:
    """The step of a bucket over the mesh: (weights, state, kept, packed) -> (state, output). The state and what is kept
    are donated.

    The weights are `weights_of` the parameters: flattening their tree at each call would cost the host 50 us. Kept are
    the arrays of `output_buffer_keys`, if `kernels` keeps them, else none.
    """
    tree = jax.tree.structure(abstract)
    weight_specs = tuple(jax.tree.leaves(specs_of(abstract)))
    function = step if bucket.num_steps == 1 else window
    state_specs = DeviceState(partition_spec(CACHE_AXES), PartitionSpec(), PartitionSpec())
    output_buffer_specs = tuple(
        shape.sharding.spec for shape in output_buffer_shapes(kernels, abstract, [bucket], mesh).values()
    )
    output_specs = StepOutput(PartitionSpec())
    if bucket.num_steps == 1:
        hidden_specs = None if bucket.is_decode else PartitionSpec()
        output_specs = StepOutput(PartitionSpec(), partition_spec((None, "vocab")), hidden_specs)

    def shard_step(
        weights: tuple[jax.Array, ...], state: DeviceState[jax.Array], buffers: tuple[jax.Array, ...], packed: jax.Array
    ) -> tuple[DeviceState[jax.Array], StepOutput[jax.Array]]:
        state, output = function(structure, kernels, bucket, jax.tree.unflatten(tree, weights), state, packed)
        return state, output.with_buffers(written_over(buffers, output.buffers)) if buffers else output

    program = jax.shard_map(
        shard_step,
        mesh=mesh,
        in_specs=(weight_specs, state_specs, output_buffer_specs, PartitionSpec()),
        out_specs=(state_specs, output_specs),
        check_vma=False,  # the sampled tokens are equal on all shards, which the checker cannot see through all_gather
    )
    options = compiler_options(mesh, has_library_gemms=_has_library_gemms(kernels, bucket))
    return jax.jit(program, donate_argnums=(1, 2), compiler_options=options)


def _has_library_gemms(kernels: Kernels, bucket: Bucket) -> bool:
    is_fused = kernels.fused(bucket.num_tokens, is_decode=bucket.is_decode) is not None
    return kernels.has_library_gemms and bucket.num_tokens >= LIBRARY_TOKENS and not is_fused


def _padded(index: jax.Array, num_rows: int) -> jax.Array:
    """index [B] with zeros up to so many, if it has fewer."""
    return jnp.pad(index, (0, max(0, num_rows - len(index))))


def weights_of(params: nnx.State) -> tuple[Leaf, ...]:
    """The parameters as `sharded_step` takes them: arrays, or shapes, in one order."""
    return tuple(jax.tree.leaves(params))


def lower_step(
    structure: nnx.GraphDef,
    params: nnx.State,
    kernels: Kernels,
    bucket: Bucket,
    state: DeviceState[jax.ShapeDtypeStruct],
    mesh: Mesh,
) -> jax.stages.Lowered:
    """The step of a bucket, ready to be compiled. `params` and `state` may be shapes with shardings."""
    packed = jax.ShapeDtypeStruct((bucket.size,), jnp.int32, sharding=named_sharding(mesh, ()))
    buffers = tuple(output_buffer_shapes(kernels, params, [bucket], mesh).values())
    return sharded_step(structure, params, kernels, bucket, mesh).lower(weights_of(params), state, buffers, packed)


def lower_set_page_row(page_table: jax.ShapeDtypeStruct, mesh: Mesh) -> jax.stages.Lowered:
    """`set_page_row`, ready to be compiled."""
    page_slot = jax.ShapeDtypeStruct((1 + page_table.shape[1],), jnp.int32, sharding=named_sharding(mesh, ()))
    program = jax.jit(set_page_row, donate_argnums=0, out_shardings=page_table.sharding)
    return program.lower(page_table, page_slot)


def lower_allocate(shapes: Any) -> jax.stages.Lowered:
    """Arrays of zeros in place of a tree of shapes, ready to be compiled."""

    def zeros() -> Any:
        return jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), shapes)

    return jax.jit(zeros, out_shardings=jax.tree.map(lambda shape: shape.sharding, shapes)).lower()


class StepRunner:
    """Holds the compiled programs, and from `start` on the parameters and the device state.

    Compiles on construction, `num_threads` programs at a time (see `compiles.compile_all`). `params` may be shapes with
    shardings there: what is compiled depends on nothing else.
    """

    def __init__(
        self,
        *,
        structure: nnx.GraphDef,
        params: nnx.State,
        state_shapes: DeviceState[jax.ShapeDtypeStruct],
        kernels: Kernels,
        buckets: Sequence[Bucket],
        mesh: Mesh,
        num_threads: int = 1,
        processors: LogitsProcessors | None = None,
    ):
        self._processors, self._mesh = processors, mesh
        self._output: StepOutput[jax.Array] | None = None  # of the last step
        self._output_buffers: dict[OutputBufferKey, jax.Array]
        self._shapes = shapes = placed_state(state_shapes, mesh)
        started = time.monotonic()
        lowered = (lower_step(structure, params, kernels, bucket, shapes, mesh) for bucket in buckets)
        programs = compile_all(lowered, len(buckets), num_threads)
        self._programs: Mapping[Bucket, jax.stages.Compiled] = dict(zip(buckets, programs, strict=True))
        self._set_page_row = lower_set_page_row(shapes.page_table, mesh).compile()
        self._output_buffer_shapes = output_buffer_shapes(kernels, params, buckets, mesh)
        self._output_buffer_keys = {
            bucket: output_buffer_keys(bucket) if kernels.has_output_buffers else () for bucket in buckets
        }
        self._allocate = lower_allocate((shapes, self._output_buffer_shapes)).compile()
        self.compile_seconds = time.monotonic() - started

    def start(self, params: nnx.State) -> None:
        """Takes the parameters and allocates the cache; from now on it can run.

        Raises:
          MemoryError: the devices do not have the room in one piece; says what to do.
        """
        self._params = params
        try:
            self._state, self._output_buffers = jax.block_until_ready(self._allocate())
            if self._processors is not None:
                self._processors.allocate()
        except jax.errors.JaxRuntimeError as error:
            if not is_out_of_memory(error):
                raise
            size = shard_bytes(self._shapes.cache) / (1 << 30)
            raise MemoryError(
                f"could not allocate {size:.2f} GiB on each device in one block, for a cache of "
                f"{self._shapes.cache.shape[1]} pages: lower --memory-fraction or --num-pages, and leave "
                "XLA_PYTHON_CLIENT_PREALLOCATE unset, because memory that is not preallocated becomes fragmented "
                f"({error})."
            ) from None
        self._weights: tuple[jax.Array, ...] = weights_of(params)

    @property
    def dtype(self) -> jnp.dtype:
        """Of the parameters."""
        return self._weights[0].dtype

    @property
    def device_bytes(self) -> int:
        """What parameters, state and kept outputs take on each device."""
        processors = self._processors.device_bytes if self._processors is not None else 0
        return shard_bytes((self._params, self._state, self._output_buffers)) + processors

    @property
    def figures(self) -> DeviceFigures:
        """What it holds, as measured: of arrays and compiled programs."""
        device, cache, processors = self._mesh.local_devices[0], self._shapes.cache, self._processors
        scratch = [added_bytes(program) for program in self._programs.values()]
        return DeviceFigures(
            limit_bytes=device.memory_stats()["bytes_limit"] if device.platform != "cpu" else 0,
            weight_bytes=shard_bytes(self._params),
            scratch_bytes=max(*scratch, processors.scratch_bytes if processors is not None else 0)
            + shard_bytes(self._output_buffer_shapes),
            processor_bytes=processors.device_bytes if processors is not None else 0,
            page_bytes=shard_bytes(cache) // cache.shape[1],
            num_pages=cache.shape[1],
            num_programs=len(self._programs),
        )

    def release(self) -> nnx.State:
        """Gives up the device state, whose memory is free at once, and returns the parameters. The runner is spent."""
        for array in (*self._state, *self._output_buffers.values()):
            array.delete()
        self._output = None
        if self._processors is not None:
            self._processors.release()
        params, self._params = self._params, nnx.State({})
        self._weights = ()
        return params

    def set_page_row(self, page_slot: np.ndarray) -> None:
        """Dispatches a new row of the page table [1 + max_request_pages] int32, for the steps to come."""
        self._state = self._state._replace(page_table=self._set_page_row(self._state.page_table, page_slot))

    def run(self, bucket: Bucket, packed: np.ndarray) -> jax.Array:
        """Dispatches one step and returns its sampled tokens, which the device may still be computing."""
        self._output = None  # its memory is free for this step, or kept for the next of its shape
        keys = self._output_buffer_keys[bucket]
        buffers = tuple(self._output_buffers[key] for key in keys)
        self._state, self._output = self._programs[bucket](self._weights, self._state, buffers, packed)
        if keys:
            self._output_buffers.update(zip(keys, self._output.buffers, strict=True))
        self._output.sampled.copy_to_host_async()
        return self._output.sampled

    def set_slot_adjustments(self, slot: int, history: np.ndarray, bias: np.ndarray) -> None:
        """Dispatches what `sample` is to know of a request from now on; see `processor_batch.SlotAdjustments`."""
        self._known_processors.set_row(slot, history, bias)

    def sample(self, packed: np.ndarray, masks: np.ndarray | None = None) -> Sampled[jax.Array]:
        """Dispatches the sampling of the last `run` anew, under controls; see `processors`. Before the next `run`.

        Its tokens, not those that `run` returned, are what the next step goes on with.

        Args:
          packed: see `processor_batch.ProcessorShape`.
          masks: [requests of the plan, ceil(V / 32)] uint32, which tokens each may take; None: all.
        """
        assert self._output is not None and self._output.logits is not None, "several decode steps have no logits"
        last_tokens, sampled = self._known_processors.sample(
            packed, self._output.logits, self._state.last_tokens, masks
        )
        self._state = self._state._replace(last_tokens=last_tokens)
        return sampled

    def prompt_logprobs(self, targets: np.ndarray) -> Logprobs[jax.Array]:
        """Dispatches the log-probabilities of the tokens [T] that follow those of the last `run`. Before the next."""
        assert self._output is not None and self._output.hidden is not None, "decodes hold no prompt"
        return self._known_processors.prompt_logprobs(self._params, self._output.hidden, targets)

    @property
    def _known_processors(self) -> LogitsProcessors:
        assert self._processors is not None, "requests that want controls are refused where there are none"
        return self._processors


def placed_state(shapes: DeviceState[jax.ShapeDtypeStruct], mesh: Mesh) -> DeviceState[jax.ShapeDtypeStruct]:
    """The device state's shapes with their shardings."""
    shardings = DeviceState(named_sharding(mesh, CACHE_AXES), named_sharding(mesh, ()), named_sharding(mesh, ()))
    return jax.tree.map(_placed, shapes, shardings)


def _placed(shape: jax.ShapeDtypeStruct, sharding: jax.sharding.NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)
