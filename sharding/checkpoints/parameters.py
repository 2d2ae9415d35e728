"""Describes how parameters are assembled from stored tensors, independent of file format and mesh.

A parameter is described by `Piece`s: rectangles of stored tensors and their places in the parameter. A `TensorSource`
holds the tensors: safetensors files (`tensor_files.py`) or an Orbax checkpoint (`checkpoint.py`). `loading.py` combines
them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import jax.numpy as jnp
import ml_dtypes  # noqa: F401  registers bfloat16 with numpy
import numpy as np
from jax.sharding import NamedSharding

Region = tuple[tuple[int, int], ...]  # (start, stop) along each dimension


class CheckpointError(ValueError):
    """Weight files are missing, unreadable, or do not hold the tensors that the model needs."""


@dataclass(frozen=True)
class Piece:
    """A rectangle of a stored tensor, and the place of its first element in a parameter.

    If the tensor and the parameter differ in rank, the extra leading dimensions have extent 1.
    """

    tensor: str
    start: tuple[int, ...]  # in the tensor
    size: tuple[int, ...]
    place: tuple[int, ...]  # in the parameter (of one layer, where layers are stacked)


@dataclass(frozen=True)
class Parameter:
    """A parameter to load: its global shape, dtype and sharding, and the pieces it is assembled from.

    With `num_layers`, the first dimension is the layer, and `pieces(layer)` describes one layer. Without it,
    `pieces(0)` describes the whole parameter. Pieces never overlap. Elements that no piece covers are padding and
    become zero.
    """

    shape: tuple[int, ...]
    dtype: jnp.dtype
    sharding: NamedSharding
    pieces: Callable[[int], Sequence[Piece]]
    num_layers: int | None = None


class Copy(NamedTuple):
    """A region of a tensor, and the memory of the same shape that it is copied to."""

    region: Region
    target: np.ndarray


class TensorSource(Protocol):
    """A store of tensors. Its methods are called from several threads at once."""

    def blocks(self, tensor: str) -> Sequence[Region]:
        """Returns the regions to read one at a time; together they cover the tensor."""

    def fill(self, tensor: str, block: Region, copies: Sequence[Copy]) -> None:
        """Reads a block once and copies parts of it, converted to the dtype of each target.

        Raises:
          CheckpointError: the block cannot be read or is damaged.
        """


def check_tensors(
    where: object,
    found: Mapping[str, tuple[int, ...]],
    expected: Mapping[str, tuple[int, ...]],
    ignored: frozenset[str] = frozenset(),
) -> None:
    """Checks that the stored tensors are those that a model needs, with the same shapes.

    Args:
      where: names the store in the error message.
      found: shapes of the stored tensors.
      expected: shapes of the tensors that the model needs.
      ignored: tensors that may be stored but are not used.

    Raises:
      CheckpointError: tensors are missing, unexpected, or of the wrong shape; the message names them.
    """
    problems = [
        *listed("missing", sorted(expected.keys() - found.keys())),
        *listed("not part of this model", sorted(found.keys() - expected.keys() - ignored)),
        *listed(
            "of another shape",
            [
                f"{name} is {found[name]}, config.json asks for {expected[name]}"
                for name in sorted(expected.keys() & found.keys())
                if found[name] != expected[name]
            ],
        ),
    ]
    if problems:
        raise CheckpointError(f"{where} does not hold the model its config.json describes:\n  " + "\n  ".join(problems))


def listed(what: str, names: Sequence[str], most: int = 5) -> list[str]:
    """Returns one line of an error message that names the first few of `names`, or no line if there are none."""
    if not names:
        return []
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return [f"{len(names)} {what}: {'; '.join(names[:most])}{more}"]


def copies_into(pieces: Sequence[Piece], blocks: Mapping[Region, np.ndarray]) -> dict[str, list[Copy]]:
    """Returns the copies from each tensor into the blocks. Zeroes each block that the pieces do not fully cover."""
    copies: dict[str, list[Copy]] = {}
    for index, block in blocks.items():
        wanted = []
        for piece in pieces:
            if (regions := overlap(piece, index)) is not None:
                source, target = regions
                memory = block[relative(target, index)].reshape([last - first for first, last in source])
                wanted.append((piece.tensor, Copy(source, memory)))
        if sum(copy.target.size for _, copy in wanted) < block.size:
            block[...] = 0
        for tensor, copy in wanted:
            copies.setdefault(tensor, []).append(copy)
    return copies


def overlap(piece: Piece, index: Region) -> tuple[Region, Region] | None:
    """Intersects a piece with the block at `index` of its parameter.

    Returns:
      The region of the intersection in the tensor and its region in the parameter, or None if it is empty.
    """
    rank = len(index)
    extent = ((1,) * rank + piece.size)[-rank:]
    target = tuple(
        (max(start, place), min(stop, place + length))
        for (start, stop), place, length in zip(index, piece.place, extent, strict=True)
    )
    if any(first >= last for first, last in target):
        return None
    shared = min(rank, len(piece.size))
    surplus = tuple((origin, origin + 1) for origin in piece.start[: len(piece.size) - shared])
    source = tuple(
        (origin + first - place, origin + last - place)
        for origin, place, (first, last) in zip(
            piece.start[-shared:], piece.place[-shared:], target[-shared:], strict=True
        )
    )
    return surplus + source, target


def part_of(copy: Copy, block: Region) -> Copy | None:
    """Returns the part of a copy that one block of the tensor supplies, or None if there is none."""
    part = tuple(
        (max(first, start), min(last, stop)) for (first, last), (start, stop) in zip(copy.region, block, strict=True)
    )
    if any(first >= last for first, last in part):
        return None
    return Copy(part, copy.target[relative(part, copy.region)])


def bounds(index: tuple[slice, ...], shape: tuple[int, ...]) -> Region:
    """Converts the slices that jax uses for a shard's index to a region of its array."""
    return tuple((axis.indices(length)[0], axis.indices(length)[1]) for axis, length in zip(index, shape, strict=True))


def relative(region: Region, outer: Region) -> tuple[slice, ...]:
    """Returns the slices that select a region within an enclosing one."""
    return tuple(slice(first - start, last - start) for (first, last), (start, _) in zip(region, outer, strict=True))


def assign(target: np.ndarray, values: np.ndarray) -> None:
    """Copies `values` to `target` and converts them if the dtypes differ.

    Equal dtypes are copied as integers: numpy holds the interpreter lock while it copies bfloat16, which is not one of
    its native dtypes.
    """
    if target.dtype == values.dtype:
        bits = np.dtype(f"u{target.dtype.itemsize}")
        target, values = target.view(bits), values.view(bits)
    target[...] = values
