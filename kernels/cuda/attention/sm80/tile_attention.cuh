// Paged attention of a step's tokens for all GPUs since Ampere, for any mix of prefill chunks and decodes.
//
// The step is split into tiles of consecutive tokens of one request, and the keys of long contexts into parts
// (prefill_parts.cuh). The rows of a tile's matrix are all query heads of a kv head for each token. A block of four
// warps computes one tile's part for one kv head: it copies keys and values to shared memory ahead of their use, a
// block of keys and its block of values in turn, and multiplies with the matrix instructions of a warp (FlashAttention
// 2, arXiv 2307.08691). There are two forms:
//   few rows    all four warps have the same 16 rows, and each a quarter of the keys; at the end they merge their
//               results. Many copies are in flight, because memory is the limit.
//   many rows   each warp has 32 of 128 rows and all keys.
//
// Keys and values in 8 bits are converted when they are read from shared memory. A word of four numbers then holds
// other columns than the matrix instructions expect of a lane. For the scores, the queries are stored in the same
// order; for the result, the columns are put in order when it is stored.
//
// Rows of keys and values beyond the end of a part are zeros in shared memory, so NaN in unused pages is harmless.
#pragma once
#include <type_traits>

#include "attention/prefill_parts.cuh"
#include "common/fp8_cache.cuh"

namespace meshserve {
namespace portable {

using prefill::Args;
using prefill::exp2_approximate;
using prefill::Item;
using prefill::Part;

constexpr int kWarps = 4, kThreads = 32 * kWarps;
constexpr int kPageRows = 16;  // consecutive keys that always lie in one page

// kRowWarps warps share the rows of a tile, the others its keys. A warp has kRowTiles times 16 rows. kSlots blocks of
// keys or of values are in shared memory.
template <int H_, class C_, int kRowWarps_, int kRowTiles_, int kKeys_, int kSlots_>
struct Form {
  using C = C_;
  static constexpr int H = H_, kRowWarps = kRowWarps_, kRowTiles = kRowTiles_, kKeys = kKeys_, kSlots = kSlots_;
  static constexpr int kKeyWarps = kWarps / kRowWarps, kRows = 16 * kRowTiles * kRowWarps,
                       kWarpKeys = kKeys / kKeyWarps;
  static constexpr int kRowBytes = H * sizeof(typename C::Element), kSlotBytes = kKeys * kRowBytes;
  static constexpr int kQueryBytes = kRows * H * 2;
  static constexpr bool kSharesRows = kKeyWarps > 1;
};

template <int H, class C>
using FewRows = Form<H, C, 1, 1, 64, 5>;
template <int H, class C, int kKeys>
using ManyRows = Form<H, C, 4, 2, kKeys, 2>;

template <class F>
struct Memory {
  uint8_t q[F::kQueryBytes];
  uint8_t slots[F::kSlots][F::kSlotBytes];
  float2 row_scales[prefill::kTileRows];
  bool is_last;
};

// What the warps of few rows leave for each other, in place of keys and values that are no longer needed.
template <int H>
struct WarpResult {
  float out[16][H + 4];
  float largest[16], sum[16];
};

// Returns where 16 bytes of a row are in shared memory: in another order in each row, so that the matrix loads of a
// warp, which read the same columns of 8 rows, find them in different banks. For an even number of 16 bytes that are
// added to `chunk`, the address of chunk 0 or 1 is xored with their bytes: a tile begins at a multiple of its rows.
template <int kRowBytes>
__device__ __forceinline__ uint32_t place_of(int row, int chunk) {
  const int order = kRowBytes >= 128 ? row % 8 : row / 2 % 4;
  return row * kRowBytes + ((chunk ^ order) * 16);
}

// Puts 16 columns in the order in which 8-bit keys are converted (convert_e4m3): 0, 2, 4, 6, 8, .. as the first of two
// steps' operands, 1, 3, 5, .. as the second.
__device__ __forceinline__ void interleave(uint4& low, uint4& high) {
  const uint32_t words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
  uint32_t even[4], odd[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    even[i] = __byte_perm(words[2 * i], words[2 * i + 1], 0x5410);
    odd[i] = __byte_perm(words[2 * i], words[2 * i + 1], 0x7632);
  }
  low = make_uint4(even[0], even[1], even[2], even[3]);
  high = make_uint4(odd[0], odd[1], odd[2], odd[3]);
}

// Copies the tile's queries to shared memory; rows without a query are zero.
template <class F>
__device__ __forceinline__ void load_queries(uint32_t q, const bf16* queries, const Item& item, const Args& args) {
  constexpr int kPairs = F::H / 16;
  const int num_rows = item.num_tokens * args.group;
#pragma unroll 4
  for (int i = threadIdx.x; i < F::kRows * kPairs; i += kThreads) {
    const int row = i / kPairs, pair = i % kPairs;
    uint4 low = make_uint4(0, 0, 0, 0), high = low;
    if (row < num_rows) {
      const uint4* from =
          reinterpret_cast<const uint4*>(queries + prefill::query_of(item, row, args) * F::H) + 2 * pair;
      low = from[0], high = from[1];
      if (F::C::kIsFp8) interleave(low, high);
    }
    store_shared(q + place_of<2 * F::H>(row, 2 * pair), low);
    store_shared(q + place_of<2 * F::H>(row, 2 * pair + 1), high);
  }
}

// Copies blocks of keys and values of a part to shared memory, in turn and in order. A thread copies 16 bytes of every
// kRowsEach-th row.
template <class F>
class Copier {
 public:
  __device__ __forceinline__ Copier(uint32_t slots, const void* pages, const Part& part, int first_key,
                                    const Item& item, const Args& args)
      : to_(slots + place_of<F::kRowBytes>(my_row(), my_chunk())),
        pages_(static_cast<const uint8_t*>(pages) + my_row() % kPageRows * F::kRowBytes + 16 * my_chunk()),
        table_(args.page_table + static_cast<size_t>(part.request) * args.max_pages),
        first_key_(first_key),
        item_(item),
        args_(args) {
    look_up();
  }
  // Begins the next copy, if there is one, as a group of copies: that of a block's keys, or of its values.
  template <bool kIsValues>
  __device__ __forceinline__ void next() {
    if (block_key_ < item_.num_keys) {
      // Of this thread's first row and those behind it.
      const int num_rows = item_.num_keys - block_key_ - my_row();
      if (num_rows > F::kKeys - kRowsEach) {
        copy<kIsValues>([](int) { return true; });
      } else {
        copy<kIsValues>([&](int row) { return row < num_rows; });
      }
      if (++slot_ == F::kSlots) slot_ = 0;
      if (kIsValues) {
        block_key_ += F::kKeys;
        look_up();
      }
    }
    commit_copies();
  }

