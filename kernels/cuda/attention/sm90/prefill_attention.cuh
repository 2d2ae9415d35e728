// Paged attention of a step's tokens with wgmma, for any mix of prefill chunks and decodes.
//
// The step is split into tiles of consecutive tokens of one request. The rows of a tile's matrix are all query heads of
// a kv head for each token, at most 128. A tile attends to the keys from 0 to its last position in blocks of 128, the
// last block first. If that would take too long, the keys are split into parts (see prefill_parts.cuh). Each
// multiprocessor runs one persistent thread block, which takes (part of a tile, kv head) items from a counter, longest
// first:
//   warpgroup 0      one warp prefetches queries, keys and values with the bulk tensor copy engine; the others write
//                    zeros for padding tokens
//   warpgroups 1, 2  64 rows each: scores = Q K^T, softmax in registers, out += P V
// The two compute warpgroups take turns: while one computes its softmax, the matmuls of the other run. Within a
// warpgroup, the matmuls of block i + 1's scores and block i's values are in flight together (FlashAttention-3, arXiv
// 2407.08608).
//
// A cache in 8 bits: the warp prefetches keys and values as they are, and the others of its warpgroup convert them.
//
// Page contents beyond a request's keys are masked (keys) or overwritten with zeros (values), so NaN is harmless.
// Rows of a tile that are not queries are computed but not stored. If a tile has one token, these rows hold zeros or
// the data of an earlier tile, and all their weights are zero. Multiplying other requests' queries instead lowered the
// clock of a GPU that decodes at its power limit.
#pragma once
#include <type_traits>

#include "attention/prefill_parts.cuh"
#include "common/fp8_cache.cuh"
#include "common/sm90/ptx.cuh"
#include "common/sm90/wgmma_registers.cuh"

namespace meshserve {
namespace prefill {

constexpr int kThreads = 384, kComputeWarps = 8;
constexpr int kStages = 2;                                    // for keys and for values; more do not help
constexpr int kHalfBytes = 128 * 128;                         // 128 rows of 64 bf16
constexpr int kFetchRegisters = 40, kComputeRegisters = 232;  // registers per thread
constexpr int kRawStages = 3, kConvertWarps = 3;              // for keys or values in 8 bits
constexpr float kNoQuery = 1e30f;                             // maximum of rows that are not queries: weights become 0

template <int H, class C>
struct RawKeys {};
template <int H>
struct alignas(128) RawKeys<H, Fp8Cache> {  // keys and values in turn, as fetched
  uint8_t pipeline[kRawStages][kBlockKeys * H];
  uint64_t full[kRawStages], empty[kRawStages];
  bool is_end[kRawStages];  // nothing follows
};

template <int H, class C>
struct Memory {
  static constexpr int kOperandBytes = H / 64 * kHalfBytes;
  uint8_t q[kOperandBytes];  // each operand: halves of 64 columns, each 128 rows of 128 bytes, swizzled
  uint8_t k[kStages][kOperandBytes];
  uint8_t v[kStages][kOperandBytes];
  uint64_t q_full, q_empty;
  uint64_t k_full[kStages], k_empty[kStages], v_full[kStages], v_empty[kStages];
  Item item;
  bool is_last[2];  // whether this part is the tile's last, for each warpgroup's rows
  float2 row_scales[kTileRows];
  RawKeys<H, C> raw;
};

// A position in a pipeline of N stages.
template <int N>
struct Place {
  int stage = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == N) stage = 0, parity ^= 1;
  }
};

__device__ __forceinline__ void copy_queries(uint32_t to, const CUtensorMap* map, int half, int kv_head, int token,
                                             uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(to),
      "l"(map), "r"(barrier), "r"(0), "r"(half), "r"(0), "r"(kv_head), "r"(token)
      : "memory");
}
__device__ __forceinline__ void copy_page_part(uint32_t to, const CUtensorMap* map, int row, int half,
                                               uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(to),
      "l"(map), "r"(barrier), "r"(0), "r"(row), "r"(half)
      : "memory");
}

