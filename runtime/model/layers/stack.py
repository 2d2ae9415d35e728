"""The stacked parameters of layers that are alike: one layer of them, and all as operands of the fused layers."""

from functools import partial
from typing import Any, TypeVar

import jax
from flax import nnx

from meshserve.kernels.decode_layers import LayerWeights

from ..declaration import matrix_of

Layer = TypeVar("Layer", bound=nnx.Module)

_WHOLE = frozenset({"gate_up", "down"})  # the experts' matrices, which kernels read in place from the stack


def layer_of(stack: Layer, index: int | jax.Array) -> Layer:
    """Returns one layer of a module with stacked parameters. The matrices of experts stay those of the whole stack."""
    structure, whole, stacked = nnx.split(stack, _is_whole, ...)
    return nnx.merge(structure, whole, jax.tree.map(partial(_slice, index=index), stacked))


def _is_whole(path: tuple[Any, ...], _: nnx.Variable) -> bool:
    return "experts" in path and not _WHOLE.isdisjoint(path)


def _slice(stack: jax.Array, index: int | jax.Array) -> jax.Array:
    """Returns one layer's part of stacked weights.

    In a loop, the part is sliced as the matrix used in the matmul: if its rows had two dimensions, the TPU compiler
    would copy it first.
    """
    if isinstance(index, int) or stack.ndim <= 3:
        return stack[index]
    return stack.reshape(stack.shape[0], -1, stack.shape[-1])[index].reshape(stack.shape[1:])


def layer_weights(layers: nnx.State) -> LayerWeights:
    """Returns the stacked parameters of all layers, arrays or shapes, as operands of the fused decode kernels.

    Quantized projections are `QuantizedMatrix` values, which the kernels may not support: ask `unsupported_reason`.
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
