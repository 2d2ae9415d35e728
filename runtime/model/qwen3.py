"""Qwen3 dense model as flax.nnx modules, written per shard; `qwen3_moe` builds on it.

Step 6 of 10. In: the token ids of one step. Out: hidden states, and logits of a vocabulary shard.

Called inside `shard_map`, every module sees its shard's block of each parameter and performs its own communication: one
`all_reduce` after the attention output, one after the MLP, one for the embedding. Outside `shard_map`, the same modules
are built abstractly (`registry.abstract_model`) and declare each parameter once, with its global shape and logical
axes.

Dimensions: T tokens, D embed, K groups of heads (KV heads, including repeats), G query heads per group, H head dim, F
mlp, V vocab.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from meshserve.kernels.decode_layers import DecodeKernels, LayerWeights
from meshserve.kernels.experts import Experts
from meshserve.kernels.experts import xla as xla_experts
from meshserve.kernels.linear import Linear, RMSNorm, inverse_rms, rms_norm, silu_product, xla
from meshserve.kernels.p2p import P2PGroup, P2POperations
from meshserve.kernels.paged_attention import (
    PagedAttention,
    PagedBatch,
    PartialAttention,
    QKNormRope,
    RopeSettings,
    WriteKV,
    write_kv,
)
from meshserve.kernels.paged_attention.context_split import Reordered, by_remainder
from meshserve.kernels.paged_attention.storage import FP8, scaled_access
from meshserve.kernels.readback import TokenReadback
from meshserve.kernels.sampling import FindThreshold
from meshserve.sharding.collectives import Exchange, P2PAllReduce, all_gather, all_reduce
from meshserve.sharding.layout import ShardLayout, split_group
from meshserve.sharding.mesh import TENSOR_AXIS, partition_spec

from ..api.model_config import ModelConfig
from ..layers import fused_decode
from ..layers.rope import rotate, rotation
from ..quantisation.declaration import Declare, matrix_of
from .context_parallel import divide_pages

LARGE_STEP_TOKENS = 512  # from this size on, a step is bound by its matmuls instead of kernel launches
LIBRARY_TOKENS = 64  # from this size on, library GEMMs are at least as fast as XLA's in steps that are not fused
LIBRARY_ROWS = 8  # minimum rows of logits with library GEMMs; for fewer, cuBLAS converts the table to float32


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """Kernels and options with which a backend computes the layers."""

    attend: PagedAttention
    attend_part: PartialAttention | None = None  # `attend` for devices that divide pages among them
    linear: Linear = xla.linear
    head: Callable[..., jax.Array] = xla.linear  # `linear` of the output head, without `prologue` and `residual`
    write: WriteKV = write_kv
    prepare: QKNormRope | None = None  # replaces `write` and the norms and rotation before it
    decode: DecodeKernels | None = None  # fused layers for small decode steps
    max_fused_tokens: int = 64  # largest decode step that runs on them
    max_fused_prompt_tokens: int = 0  # largest step with prompts that does, but for its last layer
    has_drafts: bool = False  # a request may have several tokens in a step whose tokens are all wanted
    experts: Experts = xla_experts.experts  # of layers that have experts
    is_unrolled: bool = False  # unrolls the layers instead of looping over them
    has_statistics_apart: bool = False  # in large steps without `prepare`; see `Attention`
    has_library_gemms: bool = False  # in steps of LIBRARY_TOKENS and more; see `chips.compiler_options`
    has_output_buffers: bool = False  # reused by steps; see `output_buffers`
    find_threshold: FindThreshold | None = None  # sampling threshold kernel, if one device has the whole vocabulary
    readback: TokenReadback | None = None  # of the tokens of steps with drafts, through pinned host memory
    p2p: P2PGroup | None = None  # set if the devices of the mesh can access each other's memory
    p2p_operations: P2POperations | None = None  # set together with `p2p`

    def fused(self, num_tokens: int, *, is_decode: bool) -> DecodeKernels | None:
        """Returns the fused decode kernels if they run the step, else None."""
        most_tokens = self.max_fused_tokens if is_decode else self.max_fused_prompt_tokens
        return self.decode if num_tokens <= most_tokens else None

    @property
    def p2p_all_reduce(self) -> P2PAllReduce | None:
        """The P2P all-reduce of the mesh, or None without P2P access."""
        if self.p2p is None or self.p2p_operations is None:
            return None
        return partial(self.p2p_operations.p2p_all_reduce, p2p=self.p2p)

    @property
    def exchange(self) -> Exchange:
        """The operation that gathers small arrays, such as each shard's best tokens, from all shards."""
        if self.p2p is None or self.p2p_operations is None:
            return all_gather
        return partial(self.p2p_operations.p2p_all_gather, p2p=self.p2p)


