"""Which path the layers of a decode step take, by what its devices can do."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from meshserve.kernels import paged_attention
from meshserve.kernels.decode_layers import LayerWeights, reference
from meshserve.kernels.p2p import MAX_BYTES, P2PGroup, takes_sum
from meshserve.kernels.p2p import reference as p2p_reference
from meshserve.kernels.p2p import sm90 as p2p_sm90
from meshserve.kernels.paged_attention import PagedBatch
from meshserve.runtime.api.sampling_params import SamplingMode
from meshserve.runtime.backend import fused_decode
from meshserve.runtime.backend.kernels import Kernels
from meshserve.runtime.model import strategies
from meshserve.runtime.model.layers.rope import inverse_frequencies
from meshserve.runtime.model.partitioning import specs_of
from meshserve.runtime.model.strategies import StepInputs
from meshserve.runtime.model_files.model_config import ModelConfig
from meshserve.runtime.options.serve_config import ServeConfig
from meshserve.runtime.program.batch import ON_DEVICE, Bucket
from meshserve.runtime.program.step import CacheShape, sharded_step, state_shapes, weights_of
from meshserve.runtime.resolve.resolved_server import resolve_here
from meshserve.runtime.weights.orbax_layout import model_layout
from meshserve.runtime.weights.random_weights import random_model
from meshserve.runtime.weights.registry import named_model
from meshserve.sharding.collectives import all_reduce
from meshserve.sharding.mesh import TENSOR_AXIS, make_mesh, partition_spec

CONFIG = named_model("qwen3-0.6b")


@dataclass
class Watched:
    """The reference, noting what is called of it."""

    calls: list[str] = field(default_factory=list)

    def __getattr__(self, name: str):
        def call(*arguments, **options):
            self.calls.append(name)
            self.p2p = getattr(options.get("settings"), "p2p", None)
            return getattr(reference, name)(*arguments, **options)

        return call


def run(
    mesh: Mesh, p2p: P2PGroup | None, num_tokens: int = 3, captured: tuple[int, ...] = ()
) -> tuple[Watched, np.ndarray]:
    """Two small layers of that config's head dimension over the mesh: what was called, and every device's result."""
    config, watched = CONFIG.__class__(**{**vars(CONFIG), "num_layers": 2}), Watched()
    num_groups, embed, mlp, head_dim = 4, 256, 256, CONFIG.head_dim
    draw = np.random.default_rng(0)

    def weight(*shape: int) -> jax.Array:
        return jnp.asarray(draw.standard_normal(shape) * shape[-1] ** -0.5, jnp.float32)

    weights = LayerWeights(
        input_norm=weight(2, embed), qkv=weight(2, num_groups, 4 * head_dim, embed), q_norm=weight(2, head_dim),
        k_norm=weight(2, head_dim), o=weight(2, embed, num_groups * 2 * head_dim), post_norm=weight(2, embed),
        gate_up=weight(2, 2, mlp, embed), down=weight(2, embed, mlp),
    )  # fmt: skip
    uncut = PartitionSpec()
    cut = {"qkv": 1, "o": 2, "gate_up": 2, "down": 2}
    specs = LayerWeights(
        *(PartitionSpec(*[None] * cut[name], TENSOR_AXIS) if name in cut else uncut for name in weights._fields)
    )
    cache_spec = PartitionSpec(None, None, TENSOR_AXIS)
    cache = jnp.zeros((2, num_tokens, num_groups, 2, 16, head_dim), jnp.float32)
    tokens = jnp.arange(num_tokens, dtype=jnp.int32)
    batch = PagedBatch(tokens % 16, tokens, tokens[:, None])
    options = fused_decode.FusedOptions(p2p, "decodes", captured, inverse_frequencies(config.rope, head_dim))
    program = jax.shard_map(
        partial(fused_decode.run_layers, config, batch=batch, kernels=watched, options=options),
        mesh=mesh,
        in_specs=(specs, PartitionSpec(), cache_spec),
        out_specs=(PartitionSpec(TENSOR_AXIS), cache_spec, PartitionSpec(), PartitionSpec()),
        check_vma=False,
    )
    x, *_ = jax.jit(program)(weights, weight(num_tokens, embed), cache)
    return watched, np.asarray(x).reshape(mesh.size, num_tokens, embed)


PARTS = ["qkv", "attention", "output", "gate_up", "down"] * 2


def test_one_device_makes_one_call() -> None:
    watched, _ = run(make_mesh(1), None)
    assert watched.calls == ["decode_layers"]
    assert watched.p2p is None


@pytest.mark.parametrize("num_devices", [1, 2])
def test_inputs_of_layers_can_be_captured_between_calls(num_devices: int) -> None:
    plain, alone = run(make_mesh(num_devices), None)
    watched, rows = run(make_mesh(num_devices), None, captured=(0, 1, 1))
    np.testing.assert_allclose(rows, alone, rtol=2e-4, atol=2e-4)
    assert watched.calls == (["decode_layers"] * 2 if num_devices == 1 else plain.calls)


def test_peers_make_one_call_each_and_others_a_call_a_part() -> None:
    mesh, p2p = make_mesh(2), P2PGroup(axis=TENSOR_AXIS, ordinals=(0, 1))
    _, alone = run(make_mesh(1), None)
    as_p2p_group, together = run(mesh, p2p)
    by_parts, apart = run(mesh, None)
    assert as_p2p_group.calls == ["decode_layers"]
    assert as_p2p_group.p2p is p2p
    assert by_parts.calls == PARTS
    for rows in (together[0], together[1], apart[0], apart[1]):
        np.testing.assert_allclose(rows, alone[0], rtol=2e-4, atol=2e-4)


def test_the_kernels_attention_serves_decodes_whose_layers_are_not_fused() -> None:
    """Rows of the page table are found by token, padding gives zeros, and other requests' pages do not matter."""
    draw, head_dim, page_size = np.random.default_rng(1), CONFIG.head_dim, 16
    q = jnp.asarray(draw.standard_normal((5, 2, 4, head_dim)), jnp.float32)
    cache = jnp.asarray(draw.standard_normal((3, 12, 2, 2, page_size, head_dim)), jnp.float32).at[:, 11].set(jnp.nan)
    page_table = jnp.asarray([[0, 11], [1, 2], [3, 4], [5, 6]], jnp.int32)
    batch = PagedBatch(jnp.asarray([31, 3, 16, -1, 0]), jnp.asarray([3, 0, 1, 2, 2]), page_table)
    attend = fused_decode.attention_of_decodes(CONFIG.rms_norm_eps, batch, reference)
    found = attend(q, cache, batch, layer=1, scale=head_dim**-0.5)
    expected = paged_attention.reference.paged_attention(q, cache, batch, layer=1, scale=head_dim**-0.5)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    assert not np.asarray(found)[3].any()


