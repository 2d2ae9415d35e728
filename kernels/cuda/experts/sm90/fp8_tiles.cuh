// The experts of a step in which an expert has many tokens, with 8-bit weights: products of 128 tokens of one expert by
// 256 rows of its weights on the FP8 tensor cores. The tokens are e4m3 numbers with a scale for each 128 columns: the
// sums over 128 columns, in float32, are multiplied by the scales of the weights' block and of the token, and added up
// in float32.
//
// The tokens lie in order of their experts, as in wide_tiles.cuh. Persistent blocks take tiles of equal work in turn:
//   warpgroup 0      one thread fetches boxes of tokens and of weights of 128 columns, and their scales, into a
//   pipeline warpgroups 1, 2  all tokens by 128 rows each. While one adds up, the other multiplies
// gate_up: a warpgroup's weights are 64 rows of gate and the same 64 of up, so that a thread gets both for a token.
// Stores silu(gate) * up, rounded to e4m3, with a scale for the tile's 128 rows, which are columns of down; the share
// is in the scale. down: 256 rows; it finds its tiles and fetches its first weights while gate_up still runs.
#pragma once
#include "experts/sm90/narrow_tiles.cuh"

namespace meshserve {
namespace experts {

constexpr int kFp8TileThreads = 384, kFp8TileTokens = 128, kFp8TileStages = 4, kFp8BoxRows = 64;
constexpr int kFp8BoxBytes = kFp8BoxRows * kFp8Columns;
constexpr int kFp8TokenBytes = 2 * kFp8BoxBytes, kFp8WeightBytes = 4 * kFp8BoxBytes;

struct Fp8TilesMemory {
  uint8_t pipeline[kFp8TileStages][kFp8TokenBytes + kFp8WeightBytes];
  alignas(128) float token_scales[kFp8TileStages][kFp8TileTokens + 32];
  float scales[kFp8TileStages][2];      // gate_up: of gate, of up; down: of each 128 rows
  float highest[2][2][kFp8TileTokens];  // over a warpgroup's rows, for each token; two, so that one barrier suffices
  uint64_t full[kFp8TileStages], empty[kFp8TileStages];
  int first_tile[kMaxExperts + 1], first_token[kMaxExperts + 1];
  int totals[kWarps];
};

template <bool kIsDown>
__global__ void __launch_bounds__(kFp8TileThreads, 1)
    fp8_tiles_kernel(const __grid_constant__ CUtensorMap weights, const __grid_constant__ CUtensorMap input,
                     const __grid_constant__ CUtensorMap input_scales, const __grid_constant__ NarrowTilesArgs args) {
  constexpr int kStages = kFp8TileStages, kRows = kIsDown ? 256 : 128;  // the output's, in a tile
  extern __shared__ __align__(1024) uint8_t shared[];
  auto& memory = *reinterpret_cast<Fp8TilesMemory*>(shared);
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const uint32_t full = shared_address(memory.full), empty = shared_address(memory.empty);
  if (threadIdx.x == 0) {
    prefetch_map(&weights);
    prefetch_map(&input);
    prefetch_map(&input_scales);
    for (int s = 0; s < kStages; ++s) {
      barrier_init(full + 8 * s, 1);
      barrier_init(empty + 8 * s, 8);  // warps that multiply
    }
    barrier_init_fence();
  }
  const bool is_early = kIsDown || args.is_permuted;  // fetches weights before it waits, as it finds `first` written
  if (!is_early) wait_for_previous_kernel();
  if (kIsDown || !is_early) let_next_kernel_start();
  const int all_tiles = count_tiles<kFp8TileTokens>(memory, args.first, (args.rows + kRows - 1) / kRows);
  const int blocks = args.columns / kFp8Columns;
  ExpertTile at;

  if (warp < 4) {
    give_up_registers<kFetchRegisters>();
    if (warp != 0) return;
    int stage = 0;
    uint32_t parity = 1;
    bool is_waiting = is_early;
    auto wait = [&] {
      wait_for_previous_kernel();
      if (!kIsDown) let_next_kernel_start();
    };
#pragma unroll 1
    for (int tile = blockIdx.x; tile < all_tiles; tile += gridDim.x) {
      find_tile<kFp8TileTokens>(memory, tile, kRows, &at);
      const int boxes = at.token + kFp8BoxRows < at.last_token ? 2 : 1;
      const int row = args.first_row + at.expert * args.rows * (kIsDown ? 1 : 2) + at.row;
      const TileScales scales(args.scales, row, row + (kIsDown ? kFp8Columns : args.rows), blocks);
      auto fetch_weights = [&](int k, int to_stage) {
        const float2 of_rows = scales.of(args.scales, k);
        if (lane != 0) return;
        const uint32_t to = shared_address(memory.pipeline[to_stage]) + kFp8TokenBytes, barrier = full + 8 * to_stage;
        memory.scales[to_stage][0] = of_rows.x, memory.scales[to_stage][1] = of_rows.y;
        barrier_expect_bytes(barrier, kFp8WeightBytes + boxes * kFp8BoxBytes + (kFp8TileTokens + kMoreScales) * 4);
#pragma unroll
        for (int box = 0; box < 4; ++box) {
          const int first = kIsDown ? row + kFp8BoxRows * box : row + kFp8BoxRows * (box / 2) + box % 2 * args.rows;
          copy_box(to + box * kFp8BoxBytes, &weights, k * kFp8Columns, first, 0, barrier);
        }
      };
      const int ahead = is_waiting ? min(kStages, blocks) : 0;  // stages whose weights are fetched before the wait
#pragma unroll 1
      for (int k = 0; k < ahead; ++k) fetch_weights(k, k);
      if (is_waiting) wait();
      is_waiting = false;
#pragma unroll 1
      for (int k = 0; k < blocks; ++k) {
        if (k >= ahead) {
          if (lane == 0) barrier_wait(empty + 8 * stage, parity);
          fetch_weights(k, stage);
        }
        if (lane == 0) {
          const uint32_t to = shared_address(memory.pipeline[stage]), barrier = full + 8 * stage;
          for (int box = 0; box < boxes; ++box) {
            copy_box(to + box * kFp8BoxBytes, &input, k * kFp8Columns, at.token + box * kFp8BoxRows, 0, barrier);
          }
          copy_box(shared_address(memory.token_scales[stage]), &input_scales, first_scale(at.token), k, 0, barrier);
        }
        __syncwarp();
        if (++stage == kStages) stage = 0, parity ^= 1;
      }
    }
    if (is_waiting) wait();
    return;
  }

  take_registers<kComputeRegisters>();
  const int group = warp / 4 - 1, first_token = 16 * (warp % 4) + lane / 4, quad = lane % 4;
  int stage = 0, buffer = 0;
  uint32_t parity = 0;
#pragma unroll 1
  for (int tile = blockIdx.x; tile < all_tiles; tile += gridDim.x) {
    find_tile<kFp8TileTokens>(memory, tile, kRows, &at);
    const bool has_second = at.token + 64 < at.last_token;  // whether there are more than 64 tokens
    float sums[2][64] = {};
#pragma unroll 1
    for (int k = 0; k < blocks; ++k) {
      barrier_wait(full + 8 * stage, parity);
      const uint32_t from = shared_address(memory.pipeline[stage]);
      const uint64_t tokens = tile_descriptor(from);
      const uint64_t rows = tile_descriptor(from + kFp8TokenBytes + group * 2 * kFp8BoxBytes);
      const float of_rows[2] = {memory.scales[stage][kIsDown ? group : 0], memory.scales[stage][kIsDown ? group : 1]};
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        if (m == 1 && !has_second) break;
        float partial[64];
        wgmma_begin();
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          multiply_e4m3<128>(partial, moved_on(tokens, m * kFp8BoxBytes) + 2 * i, rows + 2 * i, i > 0);
        }
        wgmma_commit();
        const float* of_tokens = memory.token_scales[stage] + at.token % kMoreScales + 64 * m + first_token;
        const float low = of_tokens[0], high = of_tokens[8];
        wgmma_wait<0>();
        keep_in_place(partial);
        if (m == has_second && lane == 0) barrier_arrive(empty + 8 * stage);
#pragma unroll
        for (int i = 0; i < 64; ++i) {
          sums[m][i] = fmaf((i / 2 % 2 == 0 ? low : high) * of_rows[i / 32], partial[i], sums[m][i]);
        }
      }
      if (++stage == kStages) stage = 0, parity ^= 1;
    }

