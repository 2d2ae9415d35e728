// The experts of a step of more than 8 tokens with 8-bit weights: products of 128 rows of one expert's weights by a few
// of its tokens. The weights stay in 8 bits in shared memory and are wgmma's left operand, converted in registers
// (quantised.cuh); the tokens, in order of their experts and with their columns in the order of weight_formats.cuh, are
// its right one. A scale covers 128 columns, and 64 rows or a multiple.
//
// Persistent blocks, two an SM if tiles have few tokens, take tiles of equal work in turn. One warp fetches 128 columns
// of a tile's weights and tokens with the bulk tensor copy engine, and their scales, into a ring of stages; two
// warpgroups multiply 64 rows each.
//   gate_up: 64 rows of gate, and the same rows of up, whose sums the second warpgroup passes to the first; stores
//            share * silu(gate) * up, again in the order of weight_formats.cuh
//   down:    128 rows. It finds its tiles and fetches its first weights while gate_up still runs
#pragma once
#include "expert_parts.cuh"
#include "expert_tiles.cuh"

namespace meshserve {
namespace experts {

constexpr int kFp8Threads = 288, kFp8Consumers = 256, kFp8Stages = 5, kFp8Columns = 128;
constexpr int kFp8HalfBytes = 64 * kFp8Columns, kFp8WeightBytes = 2 * kFp8HalfBytes;
constexpr int kFp8LaneScales = 2;  // each lane of a warp holds the scales of so many times 128 columns
constexpr int kFp8MostColumns = 32 * kFp8LaneScales * kFp8Columns;
// Blocks of an SM, by the tokens of a tile.
constexpr int fp8_blocks(int tokens) { return tokens <= 32 ? 2 : 1; }

struct Fp8TilesArgs {
  const int* first;       // [kMaxExperts + 1]: of each expert's tokens
  const float* share_of;  // of each place
  bf16* out;              // [places, rows]
  Scales scales;
  int rows, columns;  // rows of the output: an expert is [2, rows, columns] or [rows, columns]
  int first_row;      // of the layer in the stack of all layers
};

template <int N>
struct Fp8TilesMemory {
  uint8_t ring[kFp8Stages][kFp8WeightBytes + 2 * N * 128];
  float up[2][N / 2][128];  // of each thread of a warpgroup; two, so that one barrier a tile suffices
  float scales[kFp8Stages][2];
  uint64_t full[kFp8Stages], empty[kFp8Stages];
  int first_tile[kMaxExperts + 1], first_token[kMaxExperts + 1];
  int totals[kWarps];
};

template <bool kIsDown, int N>
__global__ void __launch_bounds__(kFp8Threads, fp8_blocks(N))
    fp8_tiles_kernel(const __grid_constant__ CUtensorMap weights, const __grid_constant__ CUtensorMap input,
                     const __grid_constant__ Fp8TilesArgs args) {
  constexpr int kRows = kIsDown ? 128 : 64;  // of the output, of a tile
  constexpr int kStageBytes = kFp8WeightBytes + 2 * N * 128;
  extern __shared__ __align__(1024) uint8_t shared[];
  auto& memory = *reinterpret_cast<Fp8TilesMemory<N>*>(shared);
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const uint32_t full = shared_address(memory.full), empty = shared_address(memory.empty);
  if (threadIdx.x == kFp8Consumers) {
    prefetch_map(&weights);
    prefetch_map(&input);
    for (int s = 0; s < kFp8Stages; ++s) {
      barrier_init(full + 8 * s, 1);
      barrier_init(empty + 8 * s, kWarps);
    }
    barrier_init_fence();
  }
  if (kIsDown) {
    let_next_kernel_start();
  } else {
    wait_for_previous_kernel();
    let_next_kernel_start();
  }
  const int all_tiles = count_tiles<N>(memory, args.first, (args.rows + kRows - 1) / kRows);
  const int blocks = args.columns / kFp8Columns;
  ExpertTile at;

  if (warp == kWarps) {
    const uint64_t policy = evict_first_policy();
    int stage = 0;
    uint32_t parity = 1;
    bool is_waiting = kIsDown;
#pragma unroll 1
    for (int tile = blockIdx.x; tile < all_tiles; tile += gridDim.x) {
      find_tile<N>(memory, tile, kRows, &at);
      const int row = args.first_row + at.expert * args.rows * (kIsDown ? 1 : 2) + at.row;
      const int second_row = row + (kIsDown ? 64 : args.rows);
      ScaleInFlight scale[kFp8LaneScales] = {}, second_scale[kFp8LaneScales] = {};  // of columns 128 * (lane + 32 * i)
      const Scales& s = args.scales;
      const int grid_row = min(second_row / s.rows_each, s.grid_rows - 1);  // the last tile may exceed the matrix
#pragma unroll
      for (int i = 0; i < kFp8LaneScales; ++i) {
        const int group = lane + 32 * i;
        if (group >= blocks) continue;
        scale[i].load(s, static_cast<size_t>(row / s.rows_each) * s.grid_columns + group);
        second_scale[i].load(s, static_cast<size_t>(grid_row) * s.grid_columns + group);
      }
      auto fetch_weights = [&](int k, int to_stage) {
        const int i = k / 32;
        const float first = __shfl_sync(0xffffffffu, (i == 0 ? scale[0] : scale[1]).value(s), k % 32);
        const float second = __shfl_sync(0xffffffffu, (i == 0 ? second_scale[0] : second_scale[1]).value(s), k % 32);
        if (lane == 0) {
          const uint32_t to = shared_address(memory.ring[to_stage]), barrier = full + 8 * to_stage;
          memory.scales[to_stage][0] = first;
          memory.scales[to_stage][1] = second;
          barrier_expect_bytes(barrier, kStageBytes);
          copy_bytes(to, &weights, row, k * kFp8Columns, barrier, policy);
          copy_bytes(to + kFp8HalfBytes, &weights, second_row, k * kFp8Columns, barrier, policy);
        }
      };
      const int ahead = is_waiting ? min(kFp8Stages, blocks) : 0;  // stages whose weights are fetched before the wait
#pragma unroll 1
      for (int k = 0; k < ahead; ++k) fetch_weights(k, k);
      if (is_waiting) wait_for_previous_kernel();
      is_waiting = false;
#pragma unroll 1
      for (int k = 0; k < blocks; ++k) {
        if (k >= ahead) {
          if (lane == 0) barrier_wait(empty + 8 * stage, parity);
          fetch_weights(k, stage);
        }
        if (lane == 0) {
          const uint32_t to = shared_address(memory.ring[stage]) + kFp8WeightBytes, barrier = full + 8 * stage;
          copy_box(to, &input, k * kFp8Columns, at.token, 0, barrier);
          copy_box(to + N * 128, &input, k * kFp8Columns + 64, at.token, 0, barrier);
        }
        __syncwarp();
        if (++stage == kFp8Stages) stage = 0, parity ^= 1;
      }
    }
    if (is_waiting) wait_for_previous_kernel();
    return;
  }

  const int group = warp / 4, row_of_lane = warp % 4 * 16 + lane % 16;
  const uint32_t lane_offset = group * kFp8HalfBytes + row_of_lane * 128 + ((lane / 16) ^ (row_of_lane % 8)) * 16;
  int stage = 0, buffer = 0;
  uint32_t parity = 0;
#pragma unroll 1
  for (int tile = blockIdx.x; tile < all_tiles; tile += gridDim.x) {
    find_tile<N>(memory, tile, kRows, &at);
    float sums[N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; ++i) sums[i] = 0.0f;
#pragma unroll 1
    for (int k = 0; k < blocks; ++k) {
      barrier_wait(full + 8 * stage, parity);
      const uint32_t from = shared_address(memory.ring[stage]);
      const ScaleTable table = {shared_address(&memory.scales[stage][group]), 0, 0, 7, k, k};
      BlockProduct<N, Fp8Weights>(sums, from + lane_offset, from + kFp8WeightBytes, table, k * kFp8Columns).run();
      if (lane == 0) barrier_arrive(empty + 8 * stage);
      if (++stage == kFp8Stages) stage = 0, parity ^= 1;
    }

    // Of a lane's sums, i / 2 % 2 tells which of two rows it is, and the rest which token.
    auto& exchanged = memory.up[buffer];
    if (!kIsDown) {
      buffer ^= 1;
      const int thread = threadIdx.x % 128;
#pragma unroll
      for (int i = 0; i < N / 2; ++i) {
        if (group == 1) exchanged[i][thread] = sums[i];
      }
      sync_threads(1, kFp8Consumers);
      if (group == 1) continue;
#pragma unroll
      for (int i = 0; i < N / 2; ++i) sums[i] = silu(sums[i]) * exchanged[i][thread];
    }
    const int first_row = at.row + 64 * group + warp % 4 * 16 + lane / 4;
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      const int token = at.token + i / 4 * 8 + lane % 4 * 2 + i % 2, row = first_row + i / 2 % 2 * 8;
      if (token >= at.last_token || row >= args.rows) continue;
      bf16* to = args.out + static_cast<size_t>(token) * args.rows;
      if (kIsDown) {
        to[row] = __float2bfloat16(sums[i]);
      } else {
        to[ordered_column<Fp8Weights>(row)] = __float2bfloat16(sums[i] * args.share_of[token]);
      }
    }
  }
}

}  // namespace experts
}  // namespace meshserve
