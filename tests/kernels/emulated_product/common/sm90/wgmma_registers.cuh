// Replaces wgmma_registers.cuh on the host: each warp multiplies its 16 rows.
#pragma once
#include "common/sm90/wgmma.cuh"

namespace meshserve {

template <int N>
void keep_in_place(float (&)[N]) {}

template <int N>
void multiply_registers(float (&c)[N / 2], const uint32_t* a, uint64_t b, int accumulate) {
  auto input = [&](int token, int k) {  // of a tile [N, 64] with 128-byte swizzle
    const uint32_t at = b * 16 + token * 128 + k * 2, swizzled = at ^ (at >> 7 & 7) << 4;
    uint16_t bits;
    std::memcpy(&bits, shared_memory + swizzled, 2);
    return from_bf16(bits);
  };
  read_lanes(a, [&](const auto& words) {
    const int lane = threadIdx.x % 32;
    for (int i = 0; i < N / 2; ++i) {
      const int half = i / 2 % 2, token = i / 4 * 8 + lane % 4 * 2 + i % 2;
      float sum = accumulate ? c[i] : 0.0f;
      for (int k = 0; k < 16; ++k) {
        const uint32_t pair = words[lane / 4 * 4 + k % 8 / 2][k / 8 * 2 + half];
        sum += from_bf16(k % 2 ? pair >> 16 : pair & 0xFFFF) * input(token, k);
      }
      c[i] = sum;
    }
  });
}

}  // namespace meshserve
