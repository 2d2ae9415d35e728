"""Counting the experts that a step's tokens chose."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from meshserve.runtime.model.choices import add_choices, counts_shape
from meshserve.runtime.weights.registry import named_model


def test_layers_alone_and_in_stacks_are_counted_in_order():
    rng, num_experts = np.random.default_rng(0), 12
    shapes = [(5, 3), (5, 3), (2, 4, 3), (5, 3), (1, 3)]
    chosen = [rng.integers(-1, num_experts, shape).astype(np.int32) for shape in shapes]
    before = rng.integers(0, 9, (6, num_experts)).astype(np.uint32)
    layers = [layer for choices in chosen for layer in (choices if choices.ndim == 3 else choices[None])]
    added = [np.bincount(layer[layer >= 0], minlength=num_experts) for layer in layers]
    counts = jax.jit(add_choices)(jnp.asarray(before), [jnp.asarray(each) for each in chosen])
    np.testing.assert_array_equal(counts, before + np.array(added))


def test_a_dense_model_has_no_counts():
    assert counts_shape(named_model("qwen3-0.6b")) is None
    assert add_choices(None, []) is None


def test_only_layers_with_experts_have_counts():
    model = named_model("qwen3-30b-a3b")
    assert model.experts is not None
    assert counts_shape(model) == jax.ShapeDtypeStruct((48, 128), jnp.uint32)
    model = dataclasses.replace(model, experts=dataclasses.replace(model.experts, dense_layers=(0, 7)))
    assert counts_shape(model) == jax.ShapeDtypeStruct((46, 128), jnp.uint32)


def test_layers_of_one_shape_are_one_reduction():
    """A kernel for each layer would take a decode step of a GPU a tenth of its time."""
    chosen = [jax.ShapeDtypeStruct((4, 8), jnp.int32)] * 47 + [jax.ShapeDtypeStruct((1, 8), jnp.int32)]
    text = jax.jit(add_choices).lower(jax.ShapeDtypeStruct((48, 128), jnp.uint32), chosen).as_text()
    assert text.count("stablehlo.reduce(") == 2