class MLPContext(NamedTuple):
    """Values shared by the MLPs of all layers of a step."""

    p2p_all_reduce: P2PAllReduce | None = None
    experts: Experts = xla_experts.experts
    positions: jax.Array | None = None  # [T] int32: of each token, -1 for padding; None if no token is padding
    linear: Linear = xla.linear
    chosen: list[jax.Array] | None = None  # receives what each layer's tokens chose; see `Forward.chosen`


class StepContext(NamedTuple):
    """Values shared by all layers of a step."""

    batch: PagedBatch
    cos: jax.Array  # [T, H / 2]
    sin: jax.Array
    attend: PagedAttention
    linear: Linear = xla.linear
    write: WriteKV = write_kv
    prepare: Callable[..., tuple[jax.Array, jax.Array]] | None = None  # `QKNormRope` with its settings
    p2p_all_reduce: P2PAllReduce | None = None
    has_statistics_apart: bool = False
    experts: Experts = xla_experts.experts
    chosen: list[jax.Array] | None = None

    @property
    def mlp(self) -> MLPContext:
        """The part of it that the MLPs use."""
        return MLPContext(self.p2p_all_reduce, self.experts, self.batch.positions, self.linear, self.chosen)


def add_product(x: jax.Array, product: Callable[..., jax.Array], p2p_all_reduce: P2PAllReduce | None) -> jax.Array:
    """Returns x plus the all-reduced product with a matrix whose columns are sharded: `Linear` with its operands."""
    if jax.lax.axis_size(TENSOR_AXIS) == 1:
        return product(residual=x)
    return x + all_reduce(product(), p2p_all_reduce)


def embed(table: jax.Array, token_ids: jax.Array, p2p_all_reduce: P2PAllReduce | None) -> jax.Array:
    """Looks up ids [T] in an embedding whose rows are sharded. Returns [T, D].

    Each shard looks up the ids of its part of the vocabulary and contributes zeros for the others.
    """
    num_rows = table.shape[0]
    local = token_ids - jax.lax.axis_index(TENSOR_AXIS) * num_rows
    is_here = (local >= 0) & (local < num_rows)
    rows = table[jnp.clip(local, 0, num_rows - 1)]
    return all_reduce(jnp.where(is_here[:, None], rows, 0), p2p_all_reduce)


class Attention(nnx.Module):
    """Grouped-query attention with normalized q and k."""

    def __init__(self, config: ModelConfig, layout: ShardLayout, declare: Declare):
        embed_dim, head_dim = config.embed_dim, config.head_dim
        qkv_shape = layout.qkv_shape(head_dim, embed_dim)
        self.qkv = declare.matrix("attention.qkv", qkv_shape, ("kv_heads", None, None), row_unit=head_dim)
        self.q_norm = declare((head_dim,), (None,))
        self.k_norm = declare((head_dim,), (None,))
        out_shape = (embed_dim, config.num_query_heads * head_dim)
        self.out = declare.matrix("attention.out", out_shape, (None, "query_heads"))
        has_scales = config.quantisation is not None and config.quantisation.has_kv_scales
        scale_shape = (layout.num_groups, 2)  # scales of the keys and of the values in an 8-bit cache
        self.kv_scale = declare(scale_shape, ("kv_heads", None), jnp.dtype("float32")) if has_scales else None
        self.head_dim, self.eps = head_dim, config.rms_norm_eps

    def __call__(
        self, x: jax.Array, norm: RMSNorm, cache: jax.Array, layer: int | jax.Array, context: StepContext
    ) -> tuple[jax.Array, jax.Array]:
        """Adds attention, after a norm, to x [T, D].

        Returns:
          The sum [T, D], and the cache with this step's keys and values.
        """
        if self.kv_scale is not None and cache.dtype == FP8:  # `prepare` would write without the scales
            scaled = scaled_access(context.attend, context.write, self.kv_scale[...])
            context = context._replace(prepare=None, **scaled)
        rows = context.linear(x, self.qkv[...], prologue=norm)
        if not isinstance(layer, int):  # in a loop, or the TPU compiler splits the weights instead of the rows
            rows = jax.lax.optimization_barrier(rows)
        if context.prepare is not None:
            q, cache = context.prepare(rows, cache, context.batch, layer=layer)
        else:
            q, cache = self._prepare(rows, cache, layer, context)
        attended = context.attend(q, cache, context.batch, layer=layer, scale=self.head_dim**-0.5)
        attended = attended.reshape(x.shape[0], -1)
        return add_product(x, partial(context.linear, attended, self.out[...]), context.p2p_all_reduce), cache

    def _prepare(
        self, rows: jax.Array, cache: jax.Array, layer: int | jax.Array, context: StepContext
    ) -> tuple[jax.Array, jax.Array]:
        """Computes `QKNormRope` with XLA operations."""
        heads = rows.reshape(rows.shape[0], self.qkv.shape[0], -1, self.head_dim)
        q, k, v = split_group(heads)
        of_q = of_k = None
        if context.has_statistics_apart:
            # Without the barrier, XLA's CUDA compiler first copies q and k out of `heads`, and these become its slowest
            # kernels.
            inverse = jax.lax.optimization_barrier(inverse_rms(heads[:, :, :-1], self.eps))
            of_q, of_k = inverse[:, :, :-1], inverse[:, :, -1]
        q = rotate(rms_norm(q, self.q_norm[...], self.eps, of_q), context.cos, context.sin)
        k = rotate(rms_norm(k, self.k_norm[...], self.eps, of_k), context.cos, context.sin)
        return q, context.write(cache, k, v, context.batch, layer=layer)


