// Attention of a step's tokens over the pages of their requests, prefill chunks and decodes mixed, with wgmma.
//
// The step is cut into tiles: consecutive tokens of one request, with all query heads of a kv head as many rows of one
// matrix, 128 at most. A tile attends to the keys 0 .. its last position in blocks of 128, the last block first. Where
// that would keep others waiting, the blocks are cut into parts: each leaves its rows in memory, and the part that ends
// last puts all of them together. A block of threads stays on its multiprocessor and takes one (part of a tile, kv
// head) after the other from a counter, the longest first:
//   warpgroup 0      one warp fetches queries, keys and values by the bulk tensor copy engine, always ahead; the others
//                    put zeros where a token is padding
//   warpgroups 1, 2  64 rows each: scores = Q K^T, softmax in registers, out += P V
// While one of these two computes its softmax, the other's products run: they take turns. Within one, the products of
// block i + 1's scores and of block i's values are in flight together (FlashAttention-3, arXiv 2407.08608).
//
// What a page holds beyond a request's keys is masked (keys) or overwritten with zeros (values): NaN does no harm.
// Rows of a tile that are no query of it are computed and not stored. Where a tile has one token they hold zeros or what
// an earlier tile left, and their weights are zeros everywhere: multiplying others' queries instead took the clock of a
// GPU that decodes at its power limit.
#pragma once
#include <type_traits>

#include "ptx.cuh"
#include "wgmma_registers.cuh"