// A warpgroup passes barrier `number` when the other warpgroup has arrived at it.
__device__ __forceinline__ void wait_turn(int number) { sync_threads(number, 256); }
__device__ __forceinline__ void give_turn(int number) { arrive_threads(number, 256); }

// ---- the fetch warp ----------------------------------------------------------------------------------------------
template <int H, class C>
__device__ __forceinline__ void fetch(Memory<H, C>& memory, const CUtensorMap* queries, const CUtensorMap* lone_queries,
                                      const CUtensorMap* pages, const Args& args) {
  using M = Memory<H, C>;
  constexpr int kQueryHalves = H / 64, kHalves = C::kIsFp8 ? 1 : H / 64, kRowBytes = C::kIsFp8 ? H : 128;
  const int lane = threadIdx.x;
  // A lane copies one box of keys and one of values: half `my_half` of the tokens from `my_offset` on in each block.
  const int my_half = lane % kHalves, my_offset = lane / kHalves * args.box_tokens;
  const int box_bytes = args.box_tokens * kRowBytes, num_items = args.num_parts * args.kv_heads;
  const uint32_t my_bytes = my_half * kHalfBytes + my_offset * kRowBytes;
  const uint32_t q_full = shared_address(&memory.q_full), q_empty = shared_address(&memory.q_empty);
  Place<kStages> place;
  Place<kRawStages> raw;
  int item = blockIdx.x;
#pragma unroll 1
  for (int round = 0;; ++round) {
    const Part part = item < num_items ? load_part(args.parts, item / args.kv_heads) : Part{};
    const int kv_head = item % args.kv_heads;
    int least_key = 0, num_keys = 0;
    if (part.num_tokens > 0) {
      least_key = part.first_key_of(part.index);
      num_keys = min(part.num_keys(), part.first_key_of(part.index + 1));
    }
    barrier_wait(q_empty, (round & 1) ^ 1);
    if (lane == 0) {
      memory.item = Item{part.first_token,     part.num_tokens, part.first_position - least_key,
                         num_keys - least_key, kv_head,         part.index,
                         part.num_parts,       part.first_slot};
      if (part.num_tokens > 0) {
        const bool is_lone = part.num_tokens == 1;
        barrier_expect_bytes(q_full, kQueryHalves * (is_lone ? 1 : args.tile_tokens) * args.group * 128);
        for (int half = 0; half < kQueryHalves; ++half) {
          copy_queries(shared_address(memory.q) + half * kHalfBytes, is_lone ? lone_queries : queries, half, kv_head,
                       part.first_token, q_full);
        }
      } else {
        barrier_arrive(q_full);
      }
    }
    if (part.num_tokens == 0) {
      if constexpr (C::kIsFp8) {
        barrier_wait(shared_address(memory.raw.empty + raw.stage), raw.parity ^ 1);
        if (lane == 0) {
          memory.raw.is_end[raw.stage] = true;
          barrier_arrive(shared_address(memory.raw.full + raw.stage));
        }
      }
      return;
    }
    const int next = lane == 0 ? gridDim.x + atomicAdd(args.next_item, 1) : 0;
    const int* my_pages = args.page_table + static_cast<size_t>(part.request) * args.max_pages;
    int first_key = (num_keys - 1) / kBlockKeys * kBlockKeys;
    auto look_up_page = [&] {
      const int key = first_key + my_offset;
      return my_offset < kBlockKeys && key >= least_key && key < num_keys ? my_pages[key / args.page_size] : -1;
    };
    int page = look_up_page();
#pragma unroll 1
    while (first_key >= least_key) {
      const int current = page, offset = (first_key + my_offset) % args.page_size;
      const int row = ((current * args.kv_heads + kv_head) * 2) * args.page_size + offset;
      const int num_boxes = (min(kBlockKeys, num_keys - first_key) + args.box_tokens - 1) / args.box_tokens;
      const uint32_t num_bytes = num_boxes * kHalves * box_bytes;
      first_key -= kBlockKeys;
      page = look_up_page();  // the next block's, well before it is needed
#pragma unroll
      for (int operand = 0; operand < 2; ++operand) {
        uint32_t full, to;
        if constexpr (C::kIsFp8) {
          full = shared_address(memory.raw.full + raw.stage), to = shared_address(memory.raw.pipeline[raw.stage]);
          barrier_wait(shared_address(memory.raw.empty + raw.stage), raw.parity ^ 1);
          if (lane == 0) memory.raw.is_end[raw.stage] = false;
          raw.advance();
        } else {
          full = shared_address(operand == 0 ? memory.k_full : memory.v_full) + 8 * place.stage;
          to = shared_address(operand == 0 ? memory.k : memory.v) + place.stage * M::kOperandBytes;
          const uint32_t empty = shared_address(operand == 0 ? memory.k_empty : memory.v_empty) + 8 * place.stage;
          barrier_wait(empty, place.parity ^ 1);
        }
        if (lane == 0) barrier_expect_bytes(full, num_bytes);
        __syncwarp();
        if (current >= 0) copy_page_part(to + my_bytes, pages, row + operand * args.page_size, my_half, full);
      }
      place.advance();
    }
    item = __shfl_sync(0xffffffffu, next, 0);
  }
}