 private:
  static constexpr int kChunks = F::kRowBytes / 16, kRowsEach = kThreads / kChunks;
  static constexpr int kGroupRows = kRowsEach < kPageRows ? kPageRows : kRowsEach;  // that a thread finds with one look
  static constexpr int kGroups = F::kKeys / kGroupRows;
  static_assert(kRowsEach <= F::kKeys && kRowsEach % 8 == 0, "the order of a row's bytes is the same in each round");
  static __device__ __forceinline__ int my_row() { return threadIdx.x / kChunks; }
  static __device__ __forceinline__ int my_chunk() { return threadIdx.x % kChunks; }

  template <bool kIsValues, class IsKey>
  __device__ __forceinline__ void copy(IsKey is_key) {
    constexpr int kRoundsEach = kGroupRows / kRowsEach;
    const uint32_t to = to_ + slot_ * F::kSlotBytes;
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      const uint8_t* from = places_[group] + (kIsValues ? static_cast<size_t>(args_.page_size) * F::kRowBytes : 0);
#pragma unroll
      for (int i = 0; i < kRoundsEach; ++i) {
        const int row = group * kGroupRows + i * kRowsEach;
        const bool is_copied = is_key(row);
        copy_16(to + row * F::kRowBytes, is_copied ? from + i * kRowsEach * F::kRowBytes : pages_, is_copied ? 16 : 0);
      }
    }
  }