namespace meshserve {
namespace prefill {

constexpr int kTileRows = 128, kBlockKeys = 128;
constexpr int kThreads = 384, kComputeWarps = 8;
constexpr int kStages = 2;                                    // of keys and of values; more gain nothing
constexpr int kHalfBytes = 128 * 128;                         // 128 rows of 64 bf16
constexpr int kFetchRegisters = 40, kComputeRegisters = 232;  // of a thread
constexpr float kNoQuery = 1e30f;                             // a row's largest score, beside which others vanish
constexpr int kTurnBarrier = 1, kClearBarrier = 3;            // the first of two each

// A tile, and which part of its keys.
struct Part {
  int first_token;  // of the step
  int num_tokens;   // 0: no tile
  int first_position;
  int request;
  int index, num_parts;
  int first_slot;  // where the tile's parts leave their rows; there are at least two then
  int unused;
  __device__ __forceinline__ int num_keys() const { return first_position + num_tokens; }
  __device__ __forceinline__ int first_key_of(int part) const {
    const int num_blocks = (num_keys() + kBlockKeys - 1) / kBlockKeys;
    return part * num_blocks / num_parts * kBlockKeys;
  }
};
static_assert(sizeof(Part) == 2 * sizeof(int4), "a row of the table that tiles.py makes");

// What the warpgroups that compute know of a part.
struct Item {
  int first_token, num_tokens;
  int first_position;  // counted from the part's first key
  int num_keys;        // of the part
  int kv_head;
  int index, num_parts, first_slot;
};

struct Args {
  const int4* parts;  // Part: longest first, those without tokens last
  const int *page_table, *positions;
  bf16* out;         // [T, K, G, H]
  float* unmerged;   // [slots, K, slot_rows, H + 4]: rows of a part, then each row's largest score and sum
  int* next_item;    // 0 at the start; items beyond the first of each block of threads are taken from it
  int* num_arrived;  // [slots, K, 2]: parts of a tile's rows, 64 each, that have ended; 0 at the start
  int num_tokens, num_parts, max_pages, page_size, kv_heads, group;
  int tile_tokens;   // kTileRows / group
  int slot_rows;     // tile_tokens * group, or of all tokens if those are fewer
  int box_tokens;    // of a page, fetched by one copy: divides page_size and kBlockKeys
  float scale_log2;  // softmax scale * log2(e)
};

template <int H>
struct Memory {
  static constexpr int kOperandBytes = H / 64 * kHalfBytes;
  uint8_t q[kOperandBytes];  // each operand: halves of 64 columns, 128 rows of 128 bytes, swizzled
  uint8_t k[kStages][kOperandBytes];
  uint8_t v[kStages][kOperandBytes];
  uint64_t q_full, q_empty;
  uint64_t k_full[kStages], k_empty[kStages], v_full[kStages], v_empty[kStages];
  Item item;
  bool is_last[2];  // of a tile's parts, for each warpgroup's rows
  float2 row_scales[kTileRows];
};

// A place in a ring of stages.
struct Place {
  int stage = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
};

__device__ __forceinline__ float exp2_approximate(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

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

// A warpgroup passes `number` when the other has arrived at it.
__device__ __forceinline__ void wait_turn(int number) { asm volatile("bar.sync %0, 256;" ::"r"(number) : "memory"); }
__device__ __forceinline__ void give_turn(int number) { asm volatile("bar.arrive %0, 256;" ::"r"(number) : "memory"); }

__device__ __forceinline__ Part load_part(const int4* parts, int index) {
  const int4 tile = parts[2 * index], part = parts[2 * index + 1];
  return Part{tile.x, tile.y, tile.z, tile.w, part.x, part.y, part.z, part.w};
}

// ---- the warp that fetches ---------------------------------------------------------------------------------------
template <int H>
__device__ __forceinline__ void fetch(Memory<H>& memory, const CUtensorMap* queries, const CUtensorMap* lone_queries,
                                      const CUtensorMap* pages, const Args& args) {
  using M = Memory<H>;
  constexpr int kHalves = H / 64;
  const int lane = threadIdx.x;
  // A lane copies one box of keys and of values: half `my_half` of the tokens from `my_offset` on in each block.
  const int my_half = lane % kHalves, my_offset = lane / kHalves * args.box_tokens;
  const int box_bytes = args.box_tokens * 128, num_items = args.num_parts * args.kv_heads;
  const uint32_t my_bytes = my_half * kHalfBytes + my_offset * 128;
  const uint32_t q_full = shared_address(&memory.q_full), q_empty = shared_address(&memory.q_empty);
  Place place;
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
        barrier_expect_bytes(q_full, kHalves * (is_lone ? 1 : args.tile_tokens) * args.group * 128);
        for (int half = 0; half < kHalves; ++half) {
          copy_queries(shared_address(memory.q) + half * kHalfBytes, is_lone ? lone_queries : queries, half, kv_head,
                       part.first_token, q_full);
        }
      } else {
        barrier_arrive(q_full);
      }
    }
    if (part.num_tokens == 0) return;
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
      page = look_up_page();  // of the next block, long before it is needed
#pragma unroll
      for (int operand = 0; operand < 2; ++operand) {
        const uint32_t full = shared_address(operand == 0 ? memory.k_full : memory.v_full) + 8 * place.stage;
        const uint32_t empty = shared_address(operand == 0 ? memory.k_empty : memory.v_empty) + 8 * place.stage;
        const uint32_t to = shared_address(operand == 0 ? memory.k : memory.v) + place.stage * M::kOperandBytes;
        barrier_wait(empty, place.parity ^ 1);
        if (lane == 0) barrier_expect_bytes(full, num_bytes);
        __syncwarp();
        if (current >= 0) copy_page_part(to + my_bytes, pages, row + operand * args.page_size, my_half, full);
      }
      place.advance();
    }
    item = __shfl_sync(0xffffffffu, next, 0);
  }
}

// ---- the three other warps of its warpgroup ----------------------------------------------------------------------
template <int H>
__device__ __forceinline__ void clear_padding(const Args& args) {
  const int warp = threadIdx.x / 32 - 1, lane = threadIdx.x % 32, row_elements = args.kv_heads * args.group * H;
  for (int token = blockIdx.x * 3 + warp; token < args.num_tokens; token += 3 * gridDim.x) {
    if (args.positions[token] >= 0) continue;
    uint4* row = reinterpret_cast<uint4*>(args.out + static_cast<size_t>(token) * row_elements);
    for (int i = lane; i < row_elements / 8; i += 32) row[i] = make_uint4(0, 0, 0, 0);
  }
}

