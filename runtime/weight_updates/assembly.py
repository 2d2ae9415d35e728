"""Assembles parameters from a tree of arrays, device to device, by compiled programs.

In: checked arrays, on any devices and with any sharding. Out: new arrays with the shardings of the engine's parameters,
beside these. A program writes one layer of one parameter; all layers share it, so that an update compiles a dozen small
programs at the first time and none later.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from meshserve.sharding.checkpoints.parameters import Piece

from ..model_files.model_config import ModelConfig
from ..weights.orbax_layout import Pieces, stack_of
from .name_tables import View
from .named_arrays import NamedArrays

_MAX_PROGRAMS = 1_024  # kept; a model needs about a dozen for each form of names


class _Cut(NamedTuple):
    """A rectangle of one of the arrays that a program is given, and its place in a layer of a parameter."""

    argument: int
    view: View  # without the array's name and layer
    start: tuple[int, ...]
    size: tuple[int, ...]
    place: tuple[int, ...]

    def of(self, arrays: Sequence[jax.Array], dtype: jnp.dtype) -> jax.Array:
        ends = [start + size for start, size in zip(self.start, self.size, strict=True)]
        values = jax.lax.slice(self.view.of(arrays[self.argument]), self.start, ends)
        extent = ((1,) * len(self.place) + self.size)[-len(self.place) :]
        return values.reshape(extent).astype(dtype)


class _Layer(NamedTuple):
    """How one layer of a parameter, or an unstacked one, consists of arrays."""

    row: int | None  # in the stack
    arrays: tuple[View, ...]  # where the arguments of the program are
    cuts: tuple[_Cut, ...]
    is_whole: bool  # whether all pieces of the layer are there


def layers_of(name: str, config: ModelConfig, pieces: Pieces, named: NamedArrays) -> list[_Layer]:
    """Returns the layers of a parameter of which the arrays hold something."""
    stack = stack_of(config, name)
    rows: Sequence[int | None] = [None] if stack is None else range(len(stack.layers))
    layers = (_layer(row, pieces(row or 0), named) for row in rows)
    return [layer for layer in layers if layer.cuts]


def _layer(row: int | None, pieces: Sequence[Piece], named: NamedArrays) -> _Layer:
    arguments: dict[tuple[str, int], int] = {}
    views: list[View] = []
    cuts = []
    held = [piece for piece in pieces if named.has(piece.tensor)]
    for piece in held:
        view = named.table.views[piece.tensor]
        place = (view.array, view.layer)
        if place not in arguments:
            arguments[place] = len(views)
            views.append(view)
        first, *others = piece.start
        anonymous = view._replace(array="", layer=0, first_row=0)
        cuts.append(_Cut(arguments[place], anonymous, (first + view.first_row, *others), piece.size, piece.place))
    return _Layer(row, tuple(views), tuple(cuts), len(held) == len(pieces))


def assembled(old: jax.Array, layers: Sequence[_Layer], arrays: Mapping[str, jax.Array | np.ndarray]) -> jax.Array:
    """Returns a new array like `old`, in which some layers are replaced. `old` stays as it is."""
    assert isinstance(old.sharding, NamedSharding)
    new = _copied(old.sharding)(old) if layers[0].row is not None else old
    replicated = NamedSharding(old.sharding.mesh, PartitionSpec())
    for layer in layers:
        given = tuple(_brought(arrays[view.array], view, replicated) for view in layer.arrays)
        write = _writer(old.sharding, layer.cuts, is_stacked=layer.row is not None, is_whole=layer.is_whole)
        new = write(new, np.int32(layer.row or 0), given)
    return new


def lowered_writers(
    old: jax.ShapeDtypeStruct, layers: Sequence[_Layer], arrays: Mapping[str, jax.ShapeDtypeStruct]
) -> Iterator[jax.stages.Lowered]:
    """Yields each distinct program by which `assembled` writes a parameter, for devices that need not exist.

    Args:
      old: The parameter, with its sharding.
      layers: As for `assembled`.
      arrays: The shapes and dtypes of the arrays.
    """
    assert isinstance(old.sharding, NamedSharding)
    replicated = NamedSharding(old.sharding.mesh, PartitionSpec())
    seen = set()
    for layer in layers:
        given = tuple(
            jax.ShapeDtypeStruct(shape_of_layer(arrays[view.array].shape, view), arrays[view.array].dtype)
            for view in layer.arrays
        )
        kind = (layer.cuts, layer.is_whole, given)
        if kind not in seen:
            seen.add(kind)
            write = _writer(old.sharding, layer.cuts, is_stacked=layer.row is not None, is_whole=layer.is_whole)
            placed = tuple(jax.ShapeDtypeStruct(each.shape, each.dtype, sharding=replicated) for each in given)
            yield write.lower(old, jax.ShapeDtypeStruct((), np.int32), placed)


def shape_of_layer(shape: tuple[int, ...], view: View) -> tuple[int, ...]:
    """Returns the shape of an array, or, if layers are stacked in it, of one of them."""
    axis = view.layer_axis
    return shape if axis is None else (*shape[:axis], *shape[axis + 1 :])


def _brought(array: jax.Array | np.ndarray, view: View, replicated: NamedSharding) -> jax.Array:
    """Returns an array, or its layer, on every device of the engine's mesh."""
    if view.layer_axis is not None:
        is_on_host = isinstance(array, np.ndarray)
        array = array.take(view.layer, view.layer_axis) if is_on_host else _taken(array, view.layer, view.layer_axis)
    return jax.device_put(array, replicated)


