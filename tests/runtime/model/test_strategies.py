"""Tests which strategy runs the layers of a step, by its shape, the kernels and the model."""

import dataclasses
from functools import partial
from typing import Any

import jax.numpy as jnp
import pytest
from flax import nnx

from meshserve.kernels.decode_layers import reference
from meshserve.kernels.paged_attention import implementation
from meshserve.runtime.backend.kernels import Kernels
from meshserve.runtime.model import strategies
from meshserve.runtime.model.layers.decoder import Decoder
from meshserve.runtime.weights.orbax_layout import model_layout
from meshserve.runtime.weights.registry import abstract_model, model_config, named_model, published_config

DENSE = named_model("qwen3-0.6b")
MIXED = model_config({**published_config("qwen3-30b-a3b"), "decoder_sparse_step": 2})
LOOP = Kernels(attend=implementation("reference"))
UNROLLED = dataclasses.replace(LOOP, is_unrolled=True)
FUSED = dataclasses.replace(UNROLLED, decode=reference, max_fused_tokens=64, max_fused_prompt_tokens=32)


def model_of(config: Any, *, cp: int = 1) -> Decoder:
    layout = dataclasses.replace(model_layout(config, 2 * cp), cp=cp)
    return nnx.merge(*abstract_model(config, layout, jnp.dtype("bfloat16")))


@pytest.mark.parametrize(
    ("kernels", "num_tokens", "is_decode", "expected"),
    [
        (LOOP, 8, True, strategies.looped),
        (LOOP, 8, False, strategies.looped),
        (UNROLLED, 8, True, strategies.unrolled),
        (UNROLLED, 8, False, strategies.unrolled),
        (FUSED, 64, True, strategies.fused_decodes),
        (FUSED, 65, True, strategies.unrolled),
        (FUSED, 32, False, strategies.fused_prompts),
        (FUSED, 33, False, strategies.unrolled),
    ],
)
def test_one_strategy_by_kernels_and_shape(kernels: Kernels, num_tokens: int, is_decode: bool, expected: Any) -> None:
    assert strategies.choose(model_of(DENSE), kernels, num_tokens, is_decode=is_decode) is expected


def test_layers_of_several_kinds_are_never_looped_over() -> None:
    assert strategies.choose(model_of(MIXED), LOOP, 8, is_decode=False) is strategies.unrolled


def test_prompts_are_reordered_where_pages_are_divided() -> None:
    model = model_of(DENSE, cp=2)
    prompts = strategies.choose(model, LOOP, 8, is_decode=False)
    assert isinstance(prompts, partial)
    assert (prompts.func, prompts.args) == (strategies.divided, (strategies.looped,))
    assert strategies.choose(model, LOOP, 8, is_decode=True) is strategies.looped
