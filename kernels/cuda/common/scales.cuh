// The scales of quantized weights, from memory to the registers of the lanes that multiply.
#pragma once
#include "common/weight_formats.cuh"

namespace meshserve {

// ---- scales in shared memory -------------------------------------------------------------------------------------
// A block keeps the scales of its tile and its range of columns as a table [groups, entries]. An entry is for each row
// of the tile, or for each 16 rows (a warp's) if these always share a scale. The lowest 4 bits of a scale of 4-bit
// integers, which have at most 16 bits, are zero and hold the zero point.
constexpr int kSymmetricZero = 8;

__host__ __device__ constexpr int scale_entries(int rows_each) { return rows_each % 16 == 0 ? 8 : 128; }
// Returns the number of groups of columns that a range of blocks can touch.
__host__ __device__ constexpr int scale_groups(int blocks, int block_columns, int columns_log2) {
  return (blocks * block_columns >> columns_log2) + 1;
}

struct ScaleTable {
  uint32_t address;  // entry of this lane's first row
  int second;        // bytes from there to its second row's entry
  int group_bytes, columns_log2, first_group, last_group;
  // With split or integer activations, the table of their exponents follows, [range of columns / 64, N]:
  uint32_t exponents;  // address of this lane's first token
  int first_column;    // first column of the exponents
  int num_tokens;      // with integer activations: that there are, at most N or more
  bool has_zero;       // likewise: whether the scales hold zero points other than kSymmetricZero
};

// The scales of a lane's two rows.
struct RowScales {
  uint32_t words[2];
};

// A scale on its way from memory. Nothing computes with it before it is used: a conversion right after the load would
// wait for it, and so would the loads of the next steps.
struct ScaleInFlight {
  uint32_t word, selector;  // the aligned word that holds it, and which of its bytes do

  __device__ __forceinline__ void load(const Scales& scales, size_t at) {
    const bool is_word = scales.type == kFloat32Scale;
    const size_t byte = at * (is_word ? 4 : 2);
    word = __ldg(reinterpret_cast<const uint32_t*>(static_cast<const uint8_t*>(scales.values) + (byte & ~size_t{3})));
    const uint32_t half = scales.type == kBfloat16Scale ? 0x1044u : 0x4410u;  // to the upper or the lower half
    const uint32_t second = scales.type == kBfloat16Scale ? 0x3244u : 0x4432u;
    selector = is_word ? 0x3210u : byte % 4 == 0 ? half : second;
  }
  __device__ __forceinline__ float value(const Scales& scales) const {
    const uint32_t bits = __byte_perm(word, 0u, selector);
    const uint16_t low = static_cast<uint16_t>(bits);
    const float of_half = __half2float(*reinterpret_cast<const __half*>(&low));
    return scales.type == kFloat16Scale ? of_half : __uint_as_float(bits);
  }
};

// Fills the table with `num_threads` threads. `row` is the first row of the tile in the stacked matrix; its second 64
// rows begin `second_half` further.
template <class W>
__device__ __forceinline__ void load_scales(const Scales& scales, int row, int second_half, int first_group,
                                            int num_groups, int num_threads, uint32_t to) {
  // Loads in flight at a time. Of 8-bit weights there are few scales, and blocks that begin late have no time for more
  // instructions.
  constexpr int kTogether = W::kIsInt4 ? 8 : 1;
  const int entries = scale_entries(scales.rows_each), rows = 128 / entries, total = entries * num_groups;
#pragma unroll 1
  for (int first = threadIdx.x; first < total; first += kTogether * num_threads) {
    ScaleInFlight values[kTogether];
    uint32_t zeros[kTogether];
#pragma unroll
    for (int u = 0; u < kTogether; ++u) {
      const int i = min(first + u * num_threads, total - 1), entry = i / num_groups, group = i % num_groups;
      const int local = entry * rows, at_row = row + (local < 64 ? local : second_half + local - 64);
      const int grid_row = min(at_row / scales.rows_each, scales.grid_rows - 1);  // a tile may exceed the matrix
      const size_t at =
          static_cast<size_t>(grid_row) * scales.grid_columns + min(first_group + group, scales.grid_columns - 1);
      values[u].load(scales, at);
      zeros[u] = scales.zero != nullptr ? scales.zero[at] : kSymmetricZero;
    }
#pragma unroll
    for (int u = 0; u < kTogether; ++u) {
      const int i = first + u * num_threads, entry = i / num_groups, group = i % num_groups;
      uint32_t word = __float_as_uint(values[u].value(scales));
      if (W::kBlockColumns == Int4Weights::kBlockColumns) word |= zeros[u];
      if (i < total) store_shared_word(to + (group * entries + entry) * 4, word);
    }
  }
}

__device__ __forceinline__ RowScales scales_at(const ScaleTable& table, int column) {
  const int group = min(column >> table.columns_log2, table.last_group) - table.first_group;
  const uint32_t at = table.address + group * table.group_bytes;
  return {{load_shared_word(at), load_shared_word(at + table.second)}};
}

template <class W>
__device__ __forceinline__ float scale_of(uint32_t word) {
  return __uint_as_float(W::kBlockColumns == Int4Weights::kBlockColumns ? word & ~15u : word);
}

}  // namespace meshserve
