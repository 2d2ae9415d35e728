"""Tests that pages come back from host memory bit by bit, on several devices and in every type of the cache."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from meshserve.runtime.host_cache import commands, page_copies
from meshserve.runtime.host_cache.sizes import HostCacheSize, host_cache_size
from meshserve.runtime.program.step import CACHE_AXES
from meshserve.sharding.mesh import make_mesh, named_sharding

NUM_PAGES, BLOCK_PAGES = 8, 3
SHAPE = (2, NUM_PAGES, 4, 2, 4, 8)  # [L, P, K, 2, S, H]
SIZE = HostCacheSize(num_blocks=4, block_pages=BLOCK_PAGES, page_bytes=1, max_fetches=2, max_saves=2)


def make_copies(dtype: jnp.dtype) -> tuple[page_copies.PageCopies, jax.Array, np.ndarray]:
    """Returns the copies of a cache of random values, the cache, and its bits."""
    width = {1: np.uint8, 2: np.uint16, 4: np.uint32}[dtype.itemsize]
    bits = np.random.default_rng(0).normal(size=SHAPE).astype(dtype).view(width)
    sharding = named_sharding(make_mesh(4), CACHE_AXES)
    shape = jax.ShapeDtypeStruct(SHAPE, dtype, sharding=sharding)
    gather = page_copies.lower_save(shape, BLOCK_PAGES).compile()
    scatter = page_copies.lower_write(shape, BLOCK_PAGES).compile()
    copies = page_copies.PageCopies(SIZE, page_copies.block_shape(shape, BLOCK_PAGES), gather, scatter)
    return copies, jax.device_put(bits.view(dtype), sharding), bits


def bits_of(cache: jax.Array, like: np.ndarray) -> np.ndarray:
    return np.asarray(cache).view(like.dtype)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float8_e4m3fn])
def test_pages_come_back_bit_by_bit(dtype: type) -> None:
    copies, cache, bits = make_copies(jnp.dtype(dtype))
    cache = copies.run(commands.save(1, [6, 2], BLOCK_PAGES), cache)
    cache = copies.run(commands.fetch(0, 1, {0: 3, 1: 7}, BLOCK_PAGES, NUM_PAGES), cache)
    copies.wait(0)
    assert copies.has_arrived(0)
    cache = copies.run(commands.write(0), cache)
    bits[:, 3], bits[:, 7] = bits[:, 6].copy(), bits[:, 2].copy()
    assert np.array_equal(bits_of(cache, bits), bits)


def test_a_block_keeps_what_the_pages_held_when_it_was_saved() -> None:
    copies, cache, bits = make_copies(jnp.dtype(jnp.float32))
    saved = bits[:, 5].copy()
    cache = copies.run(commands.save(0, [5], BLOCK_PAGES), cache)
    cache = copies.run(commands.save(1, [0], BLOCK_PAGES), cache)
    cache = copies.run(commands.fetch(7, 1, {0: 5}, BLOCK_PAGES, NUM_PAGES), cache)
    copies.wait(7)
    cache = copies.run(commands.write(7), cache)  # overwrites the page
    cache = copies.run(commands.fetch(8, 0, {0: 1}, BLOCK_PAGES, NUM_PAGES), cache)
    copies.wait(8)
    cache = copies.run(commands.write(8), cache)
    assert np.array_equal(bits_of(cache, bits)[:, 1], saved)
    assert np.array_equal(bits_of(cache, bits)[:, 5], bits[:, 0])


def test_blocks_are_sent_behind_the_input_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    copies, cache, bits = make_copies(jnp.dtype(jnp.float32))
    cache = copies.run(commands.save(1, [6], BLOCK_PAGES), cache)
    sent: list[str] = []
    on_each, to_device, barrier = copies._on_each, copies.to_device, copies._barrier
    monkeypatch.setattr(copies, "_on_each", lambda array: sent.append(f"{len(array)} numbers") or on_each(array))
    monkeypatch.setattr(copies, "to_device", lambda shards: sent.append("block") or to_device(shards))
    monkeypatch.setattr(copies, "_barrier", lambda mark: sent.append("program") or barrier(mark))
    packed = np.arange(9, dtype=np.int32)
    assert copies.send_behind(packed) is packed and not sent, "without blocks, the program's call sends the input"
    cache = copies.run(commands.fetch(0, 1, {0: 2}, BLOCK_PAGES, NUM_PAGES), cache)
    assert copies.has_arrived(0) is None and not sent, "a step may follow, as one does when that of its drafts ends"
    assert np.array_equal(copies.send_behind(packed), packed)
    assert sent == ["9 numbers", "1 numbers", "program", "block", f"{BLOCK_PAGES} numbers"]
    cache = copies.run(commands.fetch(1, 1, {0: 3}, BLOCK_PAGES, NUM_PAGES), cache)
    cache = copies.run(commands.clear(), cache)  # what was to be fetched before is
    for ticket in (0, 1):
        copies.wait(ticket)
        cache = copies.run(commands.write(ticket), cache)
    bits[:, 2] = bits[:, 3] = bits[:, 6]
    assert np.array_equal(bits_of(cache, bits), bits)


def test_the_program_that_keeps_blocks_behind_the_input_runs_in_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes of a cluster need not run it equally often: only process 0 asks for blocks between two steps."""
    devices = make_mesh(4).local_devices[:2]
    monkeypatch.setattr(Mesh, "local_devices", property(lambda self: devices))
    copies, _, _ = make_copies(jnp.dtype(jnp.float32))
    ((marks,), _) = copies._barrier.input_shardings
    assert marks.device_set == set(devices)