@functools.partial(jax.jit, static_argnums=2)
def _taken(array: jax.Array, layer: jax.Array, axis: int) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(array, layer, axis, keepdims=False)


@functools.lru_cache(maxsize=_MAX_PROGRAMS)
def _copied(sharding: NamedSharding) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(jnp.copy, out_shardings=sharding)


@functools.lru_cache(maxsize=_MAX_PROGRAMS)
def _writer(sharding: NamedSharding, cuts: tuple[_Cut, ...], *, is_stacked: bool, is_whole: bool) -> Any:
    """Returns the jitted function that writes one layer of a parameter; `cuts` and `is_whole` are as in `_Layer`."""
    mesh, spec = sharding.mesh, sharding.spec
    replicated = NamedSharding(mesh, PartitionSpec())
    of_layer = NamedSharding(mesh, PartitionSpec(*spec[1:])) if is_stacked else sharding

    def write(old: jax.Array, index: jax.Array, arrays: tuple[jax.Array, ...]) -> jax.Array:
        shape, dtype = old.shape[1:] if is_stacked else old.shape, old.dtype
        first = cuts[0].of(arrays, dtype)
        if len(cuts) == 1 and first.shape == shape:
            new = first
        else:
            new = jnp.zeros(shape, dtype)
            if not is_whole:
                held = jax.lax.dynamic_index_in_dim(old, index, keepdims=False) if is_stacked else old
                new = jax.lax.with_sharding_constraint(held, replicated)
            for cut in cuts:
                new = jax.lax.dynamic_update_slice(new, cut.of(arrays, dtype), cut.place)
        new = jax.lax.with_sharding_constraint(new, of_layer)
        return jax.lax.dynamic_update_index_in_dim(old, new, index, 0) if is_stacked else new

    # The layers of a stack are written into one copy. What is not stacked becomes a new array.
    return jax.jit(write, donate_argnums=(0,) if is_stacked else (), out_shardings=sharding)


def not_finite(arrays: Mapping[str, jax.Array]) -> Iterator[str]:
    """Yields the names of arrays that hold a NaN or an infinite number. Waits for the devices."""
    checked = {name: _is_finite(array) for name, array in arrays.items() if jnp.issubdtype(array.dtype, jnp.floating)}
    for name, is_finite in jax.device_get(checked).items():
        if not is_finite:
            yield name


@jax.jit
def _is_finite(array: jax.Array) -> jax.Array:
    return jnp.isfinite(array.astype(jnp.float32)).all()


@functools.lru_cache(maxsize=_MAX_PROGRAMS)
def _overwriter(shape: tuple[int, ...], dtype: jnp.dtype, sharding: NamedSharding) -> jax.stages.Compiled:
    def overwrite(old: jax.Array, new: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice(old, new, (0,) * old.ndim)

    like = jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
    return jax.jit(overwrite, donate_argnums=0, out_shardings=sharding).lower(like, like).compile()


def overwriter(old: jax.Array) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Returns the compiled program that copies an array into the memory of `old`, which it consumes.

    It returns the array in this memory, and allocates nothing on the devices.
    """
    assert isinstance(old.sharding, NamedSharding)
    return _overwriter(old.shape, old.dtype, old.sharding)
