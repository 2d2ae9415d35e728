"""Arranges the tokens of a step in tiles, each of which goes through a single expert.

A token appears once for each expert of this block that it chose. The rows of an expert are padded to whole tiles, so a
product of a tile has one matrix. How many tiles there are is known on the device alone; arrays have room for the most.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

_MAX_TILE_ROWS = 128  # as wide as the matrix units of a TPU; larger tiles waste more rows at the end of each expert


class Tiles(NamedTuple):
    """N tiles at most, of R rows each; A choices of tokens, T * k."""

    expert: jax.Array  # [N] int32: expert of each tile; tiles beyond `num_tiles` repeat the last one's
    num_tiles: jax.Array  # [] int32
    token: jax.Array  # [N * R] int32: token of each row; padding rows have any token
    row: jax.Array  # [A] int32: row of each choice; N * R if it is not computed here

    @property
    def tile_rows(self) -> int:
        """Returns R."""
        return self.token.shape[0] // self.expert.shape[0]


def tile_rows(num_choices: int, num_experts: int, least: int) -> int:
    """Returns the rows of a tile: about as many as an expert gets on average, a power of two."""
    mean = -(-num_choices // num_experts)
    return max(least, min(_MAX_TILE_ROWS, 1 << (mean - 1).bit_length()))


def most_tiles(num_choices: int, num_local: int, num_rows: int) -> int:
    """Returns how many tiles of `num_rows` rows there may be, at most, with `num_local` experts in the block."""
    return min(num_choices, num_choices // num_rows + min(num_local, num_choices))


def arrange(choices: jax.Array, *, num_local: int, num_rows: int) -> Tiles:
    """Arranges choices [T, k] of experts, of which 0..num_local - 1 are here, in tiles of `num_rows` rows."""
    num_choices = choices.size
    room = most_tiles(num_choices, num_local, num_rows)
    flat = choices.reshape(-1)
    flat = jnp.where((flat >= 0) & (flat < num_local), flat, num_local)
    order = jnp.argsort(flat, stable=True)
    in_order = flat[order]
    num_chosen = jnp.sum(flat[:, None] == jnp.arange(num_local), axis=0, dtype=jnp.int32)
    last_tile = jnp.cumsum(-(-num_chosen // num_rows))  # last tile of each expert, exclusive
    # By expert: its first row in tiles less its first position in order. The last entry is for choices left out.
    shift = num_rows * (last_tile - (-(-num_chosen // num_rows))) - (jnp.cumsum(num_chosen) - num_chosen)
    shift = jnp.append(shift, 0)
    row = jnp.where(in_order < num_local, jnp.arange(num_choices) + shift[in_order], room * num_rows)
    num_tiles = last_tile[-1]
    tile = jnp.minimum(jnp.arange(room), num_tiles - 1)
    expert = jnp.sum(last_tile <= tile[:, None], axis=1, dtype=jnp.int32)
    token = jnp.zeros(room * num_rows, jnp.int32)
    return Tiles(
        expert=jnp.minimum(expert, num_local - 1),
        num_tiles=num_tiles,
        token=token.at[row].set(order // choices.shape[1], mode="drop"),
        row=jnp.zeros(num_choices, jnp.int32).at[order].set(row.astype(jnp.int32)),
    )


def add_up(outputs: jax.Array, tiles: Tiles, weights: jax.Array) -> jax.Array:
    """Adds up each token's rows [N * R, D], multiplied by its weights [T, k]: [T, D] in the rows' dtype.

    Rows of tiles beyond `num_tiles` may hold anything.
    """
    num_tokens, num_chosen = weights.shape
    is_here = (tiles.row < outputs.shape[0]).reshape(num_tokens, num_chosen, 1)
    rows = outputs[jnp.minimum(tiles.row, outputs.shape[0] - 1)].reshape(num_tokens, num_chosen, -1)
    terms = jnp.where(is_here, rows.astype(jnp.float32) * weights[:, :, None], 0.0)
    return jnp.sum(terms, axis=1).astype(outputs.dtype)
