"""The program of a bucket, written per shard, and the device state that it updates.

Step 6 of 10. In: a packed vector (see `batch.py`). Out: one sampled token per request, still on the device. The step's
logits and hidden states also stay there until the next step, so that the logits processors can sample from them again.

Everything that a step needs besides that vector stays on the devices and is donated to each step: the KV cache, the
table of each slot's last token (a sampled token becomes the input of the next step without passing through the host),
and the table of each slot's pages. A slot is the place of a running request in those tables.
"""

from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from meshserve.kernels.paged_attention import PagedBatch
from meshserve.sharding.chips import compiler_options
from meshserve.sharding.layout import ShardLayout
from meshserve.sharding.mesh import TENSOR_AXIS, named_sharding, partition_spec

from ..adapters.bank import AdapterBank
from ..api.sampling_params import SamplingMode
from ..backend.kernels import LIBRARY_ROWS, LIBRARY_TOKENS, Kernels
from ..model.choices import add_choices, counts_shape
from ..model.partitioning import specs_of
from ..model.strategies import StepInputs, forward
from ..model_files.model_config import ModelConfig
from .batch import ANY_MODE, ON_DEVICE, Bucket
from .head_contract import Follow, HeadContract
from .last_token import pooled
from .output_buffers import output_buffer_shapes, write_over
from .sampling import SamplingBatch, sample

# [L, P, K, 2, S, H]: a page holds the keys of each KV head, then its values, so that one copy fetches both. With
# `ShardLayout.cp`, S is a device's part of the page.
CACHE_AXES = (None, None, "kv_heads", None, None, None)


# On one device, several greedy decode steps of at most this number of tokens on the fused layers have no loop, which
# costs 6 us a step: XLA launches the CUDA graph of its body for each (docs/log/decode.md). Other modes would take long
# to compile.
UNROLLED_TOKENS = 8


class CacheShape(NamedTuple):
    """The KV cache and the tables beside it."""

    num_pages: int
    page_size: int  # tokens
    max_running: int  # slots
    max_request_pages: int


Leaf = TypeVar("Leaf")


class DeviceState(NamedTuple, Generic[Leaf]):
    """The state on the devices, which each step consumes and returns updated.

    The leaves are arrays, or their shapes or shardings.
    """

    cache: Leaf  # [L, P, K, 2, S, H], sharded by KV head
    last_tokens: Leaf  # [max_running] int32
    page_table: Leaf  # [max_running, max_request_pages] int32
    expert_tokens: Leaf | None = None  # tokens of each expert so far; see `choices.counts_shape`
    followed: Any = None  # leaves that a trained head keeps; see `drafting.head_contract`


class StepOutput(NamedTuple, Generic[Leaf]):
    """The outputs of a step.

    Multi-step decode and pooling have no logits, and steps with decodes only have no hidden states either.

    The next step may overwrite logits and hidden states as soon as it is dispatched; see `output_buffers.py`.
    """

    sampled: Leaf  # [B] int32, or [num_steps, B]; of a pooling step [B, N] float32, see `last_token.pooled`
    logits: Leaf | None = None  # [B, V] float32, sharded by vocabulary: after the last token of each request
    hidden: Leaf | None = None  # [T, D], before the last layer's MLP

    @property
    def buffers(self) -> tuple[Leaf, ...]:
        """The outputs that are written to output buffers, in the order of `output_buffer_keys`."""
        return tuple(leaf for leaf in (self.logits, self.hidden) if leaf is not None)

    def with_buffers(self, buffers: tuple[Leaf, ...]) -> "StepOutput[Leaf]":
        """Returns these outputs with `buffers` in place of the arrays of the property of that name."""
        logits, hidden = (*buffers, None)[:2]
        return self._replace(logits=logits, hidden=hidden)


