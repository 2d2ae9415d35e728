"""Experts on a TPU: one Pallas kernel for gate, up, activation and down, over tiles of one expert each.

The grid is (tiles, blocks of the intermediate dimension). An expert's weights are fetched block by block from the stack
of all layers, where they lie; consecutive tiles of one expert, with a single block, fetch them once. Only tiles with
tokens are visited: the number of tiles is a bound of the grid that the device computes.

Why not `jax.lax.ragged_dot`: XLA lowers it to a kernel of its own that wants the weights as [E, in, out], and copies
every layer of the stack into that form in every step (docs/decisions).

Weights may be 8-bit floats in blocks of 128 x 128. Their scales are never multiplied by weights: those of gate and up
multiply the tokens before a product with 128 rows, those of down the result of 128 columns.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from meshserve.kernels.implementation import no_tpu
from meshserve.kernels.linear import E4M3, QuantizedMatrix

from .contract import ExpertShapes, ExpertsImplementation, ExpertWeights, Routing, least_cost
from .tiles import add_up, arrange, tile_rows

_LANES = 128
_BLOCK_BYTES = 2 << 20  # size of one matrix of a block: enough for the full bandwidth; six of them are in VMEM
_VMEM_BYTES = 48 << 20  # the chip with the least VMEM (TPU7x) has 64 MiB
_GATE, _UP = 0, 1


def experts(
    x: jax.Array,
    weights: ExpertWeights,
    routing: Routing,
    *,
    layer: int | jax.Array,
    num_experts: int,
    interpret: Any = False,
) -> jax.Array:
    """See `Experts`. `interpret` is passed to `pallas_call`.

    Raises:
      ValueError: the weights are quantized, but not to 8-bit floats in blocks of 128 x 128.
    """
    if reason := _unsupported(weights):
        raise ValueError(f"{reason}. Use moe_backend 'xla'.")
    num_local = weights.down.shape[1]
    num_rows = tile_rows(routing.experts.size, num_experts, 32 // x.dtype.itemsize)
    tiles = arrange(routing.experts, num_local=num_local, num_rows=num_rows)
    num_tiles = jnp.maximum(tiles.num_tiles, 1)  # a grid needs a step; the result of an empty tile is not read
    arguments = jnp.asarray(layer, jnp.int32).reshape(1), tiles.expert
    outputs = _tiles_through_experts(x[tiles.token], weights, arguments, num_tiles, num_rows, interpret)
    return add_up(outputs, tiles, routing.weights)


def _unsupported(weights: ExpertWeights) -> str | None:
    """Returns why the kernel does not support quantized experts, or None if it does."""
    for matrix in weights.quantized or ():
        if matrix.format != E4M3 or matrix.block != (_LANES, _LANES):
            return f"the experts are {matrix.format.name} in blocks of {matrix.block}"
    return None


def _unsupported_shapes(shapes: ExpertShapes) -> str | None:
    return _unsupported(shapes.weights)


IMPLEMENTATION = ExpertsImplementation(
    name="tpu",
    unsupported_device=no_tpu,
    unsupported_shapes=_unsupported_shapes,
    automatic_on=("tpu",),
    experts=experts,
    cost=least_cost,
)
INTERPRETED = ExpertsImplementation(
    name="tpu_interpreted",
    unsupported_shapes=_unsupported_shapes,
    experts=partial(experts, interpret=True),
    cost=least_cost,
)


def block_columns(embed_dim: int, mlp_dim: int, itemsize: int) -> int:
    """Returns how much of the intermediate dimension a block has: a divisor in whole lanes, or everything."""
    if mlp_dim % _LANES:
        return mlp_dim
    fitting = max(_LANES, _BLOCK_BYTES // (embed_dim * itemsize))
    return max(size for size in range(_LANES, mlp_dim + 1, _LANES) if mlp_dim % size == 0 and size <= fitting)


def _tiles_through_experts(
    rows: jax.Array,
    weights: ExpertWeights,
    arguments: tuple[jax.Array, jax.Array],
    num_tiles: jax.Array,
    num_rows: int,
    interpret: Any,
) -> jax.Array:
    """Returns each row after its tile's expert, [N * R, D]. `arguments`: the layer, and the expert of each tile."""
    embed_dim, mlp_dim = weights.down.shape[2:]
    if weights.quantized is not None:
        return _tiles_through_fp8(rows, weights.quantized, arguments, num_tiles, num_rows, interpret)
    assert not isinstance(weights.down, QuantizedMatrix)
    columns = block_columns(embed_dim, mlp_dim, rows.dtype.itemsize)
    # A dimension of broken lanes is not the last one on a TPU: XLA keeps such a matrix transposed, without padding.
    is_transposed = mlp_dim % _LANES != 0
    down = jnp.swapaxes(weights.down, 2, 3) if is_transposed else weights.down

    def of_projection(projection: int) -> pl.BlockSpec:
        shape = (None, None, None, columns, embed_dim)
        return pl.BlockSpec(shape, lambda tile, block, layer, expert: (layer[0], expert[tile], projection, block, 0))

    if is_transposed:
        down_spec = pl.BlockSpec(
            (None, None, columns, embed_dim), lambda tile, block, layer, expert: (layer[0], expert[tile], block, 0)
        )
    else:
        down_spec = pl.BlockSpec(
            (None, None, embed_dim, columns), lambda tile, block, layer, expert: (layer[0], expert[tile], 0, block)
        )
    of_rows = pl.BlockSpec((num_rows, embed_dim), lambda tile, block, layer, expert: (tile, 0))
    call = pl.pallas_call(
        partial(_kernel, num_blocks=mlp_dim // columns, is_transposed=is_transposed),
        out_shape=jax.ShapeDtypeStruct(rows.shape, rows.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(num_tiles, mlp_dim // columns),
            in_specs=[of_rows, of_projection(_GATE), of_projection(_UP), down_spec],
            out_specs=of_rows,
            scratch_shapes=[pltpu.VMEM((num_rows, embed_dim), jnp.float32)],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "arbitrary"), vmem_limit_bytes=_VMEM_BYTES
        ),
        interpret=interpret,
        name="experts",
    )
    return call(*arguments, rows, weights.gate_up, weights.gate_up, down)


def _tiles_through_fp8(
    rows: jax.Array,
    weights: tuple[QuantizedMatrix, QuantizedMatrix],
    arguments: tuple[jax.Array, jax.Array],
    num_tiles: jax.Array,
    num_rows: int,
    interpret: Any,
) -> jax.Array:
    """As `_tiles_through_experts`, with 8-bit weights."""
    gate_up, down = weights
    embed_dim, mlp_dim = down.shape[2:]
    columns = block_columns(embed_dim, mlp_dim, 1)
    # The scales of 128 rows of gate and up, and of 128 columns of down, one for each element of the tokens' dimension.
    layer = arguments[0][0]
    of_inputs = jnp.repeat(gate_up.scale[layer].astype(jnp.float32), _LANES, axis=-1)  # [E, 2, F / 128, D]
    of_outputs = jnp.repeat(jnp.swapaxes(down.scale[layer].astype(jnp.float32), -1, -2), _LANES, axis=-1)

    def of_projection(projection: int) -> pl.BlockSpec:
        shape = (None, None, None, columns, embed_dim)
        return pl.BlockSpec(shape, lambda tile, block, layer, expert: (layer[0], expert[tile], projection, block, 0))

    def scale_of(projection: int) -> pl.BlockSpec:
        shape = (None, None, mlp_dim // _LANES, embed_dim)
        return pl.BlockSpec(shape, lambda tile, block, layer, expert: (expert[tile], projection, 0, 0))

    down_spec = pl.BlockSpec(
        (None, None, embed_dim, columns), lambda tile, block, layer, expert: (layer[0], expert[tile], 0, block)
    )
    down_scale = pl.BlockSpec(
        (None, mlp_dim // _LANES, embed_dim), lambda tile, block, layer, expert: (expert[tile], 0, 0)
    )
    of_rows = pl.BlockSpec((num_rows, embed_dim), lambda tile, block, layer, expert: (tile, 0))
    call = pl.pallas_call(
        partial(_fp8_kernel, num_blocks=mlp_dim // columns),
        out_shape=jax.ShapeDtypeStruct(rows.shape, rows.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(num_tiles, mlp_dim // columns),
            in_specs=[
                of_rows,
                *(of_projection(projection) for projection in (_GATE, _UP)),
                down_spec,
                *(scale_of(projection) for projection in (_GATE, _UP)),
                down_scale,
            ],
            out_specs=of_rows,
            scratch_shapes=[pltpu.VMEM((num_rows, embed_dim), jnp.float32)],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "arbitrary"), vmem_limit_bytes=_VMEM_BYTES
        ),
        interpret=interpret,
        name="experts",
    )
    return call(*arguments, rows, gate_up.data, gate_up.data, down.data, of_inputs, of_inputs, of_outputs)


def _product(left: jax.Array, right: jax.Array, right_axis: int) -> jax.Array:
    """Multiplies [M, K] by a matrix whose axis `right_axis` is summed. The sum is float32."""
    return jax.lax.dot_general(
        left,
        right,
        (((1,), (right_axis,)), ((), ())),
        precision="highest" if left.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )


def _add_block(summand: jax.Array, total: Any, out: Any, num_blocks: int) -> None:
    """Adds a block's summand up, and stores the sum after the last block."""
    block = pl.program_id(1)

    @pl.when(block == 0)
    def _first() -> None:
        total[...] = summand

    @pl.when(block > 0)
    def _following() -> None:
        total[...] += summand

    @pl.when(block == num_blocks - 1)
    def _last() -> None:
        out[...] = total[...].astype(out.dtype)


def _fp8_kernel(*refs: Any, num_blocks: int) -> None:
    """One block of the intermediate dimension of one tile, 128 at a time."""
    _, _, x, gate, up, down, gate_scale, up_scale, down_scale, out, total = refs
    num_parts = gate.shape[0] // _LANES
    tokens = x[...].astype(jnp.float32)
    summand = jnp.zeros(total.shape, jnp.float32)
    for part in range(num_parts):
        lanes, row = pl.ds(part * _LANES, _LANES), pl.ds(pl.program_id(1) * num_parts + part, 1)
        gated, upped = (
            _product((tokens * scale[row, :]).astype(x.dtype), matrix[lanes, :].astype(x.dtype), 1)
            for matrix, scale in ((gate, gate_scale), (up, up_scale))
        )
        activated = (jax.nn.silu(gated) * upped).astype(x.dtype)
        summand += _product(activated, down[:, lanes].astype(x.dtype), 1) * down_scale[row, :]
    _add_block(summand, total, out, num_blocks)


def _kernel(*refs: Any, num_blocks: int, is_transposed: bool) -> None:
    """One block of the intermediate dimension of one tile; the index maps have used the scalars."""
    _, _, x, gate, up, down, out, total = refs
    activated = (jax.nn.silu(_product(x[...], gate[...], 1)) * _product(x[...], up[...], 1)).astype(x.dtype)
    _add_block(_product(activated, down[...], 0 if is_transposed else 1), total, out, num_blocks)