// ---- the three other warps of the fetch warpgroup ----------------------------------------------------------------
template <int H>
__device__ __forceinline__ void clear_padding(const Args& args) {
  const int warp = threadIdx.x / 32 - 1, lane = threadIdx.x % 32, row_elements = args.kv_heads * args.group * H;
  for (int token = blockIdx.x * 3 + warp; token < args.num_tokens; token += 3 * gridDim.x) {
    if (args.positions[token] >= 0) continue;
    uint4* row = reinterpret_cast<uint4*>(args.out + static_cast<size_t>(token) * row_elements);
    for (int i = lane; i < row_elements / 8; i += 32) row[i] = make_uint4(0, 0, 0, 0);
  }
}

// Converts keys and values, a block of keys and then of values, until `fetch` says that it ends.
template <int H>
__device__ __forceinline__ void convert(Memory<H, Fp8Cache>& memory) {
  const int thread = threadIdx.x - 32, lane = threadIdx.x % 32;
  Place<kRawStages> raw;
#pragma unroll 1
  for (Place<kStages> place;; place.advance()) {
#pragma unroll 1
    for (int operand = 0; operand < 2; ++operand, raw.advance()) {
      barrier_wait(shared_address(memory.raw.full + raw.stage), raw.parity);
      if (memory.raw.is_end[raw.stage]) return;
      const uint32_t to = shared_address(operand == 0 ? memory.k[place.stage] : memory.v[place.stage]);
      barrier_wait(shared_address((operand == 0 ? memory.k_empty : memory.v_empty) + place.stage), place.parity ^ 1);
      widen_tile<H>(shared_address(memory.raw.pipeline[raw.stage]), to, kBlockKeys, kHalfBytes, thread,
                    32 * kConvertWarps);
      fence_shared_before_copies();  // wgmma reads by the same proxy as copies
      __syncwarp();
      if (lane == 0) {
        barrier_arrive(shared_address((operand == 0 ? memory.k_full : memory.v_full) + place.stage));
        barrier_arrive(shared_address(memory.raw.empty + raw.stage));
      }
    }
  }
}

// ---- the two compute warpgroups ----------------------------------------------------------------------------------
// A lane's part of 64 rows: rows lane / 4 and lane / 4 + 8 of its warp's 16; of every 8 columns, 2 (lane % 4) and the
// next.
template <int H>
struct Rows {
  float out[H / 2];
  float scores[kBlockKeys / 2];
  uint32_t weights[kBlockKeys / 4];  // exp2(scores), in the layout of wgmma's left operand
  float largest[2], sum[2];          // statistics of unscaled scores; `sum` covers only this lane's columns
};