def cache_page_bytes(config: ModelConfig, layout: ShardLayout, page_size: int, dtype: jnp.dtype) -> int:
    """Returns the bytes of one page on one device, for all layers together."""
    groups = layout.num_groups // layout.num_shards
    return config.num_layers * groups * 2 * (page_size // layout.cp) * config.head_dim * dtype.itemsize


def state_shapes(
    config: ModelConfig, layout: ShardLayout, shape: CacheShape, dtype: jnp.dtype
) -> DeviceState[jax.ShapeDtypeStruct]:
    """Returns the device state as shapes."""
    rows = shape.page_size // layout.cp
    cache = (config.num_layers, shape.num_pages, layout.num_groups, 2, rows, config.head_dim)
    return DeviceState(
        jax.ShapeDtypeStruct(cache, dtype),
        jax.ShapeDtypeStruct((shape.max_running,), jnp.int32),
        jax.ShapeDtypeStruct((shape.max_running, shape.max_request_pages), jnp.int32),
        counts_shape(config),
    )


def step(
    structure: nnx.GraphDef,
    kernels: Kernels,
    bucket: Bucket,
    params: nnx.State,
    state: DeviceState[jax.Array],
    packed: jax.Array,
    follow: Follow | None = None,
    moved: dict[str, jax.Array] | None = None,
) -> tuple[DeviceState[jax.Array], StepOutput[jax.Array]]:
    """Runs one step, written per shard. Returns the next state and the outputs.

    `follow` updates what a trained head keeps. `moved` has the fields in which one of several steps differs from
    `packed`; the tables are then left as they are. A chunk that does not end with its request's last token gets a
    meaningless token, which the host ignores.
    """
    model = nnx.merge(structure, params)
    fields = {name: packed[place] for name, place in bucket.fields.items()} | (moved or {})
    page_table = state.page_table if moved else _with_new_pages(state.page_table, fields)
    slots = fields["slots"]
    token_slots = slots[fields["token_request"]]
    from_table = state.last_tokens[token_slots]
    token_ids = jnp.where(fields["token_ids"] == ON_DEVICE, from_table, fields["token_ids"])
    batch = PagedBatch(fields["positions"], fields["token_request"], page_table[slots])
    num_rows = LIBRARY_ROWS if _has_library_gemms(kernels, bucket) else 0
    wanted = None if bucket.is_decode else _wanted(fields, num_rows)
    layers = follow.layers if follow is not None else ()
    has_drafts = bucket.has_drafts or bucket.is_pooling
    inputs = StepInputs(token_ids, batch, kernels.products_of(token_slots), wanted, has_drafts, layers)
    last, hidden, cache, chosen, captured = forward(model, kernels, state.cache, inputs)
    expert_tokens = add_choices(state.expert_tokens, chosen)
    followed = follow(state.followed, captured, token_ids, batch) if follow is not None else None
    if bucket.has_drafts:
        last = last[fields["last_index"]]  # the tokens of a request are consecutive, its samples are not
    if bucket.is_pooling:
        output = StepOutput(pooled(model, last[: bucket.num_requests]))
        return DeviceState(cache, state.last_tokens, page_table, expert_tokens), output
    sampling = SamplingBatch.unpacked(fields)
    logits = model.logits(last, kernels.head)[: bucket.num_requests]
    sampled = sample(
        logits,
        sampling,
        fields["mode"][0] if bucket.mode == ANY_MODE else SamplingMode(bucket.mode),
        vocab_size=model.config.vocab_size,
        is_unrolled=kernels.is_unrolled,
        exchange=kernels.exchange,
        find_threshold=kernels.find_threshold,
    )
    if kernels.readback is not None and bucket.has_drafts:
        sampled = kernels.readback(sampled, fields["step_number"])
    last_tokens = state.last_tokens if moved else state.last_tokens.at[slots].set(sampled, mode="drop")
    output = StepOutput(sampled, logits, None if bucket.is_decode else hidden)
    return DeviceState(cache, last_tokens, page_table, expert_tokens, followed), output


def multi_step_decode(
    structure: nnx.GraphDef,
    kernels: Kernels,
    bucket: Bucket,
    params: nnx.State,
    state: DeviceState[jax.Array],
    packed: jax.Array,
) -> tuple[DeviceState[jax.Array], StepOutput[jax.Array]]:
    """Runs several decode steps in one dispatch, written per shard. Returns the next state and the tokens.

    Each is a `step` of the same shape with advanced positions, whose tokens are those of the step before it. Requests
    that need fewer steps become padding. The tables are updated once, before and after the steps: on a GPU, the host
    then takes half as long for a dispatch.
    """
    fields = {name: packed[place] for name, place in bucket.fields.items()}
    num_steps = fields["num_steps"]
    state = state._replace(page_table=_with_new_pages(state.page_table, fields))

    def one_step(
        carry: tuple[DeviceState[jax.Array], jax.Array], index: jax.Array
    ) -> tuple[tuple[DeviceState[jax.Array], jax.Array], jax.Array]:
        state, token_ids = carry
        moved = {
            "positions": jnp.where(index < num_steps, fields["positions"] + index, -1),
            "sample_position": fields["sample_position"] + index,
            "token_ids": token_ids,
        }
        state, output = step(structure, kernels, bucket, params, state, packed, moved=moved)
        return (state, output.sampled), output.sampled

    is_short = bucket.num_tokens <= UNROLLED_TOKENS and bucket.mode == SamplingMode.GREEDY
    is_fused = kernels.fused(bucket.num_tokens, is_decode=True) is not None and jax.lax.axis_size(TENSOR_AXIS) == 1
    carry, steps = (state, fields["token_ids"]), jnp.arange(bucket.num_steps)
    (state, _), sampled = jax.lax.scan(one_step, carry, steps, unroll=is_short and is_fused)
    last = jnp.take_along_axis(sampled, num_steps[None] - 1, axis=0)[0]
    last_tokens = state.last_tokens.at[fields["slots"]].set(last, mode="drop")
    return state._replace(last_tokens=last_tokens), StepOutput(sampled)


def _with_new_pages(page_table: jax.Array, fields: dict[str, jax.Array]) -> jax.Array:
    return page_table.at[fields["page_slot"], fields["page_index"]].set(fields["page"], mode="drop")


def set_page_row(page_table: jax.Array, page_row: jax.Array) -> jax.Array:
    """Returns the page table [max_running, max_request_pages] with one row replaced; see `Batch.page_table_rows`."""
    return page_table.at[page_row[0]].set(page_row[1:])


def sharded_step(
    structure: nnx.GraphDef,
    abstract: nnx.State,
    kernels: Kernels,
    bucket: Bucket,
    mesh: Mesh,
    head: HeadContract | None = None,
    adapters: AdapterBank | None = None,
) -> jax.stages.Wrapped:
    """Returns the step of a bucket over the mesh: (weights, state, buffers, packed) -> (state, output).

    The state and the buffers are donated. The weights are `weights_of` the parameters, because flattening the tree in
    each call would cost the host 50 us; those of a trained head follow them, then the leaves of the adapters, if the
    bucket is for tokens with any. The buffers are those of `output_buffer_shapes`, if the kernels use any.
    """
    tree = jax.tree.structure(abstract)
    weight_specs = tuple(jax.tree.leaves(specs_of(abstract)))
    num_weights = len(weight_specs)
    function = step if bucket.num_steps == 1 else multi_step_decode
    state_specs = DeviceState(partition_spec(CACHE_AXES), PartitionSpec(), PartitionSpec(), PartitionSpec())
    if head is not None:
        assert bucket.num_steps == 1, "multi-step decode and drafts exclude each other"
        weight_specs += head.weight_specs
        state_specs = state_specs._replace(followed=head.state_specs)
    num_own, adapters = len(weight_specs), adapters if bucket.num_adapters else None
    weight_specs += adapters.specs if adapters is not None else ()
    output_buffer_specs = tuple(
        shape.sharding.spec for shape in output_buffer_shapes(kernels, abstract, [bucket], mesh).values()
    )
    output_specs = StepOutput(PartitionSpec())
    if bucket.num_steps == 1 and not bucket.is_pooling:
        hidden_specs = None if bucket.is_decode else PartitionSpec()
        output_specs = StepOutput(PartitionSpec(), partition_spec((None, "vocab")), hidden_specs)

    def shard_step(
        weights: tuple[jax.Array, ...], state: DeviceState[jax.Array], buffers: tuple[jax.Array, ...], packed: jax.Array
    ) -> tuple[DeviceState[jax.Array], StepOutput[jax.Array]]:
        params = jax.tree.unflatten(tree, weights[:num_weights])
        known = () if head is None else (head.bound(weights[num_weights:num_own]),)
        used = kernels
        if adapters is not None:
            used = adapters.bound(kernels, weights[num_own:], is_one=bucket.num_adapters < adapters.shape.num_slots)
        state, output = function(structure, used, bucket, params, state, packed, *known)
        return state, output.with_buffers(write_over(buffers, output.buffers)) if buffers else output

    program = jax.shard_map(
        shard_step,
        mesh=mesh,
        in_specs=(weight_specs, state_specs, output_buffer_specs, PartitionSpec()),
        out_specs=(state_specs, output_specs),
        check_vma=False,  # the sampled tokens are equal on all shards, which the checker cannot see through all_gather
    )
    is_awaited = bucket.has_drafts and kernels.fused(bucket.num_tokens, is_decode=True) is None
    options = compiler_options(
        mesh, has_library_gemms=_has_library_gemms(kernels, bucket), awaited_weights=abstract if is_awaited else None
    )
    return jax.jit(program, donate_argnums=(1, 2), compiler_options=options)


def _has_library_gemms(kernels: Kernels, bucket: Bucket) -> bool:
    is_fused = bucket.is_decode and kernels.fused(bucket.num_tokens, is_decode=True) is not None
    # Without fused layers, XLA would time its own kernels for the shapes of each small step, for minutes.
    # The output head of a fused step: up to LIBRARY_TOKENS, XLA's matmul is as fast.
    least_tokens = 1 if kernels.decode is None else LIBRARY_TOKENS + is_fused
    return kernels.has_library_gemms and bucket.num_tokens >= least_tokens


def _wanted(fields: dict[str, jax.Array], num_rows: int) -> jax.Array:
    """Returns the index of each request's last token, at least `num_rows` entries; beyond all tokens for padding."""
    num_tokens = len(fields["positions"])
    index = jnp.where(fields["sample_position"] > 0, fields["last_index"], num_tokens)
    return jnp.pad(index, (0, max(0, num_rows - len(index))), constant_values=num_tokens)


def weights_of(params: nnx.State) -> tuple[Leaf, ...]:
    """Returns the parameters, arrays or shapes, in the order in which `sharded_step` takes them."""
    return tuple(jax.tree.leaves(params))


def placed_state(shapes: DeviceState[jax.ShapeDtypeStruct], mesh: Mesh) -> DeviceState[jax.ShapeDtypeStruct]:
    """Returns the shapes of the device state with their shardings."""
    cache = _placed(shapes.cache, named_sharding(mesh, CACHE_AXES))
    placed = jax.tree.map(lambda shape: _placed(shape, named_sharding(mesh, ())), shapes)
    return placed._replace(cache=cache)


def _placed(shape: jax.ShapeDtypeStruct, sharding: jax.sharding.NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)