class MLP(nnx.Module):
    """Feed-forward network with SwiGLU activation."""

    def __init__(self, config: ModelConfig, layout: ShardLayout, declare: Declare):
        self.gate_up = declare.matrix("mlp.gate_up", (2, layout.mlp_dim, config.embed_dim), (None, "mlp", None))
        self.down = declare.matrix("mlp.down", (config.embed_dim, layout.mlp_dim), (None, "mlp"))

    def __call__(
        self, x: jax.Array, norm: RMSNorm, linear: Linear, p2p_all_reduce: P2PAllReduce | None = None
    ) -> jax.Array:
        """Adds the MLP, after a norm, to x [T, D]."""
        halves = linear(x, self.gate_up[...], prologue=norm)
        return add_product(x, partial(linear, halves, self.down[...], prologue=silu_product), p2p_all_reduce)


class DecoderLayer(nnx.Module):
    """One decoder layer: attention and MLP, each after a norm and with a residual connection."""

    def __init__(self, config: ModelConfig, layout: ShardLayout, declare: Declare):
        self.attention_norm = declare((config.embed_dim,), (None,))
        self.attention = Attention(config, layout, declare)
        self.mlp_norm = declare((config.embed_dim,), (None,))
        self.declare_mlp(config, layout, declare)
        self.eps = config.rms_norm_eps

    def declare_mlp(self, config: ModelConfig, layout: ShardLayout, declare: Declare) -> None:
        """Creates the parameters that `after_mlp` uses beside its norm's."""
        self.mlp = MLP(config, layout, declare)

    def __call__(
        self, x: jax.Array, cache: jax.Array, layer: int | jax.Array, context: StepContext
    ) -> tuple[jax.Array, jax.Array]:
        x, cache = self.after_attention(x, cache, layer, context)
        return self.after_mlp(x, layer, context.mlp), cache

    def after_attention(
        self, x: jax.Array, cache: jax.Array, layer: int | jax.Array, context: StepContext
    ) -> tuple[jax.Array, jax.Array]:
        """Applies the attention half, in which tokens interact: x [T, D] and the cache -> the same shapes."""
        return self.attention(x, RMSNorm(self.attention_norm[...], self.eps), cache, layer, context)

    def after_mlp(self, x: jax.Array, layer: int | jax.Array, context: MLPContext) -> jax.Array:
        """Applies the MLP half, in which tokens are independent: x [B, D] -> the same shape."""
        return self.mlp(x, RMSNorm(self.mlp_norm[...], self.eps), context.linear, context.p2p_all_reduce)


class Forward(NamedTuple):
    """Result of running all layers."""

    wanted: jax.Array  # [B, D], hidden states of the wanted tokens after all layers
    hidden: jax.Array | None  # [T, D], before the MLP of the last layer; None for fused decodes
    cache: jax.Array
    chosen: list[jax.Array]  # experts that tokens chose, [T, k] of a layer or [layers, T, k], -1 for padding
    captured: list[jax.Array]  # [T, D] each, the inputs of the captured layers


