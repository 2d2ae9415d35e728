// Replaces wgmma_registers.cuh on the host: each warp multiplies its 16 rows.
#pragma once
#include "common/sm90/wgmma.cuh"

namespace meshserve {

template <int N>
void keep_in_place(float (&)[N]) {}

template <int N>
void multiply_registers(float (&c)[N / 2], const uint32_t* a, uint64_t b, int accumulate) {
  const int lane = threadIdx.x % 32;
  uint32_t words[4][32];
  for (int i = 0; i < 4; ++i) {
    read_lanes(a[i], [&](const uint32_t* of_lanes) {
      std::copy(of_lanes, of_lanes + 32, words[i]);
      return 0;
    });
  }
  for (int i = 0; i < N / 2; ++i) {
    const int half = i / 2 % 2, token = i / 4 * 8 + lane % 4 * 2 + i % 2;
    float sum = accumulate ? c[i] : 0.0f;
    for (int k = 0; k < 16; ++k) {
      const uint32_t pair = words[k / 8 * 2 + half][lane / 4 * 4 + k % 8 / 2];
      sum += from_bf16(k % 2 ? pair >> 16 : pair & 0xFFFF) * tile_element(b, token, k);
    }
    c[i] = sum;
  }
}

}  // namespace meshserve
