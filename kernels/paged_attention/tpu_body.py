"""The body of the TPU kernel for paged attention. `tpu.py` calls it and describes the algorithm.

It iterates over the step's tokens, using positions and requests in scalar memory, in two parts: decodes and chunks.
"""

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

Ref = Any  # a Pallas reference, whose type has no public name

_MASKED = -1e30  # score of masked positions; finite, so that differences of it are not NaN
_MAX_UNROLLED_PAGES = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiling:
    """How the kernel splits its work. Page counts are independent of the page size."""

    items: int  # blocks that one iteration of the decode loop processes
    block_pages: int  # pages per block of a decode
    slots: int  # iterations of the decode loop whose pages are in VMEM: one computes while the others are filled
    tile_tokens: int  # tokens per tile of a chunk; a power of two
    tile_pages: int  # pages per block of a chunk
    table_bytes: int = 640 << 10  # page table per call; scalar memory is 1 MiB, including positions and requests


@dataclasses.dataclass(frozen=True)
class Scratch:
    """References to the scratch memory of `tpu._scratch`; their shapes are given there."""

    decode_q: Ref
    decode_out: Ref
    decode_pages: Ref
    decode_max: Ref
    decode_sum: Ref
    decode_acc: Ref
    tile_q: Ref
    tile_out: Ref
    tile_rows: Ref
    tile_pages: Ref
    tile_max: Ref
    tile_sum: Ref
    tile_acc: Ref
    decode_sems: Ref
    tile_sems: Ref
    q_sems: Ref
    out_sem: Ref
    decode_sums: Ref = None  # with `Kernel.sums`
    tile_sums: Ref = None