    // A lane has columns 2 * quad and 2 * quad + 1, of each 8, of two tokens of each 64.
    if constexpr (kIsDown) {
#pragma unroll
      for (int half = 0; half < 4; ++half) {
        const int token = at.token + 64 * (half / 2) + first_token + 8 * (half % 2);
        const int column = at.row + 128 * group + 8 * quad, columns_left = args.rows - column;
        bf16* to = static_cast<bf16*>(args.out) + static_cast<size_t>(token) * args.rows + column;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          uint32_t words[4];
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const float* pair = sums[half / 2] + 4 * (4 * i + j) + 2 * (half % 2);
            words[j] = pack_bf16(pair[0], pair[1]);
          }
          const uint4 v = transpose_quad(make_uint4(words[0], words[1], words[2], words[3]), quad);
          if (token < at.last_token && columns_left > 32 * i) *reinterpret_cast<uint4*>(to + 32 * i) = v;
        }
      }
    } else {
      auto& highest = memory.highest[buffer];
      buffer ^= 1;
#pragma unroll
      for (int half = 0; half < 4; ++half) {
        float most = 0.0f;
#pragma unroll
        for (int i = 0; i < 16; ++i) {
          float& value = sums[half / 2][i / 2 * 4 + 2 * (half % 2) + i % 2];
          value = silu(value) * sums[half / 2][32 + i / 2 * 4 + 2 * (half % 2) + i % 2];
          most = fmaxf(most, fabsf(value));
        }
        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
        most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
        if (quad == 0) highest[group][64 * (half / 2) + first_token + 8 * (half % 2)] = most;
      }
      sync_threads(1, 256);
#pragma unroll
      for (int half = 0; half < 4; ++half) {
        const int local = 64 * (half / 2) + first_token + 8 * (half % 2), token = at.token + local;
        const float scale = e4m3_scale(fmaxf(highest[0][local], highest[1][local])), inverse = 1.0f / scale;
        uint32_t words[4];  // each of columns 2 * quad and one further, of two times 8
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float* first = sums[half / 2] + 8 * j + 2 * (half % 2);
          words[j] = to_e4m3(first[0] * inverse, first[1] * inverse) |
                     static_cast<uint32_t>(to_e4m3(first[4] * inverse, first[5] * inverse)) << 16;
        }
        const uint4 v = transpose_quad(make_uint4(words[0], words[1], words[2], words[3]), quad);
        if (token >= at.last_token) continue;
        uint8_t* to = static_cast<uint8_t*>(args.out) + static_cast<size_t>(token) * args.rows + at.row;
        *reinterpret_cast<uint4*>(to + 64 * group + 16 * quad) =
            make_uint4(__byte_perm(v.x, v.y, 0x5410), __byte_perm(v.z, v.w, 0x5410), __byte_perm(v.x, v.y, 0x7632),
                       __byte_perm(v.z, v.w, 0x7632));
        if (group == 0 && quad == 0) {
          args.out_scales[static_cast<size_t>(at.row / kFp8Columns) * args.stride + token] =
              scale * args.share_of[token];
        }
      }
    }
  }
}

}  // namespace experts
}  // namespace meshserve
