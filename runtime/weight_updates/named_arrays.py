"""Recognises the names of a tree of arrays, and says where in them each tensor of the model lies.

In: a tree of `jax.Array`s, as a trainer holds it. Out: the tensors that the pieces of a parameter refer to, each as a
`View` of an array. A form of names is a `NameTable`: array -> shape, and tensor -> view.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from meshserve.sharding.checkpoints.parameters import listed

from ..api.errors import InvalidRequestError
from ..model_files.model_config import ModelConfig
from ..weights.hf_layout import checkpoint_tensors, hf_pieces, tensors_to_ignore
from ..weights.orbax_layout import (
    part_of_layer,
    single_device_arrays,
    stack_of,
    stored_name,
    stored_pieces,
    with_plain_matrices,
)
from ..weights.registry import architecture_of
from .name_tables import NameTable, View
from .transposed_names import maxtext_names, tunix_names

SOURCE = "source"  # the argument that errors name
_FLOATS = tuple(jnp.dtype(name) for name in ("bfloat16", "float16", "float32"))


def hugging_face_names(config: ModelConfig) -> NameTable:
    """The names of a checkpoint of Hugging Face, without quantization."""
    shapes = checkpoint_tensors(with_plain_matrices(config))
    views = {name: View(name) for name in shapes}
    ignored = tensors_to_ignore(with_plain_matrices(config))
    return NameTable("Hugging Face's names", shapes, views, hf_pieces, ignored)


def fused_expert_names(config: ModelConfig) -> NameTable | None:
    """The same with the matrices of all experts of a layer in one tensor, as transformers 5 holds them in memory."""
    weight_map, plain = architecture_of(config).weight_map, hugging_face_names(config)
    if config.experts is None or not weight_map.fused:
        return None
    shapes, views = dict(plain.shapes), dict(plain.views)
    for layer, (fused, modules) in itertools.product(config.stacks["layers"], weight_map.fused.items()):
        prefix = weight_map.layer_prefix.format(layer)
        num_rows = 0
        for module in modules:
            for expert in range(config.experts.num_experts):
                tensor = f"{prefix}{module}.weight".format(expert)
                rows, columns = shapes.pop(tensor)
                views[tensor] = View(prefix + fused, lead=(expert,), first_row=num_rows)
            num_rows += rows
        shapes[prefix + fused] = (config.experts.num_experts, num_rows, columns)
    return NameTable("Hugging Face's names with fused experts", shapes, views, plain.pieces, plain.ignored)


def state_names(config: ModelConfig) -> NameTable:
    """The paths of our own model's state, in the layout of a single device (`model_layout(config, 1)`)."""
    shapes: dict[str, tuple[int, ...]] = {}
    views: dict[str, View] = {}
    for name, array in single_device_arrays(with_plain_matrices(config)).items():
        stack = stack_of(config, name)
        if stack is None:
            shapes[name], views[name] = array.shape, View(name)
            continue
        shapes[name] = (len(stack.layers), *array.shape)
        for index, layer in enumerate(stack.layers):
            views[stored_name(part_of_layer(layer), stack.key)] = View(name, 0, index)
    return NameTable("the paths of meshserve's state", shapes, views, stored_pieces)


_TABLES: tuple[Callable[[ModelConfig], NameTable | None], ...] = (
    hugging_face_names,
    fused_expert_names,
    tunix_names,
    maxtext_names,
    state_names,
)
_OUTER = "params."  # of flax's variables


@dataclass(frozen=True)
class NamedArrays:
    """Checked arrays, and the table of their names. Those that are missing were allowed to be."""

    table: NameTable
    arrays: Mapping[str, jax.Array | np.ndarray]

    def has(self, tensor: str) -> bool:
        """Whether a tensor is among the arrays."""
        return self.table.views[tensor].array in self.arrays


def flattened(tree: Any) -> dict[str, Any]:
    """Returns the arrays of a tree by their paths, joined by dots.

    Takes an `nnx.State`, an `nnx.Module`, or nested mappings and sequences; `nnx.Variable`s are unwrapped.
    """
    if isinstance(tree, nnx.Module):
        tree = nnx.state(tree)
    if isinstance(tree, nnx.State):
        return {".".join(map(str, path)): _value(leaf) for path, leaf in nnx.to_flat_state(tree)}
    found: dict[str, Any] = {}
    stack = [("", tree)]
    while stack:
        path, node = stack.pop()
        if isinstance(node, Mapping | nnx.State):
            children = node.items()
        elif isinstance(node, list | tuple):
            children = dict(enumerate(node)).items()
        else:
            found[path] = _value(node)
            continue
        stack += [(f"{path}.{key}" if path else str(key), child) for key, child in children]
    return found


def _value(leaf: Any) -> Any:
    return leaf[...] if isinstance(leaf, nnx.Variable) else leaf


def named_arrays(tree: Any, config: ModelConfig, *, is_partial: bool) -> NamedArrays:
    """Recognises a tree's names, and checks names, shapes and dtypes.

    Args:
      tree: See `flattened`.
      config: The served model.
      is_partial: Whether arrays may be missing.

    Raises:
      InvalidRequestError: An array is missing, unknown, or has a shape or dtype that the model's weights do not have.
    """
    arrays = flattened(tree)
    while arrays and all(name.startswith(_OUTER) for name in arrays):
        arrays = {name.removeprefix(_OUTER): array for name, array in arrays.items()}
    tables = [table for make in _TABLES if (table := make(config)) is not None]
    table = max(tables, key=lambda table: len(table.shapes.keys() & arrays.keys()))
    if not table.shapes.keys() & arrays.keys():
        names = "; ".join(f"{table.form}, such as {next(iter(table.shapes))}" for table in tables)
        got = ", ".join(itertools.islice(sorted(arrays), 3)) or "no array"
        raise InvalidRequestError(SOURCE, f"got {got}; allowed are {names}.")
    arrays = {name: array for name, array in arrays.items() if name not in table.ignored or name in table.shapes}
    problems = [
        *listed("missing (pass partial=True to replace some only)", [] if is_partial else _missing(table, arrays)),
        *listed("not part of this model", sorted(arrays.keys() - table.shapes.keys())),
        *listed("of another shape", _of_another_shape(table, arrays)),
        *listed("of a dtype other than bfloat16, float16 or float32", _of_another_dtype(arrays)),
    ]
    if problems:
        raise InvalidRequestError(SOURCE, f"has {table.form}, but not the model's weights: {'; '.join(problems)}.")
    return NamedArrays(table, arrays)


def _missing(table: NameTable, arrays: Mapping[str, Any]) -> list[str]:
    return sorted(table.shapes.keys() - arrays.keys())


def _of_another_shape(table: NameTable, arrays: Mapping[str, Any]) -> Sequence[str]:
    return [
        f"{name} is {tuple(np.shape(arrays[name]))}, the model has {table.shapes[name]}"
        for name in sorted(table.shapes.keys() & arrays.keys())
        if tuple(np.shape(arrays[name])) != table.shapes[name]
    ]


def _of_another_dtype(arrays: Mapping[str, Any]) -> Sequence[str]:
    return [
        f"{name} is {getattr(array, 'dtype', type(array).__name__)}"
        for name, array in sorted(arrays.items())
        if getattr(array, "dtype", None) not in _FLOATS
    ]
