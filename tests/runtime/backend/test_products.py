"""Tests the hook for adapters: a low-rank product of each projection equals the model with merged weights."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from meshserve.kernels.linear import Linear
from meshserve.kernels.paged_attention import PagedBatch, implementation, reference
from meshserve.runtime.backend.kernels import Kernels
from meshserve.runtime.backend.products import Products
from meshserve.runtime.model.partitioning import specs_of
from meshserve.runtime.model.strategies import StepInputs, forward
from meshserve.runtime.model_files.model_config import ModelConfig
from meshserve.runtime.weights.orbax_layout import model_layout
from meshserve.runtime.weights.random_weights import random_model
from meshserve.runtime.weights.registry import model_config, published_config
from meshserve.sharding.mesh import make_mesh, partition_spec

RANK, PAGE_SIZE, PLAIN, ADAPTED = 2, 8, 0, 1
PROJECTIONS = {"attention.qkv", "attention.out", "mlp.gate_up", "mlp.down"}
Adapters = dict[str, tuple[jax.Array, jax.Array]]  # by projection: [L, rank, K] and [L, ..., N, rank]
SMALL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 8,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


def small(name: str, **changes: Any) -> ModelConfig:
    return model_config({**published_config(name), **SMALL, **changes})


DENSE = small("qwen3-0.6b")
MODELS = {
    "dense": DENSE,
    "divided pages": dataclasses.replace(DENSE, num_kv_heads=2),
    "experts": small("qwen3-30b-a3b", **EXPERTS),
    "experts and dense": small("qwen3-30b-a3b", **EXPERTS, decoder_sparse_step=2),
}


@dataclass(frozen=True)
class LowRankProducts:
    """Adds a low-rank product to the projections of the tokens in slot ADAPTED. Implements `Products`."""

    linear: Linear
    adapters: Adapters
    slots: jax.Array  # [T]
    calls: set[tuple[str, Any]] = field(default_factory=set)  # names and layers, the latter if they are not traced

    def __call__(
        self, x: jax.Array, weight: Any, *, name: str, layer: int | jax.Array, prologue: Any = None, **operands: Any
    ) -> jax.Array:
        self.calls.add((name, layer if isinstance(layer, int) else None))
        down, up = (stack[layer] for stack in self.adapters[name])
        inputs = x if prologue is None else prologue(x)
        added = (inputs @ down.T) @ up.reshape(-1, RANK).T
        product = self.linear(x, weight, prologue=prologue, **operands)
        return product + jnp.where((self.slots == ADAPTED)[:, None], added, 0)

    def take(self, tokens: jax.Array) -> "LowRankProducts":
        return dataclasses.replace(self, slots=self.slots.at[tokens].get(mode="fill", fill_value=PLAIN))


def projections(config: ModelConfig, params: nnx.State) -> Iterator[tuple[str, tuple[int, ...], Any]]:
    """Yields name, layers and stacked parameter of each projection."""
    for path, weight in nnx.to_flat_state(params):
        name = ".".join(path[1:])
        if name in PROJECTIONS:
            yield name, config.stacks[path[0]], weight


def random_adapters(config: ModelConfig, params: nnx.State) -> tuple[Adapters, dict[str, tuple[PartitionSpec, ...]]]:
    """Returns adapters for all layers of the model, and how they are sharded: like the projections."""
    draw, adapters, specs = np.random.default_rng(3), {}, {}
    for name, layers, weight in projections(config, params):
        _, *rows, columns = weight.shape
        down, up = np.zeros((config.num_layers, RANK, columns)), np.zeros((config.num_layers, *rows, RANK))
        down[list(layers)] = draw.normal(size=(len(layers), RANK, columns)) * 0.3
        up[list(layers)] = draw.normal(size=(len(layers), *rows, RANK)) * 0.3
        adapters[name] = jnp.asarray(down, jnp.float32), jnp.asarray(up, jnp.float32)
        specs[name] = partition_spec((None, None, weight.axes[-1])), partition_spec((*weight.axes[:-1], None))
    return adapters, specs


def merged(config: ModelConfig, params: nnx.State, adapters: Adapters) -> nnx.State:
    """Returns the parameters with the adapters' products added to the projections."""
    flat = dict(nnx.to_flat_state(params))
    for path, weight in flat.items():
        if (name := ".".join(path[1:])) in adapters:
            down, up = (stack[jnp.array(config.stacks[path[0]])] for stack in adapters[name])
            flat[path] = weight.replace(weight[...] + jnp.einsum("lri,l...r->l...i", down, up, precision="highest"))
    return nnx.from_flat_state(flat.items())