// ---- the two warpgroups that compute -----------------------------------------------------------------------------
// A lane's part of 64 rows: two rows, lane / 4 and 8 below it in its warp's 16; of 8 columns, 2 (lane % 4) and one on.
template <int H>
struct Rows {
  float out[H / 2];
  float scores[kBlockKeys / 2];
  uint32_t weights[kBlockKeys / 4];  // exp2(scores), as wgmma takes its left operand
  float largest[2], sum[2];          // of unscaled scores; `sum` over this lane's columns alone
};

// Columns beyond `limit`, the last one that a row sees, become -inf.
__device__ __forceinline__ void mask(float (&scores)[kBlockKeys / 2], int limit0, int limit1, int lane) {
#pragma unroll
  for (int i = 0; i < kBlockKeys / 2; ++i) {
    const int column = i / 4 * 8 + 2 * (lane % 4) + i % 2;
    if (column > (i % 4 < 2 ? limit0 : limit1)) scores[i] = -INFINITY;
  }
}

// Scores become exp2((score - largest) scale); `shrink` is what that does to earlier sums.
template <int H>
__device__ __forceinline__ void soften(Rows<H>& rows, float (&shrink)[2], float scale_log2) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float largest = rows.largest[r];
#pragma unroll
    for (int i = 0; i < kBlockKeys / 2; i += 4) {
      largest = fmaxf(largest, fmaxf(rows.scores[i + 2 * r], rows.scores[i + 2 * r + 1]));
    }
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
    const float base = largest == -INFINITY ? 0.0f : largest * scale_log2;  // nothing seen yet: no inf - inf
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
__device__ __forceinline__ void pack_weights(Rows<H>& rows) {
#pragma unroll
  for (int i = 0; i < kBlockKeys / 4; ++i) rows.weights[i] = pack_bf16(rows.scores[2 * i], rows.scores[2 * i + 1]);
}

// scores[64, 128] = Q K^T, unfinished.
template <int H>
__device__ __forceinline__ void begin_scores(Rows<H>& rows, uint32_t q, uint32_t k) {
#pragma unroll
  for (int i = 0; i < H / 16; ++i) {
    const uint32_t offset = i / 4 * kHalfBytes + i % 4 * 32;
    wgmma<kBlockKeys>(rows.scores, tile_descriptor(q + offset), tile_descriptor(k + offset), i > 0);
  }
  wgmma_commit();
}

// out[64, H] += weights V, unfinished.
template <int H>
__device__ __forceinline__ void begin_values(Rows<H>& rows, uint32_t v) {
#pragma unroll
  for (int i = 0; i < kBlockKeys / 16; ++i) {
    wgmma_registers<H>(rows.out, rows.weights + 4 * i, values_descriptor(v + i * 2048, kHalfBytes));
  }
  wgmma_commit();
}

// Zeros for the values from row `first` on. By each of the two warpgroups for itself.
template <int H>
__device__ __forceinline__ void clear_values(uint32_t v, int first, int warpgroup) {
  for (int i = threadIdx.x % 128; i < (kBlockKeys - first) * (H / 8); i += 128) {
    const int row = first + i / (H / 8), chunk = i % (H / 8);
    store_shared(v + chunk / 8 * kHalfBytes + row * 128 + chunk % 8 * 16, make_uint4(0, 0, 0, 0));
  }
  fence_shared_before_copies();
  sync_threads(kClearBarrier + warpgroup, 128);
}

// r[j] of lane i and r[i] of lane j change places, among four neighbouring lanes.
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

