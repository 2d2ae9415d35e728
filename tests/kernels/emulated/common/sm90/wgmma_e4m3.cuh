// Replaces wgmma_e4m3.cuh on the host: each thread computes its own sums.
#pragma once
#include "common/sm90/wgmma.cuh"

namespace meshserve {

template <int N>
void multiply_e4m3(float (&c)[N / 2], uint64_t a, uint64_t b, int accumulate) {
  auto of = [](uint64_t descriptor) {
    return [=](int row, int k) { return from_e4m3(*tile_byte(descriptor, row, k)); };
  };
  multiply_tiles<N>(c, 32, accumulate, of(a), of(b));
}

}  // namespace meshserve