  // Finds the next block's keys in the pages, well before they are needed.
  __device__ __forceinline__ void look_up() {
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      const int group = block_key_ + i * kGroupRows + my_row() / kPageRows * kPageRows;
      if (group >= item_.num_keys) break;
      const int key = first_key_ + group, page = args_.page_of(key);
      const size_t row = (static_cast<size_t>(table_[page]) * args_.kv_heads + item_.kv_head) * 2 * args_.page_size +
                         (key - page * args_.page_size);
      places_[i] = pages_ + row * F::kRowBytes;
    }
  }

  const uint32_t to_;
  const uint8_t* const pages_;
  const int* const table_;
  const int first_key_;
  const Item& item_;
  const Args& args_;
  int block_key_ = 0, slot_ = 0;  // of the next copy
  const uint8_t* places_[kGroups] = {};
};

// The rows of a warp: 16 * kRowTiles of them, of which a lane holds two of each 16.
template <class F>
struct Rows {
  static constexpr int kColumns = F::H / 8;
  float out[F::kRowTiles][kColumns][4];
  float scores[F::kRowTiles][F::kWarpKeys / 8][4];
  float largest[F::kRowTiles][2], sum[F::kRowTiles][2];
};

// scores = q k^T for the warp's rows, from `q`, and its keys, from `keys`.
template <class F>
__device__ __forceinline__ void compute_scores(Rows<F>& rows, uint32_t q, uint32_t keys, int lane) {
  constexpr int kSteps = F::C::kIsFp8 ? 2 : 1;  // of 16 columns, for which a matrix load has keys
#pragma unroll
  for (int t = 0; t < F::kRowTiles; ++t) {
#pragma unroll
    for (int n = 0; n < F::kWarpKeys / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) rows.scores[t][n][i] = 0.0f;
    }
  }
  const uint32_t my_q = q + place_of<2 * F::H>(lane % 16, lane / 16);
  const uint32_t my_keys = keys + place_of<F::kRowBytes>(lane / 16 * 8 + lane % 8, lane / 8 % 2);
#pragma unroll
  for (int step = 0; step < F::H / 16; step += kSteps) {
    uint32_t a[kSteps][F::kRowTiles][4];
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
#pragma unroll
      for (int t = 0; t < F::kRowTiles; ++t) {
        load_matrices(a[s][t], (my_q ^ (32 * (step + s))) + 16 * t * 2 * F::H);
      }
    }
#pragma unroll
    for (int n = 0; n < F::kWarpKeys / 16; ++n) {
      uint32_t b[4];
      load_matrices(b, (my_keys ^ (F::C::kIsFp8 ? 16 * step : 32 * step)) + 16 * n * F::kRowBytes);
      if constexpr (F::C::kIsFp8) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {  // 8 keys, and 16 columns
          uint32_t even, odd;
          convert_e4m3(b[i], even, odd);
#pragma unroll
          for (int t = 0; t < F::kRowTiles; ++t) {
            multiply_16x8x16(rows.scores[t][2 * n + i / 2], a[i % 2][t], even, odd);
          }
        }
      } else {
#pragma unroll
        for (int t = 0; t < F::kRowTiles; ++t) {
          multiply_16x8x16(rows.scores[t][2 * n], a[0][t], b[0], b[1]);
          multiply_16x8x16(rows.scores[t][2 * n + 1], a[0][t], b[2], b[3]);
        }
      }
    }
  }
}

// Hides keys behind a row's position. `first_key` is the first of the warp's keys, counted as positions are.
template <class F>
__device__ __forceinline__ void mask(Rows<F>& rows, int first_row, int first_key, const Item& item, const Args& args,
                                     int lane) {
#pragma unroll
  for (int t = 0; t < F::kRowTiles; ++t) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int position = item.first_position + (first_row + 16 * t + 8 * r + lane / 4) / args.group;
      const int last = min(position, item.num_keys - 1) - first_key - lane % 4 * 2;
#pragma unroll
      for (int n = 0; n < F::kWarpKeys / 8; ++n) {
        if (8 * n > last) rows.scores[t][n][2 * r] = -INFINITY;
        if (8 * n + 1 > last) rows.scores[t][n][2 * r + 1] = -INFINITY;
      }
    }
  }
}

