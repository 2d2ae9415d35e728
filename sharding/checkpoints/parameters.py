"""What a parameter is made of, whatever the files and whatever the mesh.

A parameter is described by `Piece`s: rectangles of stored tensors and where they go. A `Source` holds the tensors:
safetensors files (`tensor_files.py`) or an Orbax checkpoint (`checkpoint.py`). `loading.py` brings the two together.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import jax.numpy as jnp
import ml_dtypes  # noqa: F401  registers bfloat16 with numpy
import numpy as np
from jax.sharding import NamedSharding

Region = tuple[tuple[int, int], ...]  # first and last + 1 along each dimension


class CheckpointError(ValueError):
    """Weight files that are missing, unreadable, or do not hold the tensors the model asks for."""


@dataclass(frozen=True)
class Piece:
    """A rectangle of a stored tensor, and the place of its first element in a parameter.

    Where the two have different numbers of dimensions, the surplus leading ones have extent 1.
    """

    tensor: str
    start: tuple[int, ...]  # in the tensor
    size: tuple[int, ...]
    place: tuple[int, ...]  # in the parameter (of one layer, where layers are stacked)


@dataclass(frozen=True)
class Parameter:
    """What to load: global shape, dtype and sharding as jax sees them, and the pieces it is made of.

    With `num_layers` the parameter's first dimension is the layer, and `pieces(layer)` describes one layer; without,
    `pieces(0)` describes it all. What no piece covers is padding and becomes zero. Pieces never overlap.
    """

    shape: tuple[int, ...]
    dtype: jnp.dtype
    sharding: NamedSharding
    pieces: Callable[[int], Sequence[Piece]]
    num_layers: int | None = None


class Copy(NamedTuple):
    """A region of a tensor, and the memory of the region's shape that it fills."""

    region: Region
    target: np.ndarray


class Source(Protocol):
    """Stored tensors. Its methods are called from several threads at once."""

    def blocks(self, tensor: str) -> Sequence[Region]:
        """The regions that are read at a time; together they cover the tensor."""

    def fill(self, tensor: str, block: Region, copies: Sequence[Copy]) -> None:
        """Reads a block once and copies its parts, converted to their target's dtype.

        Raises:
          CheckpointError: it cannot be read, or is damaged.
        """


def check_tensors(
    where: object,
    found: Mapping[str, tuple[int, ...]],
    expected: Mapping[str, tuple[int, ...]],
    ignored: frozenset[str] = frozenset(),
) -> None:
    """Compares the shapes of stored tensors with those a model needs; `ignored` ones may be there without use.

    Raises:
      CheckpointError: names the missing, surplus and misshapen tensors.
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


def listed(what: str, names: list[str], most: int = 5) -> list[str]:
    """One line of an error message that names the first few; no line for none."""
    if not names:
        return []
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return [f"{len(names)} {what}: {'; '.join(names[:most])}{more}"]


def copies_into(pieces: Sequence[Piece], blocks: Mapping[Region, np.ndarray]) -> dict[str, list[Copy]]:
    """What each tensor contributes to the blocks; clears a block that the pieces do not cover."""
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
    """The part of a piece that falls into the block at `index` of its parameter: where it stands in the tensor, and
    where in the parameter. None if there is none."""
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
    """What a block of the tensor contributes to a copy."""
    part = tuple(
        (max(first, start), min(last, stop)) for (first, last), (start, stop) in zip(copy.region, block, strict=True)
    )
    if any(first >= last for first, last in part):
        return None
    return Copy(part, copy.target[relative(part, copy.region)])


def bounds(index: tuple[slice, ...], shape: tuple[int, ...]) -> Region:
    """A shard's place in its array, from the slices that jax speaks in."""
    return tuple((axis.indices(length)[0], axis.indices(length)[1]) for axis, length in zip(index, shape, strict=True))


def relative(region: Region, outer: Region) -> tuple[slice, ...]:
    """A region's place within an outer one."""
    return tuple(slice(first - start, last - start) for (first, last), (start, _) in zip(region, outer, strict=True))


def assign(target: np.ndarray, values: np.ndarray) -> None:
    """Copies and, where the dtypes differ, converts. Equal dtypes are copied as integers: numpy holds the
    interpreter's lock while it copies bfloat16, which is no dtype of its own."""
    if target.dtype == values.dtype:
        bits = np.dtype(f"u{target.dtype.itemsize}")
        target, values = target.view(bits), values.view(bits)
    target[...] = values
