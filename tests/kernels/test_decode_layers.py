"""Tests the reference decode layers against a plain float64 computation, one request and one head at a time."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshserve.kernels import decode_layers
from meshserve.kernels.decode_layers import LayerWeights, cases, reference, sm90_calls
from meshserve.kernels.linear import cases as linear_cases
from meshserve.kernels.linear.cases import exact_matrix
from meshserve.kernels.linear.formats import SCALE
from meshserve.kernels.p2p import P2PGroup

from .comparing import assert_has_values
from .mesh_layers import AXIS, layers_over, mesh_of, placed

SMALL = [case for case in cases.CASES if case.embed <= 256 and sum(case.lengths) <= 160]
QUANTIZED = [case for case in cases.quantized_cases() if case.embed <= 256 and sum(case.lengths) <= 264]

# As one program: each operation by itself takes several times as long to compile.
decode_layers_at_once = jax.jit(reference.decode_layers, static_argnames="settings")
prompt_layers_at_once = jax.jit(reference.prompt_layers, static_argnames="settings")


def norm(x, gain, epsilon):
    return x / np.sqrt(np.mean(x * x) + epsilon) * gain


def rotate(x, position, inverse_frequencies, scale):
    half = len(x) // 2
    angle = position * inverse_frequencies
    cosine, sine = np.cos(angle) * scale, np.sin(angle) * scale
    return np.concatenate([x[:half] * cosine - x[half:] * sine, x[half:] * cosine + x[:half] * sine])


def naive_layers(inputs: cases.Inputs) -> tuple[np.ndarray, np.ndarray]:
    """Returns x after all layers, for the requests that are not padding, and the cache."""
    weights = LayerWeights(*map(exact_matrix, inputs.weights[:-1]))
    cache = np.asarray(inputs.cache, np.float64)
    num_layers, _, kv_heads, _, page_size, head_dim = cache.shape
    group = weights.qkv.shape[2] // head_dim - 2
    frequencies, settings = np.asarray(inputs.inverse_frequencies, np.float64), inputs.settings
    rows = []
    for row, position in enumerate(np.asarray(inputs.batch.positions)):
        x = np.asarray(inputs.x, np.float64)[row]
        pages = np.asarray(inputs.batch.page_table)[row]
        for layer in range(num_layers if position >= 0 else 0):
            normed = norm(x, weights.input_norm[layer], settings.epsilon)
            attended = []
            for head in range(kv_heads):
                parts = (weights.qkv[layer, head] @ normed).reshape(group + 2, head_dim)
                k = norm(parts[group], weights.k_norm[layer], settings.epsilon)
                k = rotate(k, position, frequencies, settings.rotary_scale)
                cache[layer, pages[position // page_size], head, :, position % page_size] = k, parts[group + 1]
                seen = np.array(
                    [cache[layer, pages[t // page_size], head, :, t % page_size] for t in range(position + 1)]
                )
                for q in parts[:group]:
                    q = norm(q, weights.q_norm[layer], settings.epsilon)
                    q = rotate(q, position, frequencies, settings.rotary_scale)
                    weight = np.exp(seen[:, 0] @ q * settings.softmax_scale)
                    attended.append(weight @ seen[:, 1] / weight.sum())
            x = x + weights.o[layer] @ np.concatenate(attended)
            gate, up = weights.gate_up[layer] @ norm(x, weights.post_norm[layer], settings.epsilon)
            x = x + weights.down[layer] @ (gate / (1 + np.exp(-gate)) * up)
        rows.append(x)
    return np.array(rows), cache


@pytest.mark.parametrize("case", SMALL + QUANTIZED, ids=lambda case: case.name)
def test_reference_is_the_float64_computation(case):
    inputs = cases.make_inputs(case, seed=1, dtype=jnp.float32)
    inputs = dataclasses.replace(inputs, settings=dataclasses.replace(inputs.settings, rotary_scale=1.1))
    expected_x, expected_cache = naive_layers(inputs)
    x, cache, _ = decode_layers_at_once(
        inputs.x, inputs.weights, inputs.cache, inputs.batch, inputs.inverse_frequencies, settings=inputs.settings
    )
    real = np.asarray(inputs.batch.positions) >= 0
    assert_has_values(expected_x[real])
    np.testing.assert_allclose(np.asarray(x)[real], expected_x[real], rtol=2e-4, atol=2e-4)
    assert np.isfinite(np.asarray(x)).all()
    np.testing.assert_allclose(np.asarray(cache), expected_cache, rtol=1e-3, atol=1e-3)  # NaN only where it was before


def test_a_range_of_layers_continues_where_the_last_one_ended():
    inputs = cases.make_inputs(cases.CASES[1], seed=2, dtype=jnp.float32)
    fixed = (inputs.batch, inputs.inverse_frequencies)
    whole = reference.decode_layers(inputs.x, inputs.weights, inputs.cache, *fixed, settings=inputs.settings)
    x, cache = inputs.x, inputs.cache
    for layers in (range(0, 1), range(1, 2)):
        x, cache, _ = reference.decode_layers(x, inputs.weights, cache, *fixed, settings=inputs.settings, layers=layers)
    assert_has_values(whole[0])
    np.testing.assert_array_equal(x, whole[0])
    np.testing.assert_array_equal(cache, whole[1])


@pytest.mark.parametrize("num_devices", [2, 4])
def test_layers_over_a_p2p_group_are_the_layers_on_one_device(num_devices):
    case = dataclasses.replace(cases.CASES[2], kv_heads=4, mlp=512)
    inputs = cases.make_inputs(case, seed=3, dtype=jnp.float32)
    whole, whole_cache, _ = decode_layers_at_once(
        inputs.x, inputs.weights, inputs.cache, inputs.batch, inputs.inverse_frequencies, settings=inputs.settings
    )
    mesh = mesh_of(jax.devices()[:num_devices])
    p2p = P2PGroup(axis=AXIS, ordinals=tuple(range(num_devices)))
    rows, cache = layers_over(mesh, reference, inputs, p2p)(*placed(inputs, mesh))
    rows = np.asarray(rows).reshape(num_devices, *whole.shape)
    assert_has_values(whole)
    for row in rows:
        np.testing.assert_array_equal(row, rows[0])
    np.testing.assert_allclose(rows[0], whole, rtol=2e-4, atol=2e-4)
    np.testing.assert_allclose(np.asarray(cache), np.asarray(whole_cache), rtol=1e-3, atol=1e-3)


def test_cuda_says_why_it_cannot_run_here():
    if jax.default_backend() == "gpu":
        pytest.skip("this machine has a GPU")
    with pytest.raises(ValueError, match="need an NVIDIA Hopper GPU; this is a cpu device"):
        decode_layers.implementation("cuda")


def test_unknown_implementation_is_named():
    with pytest.raises(ValueError, match="'fast'; this build has cuda, reference"):
        decode_layers.implementation("fast")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"head_dim": 32}, "head_dim is 32"),
        ({"group": 9}, "9 query heads"),
        ({"page_size": 8}, "page_size is 8"),
        ({"embed": 192}, "the embedding size is 192"),
        ({"mlp": 96}, "the MLP size per device is 96"),
    ],
)
def test_unsupported_shapes_are_named(change, reason):
    case = dataclasses.replace(cases.CASES[0], **change)
    inputs = cases.make_inputs(case, seed=0, dtype=jnp.bfloat16)
    assert reason in sm90_calls.unsupported_reason(inputs.weights, inputs.cache)


def shapes_of(case: cases.Case) -> cases.Inputs:
    """Returns inputs of a step of one short request: how many tokens there are does not matter to what is supported."""
    return cases.make_inputs(dataclasses.replace(case, lengths=(1,)), seed=0, dtype=jnp.bfloat16)


def test_every_bfloat16_case_is_supported_and_float32_is_not():
    for case in cases.CASES:
        if case.embed <= 512:
            inputs = shapes_of(case)
            assert sm90_calls.unsupported_reason(inputs.weights, inputs.cache) is None
    inputs = cases.make_inputs(cases.CASES[0], seed=0, dtype=jnp.float32)
    assert "is float32" in sm90_calls.unsupported_reason(inputs.weights, inputs.cache)


def test_every_quantized_case_is_supported():
    for case in cases.quantized_cases():
        if case.embed <= 512:
            inputs = shapes_of(case)
            assert sm90_calls.unsupported_reason(inputs.weights, inputs.cache) is None


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"o": ("plain", (1, 1))}, "o is not quantized, but down is"),
        ({"o": ("int4", (1, 32))}, "matrices are fp8 and int4; all must have the same format"),
        ({"down": ("fp8", (128, 32))}, "a scale of down covers 32 columns"),
        ({"down": ("fp8", (128, 96))}, "a scale of down covers 96 columns"),
        ({name: ("int4", (1, 16)) for name in ("qkv", "o", "gate_up", "down")}, "covers 16 columns"),
    ],
)
def test_unsupported_quantization_is_named(fields, reason):
    case = dataclasses.replace(cases.CASES[1], weights="fp8-block")
    inputs = cases.make_inputs(case, seed=0, dtype=jnp.bfloat16)

    def other(matrix, kind, block):
        *leading, rows, columns = matrix.shape
        made = linear_cases.Case(
            name="", kind=kind, block=block, leading=tuple(leading), rows=rows, columns=columns, dtype="bfloat16"
        )
        weight = linear_cases.make_inputs(made, seed=0).weight
        if kind == "plain":
            return weight
        return dataclasses.replace(weight, grids={**weight.grids, SCALE: weight.scale.astype(jnp.bfloat16)})

    weights = inputs.weights._replace(
        **{name: other(getattr(inputs.weights, name), *kind) for name, kind in fields.items()}
    )
    assert reason in sm90_calls.unsupported_reason(weights, inputs.cache)


def test_prompt_layers_are_decode_layers_token_by_token():
    """Each token of a prompt attends to those before it as if it had been decoded after them."""
    case = cases.Case(name="prompts", lengths=(70, 0, 33, 5), page_size=16)
    inputs = cases.make_inputs(case, seed=2, dtype=jnp.float32)
    batch = cases.prompt_batch(case, inputs, (20, 0, 33, 1))
    rng = np.random.default_rng(4)
    x = jnp.asarray(rng.standard_normal((batch.positions.shape[0], case.embed)), jnp.float32)
    known = {"settings": inputs.settings}
    arguments = inputs.weights, inputs.inverse_frequencies
    out, cache = prompt_layers_at_once(x, arguments[0], inputs.cache, batch, arguments[1], **known)
    expected, decoded = np.zeros_like(x), inputs.cache
    for place, (position, request) in enumerate(
        zip(batch.positions.tolist(), batch.token_request.tolist(), strict=True)
    ):
        if position >= 0:
            token = decode_layers.DecodeBatch(jnp.array([position]), batch.page_table[request][None])
            row, decoded, _ = decode_layers_at_once(x[place][None], arguments[0], decoded, token, arguments[1], **known)
            expected[place] = row[0]
    real = np.asarray(batch.positions) >= 0
    assert_has_values(expected[real])
    np.testing.assert_allclose(np.asarray(out)[real], expected[real], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(np.asarray(cache), np.asarray(decoded), rtol=1e-4, atol=1e-4)