// Sets columns beyond the limit of a row, the last column that it sees, to -inf.
__device__ __forceinline__ void mask(float (&scores)[kBlockKeys / 2], int limit0, int limit1, int lane) {
#pragma unroll
  for (int i = 0; i < kBlockKeys / 2; ++i) {
    const int column = i / 4 * 8 + 2 * (lane % 4) + i % 2;
    if (column > (i % 4 < 2 ? limit0 : limit1)) scores[i] = -INFINITY;
  }
}

// Replaces scores by exp2((score - largest) scale); `shrink` is the factor for earlier sums. Only the first
// `num_active` of a lane's rows are processed, because the other rows of the warp are not queries.
template <int H>
__device__ __forceinline__ void soften(Rows<H>& rows, float (&shrink)[2], float scale_log2, int num_active) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (r >= num_active) continue;
    float largest = rows.largest[r];
#pragma unroll
    for (int i = 0; i < kBlockKeys / 2; i += 4) {
      largest = fmaxf(largest, fmaxf(rows.scores[i + 2 * r], rows.scores[i + 2 * r + 1]));
    }
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
    const float base = largest == -INFINITY ? 0.0f : largest * scale_log2;  // no position seen yet: avoid inf - inf
    shrink[r] = exp2_approximate(rows.largest[r] * scale_log2 - base);
    rows.largest[r] = largest;
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kBlockKeys / 2; i += 4) {
#pragma unroll
      for (int j = i + 2 * r; j < i + 2 * r + 2; ++j) {
        rows.scores[j] = exp2_approximate(fmaf(rows.scores[j], scale_log2, -base));
        sum += rows.scores[j];
      }
    }
    rows.sum[r] = rows.sum[r] * shrink[r] + sum;
  }
}

template <int H>
__device__ __forceinline__ void shrink_sums(Rows<H>& rows, const float (&shrink)[2], int num_active) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (r >= num_active) continue;
#pragma unroll
    for (int i = 2 * r; i < H / 2; i += 4) rows.out[i] *= shrink[r], rows.out[i + 1] *= shrink[r];
  }
}

template <int H>
__device__ __forceinline__ void pack_weights(Rows<H>& rows, int num_active) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (r >= num_active) continue;
#pragma unroll
    for (int i = r; i < kBlockKeys / 4; i += 2) rows.weights[i] = pack_bf16(rows.scores[2 * i], rows.scores[2 * i + 1]);
  }
}

// Starts scores[64, 128] = Q K^T.
template <int H>
__device__ __forceinline__ void begin_scores(Rows<H>& rows, uint32_t q, uint32_t k) {
  const uint64_t q_descriptor = tile_descriptor(q), k_descriptor = tile_descriptor(k);
#pragma unroll
  for (int i = 0; i < H / 16; ++i) {
    const uint32_t offset = i / 4 * kHalfBytes + i % 4 * 32;
    wgmma<kBlockKeys>(rows.scores, moved_on(q_descriptor, offset), moved_on(k_descriptor, offset), i > 0);
  }
  wgmma_commit();
}

// Starts out[64, H] += weights V.
template <int H>
__device__ __forceinline__ void begin_values(Rows<H>& rows, uint32_t v) {
  const uint64_t descriptor = values_descriptor(v, kHalfBytes);
#pragma unroll
  for (int i = 0; i < kBlockKeys / 16; ++i) {
    wgmma_registers<H>(rows.out, rows.weights + 4 * i, moved_on(descriptor, i * 2048));
  }
  wgmma_commit();
}

