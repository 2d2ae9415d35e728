// The formats of experts' weights for all GPUs since Ampere, and how they become operands of bf16 matrix instructions.
//
// Weights in 8 and 4 bits are converted to bf16 in registers, without rounding, and their scales applied to float32
// sums of the columns that share one. A word of such weights holds other columns than the instructions expect of a
// lane; the sum over columns does not depend on their order if the activations have the same one.
#pragma once
#include "common/conversions.cuh"
#include "common/scales.cuh"

namespace meshserve::experts::sm80 {

// kOrder: whose ordered activations (weight_formats.cuh) fit the words of the weights in tiles. kSpan: columns of which
// a sum is scaled. A scale is for a multiple of as many, or for whole rows.
struct Bf16 {
  static constexpr int kBits = 16, kSpan = 64;
  static constexpr bool kIsScaled = false, kHasZeros = false;
  using Order = Bf16Weights;
};
struct E4m3 {
  static constexpr int kBits = 8, kSpan = 64;
  static constexpr bool kIsScaled = true, kHasZeros = false;
  using Order = Fp8Weights;
};
// With a span of 128, or else of 32.
template <int kSpan_>
struct Int4 {
  static constexpr int kBits = 4, kSpan = kSpan_;
  static constexpr bool kIsScaled = true, kHasZeros = true;
  using Order = Int4Weights;
};

// The matrices of all layers and experts.
struct Stack {
  const uint8_t* data;  // [rows, columns * kBits / 8]
  Scales scales;
};

// Returns the index of the first scale of a row.
__device__ __forceinline__ size_t scale_row(const Scales& scales, size_t row) {
  return row / scales.rows_each * scales.grid_columns;
}
// Returns the group of columns that share a scale.
__device__ __forceinline__ int scale_group(const Scales& scales, int column) {
  return min(column >> scales.columns_log2, scales.grid_columns - 1);
}
// Returns 128 + zero point in bf16, twice.
__device__ __forceinline__ uint32_t zero_pair(const Scales& scales, size_t at) {
  const uint32_t zero = scales.zero != nullptr ? __ldg(scales.zero + at) : kSymmetricZero;
  return 0x43004300u | zero << 16 | zero;
}

__device__ __forceinline__ float silu(float v) { return __fdividef(v, 1.0f + __expf(-v)); }

}  // namespace meshserve::experts::sm80
