"""Tests the CUDA decode layers against the reference in float32, on a Hopper GPU."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshserve.kernels.cuda import build
from meshserve.kernels.decode_layers import DecodeBatch, cases, reference
from meshserve.kernels.decode_layers import sm90_calls as sm90
from meshserve.kernels.experts import sm90 as experts_sm90
from meshserve.kernels.linear import RMSNorm, silu_product
from meshserve.kernels.linear import sm90 as linear_sm90
from meshserve.kernels.paged_attention import PagedBatch, RopeSettings
from meshserve.kernels.paged_attention import sm90 as attention_sm90

from .comparing import assert_has_values

REASON = build.unavailable_reason()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))
BOUND = 1e-2  # limit of ||out - reference|| / ||reference||; bfloat16 rounding alone gives 2e-3 to 5e-3
ALL_CASES = (*cases.CASES, *cases.quantized_cases())
case_parameter = pytest.mark.parametrize("case", ALL_CASES, ids=lambda case: case.name)


@functools.cache
def inputs_of(case: cases.Case) -> cases.Inputs:
    return cases.make_inputs(case, seed=3, dtype=jnp.bfloat16)


def expect(function, *arguments, **known):
    """Returns the reference's result in float32, computed on the CPU, without the GPU's arithmetic."""
    arguments = jax.device_put(arguments, jax.devices("cpu")[0])
    arguments = jax.tree.map(lambda a: a.astype(jnp.float32) if a.dtype == jnp.bfloat16 else a, arguments)
    return jax.jit(functools.partial(function, **known))(*arguments)


def relative_error(out, expected) -> float:
    out, expected = np.asarray(out, np.float64), np.asarray(expected, np.float64)
    assert_has_values(expected)
    return float(np.linalg.norm(out - expected) / np.linalg.norm(expected))


def with_the_same_experts(chosen, expected) -> np.ndarray:
    """Returns which tokens [B] chose the same experts as expected in every layer, [L, B, k] each, in any order.

    Where scores of a router nearly tie, the kernels may choose another expert than the reference in float32. That
    happens to few tokens, and concerns one of a token's experts.
    """
    chosen, expected = (np.sort(np.asarray(each), axis=2) for each in (chosen, expected))
    is_same = (chosen == expected).all(axis=(0, 2))
    print(f"{(~is_same).sum()} of {len(is_same)} tokens chose other experts")
    assert (~is_same).sum() <= len(is_same) // 8, (chosen[:, ~is_same], expected[:, ~is_same])
    return is_same


def check_cache(inputs: cases.Inputs, cache, expected, num_layers_written: int, bound: float = BOUND):
    """Checks that the written positions are close and that all others are bitwise unchanged."""
    before, after, expected = (np.asarray(a, np.float32) for a in (inputs.cache, cache, expected))
    written = np.isnan(before) & ~np.isnan(expected)
    head_dim = before.shape[-1]
    num_requests = int((np.asarray(inputs.batch.positions) >= 0).sum())
    assert written.sum() == num_layers_written * num_requests * before.shape[2] * 2 * head_dim
    assert relative_error(after[written], expected[written]) < bound
    np.testing.assert_array_equal(after[~written], before[~written])


@pytest.mark.parametrize(
    "case", (*cases.CASES, *cases.EXPERT_CASES, *cases.fp8_cache_cases()), ids=lambda case: case.name
)
def test_whole_stack(case):
    inputs = inputs_of(case)
    arguments = (inputs.x, inputs.weights, inputs.cache, inputs.batch, inputs.inverse_frequencies)
    run = jax.jit(functools.partial(sm90.decode_layers, settings=inputs.settings))
    x, cache, chosen = run(*arguments)
    expected_x, expected_cache, expected_chosen = expect(reference.decode_layers, *arguments, settings=inputs.settings)
    real = np.asarray(inputs.batch.positions) >= 0
    before = np.asarray(inputs.x, np.float32)[real]
    out, expected = np.asarray(x, np.float32)[real], np.asarray(expected_x)[real]
    assert np.isfinite(np.asarray(x, np.float32)).all()
    if case.num_experts:
        np.testing.assert_array_equal(np.asarray(chosen)[:, ~real], -1)
        is_same = with_the_same_experts(np.asarray(chosen)[:, real], np.asarray(expected_chosen)[:, real])
        before, out, expected = before[is_same], out[is_same], expected[is_same]
    # In tiles, experts' 8-bit weights are multiplied with activations rounded to e4m3: 4 to 5 % of what experts add.
    is_by_rows = len(case.lengths) <= experts_sm90.FEW_TOKENS and case.embed in (2048, 4096)
    rounding = 0.06 if case.num_experts and case.weights and not is_by_rows else 0.0
    added = np.linalg.norm(expected - before) / np.linalg.norm(before)
    assert relative_error(out, expected) < BOUND + rounding * added
    # Compares what the layers add, without the residual, whose rounding in each of two layers' sums remains: where the
    # layers add little, that is most of it (bfloat16 operations of XLA differ by as much).
    print(f"error {relative_error(out - before, expected - before):.2e} of what the layers add, {added:.2f} of x")
    assert relative_error(out - before, expected - before) < 2 * BOUND + 2**-9 / added + rounding
    bound = 4 * BOUND if case.num_experts else BOUND
    if case.cache_dtype:
        bound = 5 * BOUND  # where a number lies between two of 8 bits, a small difference decides
    check_cache(inputs, cache, expected_cache, case.num_layers, bound=bound)
    again = run(*arguments)
    np.testing.assert_array_equal(np.asarray(again[0]), np.asarray(x))  # bitwise equal: no races


# As in wide steps. Without it, single calls of many decodes use persistent attention, which sums in another order.
UNDIVIDED = sm90.LaunchShape(attention_splits=1)


def by_single_calls(x, weights, cache, batch, inverse_frequencies, *, settings):
    """Runs layers as steps do that are not fused: each product, with its prologue, and each half of attention apart."""
    tokens = PagedBatch(batch.positions, jnp.arange(len(x)), batch.page_table)
    angles = batch.positions.astype(jnp.float32)[:, None] * inverse_frequencies
    gains = weights.q_norm, weights.k_norm
    rope = RopeSettings(*gains, jnp.cos(angles), jnp.sin(angles), settings.epsilon)

    def product(x, stack, layer, **known):
        return linear_sm90.linear(x, jax.tree.map(lambda part: part[layer], stack), **known)

    for layer in range(weights.qkv.shape[0]):
        norm = RMSNorm(weights.input_norm[layer], settings.epsilon)
        rows = product(x, weights.qkv, layer, prologue=norm)
        q, cache = attention_sm90.qk_norm_rope(rows, cache, tokens, rope, layer=layer)
        attended = sm90.attention(q, cache, batch, settings=settings, layer=layer, launch=UNDIVIDED)
        x = product(attended, weights.o, layer, residual=x)
        halves = product(x, weights.gate_up, layer, prologue=RMSNorm(weights.post_norm[layer], settings.epsilon))
        x = product(halves, weights.down, layer, prologue=silu_product, residual=x)
    return x, cache


def wide_case(name: str, *lengths: int, cache_dtype: str = "", **sizes: int) -> cases.Case:
    known = {"embed": 512, "group": 4, "mlp": 1024, **sizes}
    return cases.Case(name=name, lengths=lengths, weights="fp8-block", cache_dtype=cache_dtype, **known)


WIDE_CASES = (
    wide_case("80", *range(80)),
    wide_case("128-8-heads", 0, *range(3, 257, 2), kv_heads=8),
    wide_case("128-8-heads-fp8-cache", 0, *range(3, 257, 2), kv_heads=8, cache_dtype="float8_e4m3fn"),
    wide_case("80-uneven", 1_200, *range(10, 84), 0, 0, 900, 2, 257, page_size=64),
    wide_case("80-uneven-fp8-cache", 1_200, *range(10, 84), 0, 0, 900, 2, 257, cache_dtype="float8_e4m3fn"),
    wide_case("256", *range(20, 276), group=2),
    wide_case("8b-layer", *range(12, 140), embed=4096, kv_heads=8, mlp=12288, page_size=64, num_layers=1),
    wide_case("8b-layer-256", *range(12, 268), embed=4096, kv_heads=8, mlp=12288, page_size=64, num_layers=1),
)
WIDE_CASES_AND_SCALES = [(case, "float32") for case in WIDE_CASES] + [(WIDE_CASES[1], "bfloat16")]


@pytest.mark.parametrize(
    ("case", "scale_dtype"), WIDE_CASES_AND_SCALES, ids=lambda value: getattr(value, "name", value)
)
def test_wide_steps_give_the_bits_of_single_calls(case, scale_dtype, monkeypatch):
    """The kernels are the same, but for attention, which rounds its result itself; here they are launched early."""
    monkeypatch.setattr(sm90, "CACHED_LAYER_BYTES", 0)
    inputs = inputs_of(case)
    weights = jax.tree.map(lambda a: a.astype(scale_dtype) if a.dtype == jnp.float32 else a, inputs.weights)
    assert len(case.lengths) in sm90.WIDE_TOKENS
    assert sm90.has_wide_steps(weights, case.head_dim)
    arguments = (inputs.x, weights, inputs.cache, inputs.batch, inputs.inverse_frequencies)
    run = jax.jit(functools.partial(sm90.decode_layers, settings=inputs.settings))
    x, cache, _ = run(*arguments)
    expected, expected_cache = jax.jit(functools.partial(by_single_calls, settings=inputs.settings))(*arguments)
    assert np.isfinite(np.asarray(x, np.float32)).all()
    np.testing.assert_array_equal(np.asarray(x, np.float32), np.asarray(expected, np.float32))
    np.testing.assert_array_equal(np.asarray(cache, np.float32), np.asarray(expected_cache, np.float32))
    for _ in range(3):
        again = run(*arguments)
        np.testing.assert_array_equal(np.asarray(again[0], np.float32), np.asarray(x, np.float32))


@pytest.mark.parametrize("num_tokens", [65, 100])
def test_wide_steps_are_the_layers_on_rounded_activations(num_tokens, monkeypatch):
    """Numbers of tokens that are padded, against float32 activations that are not rounded."""
    monkeypatch.setattr(sm90, "CACHED_LAYER_BYTES", 0)
    inputs = inputs_of(wide_case(f"wide-{num_tokens}", *range(num_tokens)))
    arguments = (inputs.x, inputs.weights, inputs.cache, inputs.batch, inputs.inverse_frequencies)
    x, cache, _ = jax.jit(functools.partial(sm90.decode_layers, settings=inputs.settings))(*arguments)
    expected, expected_cache, _ = expect(reference.decode_layers, *arguments, settings=inputs.settings)
    before = np.asarray(inputs.x, np.float32)[1:]  # the first request is padding
    out, expected = np.asarray(x, np.float32)[1:], np.asarray(expected)[1:]
    error = relative_error(out - before, expected - before)
    print(f"error {error:.2e} of what the layers add")
    assert error < 0.06
    check_cache(inputs, cache, expected_cache, 2, bound=0.06)


SINGLE_CASES = (
    wide_case("17", *range(17), num_layers=1),
    wide_case("32", *range(3, 35)),
    wide_case("32-uneven", 1_200, *range(10, 38), 0, 900, 2, page_size=64),
    wide_case("30-uneven-fp8-cache", 1_200, *range(10, 38), 900, cache_dtype="float8_e4m3fn"),
    wide_case("8b-layer", *range(12, 44), embed=4096, kv_heads=8, mlp=12288, page_size=64, num_layers=1),
    wide_case("33", *range(33)),
    wide_case("64-uneven", 1_200, *range(10, 70), 0, 900, 2, page_size=64),
    dataclasses.replace(wide_case("scales-64", *range(20, 40)), weights="fp8-block-64"),
    dataclasses.replace(wide_case("scales-of-rows", *range(20, 40)), weights="fp8-channel"),
)


@pytest.mark.parametrize("case", SINGLE_CASES, ids=lambda case: case.name)
def test_17_to_64_tokens_are_the_layers_on_rounded_activations(case):
    inputs = inputs_of(case)
    arguments = (inputs.x, inputs.weights, inputs.cache, inputs.batch, inputs.inverse_frequencies)
    run = jax.jit(functools.partial(sm90.decode_layers, settings=inputs.settings))
    x, cache, _ = run(*arguments)
    expected, expected_cache, _ = expect(reference.decode_layers, *arguments, settings=inputs.settings)
    real = np.asarray(inputs.batch.positions) >= 0
    assert np.isfinite(np.asarray(x, np.float32)).all()
    before = np.asarray(inputs.x, np.float32)[real]
    out, expected = np.asarray(x, np.float32)[real], np.asarray(expected)[real]
    error = relative_error(out - before, expected - before)
    print(f"error {error:.2e} of what the layers add")
    assert error < 0.06
    check_cache(inputs, cache, expected_cache, case.num_layers, bound=0.06)
    for _ in range(3):
        np.testing.assert_array_equal(np.asarray(run(*arguments)[0], np.float32), np.asarray(x, np.float32))


PROMPTS = {  # tokens of each request, and how many of them the step computes
    "one": ((40,), (40,)),
    "chunks": ((200, 0, 33, 65, 5, 17), (50, 0, 33, 20, 1, 17)),
    "128-tokens": ((100, 600, 4), (100, 24, 4)),
    "200-tokens": ((150, 50), (150, 50)),
}


SMALLEST = {"embed": 1024, "kv_heads": 8, "mlp": 3072, "page_size": 64}  # the 0.6B's


@pytest.mark.parametrize("sizes", [{}, SMALLEST, {"group": 4}, SMALLEST | {"cache_dtype": "float8_e4m3fn"}])
@pytest.mark.parametrize("name", PROMPTS)
def test_prompt_layers(name, sizes):
    lengths, num_new = PROMPTS[name]
    case = cases.Case(name=name, lengths=lengths, **sizes)
    inputs = inputs_of(case)
    batch = cases.prompt_batch(case, inputs, num_new, num_padding=-sum(num_new) % 64)
    x = jnp.asarray(np.random.default_rng(5).standard_normal((batch.positions.shape[0], case.embed)), jnp.bfloat16)
    arguments = (x, inputs.weights, inputs.cache, batch, inputs.inverse_frequencies)
    run = jax.jit(functools.partial(sm90.prompt_layers, settings=inputs.settings))
    out, cache = run(*arguments)
    expected, expected_cache = expect(reference.prompt_layers, *arguments, settings=inputs.settings)
    real = np.asarray(batch.positions) >= 0
    # All keys and values of these tokens are new, and where one lies between two of 8 bits, a small difference decides:
    # the reference in bfloat16 differs from itself in float32 by 1.2e-2 to 1.6e-2.
    bound = 2 * BOUND if case.cache_dtype else BOUND
    assert relative_error(np.asarray(out)[real], np.asarray(expected)[real]) < bound
    is_nan = np.isnan(np.asarray(expected_cache, np.float32))
    np.testing.assert_array_equal(np.isnan(np.asarray(cache, np.float32)), is_nan)
    found, expected_cache = np.asarray(cache, np.float32)[~is_nan], np.asarray(expected_cache, np.float32)[~is_nan]
    assert relative_error(found, expected_cache) < (5 * BOUND if case.cache_dtype else BOUND)
    np.testing.assert_array_equal(np.asarray(run(*arguments)[0])[real], np.asarray(out)[real])


@case_parameter
def test_parts(case):
    inputs = inputs_of(case)
    weights, batch, settings = inputs.weights, inputs.batch, inputs.settings
    layer = case.num_layers - 1
    real = np.asarray(batch.positions) >= 0

    def check(out, expected):
        assert np.isfinite(np.asarray(out, np.float32)).all()
        assert relative_error(np.asarray(out, np.float32)[real], np.asarray(expected)[real]) < BOUND

    known = {"settings": settings, "layer": layer}
    q, cache = sm90.qkv(inputs.x, weights, inputs.cache, batch, inputs.inverse_frequencies, **known)
    expected_q, expected_cache = expect(
        reference.qkv, inputs.x, weights, inputs.cache, batch, inputs.inverse_frequencies, **known
    )
    check(q, expected_q)
    check_cache(inputs, cache, expected_cache, 1)
    attended = sm90.attention(q, cache, batch, **known)
    check(attended, expect(reference.attention, q, cache, batch, **known))
    assert not np.asarray(attended, np.float32)[~real].any()
    for residual in (inputs.x, None):
        out = sm90.output(attended, weights, residual, layer=layer)
        check(out, expect(reference.output, attended, weights, residual, layer=layer))
    activated = sm90.gate_up(inputs.x, weights, **known)
    check(activated, expect(reference.gate_up, inputs.x, weights, **known))
    for residual in (inputs.x, None):
        out = sm90.down(activated, weights, residual, layer=layer)
        check(out, expect(reference.down, activated, weights, residual, layer=layer))


@pytest.mark.parametrize("splits", [1, 2, 4, 8])
@pytest.mark.parametrize("name", ["group-4-ring-wraps", "head-64", "batch-64"])
def test_attention_does_not_depend_on_its_splits(name, splits):
    case = next(case for case in cases.CASES if case.name == name)
    inputs = inputs_of(case)
    shape = (len(case.lengths), case.kv_heads, case.group, case.head_dim)
    q = jnp.asarray(np.random.default_rng(0).standard_normal(shape), jnp.bfloat16)
    cache = jnp.where(jnp.isnan(inputs.cache), 0.5, inputs.cache)  # including the current tokens' positions
    known = {"settings": inputs.settings, "layer": 1}
    out = sm90.attention(q, cache, inputs.batch, launch=sm90.LaunchShape(attention_splits=splits), **known)
    assert relative_error(out, expect(reference.attention, q, cache, inputs.batch, **known)) < BOUND


@pytest.mark.parametrize("group", [1, 4, 8])
def test_attention_of_many_requests_whose_blocks_stay(group):
    lengths = (0, 1_000, 1, *range(2, 380, 2), 0, 700)
    case = cases.Case(name=f"194-group-{group}", lengths=lengths, kv_heads=8, group=group, num_layers=1)
    inputs = inputs_of(case)
    shape = (len(case.lengths), case.kv_heads, case.group, case.head_dim)
    q = jnp.asarray(np.random.default_rng(0).standard_normal(shape), jnp.bfloat16)
    cache = jnp.where(jnp.isnan(inputs.cache), 0.5, inputs.cache)  # including the current tokens' positions
    known = {"settings": inputs.settings, "layer": 0}
    attend = jax.jit(functools.partial(sm90.attention, **known))
    out = attend(q, cache, inputs.batch)
    assert relative_error(out, expect(reference.attention, q, cache, inputs.batch, **known)) < BOUND
    for _ in range(3):
        np.testing.assert_array_equal(np.asarray(attend(q, cache, inputs.batch)), np.asarray(out))


@pytest.mark.parametrize(
    ("name", "splits"),
    [
        *(("qwen3-0.6b-layer", splits) for splits in range(1, 9)),
        *(("batch-16", splits) for splits in (1, 2, 3, 4)),
        *(("batch-50-odd-tiles", splits) for splits in (1, 2, 3, 5)),
        *(("batch-30", splits) for splits in (3, 6)),
        *(("batch-64", splits) for splits in (1, 2, 3, 4, 7, 8)),
    ],
)
@pytest.mark.parametrize("blocks_per_stage", [1, 2])
def test_projections_do_not_depend_on_their_launch(name, splits, blocks_per_stage):
    case = next(case for case in cases.CASES if case.name == name)
    inputs = inputs_of(case)
    arguments = (inputs.x, inputs.weights, inputs.cache, inputs.batch, inputs.inverse_frequencies)
    launch = sm90.LaunchShape(
        qkv_splits=splits, o_splits=splits, gate_up_splits=splits, down_splits=splits, blocks_per_stage=blocks_per_stage
    )
    run = jax.jit(functools.partial(sm90.decode_layers, settings=inputs.settings))
    tuned = jax.jit(functools.partial(sm90.decode_layers, settings=inputs.settings, launch=launch))
    real = np.asarray(inputs.batch.positions) >= 0
    out, expected = (np.asarray(function(*arguments)[0], np.float32)[real] for function in (tuned, run))
    assert relative_error(out, expected) < BOUND


STAYING_CASES = (  # halves whose attention's blocks stay
    cases.Case(
        name="144-8-heads", lengths=(0, 1_200, 1, *range(2, 280, 2), 0, 700), kv_heads=8, embed=512, num_layers=3
    ),
    cases.Case(name="140-group-4", lengths=(*range(1, 141),), kv_heads=4, group=4, page_size=64),
)
HALVED = ("batch-50-odd-tiles", "batch-128", "batch-200", "batch-40-uneven")
HALVED_CASES = (*(case for case in cases.CASES if case.name in HALVED), *STAYING_CASES)


@pytest.mark.parametrize("case", HALVED_CASES, ids=lambda case: case.name)
def test_halves_of_a_batch_on_two_streams_give_the_same_result(case):
    inputs = inputs_of(case)
    arguments = (inputs.x, inputs.weights, inputs.cache, inputs.batch, inputs.inverse_frequencies)
    launch = sm90.LaunchShape(streams=2)
    halves = jax.jit(functools.partial(sm90.decode_layers, settings=inputs.settings, launch=launch))
    x, cache, _ = halves(*arguments)
    expected_x, expected_cache, _ = expect(reference.decode_layers, *arguments, settings=inputs.settings)
    real = np.asarray(inputs.batch.positions) >= 0
    assert relative_error(np.asarray(x, np.float32)[real], np.asarray(expected_x)[real]) < BOUND
    check_cache(inputs, cache, expected_cache, case.num_layers)
    for _ in range(3):
        np.testing.assert_array_equal(np.asarray(halves(*arguments)[0]), np.asarray(x))  # bitwise equal: no races


def test_more_ranges_than_blocks_are_refused():
    inputs = inputs_of(next(case for case in cases.CASES if case.name == "batch-16"))
    launch = sm90.LaunchShape(down_splits=8)  # the projection has 384 columns
    with pytest.raises(jax.errors.JaxRuntimeError, match="down: at most one range for each 64 columns"):
        jax.block_until_ready(
            sm90.decode_layers(
                inputs.x,
                inputs.weights,
                inputs.cache,
                inputs.batch,
                inputs.inverse_frequencies,
                settings=inputs.settings,
                launch=launch,
            )
        )


def test_a_range_of_layers_continues_where_the_last_one_ended():
    case = dataclasses.replace(cases.CASES[1], num_layers=4)
    inputs = cases.make_inputs(case, seed=4, dtype=jnp.bfloat16)
    fixed = (inputs.batch, inputs.inverse_frequencies)
    whole_x, whole_cache, _ = sm90.decode_layers(
        inputs.x, inputs.weights, inputs.cache, *fixed, settings=inputs.settings
    )
    x, cache = inputs.x, inputs.cache
    for layers in (range(0, 1), range(1, 4)):
        x, cache, _ = sm90.decode_layers(x, inputs.weights, cache, *fixed, settings=inputs.settings, layers=layers)
    np.testing.assert_array_equal(np.asarray(x), np.asarray(whole_x))
    np.testing.assert_array_equal(np.asarray(cache, np.float32), np.asarray(whole_cache, np.float32))


def test_a_row_does_not_depend_on_the_rest_of_its_batch():
    case = next(case for case in cases.CASES if case.name == "qwen3-0.6b-layer")
    inputs = inputs_of(case)
    run = functools.partial(sm90.decode_layers, settings=inputs.settings)
    x, *_ = run(inputs.x, inputs.weights, inputs.cache, inputs.batch, inputs.inverse_frequencies)
    masked = DecodeBatch(inputs.batch.positions.at[1:].set(-1), inputs.batch.page_table)
    alone, *_ = run(inputs.x, inputs.weights, inputs.cache, masked, inputs.inverse_frequencies)
    np.testing.assert_array_equal(np.asarray(alone)[0], np.asarray(x)[0])


def test_a_donated_cache_is_updated_in_place():
    inputs = cases.make_inputs(cases.CASES[1], seed=5, dtype=jnp.bfloat16)
    run = jax.jit(functools.partial(sm90.decode_layers, settings=inputs.settings), donate_argnums=2)
    arguments = (inputs.x, inputs.weights, inputs.cache, inputs.batch, inputs.inverse_frequencies)
    text = run.lower(*arguments).compile().as_text()
    shape = "bf16[" + ",".join(map(str, inputs.cache.shape)) + "]"
    assert not [line for line in text.splitlines() if " copy(" in line and shape in line.split("copy(")[0]]
    before = inputs.cache.unsafe_buffer_pointer()
    _, cache, _ = run(*arguments)
    assert cache.unsafe_buffer_pointer() == before