class Qwen3(nnx.Module):
    """The whole model. Each of `ModelConfig.stacks` holds the stacked parameters of its layers."""

    layer_types = {"layers": DecoderLayer}  # by the name of the stack

    def __init__(self, config: ModelConfig, layout: ShardLayout, dtype: jnp.dtype):
        declare = Declare(dtype=dtype, num_shards=layout.num_shards, quantisation=config.quantisation)
        table = (layout.vocab_size, config.embed_dim)
        self.embedding = declare(table, ("vocab", None))
        for name, layers in config.stacks.items():
            stacked = replace(declare, prefix=f"{name}.", stack=(len(layers),))
            setattr(self, name, self.layer_types[name](config, layout, stacked))
        self.norm = declare((config.embed_dim,), (None,))
        if config.has_head:
            self.head = replace(declare, quantisation=config.head_quantisation).matrix("head", table, ("vocab", None))
        self.config, self.cp = config, layout.cp

    def embed(self, token_ids: jax.Array, p2p_all_reduce: P2PAllReduce | None = None) -> jax.Array:
        """Embeds ids [T] as [T, D]."""
        return embed(self.embedding[...], token_ids, p2p_all_reduce)

    def __call__(
        self,
        token_ids: jax.Array,
        cache: jax.Array,
        batch: PagedBatch,
        kernels: Kernels,
        wanted: jax.Array | None,
        captured: tuple[int, ...] = (),
    ) -> Forward:
        """Runs all layers.

        Args:
          token_ids: [T] int32.
          cache: [L, P, K, 2, S, H], this shard's KV heads.
          batch: Where each token belongs.
          kernels: Kernels of this backend. GPUs need unrolled layers, because XLA does not capture loops in command
            buffers; a loop compiles several times faster.
          wanted: Indices [B] of the tokens whose logits are wanted, T for padding. The others skip the MLP of the last
            layer, because no token attends to its output. None means that all tokens are wanted and that those of one
            request, which are few, are consecutive.
          captured: Layers, ascending, whose inputs are wanted.
        """
        moved: Reordered | None = None
        if self.cp > 1 and wanted is not None:
            moved = by_remainder(batch, self.cp)
            wanted = moved.places.at[wanted].get(mode="fill", fill_value=len(token_ids))
            token_ids, batch = token_ids[moved.order], moved.batch
        x = self.embed(token_ids, kernels.p2p_all_reduce)
        fused = kernels.fused(x.shape[0], is_decode=wanted is None)
        if fused is not None:
            weights = layer_weights(nnx.state(self.layers))
            kind = "prompts" if wanted is not None else "drafts" if kernels.has_drafts else "decodes"
            options = fused_decode.Options(kernels.p2p, kind, captured)
            x, cache, choices, inputs = fused_decode.run_layers(self.config, weights, x, cache, batch, fused, options)
            if wanted is None:
                return Forward(x, None, cache, [] if choices is None else [choices], inputs)
        context = self._context(batch, kernels, is_decode=wanted is None)
        is_loop = not kernels.is_unrolled and len(self.config.stacks) == 1
        if fused is None:
            x, cache, inputs = self._before_last(x, cache, context, captured, is_loop=is_loop)
        last: int | jax.Array = self.config.num_layers - 1
        last = jnp.int32(last) if is_loop else last  # traced as in the loop; see `slice_stack`
        hidden, cache = self.layer(last).after_attention(x, cache, last, context)
        chosen = context.chosen or []
        if wanted is None:
            return Forward(self.after_last_mlp(hidden, context.mlp), hidden, cache, chosen, inputs)
        positions = batch.positions.at[wanted].get(mode="fill", fill_value=-1)
        output = self.after_last_mlp(hidden[wanted], context.mlp._replace(positions=positions))
        hidden = hidden if moved is None else hidden[moved.places]
        return Forward(output, hidden, cache, chosen, inputs)

    def _context(self, batch: PagedBatch, kernels: Kernels, *, is_decode: bool) -> StepContext:
        """Returns what the layers of a step share, if they are not fused."""
        cos, sin = rotation(self.config.rope, self.config.head_dim, batch.positions)
        attend, prepare = kernels.attend, None
        if is_decode and kernels.decode is not None and not kernels.has_drafts:
            attend = fused_decode.attention_of_decodes(self.config, batch, kernels.decode)
        if kernels.prepare is not None:
            norms = self.layers.attention.q_norm[...], self.layers.attention.k_norm[...]
            settings = RopeSettings(*norms, cos, sin, self.config.rms_norm_eps)
            prepare = partial(kernels.prepare, settings=settings)
        context = StepContext(
            batch,
            cos,
            sin,
            attend,
            linear=kernels.linear,
            write=kernels.write,
            prepare=prepare,
            p2p_all_reduce=kernels.p2p_all_reduce,
            has_statistics_apart=kernels.has_statistics_apart and batch.positions.shape[0] >= LARGE_STEP_TOKENS,
            experts=kernels.experts,
            chosen=[],
        )
        if self.cp == 1:
            return context
        assert kernels.attend_part is not None
        return context._replace(**divide_pages(batch, self.cp, kernels.attend_part, kernels.write, prepare))

    def _before_last(
        self, x: jax.Array, cache: jax.Array, context: StepContext, captured: tuple[int, ...], *, is_loop: bool
    ) -> tuple[jax.Array, jax.Array, list[jax.Array]]:
        """Runs all layers but the last on x [T, D]. Returns x, the cache, and the inputs of the captured layers."""
        chosen = context.chosen
        assert chosen is not None

        def run_layer(index: int | jax.Array, x: jax.Array, cache: jax.Array) -> tuple[jax.Array, jax.Array]:
            return self.layer(index)(x, cache, index, context)

        def loop_layer(index: jax.Array, carry: tuple[jax.Array, jax.Array, Any]) -> tuple[jax.Array, jax.Array, Any]:
            x, cache = run_layer(index, *carry[:2])
            return x, cache, jax.tree.map(lambda stack: stack.at[index].set(chosen.pop()), carry[2])

        last, experts = self.config.num_layers - 1, self.config.experts
        inputs: list[jax.Array] = []
        all_chosen: list[jax.Array] = []
        if is_loop and experts is not None:
            all_chosen.append(jnp.zeros((last, x.shape[0], experts.num_chosen), jnp.int32))
        for start, stop in itertools.pairwise((0, *captured, last)):
            if is_loop and start < stop:
                x, cache, all_chosen = jax.lax.fori_loop(start, stop, loop_layer, (x, cache, all_chosen))
            for index in range(start, 0 if is_loop else stop):
                x, cache = run_layer(index, x, cache)
            inputs.append(x)
        chosen += all_chosen
        return x, cache, inputs[:-1]

    def layer(self, index: int | jax.Array) -> DecoderLayer:
        """Returns one decoder layer."""
        structure, stacked = nnx.split(self.layers)
        return nnx.merge(structure, jax.tree.map(partial(slice_stack, index=index), stacked))

    def after_last_mlp(self, hidden: jax.Array, context: MLPContext) -> jax.Array:
        """Applies the last layer's MLP to hidden states [B, D] as in `Forward.hidden`."""
        last = self.config.num_layers - 1
        return self.layer(last).after_mlp(hidden, last, context)

    def logits(self, x: jax.Array, linear: Callable[..., jax.Array] = xla.linear) -> jax.Array:
        """Computes float32 logits [B, V / shards] of this shard's vocabulary from hidden states [B, D]."""
        x = rms_norm(x, self.norm[...], self.config.rms_norm_eps)
        table = self.head[...] if self.config.has_head else self.embedding[...]
        return linear(x, table, out_dtype=jnp.dtype("float32"))