// Over the lanes that share a row.
__device__ __forceinline__ float sum_over_quad(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// Of `out`, where a row's result goes.
__device__ __forceinline__ size_t query_of(const Item& item, int row, const Args& args) {
  const int token = item.first_token + row / args.group;
  return (static_cast<size_t>(token) * args.kv_heads + item.kv_head) * args.group + row % args.group;
}

template <int H>
__device__ __forceinline__ void store_rows(Rows<H>& rows, const Item& item, int first_row,
                                           const Args& args) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float sum = sum_over_quad(rows.sum[r]);
    const float inverse = sum > 0.0f ? 1.0f / sum : 0.0f;
    const int row = first_row + 8 * r;
    const size_t query = query_of(item, row, args);
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

template <int H>
__device__ __forceinline__ float* unmerged_row(const Item& item, int index, int row, const Args& args) {
  const size_t slot = static_cast<size_t>(item.first_slot + index) * args.kv_heads + item.kv_head;
  return args.unmerged + (slot * args.slot_rows + row) * (H + 4);
}

// As they are: weighted sums of values, not yet divided by the sum of the weights.
template <int H>
__device__ __forceinline__ void store_unmerged(Rows<H>& rows, const Item& item, int first_row,
                                               const Args& args) {
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

// Whether this part of the tile's rows is the last to get here; then what the others have stored can be read.
__device__ __forceinline__ bool arrive(bool* is_last, const Item& item, int warpgroup, const Args& args) {
  __threadfence();
  sync_threads(kClearBarrier + warpgroup, 128);
  if (threadIdx.x % 128 == 0) {
    int* num_arrived = args.num_arrived + (item.first_slot * args.kv_heads + item.kv_head) * 2 + warpgroup;
    *is_last = atomicAdd(num_arrived, 1) == item.num_parts - 1;
    __threadfence();
  }
  sync_threads(kClearBarrier + warpgroup, 128);
  return *is_last;
}

// Of a row whose parts are being merged: its largest score of all parts, and one over its sum of weights.
template <int H>
__device__ __forceinline__ float2 scales_of(const Item& item, int row, size_t stride, const Args& args) {
  const float* stored = unmerged_row<H>(item, 0, row, args) + H;
  float largest = -INFINITY, sum = 0.0f;
#pragma unroll 4
  for (int p = 0; p < item.num_parts; ++p) largest = fmaxf(largest, __ldcg(stored + p * stride));
#pragma unroll 4
  for (int p = 0; p < item.num_parts; ++p) {
    const float2 part = __ldcg(reinterpret_cast<const float2*>(stored + p * stride));
    sum = fmaf(part.y, exp2_approximate((part.x - largest) * args.scale_log2), sum);
  }
  return make_float2(largest, 1.0f / sum);
}

// The results of a warpgroup's rows, a thread with kChunks times 8 columns at a time and kAhead parts of them in flight.
template <int H, int kChunks, int kAhead>
__device__ __forceinline__ void merge_rows(const float2* row_scales, const Item& item, int first_row, int num_rows,
                                           size_t stride, const Args& args) {
  const int num_chunks = num_rows * (H / 8);
#pragma unroll 1
  for (int first = threadIdx.x % 128; first < num_chunks; first += 128 * kChunks) {
    const float* stored[kChunks];
    float out[kChunks][8] = {};
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {  // beyond the rows: the last one's again
      stored[c] = unmerged_row<H>(item, 0, first_row + min(first + 128 * c, num_chunks - 1) / (H / 8), args);
    }
    const int column = first % (H / 8) * 8;
#pragma unroll kAhead
    for (int p = 0; p < item.num_parts; ++p) {
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        const float largest = __ldcg(stored[c] + p * stride + H);
        const float4 low = __ldcg(reinterpret_cast<const float4*>(stored[c] + p * stride + column));
        const float4 high = __ldcg(reinterpret_cast<const float4*>(stored[c] + p * stride + column + 4));
        const int row = first_row + min(first + 128 * c, num_chunks - 1) / (H / 8);
        const float shrink = exp2_approximate((largest - row_scales[row].x) * args.scale_log2);
        const float values[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
        for (int j = 0; j < 8; ++j) out[c][j] = fmaf(values[j], shrink, out[c][j]);
      }
    }
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      if (first + 128 * c >= num_chunks) break;
      const int row = first_row + (first + 128 * c) / (H / 8);
      const float inverse = row_scales[row].y;
      uint4 packed;
      uint32_t* words = &packed.x;
#pragma unroll
      for (int j = 0; j < 4; ++j) words[j] = pack_bf16(out[c][2 * j] * inverse, out[c][2 * j + 1] * inverse);
      *reinterpret_cast<uint4*>(args.out + query_of(item, row, args) * H + column) = packed;
    }
  }
}

// The result of a warpgroup's rows from what all parts have stored, in the order of the parts: the same whoever is last.
template <int H>
__device__ __forceinline__ void merge_parts(float2* row_scales, const Item& item, int warpgroup, const Args& args) {
  const int first_row = 64 * warpgroup, num_rows = min(64, item.num_tokens * args.group - first_row);
  const size_t stride = static_cast<size_t>(args.kv_heads) * args.slot_rows * (H + 4);  // from part to part
  const int my_row = first_row + threadIdx.x % 128;
  if (my_row < first_row + num_rows) row_scales[my_row] = scales_of<H>(item, my_row, stride, args);
  sync_threads(kClearBarrier + warpgroup, 128);
  if (num_rows > 16) {
    merge_rows<H, 4, 1>(row_scales, item, first_row, num_rows, stride, args);
  } else {
    merge_rows<H, 1, 4>(row_scales, item, first_row, num_rows, stride, args);
  }
}

template <int H>
__device__ __forceinline__ void compute(Memory<H>& memory, const Args& args) {
  using M = Memory<H>;
  const int warpgroup = threadIdx.x / 128 - 1, lane = threadIdx.x % 32;
  const int first_row = warpgroup * 64 + threadIdx.x % 128 / 32 * 16 + lane / 4;
  const uint32_t q = shared_address(memory.q) + warpgroup * 64 * 128;
  const uint32_t q_full = shared_address(&memory.q_full), q_empty = shared_address(&memory.q_empty);
  auto release = [&](uint32_t barrier) {
    if (lane == 0) barrier_arrive(barrier);
  };
  Place keys, values;
  auto k_full = [&] { return shared_address(memory.k_full) + 8 * keys.stage; };
  auto v_full = [&] { return shared_address(memory.v_full) + 8 * values.stage; };
  auto k_now = [&] { return shared_address(memory.k) + keys.stage * M::kOperandBytes; };
  auto v_now = [&] { return shared_address(memory.v) + values.stage * M::kOperandBytes; };
  auto release_keys = [&] {
    release(shared_address(memory.k_empty) + 8 * keys.stage);
    keys.advance();
  };
  auto release_values = [&] {
    release(shared_address(memory.v_empty) + 8 * values.stage);
    values.advance();
  };
  if (warpgroup == 1) give_turn(kTurnBarrier);  // the other one begins

#pragma unroll 1
  for (int round = 0;; ++round) {
    barrier_wait(q_full, round & 1);
    const Item item = memory.item;
    __syncwarp();
    if (item.num_tokens == 0) return;
    const int num_rows = item.num_tokens * args.group;
    const bool takes_turns = num_rows > 64;
    int block = (item.num_keys - 1) / kBlockKeys;
    if (num_rows <= 64 * warpgroup) {  // few rows, which the other warpgroup has
      release(q_empty);
#pragma unroll 1
      for (; block >= 0; --block) {
        barrier_wait(k_full(), keys.parity);
        release_keys();
        barrier_wait(v_full(), values.parity);
        release_values();
      }
      continue;
    }

    Rows<H> rows;
#pragma unroll
    for (int i = 0; i < H / 2; ++i) rows.out[i] = 0.0f;
#pragma unroll
    for (int r = 0; r < 2; ++r) rows.largest[r] = first_row + 8 * r < num_rows ? -INFINITY : kNoQuery;
    rows.sum[0] = rows.sum[1] = 0.0f;

    const int position0 = item.first_position + first_row / args.group;
    const int position1 = item.first_position + (first_row + 8) / args.group;
    float shrink[2];
    barrier_wait(k_full(), keys.parity);
    wgmma_begin();
    begin_scores(rows, q, k_now());
    wgmma_wait<0>();
    keep_in_place(rows.scores);
    release_keys();
    if (block == 0) release(q_empty);
    mask(rows.scores, position0 - block * kBlockKeys, position1 - block * kBlockKeys, lane);
    soften(rows, shrink, args.scale_log2);
    pack_weights(rows);
    if (item.num_keys % kBlockKeys != 0) {
      barrier_wait(v_full(), values.parity);
      clear_values<H>(v_now(), item.num_keys % kBlockKeys, warpgroup);
    }

    auto step = [&](auto is_masked) {
      barrier_wait(k_full(), keys.parity);
      if (takes_turns) wait_turn(kTurnBarrier + warpgroup);
      keep_in_place(rows.out);
      wgmma_begin();
      begin_scores(rows, q, k_now());
      barrier_wait(v_full(), values.parity);
      wgmma_begin();
      begin_values(rows, v_now());
      if (takes_turns) give_turn(kTurnBarrier + (warpgroup ^ 1));
      wgmma_wait<1>();
      keep_in_place(rows.scores);
      release_keys();
      if (block == 0) release(q_empty);
      if constexpr (decltype(is_masked)::value) {
        mask(rows.scores, position0 - block * kBlockKeys, position1 - block * kBlockKeys, lane);
      }
      soften(rows, shrink, args.scale_log2);
      wgmma_wait<0>();
      keep_in_place(rows.out);
      keep_in_place(rows.scores);
      release_values();
#pragma unroll
      for (int i = 0; i < H / 2; ++i) rows.out[i] *= shrink[i % 4 / 2];
      pack_weights(rows);
    };
    --block;
#pragma unroll 1
    for (; block >= 0 && (block + 1) * kBlockKeys > item.first_position + 1; --block) step(std::true_type());
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
      if (arrive(memory.is_last + warpgroup, item, warpgroup, args)) {
        merge_parts<H>(memory.row_scales, item, warpgroup, args);
      }
    }
  }
}