def test_more_than_peers_add_up_goes_by_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_decode, "MAX_BYTES", 3 * 256 * 4 - 1)
    watched, _ = run(make_mesh(2), P2PGroup(axis=TENSOR_AXIS, ordinals=(0, 1)))
    assert watched.calls == PARTS


@pytest.mark.parametrize(
    ("tp", "num_bytes", "dtype", "is_by_p2p"),
    [(4, 64, "bfloat16", True), (4, 8 << 20, "bfloat16", True), (4, (8 << 20) + 64, "bfloat16", False),
     (2, (8 << 20) + 64, "bfloat16", True), (2, (64 << 20) + 64, "bfloat16", False), (8, 64, "bfloat16", False),
     (4, 8, "bfloat16", False), (4, 64, "float32", False)],
)  # fmt: skip
def test_all_reduce_takes_peers_where_they_are_faster(tp: int, num_bytes: int, dtype: str, is_by_p2p: bool) -> None:
    seen = []

    def p2p_all_reduce(x: jax.Array) -> jax.Array:
        seen.append(x.nbytes)
        return jax.lax.psum(x, TENSOR_AXIS)

    def add(x: jax.Array) -> jax.Array:
        return all_reduce(x, p2p_all_reduce)

    x = jnp.ones(num_bytes // jnp.dtype(dtype).itemsize, dtype)
    spec = PartitionSpec()
    program = jax.shard_map(add, mesh=make_mesh(tp), in_specs=spec, out_specs=spec, check_vma=False)
    assert (np.asarray(jax.jit(program)(x), np.float32) == tp).all()
    assert seen == ([num_bytes] if is_by_p2p else [])


@pytest.mark.parametrize(
    ("num_bytes", "num_ranks", "is_taken"),
    [(8, 3, True), (12, 2, False), (MAX_BYTES, 8, True), (MAX_BYTES + 64, 4, True), (MAX_BYTES + 32, 4, False),
     (MAX_BYTES + 32, 2, True), (MAX_BYTES + 256, 8, False)],
)  # fmt: skip
def test_long_sums_are_cut_into_a_part_a_rank(num_bytes: int, num_ranks: int, is_taken: bool) -> None:
    assert takes_sum(num_bytes, num_ranks) == is_taken


@pytest.mark.parametrize(
    ("operation", "shape", "dtype", "reason"),
    [(p2p_sm90.p2p_all_reduce, (MAX_BYTES,), "bfloat16",
      r"bfloat16\[2097152\] over 3 GPUs.* only over 2 or 4 GPUs"),
     (p2p_sm90.p2p_all_reduce, (64,), "float32", "It takes bfloat16 in multiples of 8 bytes"),
     (p2p_sm90.p2p_all_gather, (MAX_BYTES // 4 + 2,), "int32", "at most 2097152 bytes")],
)  # fmt: skip
def test_p2p_operations_refuse_what_they_do_not_support(
    operation: Callable[..., jax.Array], shape: tuple[int, ...], dtype: str, reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        operation(jnp.zeros(shape, dtype), P2PGroup(axis=TENSOR_AXIS, ordinals=(0, 1, 2)))


def test_peers_that_cannot_be_are_refused_by_name() -> None:
    config = ServeConfig(model="random", tp=2, all_reduce="p2p")
    mesh = make_mesh(2)
    with pytest.raises(
        ValueError, match=r"--all-reduce p2p cannot serve this model here: .* a cpu device. Use --all-reduce"
    ):
        resolve_here(config, CONFIG, mesh)


def sampled(config: ModelConfig, kernels: Kernels) -> list[list[int]]:
    """Four greedy decode steps of three requests with 19 tokens in a random cache on two devices: the tokens."""
    mesh, layout, bfloat16 = make_mesh(2), model_layout(config, 2), jnp.dtype("bfloat16")
    structure, params = random_model(config, layout, mesh, bfloat16)
    bucket = Bucket(3, 3, 3, is_decode=True, mode=SamplingMode.GREEDY)
    shape = CacheShape(num_pages=6, page_size=16, max_running=3, max_request_pages=2)
    state = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), state_shapes(config, layout, shape, bfloat16))
    cache = jax.random.normal(jax.random.key(1), state.cache.shape, bfloat16)
    state = state._replace(cache=cache, page_table=jnp.arange(6).reshape(3, 2), last_tokens=jnp.array([5, 6, 7]))
    packed = np.zeros(bucket.size, np.int32)
    fields = {"slots": range(3), "token_request": range(3), "last_index": range(3)}
    for name, values in {**fields, "token_ids": ON_DEVICE, "positions": 19, "sample_position": 20}.items():
        packed[bucket.fields[name]] = values
    packed[bucket.fields["page_slot"]] = shape.max_running  # no new pages
    program, tokens = sharded_step(structure, params, kernels, bucket, mesh), []
    for _ in range(4):
        state, output = program(weights_of(params), state, (), packed)
        tokens.append(np.asarray(output.sampled).tolist())
    return tokens


def test_a_step_through_peers_samples_what_xla_samples() -> None:
    """Embedding, layers and the exchange of the best tokens, in bfloat16, by the reference of the peers."""
    model = dataclasses.replace(
        CONFIG,
        num_layers=2, embed_dim=128, mlp_dim=128, num_kv_heads=4, num_query_heads=8, vocab_size=512, is_tied=False,
    )  # fmt: skip
    kernels = Kernels(attend=paged_attention.implementation("reference"), decode=reference)
    p2p = P2PGroup(axis=TENSOR_AXIS, ordinals=(0, 1))
    tokens = [sampled(model, kernels), sampled(model, replace(kernels, p2p=p2p, p2p_operations=p2p_reference))]
    assert tokens[0] == tokens[1]
    assert len({token for row in tokens[0] for token in row}) > 1


@pytest.mark.parametrize("captured", [(), (0, 1, 2)])
def test_prompts_on_fused_layers_are_those_of_other_steps(captured: tuple[int, ...]) -> None:
    """All layers but the last in one call: hidden states of all tokens before its MLP, and two outputs."""
    config = dataclasses.replace(
        CONFIG, num_layers=3, embed_dim=64, mlp_dim=96, num_kv_heads=2, num_query_heads=4, vocab_size=128
    )
    mesh, layout, float32 = make_mesh(1), model_layout(config, 1), jnp.dtype("float32")
    structure, params = random_model(config, layout, mesh, float32)
    batch = PagedBatch(
        positions=jnp.array([0, 1, 2, 3, 0, 1, 2, -1]),
        token_request=jnp.array([0, 0, 0, 0, 1, 1, 1, 1]),
        page_table=jnp.array([[2], [1]]),
    )
    cache = jnp.zeros((3, 3, 2, 2, 8, config.head_dim), float32)

    def run(kernels: Kernels) -> tuple[jax.Array, ...]:
        def forward(params: nnx.State, cache: jax.Array) -> tuple[jax.Array, ...]:
            model = nnx.merge(structure, params)
            step = StepInputs(jnp.arange(8) + 20, batch, kernels.products, jnp.array([3, 6]), captured=captured)
            found = strategies.forward(model, kernels, cache, step)
            assert found.hidden is not None
            return found.wanted, found.hidden, found.cache, *found.captured

        specs = (specs_of(params), partition_spec((None,) * 6))
        program = jax.shard_map(forward, mesh=mesh, in_specs=specs, out_specs=partition_spec(()), check_vma=False)
        return jax.jit(program)(params, cache)

    plain = Kernels(attend=paged_attention.implementation("reference"))
    fused = dataclasses.replace(plain, decode=reference, max_fused_prompt_tokens=8)
    results = zip(run(fused), run(plain), strict=True)
    for found, expected in results:
        real = slice(7) if found.shape[0] == 8 else slice(None)  # the last token is padding
        np.testing.assert_allclose(found[real], expected[real], rtol=1e-4, atol=1e-5)