def slice_stack(stack: jax.Array, index: int | jax.Array) -> jax.Array:
    """Returns one layer's part of stacked weights.

    In a loop, the part is sliced as the matrix used in the matmul: if its rows had two dimensions, the TPU compiler
    would copy it first.
    """
    if isinstance(index, int) or stack.ndim <= 3:
        return stack[index]
    return stack.reshape(stack.shape[0], -1, stack.shape[-1])[index].reshape(stack.shape[1:])


def layer_weights(layers: nnx.State) -> LayerWeights:
    """Returns the stacked parameters of all layers, arrays or shapes, as operands of the fused decode kernels.

    Quantised projections are `QuantisedMatrix` values, which the kernels may not support: ask `unsupported_reason`.
    """
    attention, mlp = layers["attention"], layers["mlp" if "mlp" in layers else "experts"]
    return LayerWeights(
        input_norm=layers["attention_norm"].get_value(),
        qkv=matrix_of(attention["qkv"]),
        q_norm=attention["q_norm"].get_value(),
        k_norm=attention["k_norm"].get_value(),
        o=matrix_of(attention["out"]),
        post_norm=layers["mlp_norm"].get_value(),
        gate_up=matrix_of(mlp["gate_up"]),
        down=matrix_of(mlp["down"]),
        router=mlp["router"].get_value() if "router" in mlp else None,
    )


def specs_of(params: nnx.State) -> nnx.State:
    """Returns the partition spec of each parameter."""

    def spec(weight: nnx.Variable) -> nnx.Variable:
        return weight.replace(partition_spec(weight.axes))

    return jax.tree.map(spec, params, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