@dataclasses.dataclass(frozen=True)
class Kernel:
    """The operands and methods of the kernel. Scalars are traced int32 unless they are Python numbers."""

    scalars: Ref  # [3]: layer, first token, end of the tokens; later tokens are padding or belong to another call
    positions: Ref  # [T]
    token_request: Ref  # [T]
    table: Ref  # [B * max_pages]
    q: Ref  # [T, K, G, H] in HBM, as are the next two
    cache: Ref  # [L, P, K, 2, S, H]
    out: Ref  # [T, K, G, H]
    sums: Ref  # [T, K, G, lanes] float32: log of each query's sum of exp(scores), in all lanes; or None
    scratch: Scratch
    scale: float
    max_pages: int
    max_decodes: int
    tiling: Tiling

    @property
    def page_size(self) -> int:
        return self.cache.shape[4]

    def run(self) -> None:
        first, stop = self.scalars[1], self.scalars[2]
        num_decodes = self._num_decodes(first, stop)
        self._decodes(first, num_decodes)
        self._chunks(first + num_decodes, stop)

    # Positions of tokens and requests.

    def _request(self, token: jax.Array) -> jax.Array:
        """Returns the request of a token, or -1 for padding."""
        inside = (token >= self.scalars[1]) & (token < self.scalars[2])
        place = jnp.where(inside, token, 0)
        return jnp.where(inside & (self.positions[place] >= 0), self.token_request[place], -1)

    def _num_decodes(self, first: jax.Array, stop: jax.Array) -> jax.Array:
        """Returns the number of leading tokens that are padding or the only token of their request.

        The bisection assumes that these tokens come first. If they do not, the result is still correct: a token of a
        chunk may be computed as a decode, and vice versa.
        """
        limit = jnp.minimum(self.max_decodes, stop - first)

        def is_decode(token: jax.Array) -> jax.Array:
            request = self._request(token)
            return (request < 0) | ((self._request(token - 1) != request) & (self._request(token + 1) != request))

        return _bisect(self.max_decodes, lambda n: (n <= limit) & is_decode(first + n - 1))

    def _run_tokens(self, token: jax.Array) -> jax.Array:
        """Returns the number of consecutive tokens of one request from `token` on, at most a tile."""
        request = self._request(token)
        return _bisect(self.tiling.tile_tokens, lambda n: (request >= 0) & (self._request(token + n - 1) == request))

    def _skip_padding(self, token: jax.Array) -> jax.Array:
        """Returns the first token from `token` on that is not padding, or the end."""
        stop = self.scalars[2]
        return jax.lax.while_loop(lambda t: (t < stop) & (self._request(t) < 0), lambda t: t + 1, token)

    # Copies of pages.

    def _copy_pages(self, token: jax.Array, start: jax.Array, count: jax.Array, buffer: Ref, sem: Ref) -> None:
        """Starts copying `count` pages of the token's request, from its page `start` on, to the start of `buffer`."""
        entry = self.token_request[token] * self.max_pages + start

        def copy(index: jax.Array, _: None) -> None:
            page = self.cache.at[self.scalars[0], self.table[entry + index]]
            pltpu.make_async_copy(page, buffer.at[index], sem).start()

        self._each_page(count, buffer, copy)

    def _await_pages(self, count: jax.Array, buffer: Ref, sem: Ref) -> None:
        def wait(index: jax.Array, _: None) -> None:
            pltpu.make_async_copy(self.cache.at[0, 0], buffer.at[0], sem).wait()

        self._each_page(count, buffer, wait)

    def _each_page(self, count: jax.Array, buffer: Ref, act: Callable[[Any, None], None]) -> None:
        """Calls act(index, None) for the first `count` pages of `buffer`.

        Loops over few pages are unrolled: predicated copies can be scheduled among the arithmetic, unlike a loop.
        """
        if buffer.shape[0] > _MAX_UNROLLED_PAGES:
            jax.lax.fori_loop(0, count, act, None)
            return
        for index in range(buffer.shape[0]):
            pl.when(index < count)(partial(act, index, None))

    def _num_pages(self, num_positions: jax.Array, block: jax.Array, block_pages: int) -> jax.Array:
        """Returns the number of pages of a block that hold any of a request's first `num_positions` positions."""
        pages = pl.cdiv(num_positions, self.page_size) - block * block_pages
        return jnp.clip(pages, 0, block_pages)

    # Part 1: decodes.

    def _decodes(self, first: jax.Array, num_decodes: jax.Array) -> None:
        tiling, scratch = self.tiling, self.scratch
        stop = first + num_decodes
        block_tokens = tiling.block_pages * self.page_size

        def num_positions(token: jax.Array) -> jax.Array:
            """Returns the number of positions that a token attends to, or 0 beyond the last decode."""
            return jnp.where(token < stop, self.positions[jnp.minimum(token, self.positions.shape[0] - 1)] + 1, 0)

        def items(token: jax.Array, block: jax.Array) -> list[tuple[jax.Array, jax.Array]]:
            """Returns the items of the iteration that begins with this item, and the next iteration's first item."""
            found = [(token, block)]
            for _ in range(tiling.items):
                is_last = (block + 1) * block_tokens >= num_positions(token)
                token, block = jnp.where(is_last, token + 1, token), jnp.where(is_last, 0, block + 1)
                found.append((token, block))
            return found

        def pages_of(token: jax.Array, block: jax.Array) -> jax.Array:
            return self._num_pages(num_positions(token), block, tiling.block_pages)

        def fetch(token: jax.Array, block: jax.Array, slot: jax.Array) -> tuple[jax.Array, jax.Array]:
            """Starts the copies of an iteration. Returns the first item of the next iteration."""
            found = items(token, block)
            for index, (token, block) in enumerate(found[:-1]):
                place = pl.ds(index * tiling.block_pages, tiling.block_pages)
                token_here = jnp.minimum(token, self.positions.shape[0] - 1)
                self._copy_pages(
                    token_here, block * tiling.block_pages, pages_of(token, block),
                    scratch.decode_pages.at[slot, place], scratch.decode_sems.at[slot],
                )  # fmt: skip
            return found[-1]

        def turn(carry: Any) -> Any:
            token, block, ahead_token, ahead_block, slot = carry
            ahead_slot = jnp.where(slot == 0, tiling.slots - 1, slot - 1)
            ahead = fetch(ahead_token, ahead_block, ahead_slot)
            found = items(token, block)
            for index, item_ in enumerate(found[:-1]):
                place = pl.ds(index * tiling.block_pages, tiling.block_pages)
                self._await_pages(pages_of(*item_), scratch.decode_pages.at[slot, place], scratch.decode_sems.at[slot])
            rows = [jnp.where(token < stop, token - first, self.max_decodes) for token, _ in found[:-1]]
            valid = [num_positions(token) - block * block_tokens for token, block in found[:-1]]
            is_first = [block == 0 for _, block in found[:-1]]
            for head in range(self.q.shape[1]):
                self._decode_head(head, slot, rows, valid, is_first)
            return *found[-1], *ahead, jnp.where(slot == tiling.slots - 1, 0, slot + 1)

        @pl.when(num_decodes > 0)
        def _() -> None:
            place = (first, jnp.int32(0))
            ahead = place
            for slot in range(tiling.slots - 1):
                ahead = fetch(*ahead, jnp.int32(slot))
            self._copy_rows(self.q, first, scratch.decode_q, 0, num_decodes, scratch.q_sems.at[0])
            self._copy_rows(self.q, first, scratch.decode_q, 0, num_decodes, scratch.q_sems.at[0], is_wait=True)
            jax.lax.while_loop(lambda carry: carry[0] < stop, turn, (*place, *ahead, jnp.int32(0)))
            self._copy_decodes(first, num_decodes, is_wait=False)
            self._copy_decodes(first, num_decodes, is_wait=True)

    def _copy_decodes(self, first: jax.Array, num_decodes: jax.Array, *, is_wait: bool) -> None:
        """Starts copying the results of the decodes to HBM, or waits for the copies."""
        scratch = self.scratch
        for source, target in self._results(scratch.decode_out, scratch.decode_sums):
            self._copy_rows(source, 0, target, first, num_decodes, scratch.out_sem, is_wait=is_wait)

    def _decode_head(
        self, head: int, slot: jax.Array, rows: list[jax.Array], valid: list[jax.Array], is_first: list[jax.Array]
    ) -> None:
        """Processes one KV head of one iteration.

        The items of a token are consecutive, also from one iteration to the next.

        Args:
          head: index of the KV head.
          slot: slot that holds the pages of this iteration.
          rows: row of each item in decode_q and decode_out.
          valid: number of positions of each item's block that its token attends to.
          is_first: whether each item is the first of its token.
        """
        scratch, pages = self.scratch, self.tiling.block_pages
        highest, total, acc = scratch.decode_max[head], scratch.decode_sum[head], scratch.decode_acc[head]
        scores, values, highests, decays = [], [], [], []
        for index, row in enumerate(rows):
            block = slice(index * pages, (index + 1) * pages)
            clipped = jnp.minimum(row, self.max_decodes - 1)
            key = self._flat(scratch.decode_pages[slot, block, head, 0])
            score = self._dot(scratch.decode_q[clipped, head], key, transpose=True) * (self.scale * math.log2(math.e))
            is_seen = jax.lax.broadcasted_iota(jnp.int32, score.shape, 1) < valid[index]
            scores.append(jnp.where(is_seen, score, _MASKED))
            values.append(_first_rows(self._flat(scratch.decode_pages[slot, block, head, 1]), valid[index]))
        for index, score in enumerate(scores):
            before = jnp.where(is_first[index], _MASKED, highest)
            highest = jnp.maximum(before, jnp.max(score, axis=1, keepdims=True))
            highests.append(highest)
            decays.append(jnp.exp2(before - highest))
        weights = [jnp.exp2(score - highest) for score, highest in zip(scores, highests, strict=True)]
        sums = [jnp.sum(weight, axis=1, keepdims=True) for weight in weights]
        seen = [self._dot(weight.astype(self.q.dtype), value) for weight, value in zip(weights, values, strict=True)]
        for index, row in enumerate(rows):
            # A token's first item has decay 0; `where` is needed because uninitialized scratch memory may hold NaN.
            total = jnp.where(is_first[index], 0.0, total * decays[index]) + sums[index]
            acc = jnp.where(is_first[index], 0.0, acc * decays[index]) + seen[index]
            scratch.decode_out[row, head] = (acc / total).astype(scratch.decode_out.dtype)
            if self.sums is not None:
                scratch.decode_sums[row, head] = _log_sums(highests[index], total, scratch.decode_sums.shape[-1])
        scratch.decode_max[head], scratch.decode_sum[head], scratch.decode_acc[head] = highest, total, acc

    # Part 2: chunks.

    def _chunks(self, first: jax.Array, stop: jax.Array) -> None:
        tiling, scratch = self.tiling, self.scratch
        block_tokens = tiling.tile_pages * self.page_size

        def num_positions(token: jax.Array, count: jax.Array) -> jax.Array:
            """Returns the number of positions that the last token of a tile attends to, or 0 if there is no tile."""
            last = jnp.clip(token + count - 1, 0, self.positions.shape[0] - 1)
            return jnp.where(count > 0, self.positions[last] + 1, 0)

        def fetch(token: jax.Array, count: jax.Array, block: jax.Array, slot: jax.Array, q_slot: jax.Array) -> None:
            """Starts copying an item's pages and, for a tile's first block, its queries."""
            pages = self._num_pages(num_positions(token, count), block, tiling.tile_pages)
            token = jnp.minimum(token, self.positions.shape[0] - 1)
            self._copy_pages(
                token, block * tiling.tile_pages, pages, scratch.tile_pages.at[slot], scratch.tile_sems.at[slot]
            )
            count = jnp.where(block == 0, count, 0)
            self._copy_rows(self.q, token, scratch.tile_q.at[q_slot], 0, count, scratch.q_sems.at[q_slot])

        def item(carry: Any) -> Any:
            token, count, block, slot, q_slot, num_written = carry
            positions = num_positions(token, count)
            is_last = (block + 1) * block_tokens >= positions
            next_token = self._skip_padding(jnp.where(is_last, token + count, token))
            next_count = jax.lax.cond(is_last, lambda: self._run_tokens(next_token), lambda: count)
            next_block = jnp.where(is_last, 0, block + 1)
            next_q_slot = jnp.where(is_last, 1 - q_slot, q_slot)
            fetch(next_token, next_count, next_block, 1 - slot, next_q_slot)

            pages = self._num_pages(positions, block, tiling.tile_pages)
            self._await_pages(pages, scratch.tile_pages.at[slot], scratch.tile_sems.at[slot])

            @pl.when(block == 0)
            def _() -> None:
                tile = scratch.tile_q.at[q_slot]
                self._copy_rows(self.q, 0, tile, 0, count, scratch.q_sems.at[q_slot], is_wait=True)
                self._begin_tile(tile)

            for head in range(self.q.shape[1]):
                self._tile_head(head, slot, block * block_tokens, positions, count)

            @pl.when(is_last)
            def _() -> None:
                self._await_tile(num_written)
                self._end_tile()
                for source, target in self._results(scratch.tile_out, scratch.tile_sums):
                    self._copy_rows(source, 0, target, token, count, scratch.out_sem)

            num_written = jnp.where(is_last, count, num_written)
            return next_token, next_count, next_block, 1 - slot, next_q_slot, num_written

        zero = jnp.int32(0)
        first = self._skip_padding(first)
        count = self._run_tokens(first)
        fetch(first, count, zero, zero, zero)
        *_, num_written = jax.lax.while_loop(lambda carry: carry[1] > 0, item, (first, count, zero, zero, zero, zero))
        self._await_tile(num_written)

    def _await_tile(self, num_written: jax.Array) -> None:
        """Waits until the results of a tile of `num_written` tokens are in HBM."""
        scratch = self.scratch
        for source, target in self._results(scratch.tile_out, scratch.tile_sums):
            self._copy_rows(source, 0, target, 0, num_written, scratch.out_sem, is_wait=True)

    def _begin_tile(self, tile: Ref) -> None:
        """Rearranges the queries [tile_tokens, K, G, H] into rows per head, and resets the accumulators."""
        scratch = self.scratch
        for head in range(self.q.shape[1]):
            rows = tile[:, head].astype(jnp.float32)  # rows of packed types cannot be regrouped, hence 32 bits
            scratch.tile_rows[head] = rows.reshape(scratch.tile_rows.shape[1:]).astype(scratch.tile_rows.dtype)
        scratch.tile_max[...] = jnp.full(scratch.tile_max.shape, _MASKED, jnp.float32)
        scratch.tile_sum[...] = jnp.zeros(scratch.tile_sum.shape, jnp.float32)
        scratch.tile_acc[...] = jnp.zeros(scratch.tile_acc.shape, jnp.float32)

    def _tile_head(
        self, head: int, slot: jax.Array, start: jax.Array, num_positions: jax.Array, count: jax.Array
    ) -> None:
        """Processes one KV head of a tile for the block of positions from `start` on.

        The last of the tile's `count` tokens attends to `num_positions` positions.
        """
        scratch = self.scratch
        key = self._flat(scratch.tile_pages[slot, :, head, 0])
        value = _first_rows(self._flat(scratch.tile_pages[slot, :, head, 1]), num_positions - start)
        score = self._dot(scratch.tile_rows[head], key, transpose=True) * (self.scale * math.log2(math.e))
        row_token = jax.lax.broadcasted_iota(jnp.int32, score.shape, 0) // self.q.shape[2]
        position = jax.lax.broadcasted_iota(jnp.int32, score.shape, 1) + start
        score = jnp.where(position <= row_token + (num_positions - count), score, _MASKED)
        before = scratch.tile_max[head]
        highest = jnp.maximum(before, jnp.max(score, axis=1, keepdims=True))
        weight = jnp.exp2(score - highest)
        decay = jnp.exp2(before - highest)
        scratch.tile_max[head] = highest
        scratch.tile_sum[head] = scratch.tile_sum[head] * decay + jnp.sum(weight, axis=1, keepdims=True)
        seen = self._dot(weight.astype(self.q.dtype), value)
        scratch.tile_acc[head] = scratch.tile_acc[head] * decay + seen

    def _end_tile(self) -> None:
        scratch = self.scratch
        _, tokens, _, group, head_dim = scratch.tile_q.shape
        for head in range(self.q.shape[1]):
            rows = (scratch.tile_acc[head] / scratch.tile_sum[head]).reshape(tokens, group, head_dim)
            scratch.tile_out[:, head] = rows.astype(scratch.tile_out.dtype)
            if self.sums is not None:
                lanes = scratch.tile_sums.shape[-1]
                sums = _log_sums(scratch.tile_max[head], scratch.tile_sum[head], lanes)
                scratch.tile_sums[:, head] = sums.reshape(tokens, group, lanes)

    # Helpers.

    def _results(self, out: Ref, sums: Ref) -> list[tuple[Ref, Ref]]:
        """Returns the references to results in VMEM with those of their place in HBM."""
        return [(out, self.out)] if self.sums is None else [(out, self.out), (sums, self.sums)]

    def _copy_rows(
        self, source: Ref, start: Any, target: Ref, place: Any, count: jax.Array, sem: Ref, *, is_wait: bool = False
    ) -> None:
        """Starts copying `count` rows, or waits for the copies, in power-of-two pieces so that all sizes are static."""
        size = 1 << (min(source.shape[0], target.shape[0]).bit_length() - 1)
        while size:

            @pl.when(count & size != 0)
            def _(size: int = size) -> None:
                done = count & ~(2 * size - 1)  # larger pieces come first
                rows, places = pl.ds(start + done, size), pl.ds(place + done, size)
                copy = pltpu.make_async_copy(source.at[rows], target.at[places], sem)
                copy.wait() if is_wait else copy.start()

            size //= 2

    def _flat(self, pages: jax.Array) -> jax.Array:
        """Reshapes pages [N, S, H] to rows [N * S, H] in the dtype of q."""
        return pages.reshape(-1, pages.shape[-1]).astype(self.q.dtype)

    def _dot(self, left: jax.Array, right: jax.Array, *, transpose: bool = False) -> jax.Array:
        """Multiplies left [M, N] by right [N, H], or by right [H, N] transposed, and returns float32."""
        contracted = (((1,), (1 if transpose else 0,)), ((), ()))
        precision = jax.lax.Precision.HIGHEST if left.dtype == jnp.float32 else None
        return jax.lax.dot_general(left, right, contracted, precision=precision, preferred_element_type=jnp.float32)


def _log_sums(highest: jax.Array, total: jax.Array, lanes: int) -> jax.Array:
    """Returns the logarithm of 2^highest * total, each [N, 1], in all of `lanes` columns."""
    return jnp.broadcast_to((highest + jnp.log2(total)) * math.log(2), (highest.shape[0], lanes))


def _first_rows(rows: jax.Array, count: jax.Array) -> jax.Array:
    """Zeroes all rows after the first `count`, because even with a weight of 0 a NaN there would spoil the sum."""
    return jnp.where(jax.lax.broadcasted_iota(jnp.int32, rows.shape, 0) < count, rows, jnp.zeros_like(rows))


def _bisect(limit: int, holds: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Returns the largest n <= `limit` with holds(n), or 0 if there is none, provided holds(m) for all 0 < m < n."""
    found = jnp.int32(0)
    for power in reversed(range(limit.bit_length())):
        candidate = found + (1 << power)
        found = jnp.where((candidate <= limit) & holds(candidate), candidate, found)
    return found
