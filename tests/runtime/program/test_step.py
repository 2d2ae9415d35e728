"""The step program in full size without weights: its shapes, its bytes, what crosses the mesh, what is donated."""

import dataclasses
import math
import re
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.extend.core import Jaxpr
from jax.sharding import Mesh, NamedSharding

from meshserve.kernels.paged_attention import implementation
from meshserve.runtime.api.sampling_params import SamplingMode
from meshserve.runtime.backend.kernels import Kernels
from meshserve.runtime.model.partitioning import specs_of
from meshserve.runtime.model_files.model_config import ModelConfig
from meshserve.runtime.program.batch import Bucket
from meshserve.runtime.program.output_buffers import output_buffer_shapes
from meshserve.runtime.program.step import (
    CacheShape,
    DeviceState,
    cache_page_bytes,
    placed_state,
    sharded_step,
    state_shapes,
    weights_of,
)
from meshserve.runtime.resolve.server_programs import ServerPrograms
from meshserve.runtime.weights.registry import abstract_model, named_model
from meshserve.sharding.layout import ShardLayout, shard_layout
from meshserve.sharding.mesh import make_mesh, named_sharding

BFLOAT16 = jnp.dtype("bfloat16")
SHAPE = CacheShape(num_pages=1000, page_size=32, max_running=64, max_request_pages=128)
BUCKET = Bucket(num_tokens=512, num_requests=64, num_new_pages=80)
TP_SIZES = (1, 2, 4, 8)
SIZES = ("qwen3-0.6b", "qwen3-8b", "qwen3-32b")
# Small enough to compile in a second or two, with a KV head for every two shards of 8.
TINY = dataclasses.replace(
    named_model("qwen3-0.6b"),
    vocab_size=41, embed_dim=16, mlp_dim=12, num_layers=2, num_query_heads=8, num_kv_heads=4, head_dim=8,
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Case:
    """A model on a mesh, as shapes."""

    config: ModelConfig
    tp: int

    @property
    def mesh(self) -> Mesh:
        return make_mesh(self.tp)

    @property
    def layout(self) -> ShardLayout:
        names = ("num_query_heads", "num_kv_heads", "vocab_size", "mlp_dim")
        return shard_layout(num_shards=self.tp, **{name: getattr(self.config, name) for name in names})

    def params(self) -> tuple[nnx.GraphDef, nnx.State]:
        return abstract_model(self.config, self.layout, BFLOAT16)

    def state(self, shape: CacheShape = SHAPE) -> DeviceState:
        return state_shapes(self.config, self.layout, shape, BFLOAT16)

    def program(self, bucket: Bucket = BUCKET, **kernels_options: bool) -> jax.stages.Wrapped:
        kernels = Kernels(attend=implementation("reference"), **kernels_options)
        return sharded_step(*self.params(), kernels, bucket, self.mesh)

    def arguments(
        self, shape: CacheShape = SHAPE, bucket: Bucket = BUCKET, buffers: tuple[jax.ShapeDtypeStruct, ...] = ()
    ) -> tuple[object, ...]:
        packed = jax.ShapeDtypeStruct((bucket.size,), jnp.int32)
        return weights_of(self.params()[1]), self.state(shape), buffers, packed


@pytest.mark.parametrize("tp", TP_SIZES)
@pytest.mark.parametrize("name", SIZES)
def test_full_sizes_have_the_shapes_they_must(name: str, tp: int):
    case = Case(named_model(name), tp)
    state, output = jax.eval_shape(case.program(), *case.arguments())
    assert (output.sampled.shape, output.sampled.dtype) == ((BUCKET.num_requests,), jnp.int32)
    assert (output.logits.shape, output.logits.dtype) == ((BUCKET.num_requests, case.layout.vocab_size), jnp.float32)
    assert (output.hidden.shape, output.hidden.dtype) == ((BUCKET.num_tokens, case.config.embed_dim), BFLOAT16)
    assert state.cache.shape == (case.config.num_layers, 1000, 8, 2, 32, 128)
    assert state.cache.dtype == BFLOAT16
    assert state == case.state(), "a step's state is the next one's argument"


@pytest.mark.parametrize("tp", TP_SIZES)
@pytest.mark.parametrize("name", SIZES)
def test_a_shard_holds_its_part_of_the_parameters(name: str, tp: int):
    """All but the norms, which every shard has; nothing is padded, because these sizes divide by 8."""
    case = Case(named_model(name), tp)
    config = case.config
    _, abstract = case.params()
    shard_bytes = sum(
        math.prod(named_sharding(case.mesh, weight.axes).shard_shape(weight.shape)) * weight.dtype.itemsize
        for _, weight in nnx.to_flat_state(abstract)
    )
    num_norm_params = config.num_layers * 2 * (config.embed_dim + config.head_dim) + config.embed_dim
    assert shard_bytes * tp == 2 * (config.num_params + (tp - 1) * num_norm_params)


@pytest.mark.parametrize(("tp", "kv_heads_a_shard"), [(1, 4), (2, 2), (4, 1), (8, 1)])
def test_a_page_costs_each_device_its_own_kv_heads(tp: int, kv_heads_a_shard: int):
    case = Case(TINY, tp)
    num_elements = TINY.num_layers * kv_heads_a_shard * 2 * 32 * TINY.head_dim
    assert cache_page_bytes(TINY, case.layout, 32, BFLOAT16) == 2 * num_elements
    cache = case.state().cache
    axes = (None, None, "kv_heads", None, None, None)
    assert math.prod(named_sharding(case.mesh, axes).shard_shape(cache.shape)) == 1000 * num_elements


def executed(jaxpr: Jaxpr, times: int = 1) -> Iterator[tuple[str, int]]:
    """(primitive, how often it runs) of a program, but for what runs on a condition, which here is random sampling."""
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        yield name, times
        if name == "cond":
            continue
        loops = times * equation.params.get("length", 1) if name == "scan" else times
        for parameter in equation.params.values():
            inner = getattr(parameter, "jaxpr", parameter)
            if hasattr(inner, "eqns"):
                yield from executed(inner, loops)


@pytest.mark.parametrize("is_unrolled", [False, True], ids=["loop", "unrolled"])
@pytest.mark.parametrize("tp", [1, 8])
def test_two_sums_a_layer_and_one_for_the_embedding_cross_the_mesh(tp: int, is_unrolled: bool):
    case = Case(dataclasses.replace(named_model("qwen3-0.6b"), num_layers=5), tp)
    jaxpr = jax.make_jaxpr(case.program(is_unrolled=is_unrolled))(*case.arguments())
    counts: dict[str, int] = {}
    for name, times in executed(jaxpr.jaxpr):
        counts[name] = counts.get(name, 0) + times
    assert counts["psum"] == (2 * 5 + 1 if tp > 1 else 1)
    assert counts.get("all_gather", 0) == (tp > 1), "of one candidate a shard and row, to choose the token"
    assert "scan" not in counts if is_unrolled else counts["scan"] == 1
    moved = {"psum_scatter", "reduce_scatter", "all_to_all", "ppermute", "pmax", "pmin", "pbroadcast"}
    assert not moved & counts.keys()


@pytest.mark.parametrize("mode", SamplingMode)
def test_a_step_of_one_sampling_mode_chooses_nothing_on_the_device(mode: SamplingMode):
    """A conditional costs a GPU as much as a layer."""
    case, bucket = Case(TINY, 1), dataclasses.replace(BUCKET, mode=mode)
    counts = dict(
        executed(jax.make_jaxpr(case.program(bucket, is_unrolled=True))(*case.arguments(bucket=bucket)).jaxpr)
    )
    assert "cond" not in counts
    switched = case.program(is_unrolled=True)
    assert "cond" in dict(executed(jax.make_jaxpr(switched)(*case.arguments()).jaxpr))


def test_a_head_of_few_rows_is_padded_beside_the_products_of_a_library():
    case, bucket = Case(TINY, 1), Bucket(num_tokens=64, num_requests=1, num_new_pages=3)
    for has_library_gemms, num_rows in ((False, 1), (True, 8)):
        program = case.program(bucket, has_library_gemms=has_library_gemms)
        _, output = jax.eval_shape(program, *case.arguments(bucket=bucket))
        assert output.logits.shape == (1, TINY.vocab_size)
        text = str(jax.make_jaxpr(program)(*case.arguments(bucket=bucket)))
        assert f"f32[{num_rows},{TINY.vocab_size}] = dot_general" in text


@pytest.mark.parametrize("is_unrolled", [False, True], ids=["loop", "unrolled"])
def test_the_last_mlp_is_for_the_tokens_whose_logits_are_wanted(is_unrolled: bool):
    config = dataclasses.replace(TINY, num_layers=5)
    text = str(jax.make_jaxpr(Case(config, 1).program(is_unrolled=is_unrolled))(*Case(config, 1).arguments()))
    of_every_token, of_wanted = (
        text.count(f"bf16[{num_rows},{2 * config.mlp_dim}] = dot_general")
        for num_rows in (BUCKET.num_tokens, BUCKET.num_requests)
    )
    assert (of_every_token, of_wanted) == (4 if is_unrolled else 1, 1)


def test_the_state_is_donated():
    """Cache and tables are updated in place: every byte of the state that comes out lies where one came in."""
    case, bucket = Case(TINY, 2), Bucket(num_tokens=4, num_requests=2, num_new_pages=2)
    shape = CacheShape(num_pages=6, page_size=4, max_running=2, max_request_pages=3)
    compiled = case.program(bucket).lower(*case.arguments(shape, bucket)).compile()
    header = compiled.as_text().splitlines()[0]
    aliases = re.search(r"input_output_alias={(.*?) }", header)
    assert aliases is not None and len(re.findall(r"alias\)", aliases[1])) == 3, header
    cache_bytes = 6 * cache_page_bytes(TINY, case.layout, 4, BFLOAT16)
    assert compiled.memory_analysis().alias_size_in_bytes == cache_bytes + 4 * 2 + 4 * 2 * 3


def test_kept_outputs_are_written_where_they_lay():
    case, bucket = Case(TINY, 2), Bucket(num_tokens=4, num_requests=2, num_new_pages=2)
    kernels = Kernels(attend=implementation("reference"), has_output_buffers=True)
    buffers = tuple(output_buffer_shapes(kernels, case.params()[1], [bucket], case.mesh).values())
    arguments = case.arguments(bucket=bucket, buffers=buffers)
    compiled = case.program(bucket, has_output_buffers=True).lower(*arguments).compile()
    logits_bytes, hidden_bytes = 2 * case.layout.vocab_size // 2 * 4, 4 * TINY.embed_dim * 2
    plain = case.program(bucket).lower(*case.arguments(bucket=bucket)).compile().memory_analysis()
    in_place = compiled.memory_analysis().alias_size_in_bytes - plain.alias_size_in_bytes
    assert in_place == logits_bytes + hidden_bytes


def test_a_cache_without_room_ends_the_start_and_says_what_to_do():
    case, bucket = Case(TINY, 2), Bucket(num_tokens=4, num_requests=2, num_new_pages=2)
    structure, params = case.params()
    placed = jax.tree.map(
        lambda shape, spec: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=NamedSharding(case.mesh, spec)),
        params,
        specs_of(params),
    )
    shape = CacheShape(num_pages=1 << 30, page_size=1 << 20, max_running=2, max_request_pages=3)
    runner = ServerPrograms(
        structure=structure,
        params=placed,
        state=placed_state(case.state(shape), case.mesh),
        kernels=Kernels(attend=implementation("reference")),
        buckets=(bucket,),
        mesh=case.mesh,
    ).compile_runner()
    with pytest.raises(
        MemoryError, match=r"could not allocate .* GiB on each device.*a cache of \d+ pages, while .* in use: lower"
    ):
        runner.start(params)
