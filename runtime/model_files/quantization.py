"""How the weights of a model are quantized, and how its files store them."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from .module_expressions import Expressions

if TYPE_CHECKING:
    from meshserve.kernels.linear import Format

    from ..weights.formats.stored_matrix import StoredMatrix

NOT_QUANTIZED = "none"
SCHEMES = ("fp8-block", "fp8-channel", "int4", "nvfp4", "mxfp4")  # that `--quantize` makes
_EXPRESSION = "re:"  # begins a regular expression in a list of modules
_LEAST_EXPERT_COLUMNS = 32  # of an expert's shard that share a scale, unless a group has fewer


class Grid(NamedTuple):
    """Numbers that describe rectangles of a matrix, such as its scales."""

    part: str  # among the parts of a quantized matrix: "scale" or "zero"
    dtype: str
    block: tuple[int, int]  # rows and columns of the whole matrix that share a number; 0 means all
    has_model_dtype: bool = False  # in files, it has the dtype of the model


@dataclass(frozen=True, kw_only=True)
class Quantization:
    """The quantization of a model's projections. Everything else keeps the model's dtype."""

    # How files store a matrix: (module, rows, columns, quantization) -> its tensors. None: it is quantized while read.
    layout: "Callable[[str, int, int, Quantization], StoredMatrix] | None"
    format: "Format"
    grids: tuple[Grid, ...]  # the first has the scales
    skipped: tuple[str, ...] = ()  # modules that files do not quantize; "re:" begins a regular expression
    listed: frozenset[str] | None = None  # the only modules that files quantize, if they are listed
    # Modules that files quantize otherwise, by how, which are dequantized while they are loaded.
    others: "tuple[tuple[frozenset[str], Quantization], ...]" = ()
    parameters: frozenset[str] = frozenset()  # the model's parameters that stay quantized on the devices
    dequantized: frozenset[str] = frozenset()  # those that would, but for `--dequantize`
    has_kv_scales: bool = False  # files hold scales for an FP8 KV cache

    @property
    def is_made(self) -> bool:
        """Whether the files hold weights that are quantized while they are read."""
        return self.layout is None

    @property
    def scale(self) -> Grid:
        """The scales."""
        return self.grids[0]

    @property
    def has_zero_points(self) -> bool:
        """Whether elements are differences from zero points, which are stored."""
        return any(grid.part == "zero" for grid in self.grids)

    @property
    def expert_unit(self) -> int:
        """Rows of an expert's intermediate dimension that stay together if experts are split by tensor.

        Blocks of several rows are not divided. Groups of columns are, for shards of equal size, but no further than
        kernels read them.
        """
        rows, columns = self.scale.block
        return rows if rows > 1 or not columns else min(columns, _LEAST_EXPERT_COLUMNS)

    def of_module(self, module: str) -> "Quantization":
        """Returns how files quantize a module that they do not skip."""
        return next((other for modules, other in self.others if module in modules), self)

    def skips(self, module: str) -> bool:
        """Returns whether files leave a module, given by its path, unquantized: it or a part around it is listed."""
        if self.listed is not None and module not in self.listed:
            return True
        names = module.split(".")
        for place, name in enumerate(names):
            for length, paths in self._skipped_paths.get(name, {}).items():
                if tuple(names[place : place + length]) in paths:
                    return True
        return self._skipped_expressions.match(module)

    @functools.cached_property
    def _skipped_paths(self) -> dict[str, dict[int, set[tuple[str, ...]]]]:
        """The listed paths by first name and length, because a list may have an entry for each of many experts."""
        found: dict[str, dict[int, set[tuple[str, ...]]]] = {}
        for entry in self.skipped:
            if not entry.startswith(_EXPRESSION):
                path = tuple(entry.strip(".").split("."))
                found.setdefault(path[0], {}).setdefault(len(path), set()).add(path)
        return found

    @functools.cached_property
    def _skipped_expressions(self) -> Expressions:
        return Expressions(entry.removeprefix(_EXPRESSION) for entry in self.skipped if entry.startswith(_EXPRESSION))

    def held_plain(self) -> "Quantization":
        """Returns the quantization of the same weights if they are dequantized while they are loaded."""
        return replace(self, parameters=frozenset(), dequantized=self.parameters | self.dequantized)

    def held_quantized(self) -> "Quantization":
        """Undoes `held_plain`: this is how an Orbax checkpoint stores them."""
        return replace(self, parameters=self.parameters | self.dequantized, dequantized=frozenset())

    @property
    def name(self) -> str:
        """A short name for logs and GetModelInfo, such as fp8-block-128x128 or int4-group-128."""
        rows, columns = self.scale.block
        granularity = "channel" if not columns else f"group-{columns}" if rows == 1 else f"block-{rows}x{columns}"
        return f"{self.format.name}-{granularity}" + ("-zero-points" if self.has_zero_points else "")


def grouped(scale: Grid, *, has_zero_points: bool) -> tuple[Grid, ...]:
    """Returns the grids of 4-bit integers: the scales, and the zero points if there are any."""
    return (scale, Grid("zero", "uint8", scale.block)) if has_zero_points else (scale,)


def granule(block: int, size: int, num_shards: int = 1) -> int:
    """Returns how many rows (or columns) share a scale on a device: a divisor of a shard that divides a block.

    Args:
      block: Rows that share a scale in the whole matrix; 0 means all, on every shard.
      size: Rows of the whole matrix, padding included.
      num_shards: Number of equal shards of the axis.
    """
    if block == 0 or (num_shards == 1 and size <= block):
        return size
    return math.gcd(block, size // num_shards)