// Zeroes the values from row `first` on. Each of the two warpgroups does this for itself.
template <int H>
__device__ __forceinline__ void clear_values(uint32_t v, int first, int warpgroup) {
  for (int i = threadIdx.x % 128; i < (kBlockKeys - first) * (H / 8); i += 128) {
    const int row = first + i / (H / 8), chunk = i % (H / 8);
    store_shared(v + chunk / 8 * kHalfBytes + row * 128 + chunk % 8 * 16, make_uint4(0, 0, 0, 0));
  }
  fence_shared_before_copies();
  sync_threads(kClearBarrier + warpgroup, 128);
}

// Transposes a 4 x 4 matrix over four neighboring lanes: swaps r[j] of lane i with r[i] of lane j.
__device__ __forceinline__ void transpose_quad(uint32_t (&r)[4], int lane) {
#pragma unroll
  for (int step = 1; step <= 2; step *= 2) {
    const bool is_odd = lane & step;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & step) continue;
      const uint32_t received = __shfl_xor_sync(0xffffffffu, is_odd ? r[i] : r[i + step], step);
      (is_odd ? r[i] : r[i + step]) = received;
    }
  }
}

// Returns the sum over the lanes that share a row.
__device__ __forceinline__ float sum_over_quad(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

template <int H>
__device__ __forceinline__ void store_rows(Rows<H>& rows, const Item& item, int first_row, const Args& args) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float sum = sum_over_quad(rows.sum[r]);
    const float inverse = sum > 0.0f ? 1.0f / sum : 0.0f;
    const int row = first_row + 8 * r;
    const size_t query = query_of(item, row, args);
    if (args.sums != nullptr && lane % 4 == 0 && row < item.num_tokens * args.group) {
      store_sum(query, rows.largest[r], sum, args);
    }
#pragma unroll
    for (int c = 0; c < H / 32; ++c) {  // 32 columns: 4 lanes with 2 of each 8, then 4 lanes with 8 each
      uint32_t pairs[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* out = rows.out + (4 * c + i) * 4 + 2 * r;
        pairs[i] = pack_bf16(out[0] * inverse, out[1] * inverse);
      }
      transpose_quad(pairs, lane);
      if (row < item.num_tokens * args.group) {
        *reinterpret_cast<uint4*>(args.out + query * H + 32 * c + 8 * (lane % 4)) =
            make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
      }
    }
  }
}

// Stores the weighted sums of values, not yet divided by the sum of the weights.
template <int H>
__device__ __forceinline__ void store_unmerged(Rows<H>& rows, const Item& item, int first_row, const Args& args) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float sum = sum_over_quad(rows.sum[r]);
    const int row = first_row + 8 * r;
    if (row >= item.num_tokens * args.group) continue;
    float2* place = reinterpret_cast<float2*>(unmerged_row<H>(item, item.index, row, args));
#pragma unroll
    for (int i = 0; i < H / 8; ++i) {
      place[4 * i + lane % 4] = make_float2(rows.out[4 * i + 2 * r], rows.out[4 * i + 2 * r + 1]);
    }
    if (lane % 4 == 0) place[H / 2] = make_float2(rows.largest[r], sum);
  }
}

// The state of a compute warpgroup: its positions in the pipelines of keys and values, and its rows of a tile.
template <int H, class C>
struct Worker {
  Memory<H, C>& memory;
  const Args& args;
  const int warpgroup = threadIdx.x / 128 - 1, lane = threadIdx.x % 32;
  const int first_row = warpgroup * 64 + threadIdx.x % 128 / 32 * 16 + lane / 4;
  Place<kStages> keys, values;

  __device__ __forceinline__ Worker(Memory<H, C>& memory, const Args& args) : memory(memory), args(args) {}

