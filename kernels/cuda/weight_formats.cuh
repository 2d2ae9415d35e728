// The formats of weights, and the order of the activations that they are multiplied with.
//
// Quantised weights are converted in registers, as wgmma's left operand. A lane reads 4 bytes of a row from shared
// memory at once, so the columns that it holds of each 16 are not those that wgmma expects. The sum over columns does
// not depend on their order if the activations have the same one, so the kernels that write activations for a product
// with quantised weights store them in that order; the weights stay as they are in the checkpoint.
#pragma once
#include "ptx.cuh"

namespace meshserve {

// Scales of a stacked matrix [rows, columns], one for `rows_each` rows and 2^columns_log2 columns.
struct Scales {
  const void* values;   // [grid_rows, grid_columns]
  const uint8_t* zero;  // the same of 4-bit integers; null: 8
  int type;             // of the values: see ScaleType
  int rows_each, columns_log2, grid_rows, grid_columns;
};
enum ScaleType : int { kFloat32Scale, kBfloat16Scale, kFloat16Scale };

struct ScaledMatrix {
  const void* data;
  Scales scales;
};

struct Bf16Weights {
  using Matrix = const bf16*;
  static constexpr bool kIsQuantised = false;
  static constexpr int kBlockColumns = 64;  // 128 bytes, the swizzle's width
};
struct Fp8Weights {  // e4m3
  using Matrix = ScaledMatrix;
  static constexpr bool kIsQuantised = true;
  static constexpr int kBlockColumns = 128;
};
struct Int4Weights {  // unsigned, two in a byte; column 2j is the low half of byte j
  using Matrix = ScaledMatrix;
  static constexpr bool kIsQuantised = true;
  static constexpr int kBlockColumns = 256;
};

// Returns where the first two of columns `column` to `column` + 3 (a multiple of 4) are stored, in pairs of elements;
// the other two are 4 pairs further. 8-bit weights reorder each 16 columns, 4-bit weights each 32.
template <class W>
__device__ __forceinline__ int ordered_pair(int column) {
  static_assert(W::kIsQuantised);
  const int chunk = column / 4;
  if (W::kBlockColumns == Fp8Weights::kBlockColumns) return chunk / 4 * 8 + chunk % 4;
  return chunk / 8 * 16 + chunk % 2 * 8 + chunk / 2 % 4;
}

// Stores columns `column` to `column` + 3 of a row of activations for a product with weights of the format.
template <class W>
__device__ __forceinline__ void store_activations(bf16* row, int column, float4 v) {
  if constexpr (W::kIsQuantised) {
    uint32_t* to = reinterpret_cast<uint32_t*>(row) + ordered_pair<W>(column);
    to[0] = pack_bf16(v.x, v.z);
    to[4] = pack_bf16(v.y, v.w);
  } else {
    *reinterpret_cast<uint2*>(row + column) = make_uint2(pack_bf16(v.x, v.y), pack_bf16(v.z, v.w));
  }
}

}  // namespace meshserve