// Returns the largest value, or the sum, of the four lanes that hold a row.
__device__ __forceinline__ float largest_of_row(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}
__device__ __forceinline__ float sum_of_row(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// Turns scores into weights relative to `largest`, a score of the row. It is replaced by the largest score so far, and
// earlier results are shrunk to that, only when one is 2^kMostLog2 times as heavy: most blocks of keys leave it.
template <class F>
__device__ __forceinline__ void soften(Rows<F>& rows, float scale_log2) {
  constexpr float kMostLog2 = 8.0f;
  float largest[F::kRowTiles][2];
  bool is_larger = false;
#pragma unroll
  for (int t = 0; t < F::kRowTiles; ++t) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float& most = largest[t][r] = -INFINITY;
#pragma unroll
      for (int n = 0; n < F::kWarpKeys / 8; ++n) {
        most = fmaxf(most, fmaxf(rows.scores[t][n][2 * r], rows.scores[t][n][2 * r + 1]));
      }
      most = largest_of_row(most);
      is_larger = is_larger || (most - rows.largest[t][r]) * scale_log2 > kMostLog2;
    }
  }
  if (!__all_sync(0xffffffffu, !is_larger)) {
#pragma unroll
    for (int t = 0; t < F::kRowTiles; ++t) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float most = fmaxf(largest[t][r], rows.largest[t][r]);
        const float shrink = most == -INFINITY ? 0.0f : exp2_approximate((rows.largest[t][r] - most) * scale_log2);
        rows.largest[t][r] = most;
        rows.sum[t][r] *= shrink;
#pragma unroll
        for (int c = 0; c < Rows<F>::kColumns; ++c) {
          rows.out[t][c][2 * r] *= shrink;
          rows.out[t][c][2 * r + 1] *= shrink;
        }
      }
    }
  }
#pragma unroll
  for (int t = 0; t < F::kRowTiles; ++t) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float base =
          rows.largest[t][r] == -INFINITY ? 0.0f : rows.largest[t][r] * scale_log2;  // none is visible yet
#pragma unroll
      for (int n = 0; n < F::kWarpKeys / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float& score = rows.scores[t][n][2 * r + i];
          score = exp2_approximate(fmaf(score, scale_log2, -base));
          rows.sum[t][r] += score;  // of this lane's keys
        }
      }
    }
  }
}

// out += weights v
template <class F>
__device__ __forceinline__ void add_values(Rows<F>& rows, uint32_t values, int lane) {
  const uint32_t my_values = values + place_of<F::kRowBytes>(lane % 16, lane / 16);
#pragma unroll
  for (int step = 0; step < F::kWarpKeys / 16; ++step) {
    uint32_t a[F::kRowTiles][4];
#pragma unroll
    for (int t = 0; t < F::kRowTiles; ++t) {
      const auto& left = rows.scores[t][2 * step];
      const auto& right = rows.scores[t][2 * step + 1];
      a[t][0] = pack_bf16(left[0], left[1]), a[t][1] = pack_bf16(left[2], left[3]);
      a[t][2] = pack_bf16(right[0], right[1]), a[t][3] = pack_bf16(right[2], right[3]);
    }
    constexpr int kLoads = F::kRowBytes / 32;
#pragma unroll
    for (int load = 0; load < kLoads; ++load) {  // 16 keys, and 32 bytes of each
      uint32_t b[4];
      load_matrices_transposed(b, (my_values ^ (32 * load)) + 16 * step * F::kRowBytes);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if constexpr (F::C::kIsFp8) {
          uint32_t even[2], odd[2];
          convert_e4m3(b[2 * half], even[0], odd[0]);
          convert_e4m3(b[2 * half + 1], even[1], odd[1]);
#pragma unroll
          for (int t = 0; t < F::kRowTiles; ++t) {
            multiply_16x8x16(rows.out[t][4 * load + 2 * half], a[t], even[0], even[1]);
            multiply_16x8x16(rows.out[t][4 * load + 2 * half + 1], a[t], odd[0], odd[1]);
          }
        } else {
#pragma unroll
          for (int t = 0; t < F::kRowTiles; ++t) {
            multiply_16x8x16(rows.out[t][2 * load + half], a[t], b[2 * half], b[2 * half + 1]);
          }
        }
      }
    }
  }
}

