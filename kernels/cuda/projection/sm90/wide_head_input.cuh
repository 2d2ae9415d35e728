// Splits the tokens of an output head into the numbers that its product multiplies (wide_head.cuh).
#pragma once
#include "projection/sm90/wide_head.cuh"

namespace meshserve {
namespace wide_head {

constexpr int kSplitThreads = 128, kSplitColumns = 8;  // columns of a thread

struct SplitArgs {
  const bf16* x;     // [tokens, columns]
  uint8_t* numbers;  // [tokens, columns / 128, kNumbers, 128] e4m3
  float* scales;     // [tokens / kMostTokens, columns / 128, kMostTokens]
  int columns;
};

// Splits each element into two e4m3 numbers, whose powers of two scale the largest element of 128 columns to 128 and
// more, below 256. Grid: tokens, groups of 8 columns for each thread.
__global__ void __launch_bounds__(kSplitThreads) split_kernel(const __grid_constant__ SplitArgs args) {
  const int token = blockIdx.x, column = (blockIdx.y * kSplitThreads + threadIdx.x) * kSplitColumns;
  if (threadIdx.x == 0) let_next_kernel_start();
  if (column >= args.columns) return;  // the 16 lanes of 128 columns together
  const size_t row = static_cast<size_t>(token) * args.columns;
  const uint4 packed = __ldcg(reinterpret_cast<const uint4*>(args.x + row + column));
  const float4 low = unpack_bf16(make_uint2(packed.x, packed.y)), high = unpack_bf16(make_uint2(packed.z, packed.w));
  const float v[kSplitColumns] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
  float highest = 0.0f;
#pragma unroll
  for (int i = 0; i < kSplitColumns; ++i) highest = fmaxf(highest, fabsf(v[i]));
  constexpr uint32_t kLargest = 7;
  const uint32_t exponent = max(__float_as_uint(largest_of_16_lanes(highest)) >> 23, kLargest);
  const float factor = power_of(254 + kLargest - exponent);
  alignas(8) uint16_t first[kSplitColumns / 2], second[kSplitColumns / 2];
#pragma unroll
  for (int i = 0; i < kSplitColumns / 2; ++i) {
    const E4m3Pair pair = split_e4m3(v[2 * i] * factor, v[2 * i + 1] * factor);
    first[i] = pair.first, second[i] = pair.second;
  }
  const int block = column / kRowBytes, place = column % kRowBytes;
  uint8_t* to = args.numbers + kNumbers * (row + block * kRowBytes) + place;
  *reinterpret_cast<uint2*>(to) = *reinterpret_cast<const uint2*>(first);
  *reinterpret_cast<uint2*>(to + kRowBytes) = *reinterpret_cast<const uint2*>(second);
  // Infinity stays infinite, and NaN is a number of e4m3.
  if (place == 0) {
    const int group = token / kMostTokens * (args.columns / kRowBytes) + block;
    args.scales[group * kMostTokens + token % kMostTokens] = power_of(exponent == 255 ? 255 : exponent - kLargest);
  }
}

}  // namespace wide_head
}  // namespace meshserve