@pytest.mark.parametrize(
    ("name", "tp", "cp", "is_unrolled", "is_decode"),
    [
        ("dense", 1, 1, True, True),
        ("dense", 2, 1, False, False),
        ("divided pages", 4, 2, False, False),
        ("divided pages", 4, 2, True, True),
        ("experts", 1, 1, False, True),
        ("experts", 2, 1, True, False),
        ("experts and dense", 2, 1, True, False),
    ],
)
def test_each_projection_of_each_layer_gets_its_tokens_adapters(
    name: str, tp: int, cp: int, is_unrolled: bool, is_decode: bool
) -> None:
    """Requests 0 and 2 have no adapter; they get the hidden states of the model as it is."""
    config, mesh = MODELS[name], make_mesh(tp)
    layout = dataclasses.replace(model_layout(config, tp), cp=cp)
    structure, params = random_model(config, layout, mesh, jnp.dtype("float32"))
    adapters, adapter_specs = random_adapters(config, params)
    positions = jnp.array([3, 5, 2, -1] if is_decode else [0, 1, 2, 3, 0, 1, 2, 0, -1])
    requests = jnp.array([0, 1, 2, 2] if is_decode else [1, 1, 1, 1, 0, 0, 0, 2, 2])
    batch = PagedBatch(positions, requests, jnp.array([[3], [1], [0]]))
    num_tokens = len(positions)
    wanted = None if is_decode else jnp.array([6, 3, 7, num_tokens])
    kernels = Kernels(
        attend=implementation("reference"), attend_part=reference.IMPLEMENTATION.attend_part, is_unrolled=is_unrolled
    )
    cache = jnp.zeros((config.num_layers, 4, layout.num_groups, 2, PAGE_SIZE // cp, config.head_dim))
    calls: set[tuple[str, Any]] = set()

    def run(params: nnx.State, adapters: Adapters | None) -> np.ndarray:
        def hidden_states(params: nnx.State, adapters: Adapters | None, cache: jax.Array) -> jax.Array:
            products: Products = kernels.products
            if adapters is not None:
                slots = jnp.array([PLAIN, ADAPTED, PLAIN])[requests]
                products = LowRankProducts(kernels.linear, adapters, slots, calls)
            step = StepInputs(jnp.arange(num_tokens) + 7, batch, products, wanted)
            return forward(nnx.merge(structure, params), kernels, cache, step).wanted

        cache_spec = partition_spec((None, None, "kv_heads", None, None, None))
        specs = (specs_of(params), None if adapters is None else adapter_specs, cache_spec)
        program = jax.shard_map(hidden_states, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(), check_vma=False)
        return np.asarray(jax.jit(program)(params, adapters, cache))

    plain, all_merged, found = run(params, None), run(merged(config, params, adapters), None), run(params, adapters)
    np.testing.assert_allclose(found[1], all_merged[1], rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(found[[0, 2]], plain[[0, 2]])
    assert np.abs(all_merged - plain)[:3].max(axis=1).min() > 0.01, "an adapter that changes nothing proves nothing"
    is_loop = not is_unrolled and len(config.stacks) == 1
    expected = {(each, layer) for each, layers, _ in projections(config, params) for layer in layers}
    seen = {(each, layer) for each, layer in calls if layer is not None}
    assert {each for each, _ in calls} == {each for each, _ in expected}
    assert seen <= expected
    assert is_loop or seen == expected


def test_projections_without_adapters_are_the_same_program() -> None:
    """Products that add nothing leave no trace in the program."""
    kernels = Kernels(attend=implementation("reference"))
    x, weight = jnp.ones((3, 4)), jnp.ones((5, 4))
    plain = jax.make_jaxpr(kernels.linear)(x, weight)
    hooked = jax.make_jaxpr(lambda x, weight: kernels.products(x, weight, name="mlp.down", layer=1))(x, weight)
    assert str(hooked) == str(plain)
    assert kernels.products.take(jnp.arange(2)) == kernels.products