// Calls store(column, first, second) for the neighboring columns that a lane holds of a row; r is 0 or 1.
template <class F, class Store>
__device__ __forceinline__ void for_columns(const Rows<F>& rows, int t, int r, int lane, Store store) {
  if constexpr (F::C::kIsFp8) {
#pragma unroll
    for (int c = 0; c < Rows<F>::kColumns; c += 2) {  // columns 0, 2, .. and 1, 3, .. of 16
      const auto& even = rows.out[t][c];
      const auto& odd = rows.out[t][c + 1];
      store(8 * c + 4 * (lane % 4), even[2 * r], odd[2 * r]);
      store(8 * c + 4 * (lane % 4) + 2, even[2 * r + 1], odd[2 * r + 1]);
    }
  } else {
#pragma unroll
    for (int c = 0; c < Rows<F>::kColumns; ++c) {
      store(8 * c + 2 * (lane % 4), rows.out[t][c][2 * r], rows.out[t][c][2 * r + 1]);
    }
  }
}

// Stores a warp's rows: the result, or what is merged with that of other parts.
template <class F>
__device__ __forceinline__ void store_rows(Rows<F>& rows, int first_row, const Item& item, const Args& args, int lane) {
#pragma unroll
  for (int t = 0; t < F::kRowTiles; ++t) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float sum = sum_of_row(rows.sum[t][r]);
      const int row = first_row + 16 * t + 8 * r + lane / 4;
      if (row >= item.num_tokens * args.group) continue;
      if (item.num_parts == 1) {
        const size_t query = prefill::query_of(item, row, args);
        const float inverse = 1.0f / sum;
        for_columns<F>(rows, t, r, lane, [&](int column, float first, float second) {
          *reinterpret_cast<uint32_t*>(args.out + query * F::H + column) = pack_bf16(first * inverse, second * inverse);
        });
        if (args.sums != nullptr && lane % 4 == 0) prefill::store_sum(query, rows.largest[t][r], sum, args);
      } else {
        float* place = prefill::unmerged_row<F::H>(item, item.index, row, args);
        for_columns<F>(rows, t, r, lane, [&](int column, float first, float second) {
          *reinterpret_cast<float2*>(place + column) = make_float2(first, second);
        });
        if (lane % 4 == 0) *reinterpret_cast<float2*>(place + F::H) = make_float2(rows.largest[t][r], sum);
      }
    }
  }
}

// Merges the results of warps that have the same rows, and stores them.
template <class F>
__device__ __forceinline__ void merge_warps(Rows<F>& rows, WarpResult<F::H>* results, const Item& item,
                                            const Args& args, int lane) {
  constexpr int H = F::H, kEach = 4;
  const int warp = threadIdx.x / 32;
  __syncthreads();  // all warps have read their last keys and values
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float sum = sum_of_row(rows.sum[0][r]);
    const int row = 8 * r + lane / 4;
    for_columns<F>(rows, 0, r, lane, [&](int column, float first, float second) {
      *reinterpret_cast<float2*>(results[warp].out[row] + column) = make_float2(first, second);
    });
    if (lane % 4 == 0) results[warp].largest[row] = rows.largest[0][r], results[warp].sum[row] = sum;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < item.num_tokens * args.group * (H / kEach); i += kThreads) {
    const int row = i / (H / kEach), column = i % (H / kEach) * kEach;
    float largest = -INFINITY, sum = 0.0f;
    float4 out = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int w = 0; w < kWarps; ++w) largest = fmaxf(largest, results[w].largest[row]);
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const float weight = exp2_approximate((results[w].largest[row] - largest) * args.scale_log2);
      const float4 part = *reinterpret_cast<const float4*>(results[w].out[row] + column);
      sum = fmaf(results[w].sum[row], weight, sum);
      out = make_float4(fmaf(part.x, weight, out.x), fmaf(part.y, weight, out.y), fmaf(part.z, weight, out.z),
                        fmaf(part.w, weight, out.w));
    }
    if (item.num_parts == 1) {
      const size_t query = prefill::query_of(item, row, args);
      const float inverse = 1.0f / sum;
      *reinterpret_cast<uint2*>(args.out + query * H + column) =
          make_uint2(pack_bf16(out.x * inverse, out.y * inverse), pack_bf16(out.z * inverse, out.w * inverse));
      if (args.sums != nullptr && column == 0) prefill::store_sum(query, largest, sum, args);
    } else {
      float* place = prefill::unmerged_row<H>(item, item.index, row, args);
      *reinterpret_cast<float4*>(place + column) = out;
      if (column == 0) *reinterpret_cast<float2*>(place + H) = make_float2(largest, sum);
    }
  }
}