def test_copies_that_fail_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    copies, cache, _ = make_copies(jnp.dtype(jnp.float32))

    def fail(shards: object) -> list[jax.Array]:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no host memory")

    copies.run(commands.save(0, [5], BLOCK_PAGES), cache)
    monkeypatch.setattr(copies, "to_host", fail)
    copies.run(commands.save(2, [5], BLOCK_PAGES), cache)
    assert copies.take_failed() == [(2, True)] and copies.take_failed() == []
    monkeypatch.setattr(copies, "to_device", fail)
    for ticket, block in ((0, 0), (1, 2)):
        copies.run(commands.fetch(ticket, block, {0: 5}, BLOCK_PAGES, NUM_PAGES), cache)
        copies.wait(ticket)
        assert copies.has_arrived(ticket) is False
        copies.run(commands.forget(ticket), cache)


def test_the_cache_is_written_in_place() -> None:
    sharding = named_sharding(make_mesh(4), CACHE_AXES)
    shape = jax.ShapeDtypeStruct((2, 4096, 4, 2, 4, 8), jnp.float32, sharding=sharding)
    analysis = page_copies.lower_write(shape, BLOCK_PAGES).compile().memory_analysis()
    shard_bytes = 2 * 4096 * 2 * 4 * 8 * 4
    assert analysis.alias_size_in_bytes == shard_bytes and analysis.temp_size_in_bytes < shard_bytes / 8


def test_blocks_are_large_and_fit_into_host_memory() -> None:
    page_bytes = 36 * 8 * 2 * 32 * 128 * 2  # Qwen3-8B at TP 1
    shape = {"max_request_pages": 1024, "max_step_pages": 256}
    size = host_cache_size(64 << 30, page_bytes=page_bytes, num_local_devices=1, **shape)
    assert size is not None and size.block_pages == 8 and 32 << 20 <= size.block_bytes < 40 << 20
    assert size.num_pages * page_bytes <= 64 << 30 and size.staging_bytes < 2 << 30
    assert size.max_saves * size.block_pages > 200, "of 256 pages that prompts fill in a step, most can be saved"
    assert size.max_fetches == size.max_saves, "and restored"
    split = host_cache_size(64 << 30, page_bytes=page_bytes // 8, num_local_devices=8, **shape)
    assert split is not None and split.block_pages == 57 and abs(split.num_pages / size.num_pages - 1) < 0.01
    assert (split.max_saves, split.max_fetches) == (6, 15)
    assert host_cache_size(0, page_bytes=page_bytes, num_local_devices=1, **shape) is None
    with pytest.raises(ValueError, match=r"host_cache_gib is 0.010; two blocks of 8 pages take 0.070 GiB"):
        host_cache_size(10 << 20, page_bytes=page_bytes, num_local_devices=1, **shape)
