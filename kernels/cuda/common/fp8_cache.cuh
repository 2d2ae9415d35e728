// Keys and values in 8 bits (e4m3), as `--kv-dtype fp8` stores them.
#pragma once
#include "common/conversions.cuh"
#include "common/ptx.cuh"

namespace meshserve {

// The elements of a cache.
struct Bf16Cache {
  using Element = bf16;
  static constexpr bool kIsFp8 = false;
};
struct Fp8Cache {
  using Element = uint8_t;
  static constexpr bool kIsFp8 = true;
};

// Converts 16 e4m3 numbers to bf16, without rounding and in order. NaN becomes 480.
__device__ __forceinline__ void widen_e4m3(uint4 raw, uint4& low, uint4& high) {
  const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
  uint32_t pairs[8];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    uint32_t even, odd;
    convert_e4m3(words[i], even, odd);
    pairs[2 * i] = __byte_perm(even, odd, 0x5410);
    pairs[2 * i + 1] = __byte_perm(even, odd, 0x7632);
  }
  low = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
  high = make_uint4(pairs[4], pairs[5], pairs[6], pairs[7]);
}

// Converts two bf16 numbers to e4m3, rounded to the nearest; those beyond the range become the largest number.
__device__ __forceinline__ uint16_t narrow_to_e4m3(uint32_t pair) {
  return to_e4m3(__uint_as_float(pair << 16), __uint_as_float(pair & 0xFFFF0000u));
}

// Converts one of `num_threads` threads' share of a tile of `rows` rows [rows, H] of e4m3 numbers to halves of 64
// columns, each [128 rows, 64] bf16 in 128-byte swizzle.
template <int H>
__device__ __forceinline__ void widen_tile(uint32_t from, uint32_t to, int rows, int half_bytes, int thread,
                                           int num_threads) {
  constexpr int kChunks = H / 16;
#pragma unroll 2
  for (int i = thread; i < rows * kChunks; i += num_threads) {
    const int row = i / kChunks, chunk = i % kChunks, column = chunk % 4 * 2;  // a column has 8 bf16
    uint4 low, high;
    widen_e4m3(load_shared(from + 16 * i), low, high);
    const uint32_t at = to + chunk / 4 * half_bytes + row * 128;
    store_shared(at + ((column ^ (row % 8)) * 16), low);
    store_shared(at + (((column + 1) ^ (row % 8)) * 16), high);
  }
}

}  // namespace meshserve