  __device__ __forceinline__ uint32_t k_full() const { return shared_address(memory.k_full) + 8 * keys.stage; }
  __device__ __forceinline__ uint32_t v_full() const { return shared_address(memory.v_full) + 8 * values.stage; }
  __device__ __forceinline__ uint32_t k_now() const {
    return shared_address(memory.k) + keys.stage * Memory<H, C>::kOperandBytes;
  }
  __device__ __forceinline__ uint32_t v_now() const {
    return shared_address(memory.v) + values.stage * Memory<H, C>::kOperandBytes;
  }
  __device__ __forceinline__ void release(uint32_t barrier) const {
    if (lane == 0) barrier_arrive(barrier);
  }
  __device__ __forceinline__ void release_queries() const { release(shared_address(&memory.q_empty)); }
  __device__ __forceinline__ void release_keys() {
    release(shared_address(memory.k_empty) + 8 * keys.stage);
    keys.advance();
  }
  __device__ __forceinline__ void release_values() {
    release(shared_address(memory.v_empty) + 8 * values.stage);
    values.advance();
  }

  __device__ __forceinline__ void pass_by(const Item& item) {
    release_queries();
#pragma unroll 1
    for (int block = (item.num_keys - 1) / kBlockKeys; block >= 0; --block) {
      barrier_wait(k_full(), keys.parity);
      release_keys();
      barrier_wait(v_full(), values.parity);
      release_values();
    }
  }

  // kIsFew: the other warpgroup has no rows, and some warps of this one may have none.
  template <bool kIsFew>
  __device__ __forceinline__ void attend(const Item& item) {
    const int num_rows = item.num_tokens * args.group;
    const int num_active = kIsFew ? min(max((num_rows - (first_row - lane / 4) + 7) / 8, 0), 2) : 2;
    const uint32_t q = shared_address(memory.q) + warpgroup * 64 * 128;
    int block = (item.num_keys - 1) / kBlockKeys;
    Rows<H> rows;
#pragma unroll
    for (int i = 0; i < H / 2; ++i) rows.out[i] = 0.0f;
#pragma unroll
    for (int r = 0; r < 2; ++r) rows.largest[r] = first_row + 8 * r < num_rows ? -INFINITY : kNoQuery;
    rows.sum[0] = rows.sum[1] = 0.0f;
    if (kIsFew) {
#pragma unroll
      for (int i = 0; i < kBlockKeys / 4; ++i) rows.weights[i] = 0;
    }

    const int position0 = item.first_position + first_row / args.group;
    const int position1 = item.first_position + (first_row + 8) / args.group;
    auto mask_block = [&] { mask(rows.scores, position0 - block * kBlockKeys, position1 - block * kBlockKeys, lane); };
    auto sees_all = [&] { return (block + 1) * kBlockKeys <= item.first_position + 1; };
    float shrink[2];
    barrier_wait(k_full(), keys.parity);
    wgmma_begin();
    begin_scores(rows, q, k_now());
    wgmma_wait<0>();
    keep_in_place(rows.scores);
    release_keys();
    if (block == 0) release_queries();
    mask_block();
    soften(rows, shrink, args.scale_log2, num_active);
    pack_weights(rows, num_active);
    if (item.num_keys % kBlockKeys != 0) {
      barrier_wait(v_full(), values.parity);
      clear_values<H>(v_now(), item.num_keys % kBlockKeys, warpgroup);
    }

    auto step = [&](auto is_masked) {
      barrier_wait(k_full(), keys.parity);
      if (!kIsFew) wait_turn(kTurnBarrier + warpgroup);
      keep_in_place(rows.out);
      wgmma_begin();
      begin_scores(rows, q, k_now());
      barrier_wait(v_full(), values.parity);
      wgmma_begin();
      begin_values(rows, v_now());
      if (!kIsFew) give_turn(kTurnBarrier + (warpgroup ^ 1));
      wgmma_wait<1>();
      keep_in_place(rows.scores);
      release_keys();
      if (block == 0) release_queries();
      if (kIsFew ? !sees_all() : decltype(is_masked)::value) mask_block();
      soften(rows, shrink, args.scale_log2, num_active);
      wgmma_wait<0>();
      keep_in_place(rows.out);
      keep_in_place(rows.scores);
      release_values();
      shrink_sums(rows, shrink, num_active);
      pack_weights(rows, num_active);
    };
    --block;
    if (!kIsFew) {
#pragma unroll 1
      for (; block >= 0 && !sees_all(); --block) step(std::true_type());
    }
#pragma unroll 1
    for (; block >= 0; --block) step(std::false_type());

    barrier_wait(v_full(), values.parity);
    keep_in_place(rows.out);
    wgmma_begin();
    begin_values(rows, v_now());
    wgmma_wait<0>();
    keep_in_place(rows.out);
    release_values();
    if (item.num_parts == 1) {
      store_rows(rows, item, first_row, args);
    } else {
      store_unmerged(rows, item, first_row, args);
    }
  }
};

