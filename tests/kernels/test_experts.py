"""Tests the implementations of the experts: the reference against float64, the others against the reference."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshserve.kernels import experts
from meshserve.kernels.experts import cases, sm80, sm90, tiles, tpu
from meshserve.kernels.linear import E4M3, INT4, QuantizedMatrix, layer_of
from meshserve.kernels.linear.formats import SCALE

from .comparing import assert_has_values

TOLERANCE = {"float32": 2e-5, "bfloat16": 1e-2}  # relative to the largest value


def naive(inputs: cases.Inputs, layer: int) -> np.ndarray:
    """Returns the output in float64, token by token."""
    gate_up, down = (np.asarray(layer_of(stack, layer), np.float64) for stack in inputs.weights)
    outputs = np.zeros(inputs.x.shape)
    for token, (chosen, shares) in enumerate(zip(*map(np.asarray, inputs.routing), strict=True)):
        for expert, share in zip(chosen, shares, strict=True):
            if 0 <= expert < len(down):
                gate, up = gate_up[expert] @ np.asarray(inputs.x[token], np.float64)
                outputs[token] += share * (down[expert] @ (gate / (1 + np.exp(-gate)) * up))
    return outputs


@functools.cache
def compiled(name: str, num_experts: int):
    return jax.jit(functools.partial(experts.implementation(name), num_experts=num_experts))


@pytest.mark.parametrize(
    ("name", "case"),
    [
        *((name, case) for name in ("reference", "xla", "tpu_interpreted") for case in cases.CASES),
        *((name, case) for name in ("reference", "xla") for case in cases.PACKED_CASES),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_every_case_is_the_float64_computation(name, case):
    """The layer is traced, as in a loop."""
    inputs = cases.make_inputs(case, seed=1)
    found = compiled(name, case.num_experts)(inputs.x, inputs.weights, inputs.routing, layer=jnp.int32(1))
    expected = naive(inputs, 1)
    assert found.dtype == inputs.x.dtype
    if not case.is_zero:
        assert_has_values(expected)
    scale = max(np.abs(expected).max(), 1.0)
    np.testing.assert_allclose(np.asarray(found, np.float64), expected, atol=TOLERANCE[case.dtype] * scale)


def test_the_loop_ends_with_the_last_tile_that_has_tokens():
    """Experts that no token chose are not read: NaN in them harms nothing, not even in the products."""
    case = cases.Case(name="few", num_tokens=4, num_experts=64, num_chosen=2)
    inputs = cases.make_inputs(case, seed=2)
    chosen = set(np.asarray(inputs.routing.experts).ravel().tolist())
    others = [expert for expert in range(64) if expert not in chosen]
    spoiled = experts.ExpertWeights(*(stack.at[:, np.array(others)].set(jnp.nan) for stack in inputs.weights))
    for name in ("xla", "tpu_interpreted"):
        found = compiled(name, 64)(inputs.x, spoiled, inputs.routing, layer=0)
        assert_has_values(found)
        np.testing.assert_allclose(found, naive(inputs, 0), atol=1e-4)


def test_experts_stay_packed_but_for_one_at_a_time():
    """Beside its arguments, a step has room for the float32 numbers of one or two experts, and not for those of all."""
    case = cases.Case(name="memory", num_tokens=4, num_experts=64, num_chosen=2, mlp=256, packed="int4", group=128)
    inputs = cases.make_inputs(case, seed=4)
    lowered = compiled("xla", 64).lower(inputs.x, inputs.weights, inputs.routing, layer=jnp.int32(1))
    found = lowered.compile().memory_analysis().temp_size_in_bytes
    expert_bytes = 4 * 3 * case.mlp * case.embed
    assert 0 < found < 6 * expert_bytes < 64 * expert_bytes


@pytest.mark.parametrize("case", cases.PACKED_CASES, ids=lambda case: case.name)
def test_kernels_say_that_they_do_not_take_packed_experts(case):
    inputs = cases.make_inputs(dataclasses.replace(case, dtype="bfloat16"), seed=5)
    shapes = experts.ExpertShapes(weights=inputs.weights, dtype=jnp.dtype("bfloat16"))
    for implementation in (sm90.IMPLEMENTATION, tpu.IMPLEMENTATION):
        reason = implementation.unsupported_shapes(shapes)
        assert reason is not None and f"the experts are {inputs.weights.down.format.name}" in reason
    assert experts.IMPLEMENTATIONS["xla"].unsupported_shapes(shapes) is None


@pytest.mark.parametrize("skew", [0.0, 3.0])
def test_tiles_have_one_expert_and_every_choice_a_row(skew):
    case = cases.Case(name="tiles", num_tokens=150, padding=7, skew=skew)
    choices = cases.make_inputs(case, seed=3).routing.experts
    arranged = tiles.arrange(choices, num_local=16, num_rows=8)
    expert, row, token = (np.asarray(array) for array in (arranged.expert, arranged.row, arranged.token))
    flat = np.asarray(choices).ravel()
    is_here = flat >= 0
    assert (row[~is_here] == len(token)).all(), "padding has no row"
    assert len(set(row[is_here])) == is_here.sum(), "no two choices share a row"
    assert (expert[row[is_here] // 8] == flat[is_here]).all()
    assert (token[row[is_here]] == np.flatnonzero(is_here) // case.num_chosen).all()
    num_chosen = np.bincount(flat[is_here], minlength=16)
    assert int(arranged.num_tiles) == sum(-(-num_chosen // 8)) <= len(expert) == len(token) // arranged.tile_rows
    assert (np.diff(expert) >= 0).all(), "tiles of an expert follow each other, so its weights are fetched once"


def test_a_tile_is_about_as_large_as_an_experts_share():
    assert [tiles.tile_rows(tokens * 8, 128, least=8) for tokens in (1, 64, 128, 300, 4096)] == [8, 8, 8, 32, 128]


def test_blocks_of_the_tpu_kernel_are_whole_lanes_or_everything():
    # 30B-A3B split by tensor over 8 and by expert, 235B-A22B, 480B-A35B by tensor over 8 and by expert
    shapes = ((2048, 96), (2048, 768), (4096, 1536), (6144, 320), (6144, 2560))
    assert [tpu.block_columns(*shape, 2) for shape in shapes] == [96, 384, 256, 320, 128]


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ((128, 768, 2048, "bfloat16"), None),
        ((128, 96, 2048, "bfloat16"), None),
        ((16, 2560, 6144, "bfloat16"), None),
        ((512, 64, 2048, "bfloat16"), "a device has 512 experts; 256 are supported"),
        ((128, 48, 2048, "bfloat16"), "intermediate size per device is 48; a multiple of 32 is needed"),
        ((128, 64, 192, "bfloat16"), "embedding size is 192; a multiple of 128"),
        ((128, 64, 256, "float32"), "the experts are float32; bfloat16 or float8_e4m3fn is needed"),
    ],
)
def test_what_the_cuda_kernels_support(sizes, reason):
    num_local, mlp, embed, dtype = sizes
    weights = experts.ExpertWeights(
        jax.ShapeDtypeStruct((2, num_local, 2, mlp, embed), dtype),
        jax.ShapeDtypeStruct((2, num_local, embed, mlp), dtype),
    )
    found = sm90.unsupported_reason(weights)
    assert found is reason is None or reason in found


def shapes_of(num_local: int, mlp: int, embed: int, dtype: str, form=None, block=(1, 1), scale_dtype="float32"):
    def matrix(*shape: int):
        if form is None:
            return jax.ShapeDtypeStruct(shape, dtype)
        *leading, rows, columns = shape
        data = jax.ShapeDtypeStruct((*leading, rows, columns // form.packed), form.storage)
        grid = (*leading, rows // block[0], columns // (block[1] or columns))
        return QuantizedMatrix(form, data, {SCALE: jax.ShapeDtypeStruct(grid, scale_dtype)})

    return experts.ExpertWeights(matrix(2, num_local, 2, mlp, embed), matrix(2, num_local, embed, mlp))


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((128, 768, 2048, "bfloat16"), None),
        ((16, 96, 2048, "bfloat16"), None),
        ((128, 768, 2048, "", E4M3, (128, 128)), None),
        ((128, 768, 2048, "", E4M3, (1, 0), "bfloat16"), None),
        ((128, 768, 2048, "", INT4, (1, 128), "float16"), None),
        ((128, 96, 2048, "", INT4, (1, 32), "bfloat16"), None),
        ((257, 64, 2048, "bfloat16"), "a device has 257 experts; 256 are supported"),
        ((128, 48, 2048, "bfloat16"), "intermediate size per device is 48; a multiple of 32 is needed"),
        ((128, 96, 2048, "", E4M3, (1, 0)), "intermediate size per device is 96; a multiple of 64 is needed"),
        ((128, 64, 192, "bfloat16"), "embedding size is 192; a multiple of 128"),
        ((128, 64, 256, "float32"), "the experts are float32 and float32; bfloat16, fp8 or int4 are needed"),
        ((128, 768, 2048, "", E4M3, (32, 32)), "a scale covers 32 columns; whole rows or a power of two from 64 on"),
        ((128, 768, 2304, "", E4M3, (1, 384)), "a scale covers 384 columns"),
        ((128, 768, 2048, "", INT4, (1, 128), "float64"), "scales are float64; float32, bfloat16, float16 are"),
    ],
)
def test_what_the_portable_kernels_support(arguments, reason):
    found = sm80.unsupported_reason(shapes_of(*arguments))
    assert found is reason is None or reason in found


def test_names():
    with pytest.raises(
        ValueError, match="moe_backend is 'fast'; this build has cuda, tpu, portable, xla, reference, tpu_"
    ):
        experts.implementation("fast")
    with pytest.raises(ValueError, match="'tpu' cannot run: the backend is cpu"):
        experts.implementation("tpu")
    with pytest.raises(ValueError, match="'cuda' cannot run: .*this is a cpu device. Use 'xla'"):
        experts.implementation("cuda")
