"""Runs a decode step's layers over a mesh, each device with its shard, for tests on CPUs and on GPUs."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshserve.kernels.decode_layers import DecodeKernels, LayerWeights, cases
from meshserve.kernels.p2p import P2PGroup

AXIS = "shards"


def mesh_of(devices: list[jax.Device]) -> Mesh:
    return Mesh(np.array(devices), (AXIS,))


def spec(name: str) -> PartitionSpec:
    """Returns the partition spec of an argument of the layers."""
    dimension = cases.CUT_DIMENSIONS.get(name)
    return PartitionSpec() if dimension is None else PartitionSpec(*[None] * dimension, AXIS)


def placed(inputs: cases.Inputs, mesh: Mesh) -> tuple[object, ...]:
    """Places x, weights, cache, batch and frequencies on the mesh."""

    def place(name: str, array: jax.Array) -> jax.Array:
        return jax.device_put(array, NamedSharding(mesh, spec(name)))

    weights = LayerWeights(*(place(name, array) for name, array in inputs.weights._asdict().items()))
    rest = (inputs.batch, inputs.inverse_frequencies)
    return (
        place("x", inputs.x),
        weights,
        place("cache", inputs.cache),
        *jax.tree.map(lambda array: place("", array), rest),
    )


def layers_over(
    mesh: Mesh, kernels: DecodeKernels, inputs: cases.Inputs, p2p: P2PGroup
) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """Returns the program, which computes the stacked x of every device, and the cache."""
    weights = LayerWeights(*(spec(name) for name in LayerWeights._fields))

    def run(*arguments: Any) -> tuple[jax.Array, jax.Array]:
        x, cache, _ = kernels.decode_layers(*arguments, settings=dataclasses.replace(inputs.settings, p2p=p2p))
        return x, cache

    return jax.jit(
        jax.shard_map(
            run,
            mesh=mesh,
            in_specs=(PartitionSpec(), weights, spec("cache"), PartitionSpec(), PartitionSpec()),
            out_specs=(PartitionSpec(AXIS), spec("cache")),
            check_vma=False,
        )
    )
