"""How a form of names says where in a tree of arrays each tensor of a model lies."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from meshserve.sharding.layout import ShardLayout

from ..model_files.model_config import ModelConfig
from ..weights.orbax_layout import Pieces


class View(NamedTuple):
    """A tensor as a part of an array of the tree: `array[layer]` along `layer_axis`, transposed, reshaped, then cut."""

    array: str
    layer_axis: int | None = None  # the axis over which layers are stacked
    layer: int = 0
    axes: tuple[int, ...] | None = None  # order of the axes that remain
    shape: tuple[int, ...] | None = None  # after this order
    lead: tuple[int, ...] = ()  # indices of the first axes of this shape, such as an expert
    first_row: int = 0  # of the tensor in what remains

    def of(self, array: Any) -> Any:
        """Returns the array, without `layer_axis`, as the tensor is cut from it."""
        array = array if self.axes is None else array.transpose(self.axes)
        array = array if self.shape is None else array.reshape(self.shape)
        return array[self.lead] if self.lead else array


@dataclass(frozen=True)
class NameTable:
    """The arrays of one form of a model's weights."""

    form: str  # for messages
    shapes: Mapping[str, tuple[int, ...]]
    views: Mapping[str, View]  # by the tensor names of `pieces`
    pieces: Callable[[ModelConfig, ShardLayout], dict[str, Pieces]]
    ignored: frozenset[str] = field(default_factory=frozenset)
