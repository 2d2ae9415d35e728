// Replaces wgmma.cuh on the host, where a product is finished at once.
#pragma once
#include "common/ptx.cuh"

namespace meshserve {

inline uint64_t tile_descriptor(uint32_t address) { return address / 16; }
inline uint64_t moved_on(uint64_t descriptor, uint32_t bytes) { return descriptor + bytes / 16; }
inline void wgmma_begin() {}
inline void wgmma_commit() {}
template <int kLeft>
void wgmma_wait() {  // the lanes of a warp stay together, as on a GPU: none may miss the phase of a barrier
  __syncwarp();
}

// Returns where a byte of a row of a tile with rows of 128 bytes and 128-byte swizzle lies.
inline const uint8_t* tile_byte(uint64_t descriptor, int row, int byte) {
  const uint32_t at = descriptor * 16 + row * 128 + byte;
  return shared_base + (at ^ (at >> 7 & 7) << 4);
}
// Returns element k of a row of a tile [rows, 64].
inline float tile_element(uint64_t descriptor, int row, int k) {
  uint16_t bits;
  std::memcpy(&bits, tile_byte(descriptor, row, 2 * k), 2);
  return from_bf16(bits);
}

// A thread's part of c[64, N] = a b, or c += a b.
template <int N>
void multiply_tiles(float (&c)[N / 2], int steps, int accumulate, auto left, auto right) {
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  for (int i = 0; i < N / 2; ++i) {
    const int row = 16 * warp + lane / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
    float sum = accumulate ? c[i] : 0.0f;
    for (int k = 0; k < steps; ++k) sum += left(row, k) * right(column, k);
    c[i] = sum;
  }
}
template <int N>
void wgmma(float (&c)[N / 2], uint64_t a, uint64_t b, int accumulate) {
  auto of = [](uint64_t descriptor) { return [=](int row, int k) { return tile_element(descriptor, row, k); }; };
  multiply_tiles<N>(c, 16, accumulate, of(a), of(b));
}
inline void wgmma_64x256(float (&c)[128], uint64_t a, uint64_t b, int accumulate) { wgmma<256>(c, a, b, accumulate); }

}  // namespace meshserve