// One block of threads a multiprocessor.
template <int H>
__global__ void __launch_bounds__(kThreads, 1)
    attention_kernel(const __grid_constant__ CUtensorMap queries, const __grid_constant__ CUtensorMap lone_queries,
                     const __grid_constant__ CUtensorMap pages, const __grid_constant__ Args args) {
  extern __shared__ __align__(1024) uint8_t raw[];
  auto& memory = *reinterpret_cast<Memory<H>*>(raw);
  if (threadIdx.x == 0) {
    prefetch_map(&queries);
    prefetch_map(&lone_queries);
    prefetch_map(&pages);
    barrier_init(shared_address(&memory.q_full), 1);
    barrier_init(shared_address(&memory.q_empty), kComputeWarps);
    for (int s = 0; s < kStages; ++s) {
      barrier_init(shared_address(memory.k_full + s), 1);
      barrier_init(shared_address(memory.v_full + s), 1);
      barrier_init(shared_address(memory.k_empty + s), kComputeWarps);
      barrier_init(shared_address(memory.v_empty + s), kComputeWarps);
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
      fetch<H>(memory, &queries, &lone_queries, &pages, args);
    } else {
      clear_padding<H>(args);
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kComputeRegisters));
    compute<H>(memory, args);
  }
}

}  // namespace prefill
}  // namespace meshserve
