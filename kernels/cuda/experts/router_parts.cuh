// A router's scores without a kernel of their own, in steps of few tokens.
//
// A score is a sum over the columns of the normed residual stream. A block of the output projection that has just
// computed 128 of these columns multiplies them by the router's and leaves a part of each score, so that the experts'
// kernels wait for one kernel less. They add up the parts, and finish the norm (row_pipelines.cuh).
#pragma once
#include "experts/row_products.cuh"

namespace meshserve {
namespace experts {

constexpr int kPartColumns = 128;  // the rows of a tile of the projection
constexpr int kPartSteps = kPartColumns / RowFormat<Bf16Weights>::kStep;
// Bytes between tokens in shared memory: two neighbors do not share banks.
constexpr int kPartRowBytes = 2 * kPartColumns + 64;

struct RouterPart {
  const bf16* router;  // one layer's [E, D], of which there are at most kMostRouted experts
  float* scores;       // [T, D / kPartColumns, kMostRouted]
  int num_experts;
};

// A warp's 16 experts and a tile's columns.
struct RouterRows {
  uint4 rows[kPartSteps][2];

  __device__ __forceinline__ void load(const RouterPart& part, int warp, int tile, int columns) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int expert = 16 * warp + 8 * half + lane / 4;
      const bf16* from = part.router + static_cast<size_t>(expert) * columns + tile * kPartColumns + 8 * (lane % 4);
#pragma unroll
      for (int step = 0; step < kPartSteps; ++step) {
        rows[step][half] = make_uint4(0, 0, 0, 0);
        if (expert < part.num_experts) {
          rows[step][half] = __ldg(reinterpret_cast<const uint4*>(from + step * RowFormat<Bf16Weights>::kStep));
        }
      }
    }
  }

  // Multiplies them by up to 8 tokens in shared memory, and stores the parts of those for which `is_mine`.
  template <class IsMine>
  __device__ __forceinline__ void score(const RouterPart& part, const uint8_t* tokens, int warp, int tile,
                                        int num_tiles, IsMine is_mine) const {
    const int lane = threadIdx.x % 32;
    const uint8_t* row = tokens + lane / 4 * kPartRowBytes + lane % 4 * 16;
    float c[4] = {};
#pragma unroll
    for (int step = 0; step < kPartSteps; ++step) {
      const uint4 token[1] = {*reinterpret_cast<const uint4*>(row + step * 2 * RowFormat<Bf16Weights>::kStep)};
      multiply(c, rows[step][0], rows[step][1], token);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int token = 2 * (lane % 4) + i;
      float* to = part.scores + (static_cast<size_t>(token) * num_tiles + tile) * kMostRouted + 16 * warp + lane / 4;
      if (is_mine(token)) to[0] = c[i], to[8] = c[2 + i];
    }
  }
};

// Where a token's columns 4 * lane to 4 * lane + 3 of the tile lie.
__device__ __forceinline__ uint2* part_columns(uint8_t* tokens, int token, int lane) {
  return reinterpret_cast<uint2*>(tokens + token * kPartRowBytes) + lane;
}

}  // namespace experts
}  // namespace meshserve