template <int H, class C>
__device__ __forceinline__ void compute(Memory<H, C>& memory, const Args& args) {
  Worker<H, C> worker(memory, args);
  const int warpgroup = worker.warpgroup;
  if (warpgroup == 1) give_turn(kTurnBarrier);  // the other warpgroup begins
#pragma unroll 1
  for (int round = 0;; ++round) {
    barrier_wait(shared_address(&memory.q_full), round & 1);
    const Item item = memory.item;
    __syncwarp();
    if (item.num_tokens == 0) return;
    const int num_rows = item.num_tokens * args.group;
    if (num_rows <= 64 * warpgroup) {
      worker.pass_by(item);
      continue;
    }
    if (num_rows <= 64) {
      worker.template attend<true>(item);
    } else {
      worker.template attend<false>(item);
    }
    if (item.num_parts > 1 && arrive(memory.is_last + warpgroup, item, warpgroup, args)) {
      merge_parts<H>(memory.row_scales, item, warpgroup, args);
    }
  }
}

// One thread block per multiprocessor.
template <int H, class C = Bf16Cache>
__global__ void __launch_bounds__(kThreads, 1)
    attention_kernel(const __grid_constant__ CUtensorMap queries, const __grid_constant__ CUtensorMap lone_queries,
                     const __grid_constant__ CUtensorMap pages, const __grid_constant__ Args args) {
  extern __shared__ __align__(1024) uint8_t raw[];
  auto& memory = *reinterpret_cast<Memory<H, C>*>(raw);
  if (threadIdx.x == 0) {
    prefetch_map(&queries);
    prefetch_map(&lone_queries);
    prefetch_map(&pages);
    barrier_init(shared_address(&memory.q_full), 1);
    barrier_init(shared_address(&memory.q_empty), kComputeWarps);
    for (int s = 0; s < kStages; ++s) {
      barrier_init(shared_address(memory.k_full + s), C::kIsFp8 ? kConvertWarps : 1);
      barrier_init(shared_address(memory.v_full + s), C::kIsFp8 ? kConvertWarps : 1);
      barrier_init(shared_address(memory.k_empty + s), kComputeWarps);
      barrier_init(shared_address(memory.v_empty + s), kComputeWarps);
    }
    if constexpr (C::kIsFp8) {
      for (int s = 0; s < kRawStages; ++s) {
        barrier_init(shared_address(memory.raw.full + s), 1);
        barrier_init(shared_address(memory.raw.empty + s), kConvertWarps);
      }
    }
    barrier_init_fence();
  }
  for (int i = threadIdx.x * 16; i < static_cast<int>(sizeof(memory.q)); i += kThreads * 16) {
    store_shared(shared_address(memory.q) + i, make_uint4(0, 0, 0, 0));
  }
  fence_shared_before_copies();
  __syncthreads();
  if (threadIdx.x < 128) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kFetchRegisters));
    if (threadIdx.x < 32) {
      fetch<H, C>(memory, &queries, &lone_queries, &pages, args);
    } else {
      clear_padding<H>(args);
      if constexpr (C::kIsFp8) convert<H>(memory);
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kComputeRegisters));
    compute<H, C>(memory, args);
  }
}

}  // namespace prefill
}  // namespace meshserve
