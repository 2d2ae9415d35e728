"""Tests that devices that divide the pages of a KV head among them sample the tokens of devices that repeat it."""

from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from meshserve.kernels.paged_attention import PagedBatch, reference, write_kv
from meshserve.runtime.api.errors import ConfigError
from meshserve.runtime.api.request import FinishReason
from meshserve.runtime.backend.context_parallel import divide_pages
from meshserve.sharding.mesh import TENSOR_AXIS, make_mesh
from tests import checkpoints
from tests.runtime.token_server import Server
from tests.waiting import wait_for

# KV heads, TP size, and context-parallel sizes. Those at TP 4 are only run with --every-case, because test_cluster.py
# also divides the pages of an only KV head.
SPLITS = [(2, 8, 1), (2, 8, 2), (2, 8, 4), (1, 4, 1), (1, 4, 2), (1, 4, 4)]
LIMITS = {"max_running": 3, "max_step_tokens": 8, "max_context": 128, "num_pages": 40}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    found: dict[int, Path] = {}

    def save(kv_heads: int) -> Path:
        if kv_heads not in found:
            found[kv_heads] = checkpoints.save_checkpoint(
                tmp_path_factory.mktemp("model"), num_hidden_layers=2, num_key_value_heads=kv_heads
            )
        return found[kv_heads]

    return save


@pytest.fixture(scope="module")
def expected() -> dict[int, list[list[int]]]:
    """The tokens of each prompt, by the number of KV heads: those of the first server."""
    return {}


@pytest.fixture(scope="module", params=SPLITS, ids=lambda split: "kv{}-tp{}-cp{}".format(*split))
def server(request: pytest.FixtureRequest, model: Callable[[int], Path], expected: dict) -> Iterator[Server]:
    kv_heads, tp, cp = request.param
    if tp == 4 and not request.config.getoption("--every-case"):
        pytest.skip("only run with --every-case")
    server = Server(model(kv_heads), tp=tp, cp=cp, **LIMITS)
    server.expected = expected.setdefault(kv_heads, [server.serve(index)[0] for index in range(4)])
    yield server
    server.launched.close()
    assert server.launched.engine.failure is None


def test_prompts_one_after_another(server: Server) -> None:
    """In chunks, beside pages that are kept, and with pages that come back from host memory."""
    for index in (0, 0, 1, 2, 3, 0, 2):
        tokens, num_cached = server.serve(index)
        assert tokens == server.expected[index]
    assert num_cached and server.host.counts.num_restored


def test_prompts_together_with_preemptions_and_cancellations(server: Server) -> None:
    server.may_go_on.clear()
    low = server.submit(3)
    wait_for(lambda: low in server.tokens)
    cancelled = server.submit(2)
    names = [server.submit(index, priority=1) for index in (1, 0, 2, 3)]
    server.launched.engine.cancel(cancelled, FinishReason.CANCELLED)
    server.may_go_on.set()
    server.wait(low, cancelled, *names)
    for name, index in zip([low, *names], (3, 1, 0, 2, 3), strict=True):
        assert server.tokens[name] == server.expected[index], name


@pytest.mark.parametrize("method", ["to_device", "to_host"])
def test_failures_in_mid_copy(method: str, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    server.launched.engine.flush_prefix_cache()
    server.fail_copies(method, monkeypatch)
    before = server.host.counts.num_failed
    for index in (0, 1, 2, 3, 0, 3, 2):
        assert server.serve(index)[0] == server.expected[index]
    assert server.host.counts.num_failed > before


@pytest.mark.parametrize("cp", [2, 4])
def test_decodes_of_four_long_contexts_are_the_reference(cp: int) -> None:
    """Four requests of 100,000 tokens, with two KV heads on 8 devices."""
    page_size, num_tokens, scale = 64, 100_000, 0.3
    num_pages = -(-num_tokens // page_size)
    rng = np.random.default_rng(cp)
    pages = rng.permutation(4 * num_pages).reshape(4, num_pages)
    batch = PagedBatch(
        jnp.array([num_tokens - 1, num_tokens - 2, 77_777, 63], jnp.int32), jnp.arange(4), jnp.asarray(pages, jnp.int32)
    )
    cache = rng.standard_normal((1, 4 * num_pages, 2, 2, page_size, 8), np.float32)
    q, k, v = (rng.standard_normal((4, 8, *shape), np.float32) for shape in ((2, 8), (8,), (8,)))
    k[:], v[:] = (np.repeat(array[:, ::4], 4, axis=1) for array in (k, v))  # repeated, as devices compute them
    spec, mesh = PartitionSpec(None, TENSOR_AXIS), make_mesh(8)
    cache_spec = PartitionSpec(None, None, TENSOR_AXIS)

    def shard(q: jax.Array, k: jax.Array, v: jax.Array, cache: jax.Array) -> tuple[jax.Array, jax.Array]:
        divided = divide_pages(batch, cp, reference.partial_attention, write_kv, None)
        cache = divided["write"](cache, k, v, batch, layer=0)
        return divided["attend"](q, cache, batch, layer=0, scale=scale), cache

    # Device d holds KV head d // 4, and of its pages the tokens d % cp, d % cp + cp, ...
    held = np.concatenate([cache[:, :, device // 4, None, :, device % cp :: cp] for device in range(8)], axis=2)
    specs = {"in_specs": (spec, spec, spec, cache_spec), "out_specs": (spec, cache_spec)}
    program = jax.jit(jax.shard_map(shard, mesh=mesh, check_vma=False, **specs))
    attended, held = program(q, k, v, held)
    cache = write_kv(jnp.asarray(cache), jnp.asarray(k[:, ::4]), jnp.asarray(v[:, ::4]), batch, layer=0)
    expected = reference.paged_attention(q.reshape(4, 2, 8, 8), cache, batch, layer=0, scale=scale)
    np.testing.assert_allclose(attended.reshape(4, 2, 8, 8), expected, rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(held[:, :, 5], np.asarray(cache)[:, :, 1, :, 5 % cp :: cp])


def test_a_live_change_of_the_tp_size_divides_anew_or_is_refused(model: Callable[[int], Path]) -> None:
    limits = LIMITS | {"page_size": 64, "num_pages": 6, "host_cache_gib": 0.01}
    server = Server(model(2), tp=8, cp=0, **limits)
    expected = [server.serve(index)[0] for index in range(4)]
    for tp, cp in ((2, 1), (4, 2)):
        server.launched.resharder.change_tp(tp)
        assert server.launched.resharder.server.layout.cp == cp
        assert [server.serve(index)[0] for index in range(4)] == expected
    server.launched.close()
    named = Server(model(2), tp=8, cp=4, **limits)
    with pytest.raises(ConfigError, match="cp is 4, but at tp 4 a KV head of the model is on 2 device"):
        named.launched.resharder.change_tp(4)
    assert [named.serve(index)[0] for index in range(4)] == expected
    named.launched.close()
