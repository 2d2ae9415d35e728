// Replaces kernels/cuda/wgmma.cuh on the host, where a product is finished at once.
#pragma once
#include "ptx.cuh"

namespace meshserve {

inline uint64_t tile_descriptor(uint32_t address) { return address / 16; }
inline void wgmma_begin() {}
inline void wgmma_commit() {}
template <int kLeft>
void wgmma_wait() {  // the lanes of a warp stay together, as on a GPU: none may miss the phase of a barrier
  __syncwarp();
}

// Returns element k of a row of a tile [rows, 64] with 128-byte swizzle.
inline float tile_element(uint64_t descriptor, int row, int k) {
  const uint32_t at = descriptor * 16 + row * 128 + k * 2;
  uint16_t bits;
  std::memcpy(&bits, shared_base + (at ^ (at >> 7 & 7) << 4), 2);
  return from_bf16(bits);
}

inline void wgmma_64x256(float (&c)[128], uint64_t a, uint64_t b, int accumulate) {
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  for (int i = 0; i < 128; ++i) {
    const int row = 16 * warp + lane / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
    float sum = accumulate ? c[i] : 0.0f;
    for (int k = 0; k < 16; ++k) sum += tile_element(a, row, k) * tile_element(b, column, k);
    c[i] = sum;
  }
}

}  // namespace meshserve
