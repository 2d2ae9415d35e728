// Replaces wgmma_e4m3.cuh on the host: each thread computes its own sums.
#pragma once
#include "common/sm90/wgmma.cuh"

namespace meshserve {

// Returns an e4m3 number of a tile with rows of 128 bytes and 128-byte swizzle.
inline float e4m3_at(uint64_t descriptor, int row, int k) {
  const uint32_t at = descriptor * 16 + row * 128 + k;
  return from_e4m3(shared_memory[at ^ (at >> 7 & 7) << 4]);
}

template <int N>
void multiply_e4m3(float (&c)[N / 2], uint64_t a, uint64_t b, int accumulate) {
  const int lane = threadIdx.x % 32, first_row = threadIdx.x % 128 / 32 * 16 + lane / 4;
  for (int i = 0; i < N / 2; ++i) {
    const int row = first_row + i / 2 % 2 * 8, token = i / 4 * 8 + lane % 4 * 2 + i % 2;
    float sum = accumulate ? c[i] : 0.0f;
    for (int k = 0; k < 32; ++k) sum += e4m3_at(a, row, k) * e4m3_at(b, token, k);
    c[i] = sum;
  }
}

}  // namespace meshserve
