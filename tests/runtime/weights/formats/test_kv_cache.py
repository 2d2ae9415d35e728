"""A KV cache of 8-bit floats: its logits against float64, its scales at every TP size, and retrieval from far away."""

from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from meshserve.kernels.paged_attention import PagedBatch, implementation, write_kv
from meshserve.kernels.paged_attention.storage import scaled_access
from tests.runtime.weights.formats import formats
from tests.runtime.weights.formats.exact_model import exact_logits, our_logits, relative_error

FP8 = "float8_e4m3fn"
TOKEN_IDS = [int(token) for token in np.random.default_rng(0).integers(0, 96, 24)]


def with_kv_scales(directory: Path) -> tuple[formats.Checkpoint, dict[str, float]]:
    """Writes a checkpoint with scales of keys and values, as llm-compressor does. Also returns the scales."""
    scheme = {
        "type": "float", "num_bits": 8, "strategy": "tensor", "dynamic": False, "symmetric": True, "group_size": None,
    }  # fmt: skip
    config = {**formats.FP8_CHANNEL_CONFIG, "kv_cache_scheme": scheme}
    checkpoint = formats.save(directory, "fp8-channel", quantization_config=config, num_hidden_layers=1)
    scales = {"k_scale": 0.03, "v_scale": 0.02}
    tensors = load_file(directory / "model.safetensors")
    for name, scale in scales.items():
        tensors[f"model.layers.0.self_attn.{name}"] = torch.tensor([scale])
    save_file(tensors, directory / "model.safetensors")
    return checkpoint, scales


def test_logits_are_the_float64_computation_with_rounded_keys_and_values(tmp_path: Path) -> None:
    """As with rounded activations, the median of the tokens' errors is bounded."""
    checkpoint, scales = with_kv_scales(tmp_path)

    def rounded(x: np.ndarray, name: str) -> np.ndarray:
        scale = np.float32(scales[name])
        return (x.astype(np.float32) / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * scale

    unrounded = exact_logits(checkpoint.weights, checkpoint.raw, TOKEN_IDS)
    expected = exact_logits(
        checkpoint.weights,
        checkpoint.raw,
        TOKEN_IDS,
        rounded_cache=lambda k, v: (rounded(k, "k_scale"), rounded(v, "v_scale")),
    )
    for tp in (1, 4, 8):
        found = our_logits(checkpoint.directory, TOKEN_IDS, tp, kv_dtype=FP8)
        assert np.median([relative_error(*rows) for rows in zip(found, expected, strict=True)]) < 1e-5
        assert relative_error(found, unrounded) > 1e-3
        found = our_logits(checkpoint.directory, TOKEN_IDS, tp)
        assert relative_error(found, unrounded) < 1e-5, "the scales are those of an 8-bit cache only"


@pytest.mark.parametrize("kv_dtype", ["bfloat16", FP8])
def test_a_needle_is_found_in_a_long_context(kv_dtype: str) -> None:
    """Each of many queries finds the one key made for it among 8,192 others, and returns its value, not a neighbor's.

    The scores of the other keys reach a third of the needle's, so that the softmax decides clearly but not trivially.
    """
    num_keys, num_queries, head_dim, page_size = 8192, 32, 64, 64
    rng = np.random.default_rng(1)
    keys = rng.standard_normal((num_keys, 1, head_dim)).astype(np.float32)
    values = rng.choice([-1.0, 1.0], (num_keys, 1, head_dim)).astype(np.float32)
    needles = rng.choice(num_keys, num_queries, replace=False)
    queries = 2.5 * keys[needles] / np.linalg.norm(keys[needles], axis=-1, keepdims=True) * head_dim**0.5
    pages = jnp.asarray(rng.permutation(num_keys // page_size).astype(np.int32))[None]
    cache = jnp.zeros((1, num_keys // page_size, 1, 2, page_size, head_dim), kv_dtype)
    written = PagedBatch(jnp.arange(num_keys), jnp.zeros(num_keys, jnp.int32), pages)
    cache = write_kv(cache, jnp.asarray(keys), jnp.asarray(values), written, layer=0)
    asked = PagedBatch(jnp.full(num_queries, num_keys - 1), jnp.zeros(num_queries, jnp.int32), pages)
    q = jnp.asarray(queries[:, :, None], jnp.bfloat16)
    found = implementation("reference")(q, cache, asked, layer=0, scale=head_dim**-0.5)
    found = np.asarray(found[:, 0, 0].astype(jnp.float32))
    scores = found @ values[:, 0].T
    np.testing.assert_array_equal(scores.argmax(axis=1), needles)
    np.testing.assert_array_equal(np.sign(found), values[needles, 0])


def test_numbers_beyond_the_range_are_not_lost() -> None:
    """A key of 1000 becomes 448 without a scale, and 1000 with one of 4; without saturation it would be NaN."""
    batch = PagedBatch(jnp.array([0]), jnp.array([0]), jnp.array([[0]]))
    k = v = jnp.full((1, 1, 16), 1000.0)
    cache = jnp.zeros((1, 1, 1, 2, 16, 16), FP8)
    assert write_kv(cache, k, v, batch, layer=0)[0, 0, 0, 0, 0, 0].astype(float) == 448.0
    access = scaled_access(implementation("reference"), write_kv, jnp.full((1, 2), 4.0))
    cache = access["write"](cache, k, v, batch, layer=0)
    attended = access["attend"](jnp.ones((1, 1, 2, 16)), cache, batch, layer=0, scale=1.0)
    np.testing.assert_allclose(attended, 1000.0, rtol=2**-4)


def test_a_step_holds_the_cache_in_no_wider_type() -> None:
    """XLA for CPUs copies it once, as 8-bit numbers."""
    cache = jnp.zeros((4, 256, 2, 2, 32, 64), FP8)
    batch = PagedBatch(jnp.array([3, 40]), jnp.array([0, 1]), jnp.array([[0, 1], [2, 3]]))
    heads = jnp.ones((2, 2, 64))

    def step(cache: jax.Array) -> tuple[jax.Array, jax.Array]:
        cache = write_kv(cache, heads, heads, batch, layer=1)
        return cache, implementation("reference")(heads[:, :, None], cache, batch, layer=1, scale=1.0)

    analysis = jax.jit(step, donate_argnums=0).lower(cache).compile().memory_analysis()
    assert analysis is not None and analysis.alias_size_in_bytes >= cache.nbytes
    assert analysis.temp_size_in_bytes < 1.1 * cache.nbytes
