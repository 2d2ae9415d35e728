// Parts of a tile's keys, for prefill_attention.cuh. Each part stores its results for the tile's rows in memory, and
// the part that ends last merges them.
#pragma once
#include "common/ptx.cuh"

namespace meshserve {
namespace prefill {

constexpr int kTileRows = 128, kBlockKeys = 128;
constexpr int kTurnBarrier = 1, kClearBarrier = 3;  // each is the first of two barriers

// A tile and a part of its keys.
struct Part {
  int first_token;  // index in the step
  int num_tokens;   // 0: no tile
  int first_position;
  int request;
  int index, num_parts;
  int first_slot;  // first slot for the rows of the tile's parts; used if there are at least two parts
  int unused;
  __device__ __forceinline__ int num_keys() const { return first_position + num_tokens; }
  __device__ __forceinline__ int first_key_of(int part) const {
    const int num_blocks = (num_keys() + kBlockKeys - 1) / kBlockKeys;
    return part * num_blocks / num_parts * kBlockKeys;
  }
};
static_assert(sizeof(Part) == 2 * sizeof(int4), "a row of the table that tiles.py makes");

__device__ __forceinline__ Part load_part(const int4* parts, int index) {
  const int4 tile = parts[2 * index], part = parts[2 * index + 1];
  return Part{tile.x, tile.y, tile.z, tile.w, part.x, part.y, part.z, part.w};
}

// The description of a part for the compute warpgroups.
struct Item {
  int first_token, num_tokens;
  int first_position;  // relative to the part's first key
  int num_keys;        // in the part
  int kv_head;
  int index, num_parts, first_slot;
};

struct Args {
  const int4* parts;  // as Part: longest first, those without tokens last
  const int *page_table, *positions;
  bf16* out;         // [T, K, G, H]
  float* unmerged;   // [slots, K, slot_rows, H + 4]: each row's H elements, then its largest score and sum
  float* sums;       // [T, K, G]: log of each query's sum of exp(scaled scores); null if it is not wanted
  int* next_item;    // 0 at the start; supplies all items but the first of each thread block
  int* num_arrived;  // [slots, K, 2]: parts that have ended, per 64 rows of a tile; 0 at the start
  int num_tokens, num_parts, max_pages, page_size, kv_heads, group;
  int tile_tokens;        // kTileRows / group
  int slot_rows;          // min(tile_tokens, num_tokens) * group
  int box_tokens;         // tokens of a page that one copy fetches; divides page_size and kBlockKeys
  float scale_log2;       // softmax scale * log2(e)
  uint32_t page_inverse;  // 2^32 / page_size, rounded up; used by kernels that look up pages for groups of keys
  // Returns the page of a key, which is below 2^32 / page_size.
  __device__ __forceinline__ int page_of(int key) const { return __umulhi(key, page_inverse); }
};

__device__ __forceinline__ float exp2_approximate(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Returns the index in `out` of a row's query.
__device__ __forceinline__ size_t query_of(const Item& item, int row, const Args& args) {
  const int token = item.first_token + row / args.group;
  return (static_cast<size_t>(token) * args.kv_heads + item.kv_head) * args.group + row % args.group;
}

// Stores the logarithm of a query's sum of exp(scaled scores), given its largest score, before scaling, and its sum
// relative to that.
__device__ __forceinline__ void store_sum(size_t query, float largest, float sum, const Args& args) {
  constexpr float kLog2 = 0.6931471805599453f;
  args.sums[query] = kLog2 * (largest * args.scale_log2 + log2f(sum));
}

template <int H>
__device__ __forceinline__ float* unmerged_row(const Item& item, int index, int row, const Args& args) {
  const size_t slot = static_cast<size_t>(item.first_slot + index) * args.kv_heads + item.kv_head;
  return args.unmerged + (slot * args.slot_rows + row) * (H + 4);
}

// Returns whether this part is the last one for these rows to arrive; if so, the results of all parts can be read.
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

// Returns the largest score over all parts of a row, and 1 / its sum of weights.
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

// Merges a warpgroup's rows. A thread processes kChunks times 8 columns at a time, with the loads of kAhead parts in
// flight.
template <int H, int kChunks, int kAhead>
__device__ __forceinline__ void merge_rows(const float2* row_scales, const Item& item, int first_row, int num_rows,
                                           size_t stride, const Args& args) {
  const int num_chunks = num_rows * (H / 8);
#pragma unroll 1
  for (int first = threadIdx.x % 128; first < num_chunks; first += 128 * kChunks) {
    const float* stored[kChunks];
    float out[kChunks][8] = {};
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {  // beyond the last chunk, read the last one again
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

// Merges the stored results of all parts for a warpgroup's rows, in order, so that the bits do not depend on which part
// ends last.
template <int H>
__device__ __forceinline__ void merge_parts(float2* row_scales, const Item& item, int warpgroup, const Args& args) {
  const int first_row = 64 * warpgroup, num_rows = min(64, item.num_tokens * args.group - first_row);
  const size_t stride = static_cast<size_t>(args.kv_heads) * args.slot_rows * (H + 4);  // from one part to the next
  const int my_row = first_row + threadIdx.x % 128;
  if (my_row < first_row + num_rows) {
    const float2 scales = row_scales[my_row] = scales_of<H>(item, my_row, stride, args);
    if (args.sums != nullptr) store_sum(query_of(item, my_row, args), scales.x, 1.0f / scales.y, args);
  }
  sync_threads(kClearBarrier + warpgroup, 128);
  if (num_rows > 16) {
    merge_rows<H, 4, 1>(row_scales, item, first_row, num_rows, stride, args);
  } else {
    merge_rows<H, 1, 4>(row_scales, item, first_row, num_rows, stride, args);
  }
}

}  // namespace prefill
}  // namespace meshserve