// Merges the stored results of all parts of a few rows, in order, so that the bits do not depend on which part ends
// last. A warp finds the weights of a row's parts, which are then kept for all columns: `weights` is [rows, parts].
template <class F>
__device__ __forceinline__ void merge_few_rows(float* weights, const Item& item, const Args& args, int lane) {
  constexpr int H = F::H, kEach = 4;
  const int num_rows = item.num_tokens * args.group, num_parts = item.num_parts;
  const size_t stride = static_cast<size_t>(args.kv_heads) * args.slot_rows * (H + 4);  // from one part to the next
#pragma unroll 1
  for (int row = threadIdx.x / 32; row < num_rows; row += kWarps) {
    const float* stored = prefill::unmerged_row<H>(item, 0, row, args) + H;
    float* mine = weights + row * num_parts;
    float largest = -INFINITY, sum = 0.0f;
    for (int p = lane; p < num_parts; p += 32) largest = fmaxf(largest, __ldcg(stored + p * stride));
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) {
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, lanes));
    }
    for (int p = lane; p < num_parts; p += 32) {
      const float2 part = __ldcg(reinterpret_cast<const float2*>(stored + p * stride));
      mine[p] = exp2_approximate((part.x - largest) * args.scale_log2);
      sum = fmaf(part.y, mine[p], sum);
    }
    sum = sum_over_lanes(sum, 32);
    for (int p = lane; p < num_parts; p += 32) mine[p] *= 1.0f / sum;
    if (args.sums != nullptr && lane == 0) prefill::store_sum(prefill::query_of(item, row, args), largest, sum, args);
  }
  __syncthreads();
#pragma unroll 1
  for (int i = threadIdx.x; i < num_rows * (H / kEach); i += kThreads) {
    const int row = i / (H / kEach), column = i % (H / kEach) * kEach;
    const float* stored = prefill::unmerged_row<H>(item, 0, row, args) + column;
    const float* mine = weights + row * num_parts;
    float4 out = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 8
    for (int p = 0; p < num_parts; ++p) {
      const float4 part = __ldcg(reinterpret_cast<const float4*>(stored + p * stride));
      out = make_float4(fmaf(part.x, mine[p], out.x), fmaf(part.y, mine[p], out.y), fmaf(part.z, mine[p], out.z),
                        fmaf(part.w, mine[p], out.w));
    }
    *reinterpret_cast<uint2*>(args.out + prefill::query_of(item, row, args) * H + column) =
        make_uint2(pack_bf16(out.x, out.y), pack_bf16(out.z, out.w));
  }
}

// Writes zeros for padding tokens.
template <class F>
__device__ __forceinline__ void clear_padding(const Args& args) {
  const int warp = blockIdx.x * kWarps + threadIdx.x / 32, row_elements = args.kv_heads * args.group * F::H;
  for (int token = warp; token < args.num_tokens; token += kWarps * gridDim.x) {
    if (args.positions[token] >= 0) continue;
    uint4* row = reinterpret_cast<uint4*>(args.out + static_cast<size_t>(token) * row_elements);
    for (int i = threadIdx.x % 32; i < row_elements / 8; i += 32) row[i] = make_uint4(0, 0, 0, 0);
  }
}

// A block for each part and kv head, those of the longest parts first. `q` is [T, K, G, H], and `pages` are one layer's
// [P, K, 2, S, H].
template <class F>
__global__ void __launch_bounds__(kThreads, 2)
    attention_kernel(const bf16* q, const void* pages, const __grid_constant__ Args args) {
  extern __shared__ __align__(1024) uint8_t raw[];
  auto& memory = *reinterpret_cast<Memory<F>*>(raw);
  clear_padding<F>(args);
  const Part part = prefill::load_part(args.parts, blockIdx.x / args.kv_heads);
  if (part.num_tokens == 0) return;
  const int first_key = part.first_key_of(part.index);
  const int num_keys = min(part.num_keys(), part.first_key_of(part.index + 1)) - first_key;
  const Item item = {part.first_token,
                     part.num_tokens,
                     part.first_position - first_key,
                     num_keys,
                     static_cast<int>(blockIdx.x) % args.kv_heads,
                     part.index,
                     part.num_parts,
                     part.first_slot};
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int first_row = F::kSharesRows ? 0 : warp * 16 * F::kRowTiles;
  const int warp_key = F::kSharesRows ? warp * F::kWarpKeys : 0;  // in each block of keys
  const uint32_t queries = shared_address(memory.q), slots = shared_address(memory.slots);
  const uint32_t my_queries = queries + first_row * F::H * 2;
  const bool has_rows = first_row < item.num_tokens * args.group;  // other warps only copy

  Copier<F> copier(slots, pages, part, first_key, item, args);
#pragma unroll
  for (int i = 0; i < F::kSlots - 1; ++i) i % 2 == 0 ? copier.template next<false>() : copier.template next<true>();
  load_queries<F>(queries, q, item, args);

  Rows<F> rows;
#pragma unroll
  for (int t = 0; t < F::kRowTiles; ++t) {
#pragma unroll
    for (int c = 0; c < Rows<F>::kColumns; ++c) {
#pragma unroll
      for (int i = 0; i < 4; ++i) rows.out[t][c][i] = 0.0f;
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) rows.largest[t][r] = -INFINITY, rows.sum[t][r] = 0.0f;
  }

  int slot = 0;
  const auto next_slot = [&](auto is_values) {  // returns where the next operand is, which has arrived for all threads
    constexpr bool kIsValues = decltype(is_values)::value;
    wait_for_copies<F::kSlots - 2>();
    __syncthreads();
    // Into the slot that all warps have read before they came here.
    copier.template next<(F::kSlots % 2 == 0) != kIsValues>();
    const uint32_t at = slots + slot * F::kSlotBytes + warp_key * F::kRowBytes;
    if (++slot == F::kSlots) slot = 0;
    return at;
  };
#pragma unroll 1
  for (int key = 0; key < item.num_keys; key += F::kKeys) {
    const uint32_t keys = next_slot(std::false_type());
    if (has_rows) {
      compute_scores<F>(rows, my_queries, keys, lane);
      if (key + F::kKeys > min(item.first_position + 1, item.num_keys)) {
        mask<F>(rows, first_row, key + warp_key, item, args, lane);
      }
      soften<F>(rows, args.scale_log2);
    }
    const uint32_t values = next_slot(std::true_type());
    if (has_rows) add_values<F>(rows, values, lane);
  }
  wait_for_copies<0>();

  if constexpr (F::kSharesRows) {
    static_assert(sizeof(WarpResult<F::H>) * kWarps <= sizeof(memory.slots), "in the place of keys and values");
    merge_warps<F>(rows, reinterpret_cast<WarpResult<F::H>*>(memory.slots), item, args, lane);
  } else if (has_rows) {
    store_rows<F>(rows, first_row, item, args, lane);
  }
  if (item.num_parts == 1) return;
#pragma unroll 1
  for (int half = 0; 64 * half < item.num_tokens * args.group; ++half) {
    if (!prefill::arrive(&memory.is_last, item, half, args)) continue;
    if (F::kSharesRows && item.num_parts <= static_cast<int>(sizeof(memory.slots) / sizeof(float)) / F::kRows) {
      merge_few_rows<F>(reinterpret_cast<float*>(memory.slots), item, args, lane);
    } else {
      prefill::merge_parts<F::H>(memory.row_scales, item, half, args);
    }
  }
}

}  // namespace portable
}  // namespace meshserve
