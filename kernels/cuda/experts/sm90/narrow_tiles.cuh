// The experts of a step in which an expert has few tokens: products of 256 rows of one expert's weights by 16, 32 or 64
// of its tokens, with wgmma. Weights are the left operand and tokens the right one, both in shared memory as they lie
// in memory, so that an expert of few tokens costs hardly more than the time to read it.
//
// bf16 weights are multiplied with bf16 tokens. e4m3 weights are multiplied on the FP8 tensor cores, with tokens that
// are e4m3 numbers and a scale for each 128 columns: the sums over 128 columns, in float32, are multiplied by the
// scales of the weights' block and of the token, and added up in float32.
//
// Persistent blocks, one an SM, take tiles of equal work in turn. One warp fetches units of 64 rows of weights by 256
// bytes (of shorter stretches, the memory delivers less), the tokens' 256 bytes, and scales, into two pipelines. Of a
// tile's four units of the same columns, the first warpgroup multiplies the first and third, the second one the others.
//   gate_up: 128 rows of gate, and the same rows of up, of which a thread has both. Stores share * silu(gate) * up: in
//            bf16, or rounded to e4m3, with a scale for the 128 rows, which are columns of down; the share is in it
//   down:    256 rows. It finds its tiles and fetches its first weights while gate_up still runs
//
// In a decode step (kPermutes), the kernels also find the slots of the choices by themselves (narrow_tiles_memory.cuh);
// shares are multiplied when a token's experts are added up.
#pragma once
#include "common/rounding.cuh"
#include "common/sm90/wgmma_e4m3.cuh"
#include "experts/sm90/narrow_tiles_memory.cuh"

namespace meshserve {
namespace experts {

// The scales of a tile's first and second rows, for all columns: a lane has those of columns 128 * (lane + 32 * i).
struct TileScales {
  ScaleInFlight first[kFp8LaneScales] = {}, second[kFp8LaneScales] = {};

  __device__ __forceinline__ TileScales(const Scales& s, int row, int second_row, int blocks) {
    if (blocks == 0) return;
    const int grid_row = min(second_row / s.rows_each, s.grid_rows - 1);  // the last tile may exceed the matrix
#pragma unroll
    for (int i = 0; i < kFp8LaneScales; ++i) {
      const int group = threadIdx.x % 32 + 32 * i;
      if (group >= blocks) continue;
      first[i].load(s, static_cast<size_t>(row / s.rows_each) * s.grid_columns + group);
      second[i].load(s, static_cast<size_t>(grid_row) * s.grid_columns + group);
    }
  }
  // Returns those of block k of columns. All lanes call it.
  __device__ __forceinline__ float2 of(const Scales& s, int k) const {
    const float low = (k < 32 ? first[0] : first[1]).value(s), high = (k < 32 ? second[0] : second[1]).value(s);
    return make_float2(__shfl_sync(0xffffffffu, low, k % 32), __shfl_sync(0xffffffffu, high, k % 32));
  }
};

// Adds the product of a unit to the sums of its 64 rows. `groups` of its columns exist; `token` is the tile's first.
template <class W, int N>
__device__ __forceinline__ void add_unit(float (&sums)[N / 2], const NarrowTilesMemory<N>& memory, int unit, int chunk,
                                         int token, int groups, bool is_first) {
  const int lane = threadIdx.x % 32;
  const uint64_t weights = tile_descriptor(shared_address(memory.units[unit]));
  const uint64_t tokens = tile_descriptor(shared_address(memory.tokens[chunk]));
  if constexpr (W::kIsQuantized) {
    float partial[2][N / 2];
    auto multiply = [&](int g) {
      wgmma_begin();
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        multiply_e4m3<N>(partial[g % 2], moved_on(weights, g * kUnitRows * 128) + 2 * i,
                         moved_on(tokens, g * N * 128) + 2 * i, i > 0);
      }
      wgmma_commit();
    };
    auto scale = [&](int g) {
      keep_in_place(partial[g % 2]);
      const float of_rows = memory.scales[unit][g];
#pragma unroll
      for (int j = 0; j < N / 8; ++j) {
        const float* of_tokens = memory.token_scales[chunk][g] + token % kMoreScales + 8 * j + 2 * (lane % 4);
        const float scale[2] = {of_rows * of_tokens[0], of_rows * of_tokens[1]};
#pragma unroll
        for (int i = 4 * j; i < 4 * j + 4; ++i) {
          sums[i] = fmaf(scale[i % 2], partial[g % 2][i], is_first && g == 0 ? 0.0f : sums[i]);
        }
      }
    };
    multiply(0);
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      if (g >= groups) break;
      const bool has_next = g + 1 < kGroups && g + 1 < groups;
      if (has_next) multiply(g + 1);
      if (has_next) {
        wgmma_wait<1>();
      } else {
        wgmma_wait<0>();
      }
      scale(g);
    }
  } else {
    wgmma_begin();
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      if (g >= groups) break;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        wgmma<N>(sums, moved_on(weights, g * kUnitRows * 128) + 2 * i, moved_on(tokens, g * N * 128) + 2 * i,
                 !is_first || g + i > 0);
      }
    }
    wgmma_commit();
    wgmma_wait<0>();
    keep_in_place(sums);
  }
}

// Stores a warp's 16 rows of the tokens as bf16. `to` is the first row's number of the tile's first token.
template <int N>
__device__ __forceinline__ void store_rows(bf16* to, int stride, const float (&sums)[N / 2], int num_tokens,
                                           int num_rows) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int j = 0; j < N / 8; ++j) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {  // 8 rows by 8 tokens: a lane then has two rows of a token
      const uint32_t pair = transpose_8x8(pack_bf16(sums[4 * j + 2 * half], sums[4 * j + 2 * half + 1]));
      const int token = 8 * j + lane / 4, row = 8 * half + 2 * (lane % 4);
      if (token < num_tokens && row < num_rows) {
        *reinterpret_cast<uint32_t*>(to + static_cast<size_t>(token) * stride + row) = pair;
      }
    }
  }
}

// Stores a warp's 16 rows of the tokens as e4m3, multiplied by the inverses of the lane's tokens' scales.
template <int N>
__device__ __forceinline__ void store_rows(uint8_t* to, int stride, const float (&values)[N / 2],
                                           const float (&inverse)[N / 4], int num_tokens) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int j = 0; j < N / 8; ++j) {
    uint32_t pairs = 0;  // rows r and r + 8 of each of two tokens
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      const float factor = inverse[2 * j + t];
      pairs |= static_cast<uint32_t>(to_e4m3(values[4 * j + t] * factor, values[4 * j + t + 2] * factor)) << 16 * t;
    }
    // 8 rows by 8 tokens: a lane then has rows 2q, 2q + 8, 2q + 1 and 2q + 9 of a token, where q = lane % 4.
    pairs = __byte_perm(transpose_8x8(pairs), 0u, 0x3120);
    // One of the neighboring lanes gets rows 2q and 2q + 1, the other 2q + 8 and 2q + 9.
    const uint32_t other = __shfl_xor_sync(0xffffffffu, pairs, 1);
    const uint32_t four = lane % 2 == 0 ? __byte_perm(pairs, other, 0x5410) : __byte_perm(other, pairs, 0x7632);
    const int token = 8 * j + lane / 4, row = lane % 4 / 2 * 4 + lane % 2 * 8;
    if (token < num_tokens) *reinterpret_cast<uint32_t*>(to + static_cast<size_t>(token) * stride + row) = four;
  }
}

template <bool kIsDown, int N, class W, bool kPermutes = false>
__global__ void __launch_bounds__(narrow_threads(kPermutes), 1)
    narrow_tiles_kernel(const __grid_constant__ CUtensorMap weights, const __grid_constant__ CUtensorMap input,
                        const __grid_constant__ CUtensorMap input_scales,
                        const __grid_constant__ NarrowTilesArgs args) {
  using Memory = std::conditional_t<kPermutes, PermutingMemory<N>, NarrowTilesMemory<N>>;
  constexpr bool kGathers = kPermutes && !kIsDown;
  constexpr int kRows = kIsDown ? 2 * kHalfRows : kHalfRows;  // the output's
  constexpr int kTokenBytes = kGroups * (N * 128 + (W::kIsQuantized ? (N + kMoreScales) * 4 : 0));
  extern __shared__ __align__(1024) uint8_t shared[];
  auto& memory = *reinterpret_cast<Memory*>(shared);
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const uint32_t full = shared_address(memory.full), empty = shared_address(memory.empty);
  const uint32_t tokens_full = shared_address(memory.tokens_full), tokens_empty = shared_address(memory.tokens_empty);
  if (threadIdx.x == kNarrowConsumers) {
    prefetch_map(&weights);
    prefetch_map(&input);
    if (W::kIsQuantized) prefetch_map(&input_scales);
    for (int s = 0; s < kUnits<N>; ++s) {
      barrier_init(full + 8 * s, 1);
      barrier_init(empty + 8 * s, kWarps / 2);
    }
    for (int s = 0; s < kChunks<N>; ++s) {
      barrier_init(tokens_full + 8 * s, 1);
      barrier_init(tokens_empty + 8 * s, kWarps);
    }
    barrier_init_fence();
  }
  const int row_tiles = (args.rows + kRows - 1) / kRows;
  const int blocks = (args.columns + W::kBlockColumns - 1) / W::kBlockColumns;
  const int units = (blocks + kGroups - 1) / kGroups * 4;  // in a tile
  const uint64_t policy = evict_first_policy();
  const int to_second_row = kIsDown ? kHalfRows : args.rows;
  auto row_of = [&](int expert, int row) { return args.first_row + expert * args.rows * (kIsDown ? 1 : 2) + row; };
  auto scales_of = [&](int row) {
    return TileScales(args.scales, row, row + to_second_row, W::kIsQuantized ? blocks : 0);
  };
  auto row_of_unit = [&](int row, int i) { return row + (i % 4 < 2 ? 0 : to_second_row) + i % 2 * kUnitRows; };
  // Fetches unit i of the tile whose first row is `row`.
  auto fetch_unit = [&](int row, const TileScales& scales, int i, int to_unit) {
    const int first_group = i / 4 * kGroups;
    const uint32_t to = shared_address(memory.units[to_unit]), barrier = full + 8 * to_unit;
    if constexpr (W::kIsQuantized) {
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        const float2 of_rows = scales.of(args.scales, min(first_group + g, blocks - 1));
        if (lane == 0) memory.scales[to_unit][g] = i % 4 < 2 ? of_rows.x : of_rows.y;
      }
    }
    if (lane == 0) {
      barrier_expect_bytes(barrier, kUnitBytes);
      copy_tile(to, &weights, row_of_unit(row, i), first_group, barrier, policy);
    }
  };
  ReservedTile reserved = {};
  int num_reserved = 0, num_early = 0;  // experts, and units that are fetched before the wait
  if constexpr (kPermutes) {
    if constexpr (!kIsDown) num_reserved = min(static_cast<int>(gridDim.x) / row_tiles, args.num_experts);
    reserved.expert = blockIdx.x / row_tiles, reserved.row = blockIdx.x % row_tiles * kRows;
    reserved.is_reserved = reserved.expert < num_reserved;
    if (reserved.is_reserved) num_early = min(kUnits<N>, units);
    if (threadIdx.x == 0) memory.is_released = false;
    clear(memory.choices);
    __syncthreads();
    if (warp == kWarps && num_early > 0) {
      const int row = row_of(reserved.expert, reserved.row);
      const TileScales scales = scales_of(row);
#pragma unroll 1
      for (int i = 0; i < num_early; ++i) {
        if (i >= kEarlyInFlight && !memory.is_released) barrier_wait(full + 8 * (i - kEarlyInFlight), 0);
        fetch_unit(row, scales, i, i);
        const int later = num_early + i;
        if (i < kLaterUnits && later < units && lane == 0) {
          prefetch_tile(&weights, row_of_unit(row, later), later / 4 * kGroups);
        }
      }
    }
  }
  auto wait = [&] {
    if (!kIsDown) wait_for_previous_kernel();
    let_next_kernel_start();
  };
  int all_tiles;
  if constexpr (kPermutes) {
    if (warp != kWarps) wait();
    if (warp < kWarps) {
      if (threadIdx.x == 0) memory.is_released = true;
      assign_slots<N>(memory, args, row_tiles, num_reserved);
    }
    __syncthreads();
    all_tiles = count_left_tiles<N>(memory, row_tiles, num_reserved, &reserved);
  } else {
    wait();
    all_tiles = count_tiles<N>(memory, args.first, row_tiles);
  }
  // Finds the block's tile i, given an earlier one.
  auto find = [&](int i, ExpertTile* at) {
    if constexpr (kPermutes) {
      if (i == 0 && reserved.is_chosen) {
        const int* first = memory.first_token + reserved.expert;
        *at = {reserved.expert, first[0], first[1], reserved.row};
        return true;
      }
      const int number = reserved.number(i);
      if (number < all_tiles) *at = find_left_tile<N>(memory, number, kRows, num_reserved);
      return number < all_tiles;
    } else {
      const int number = blockIdx.x + i * gridDim.x;
      if (number < all_tiles) find_tile<N>(memory, number, kRows, at);
      return number < all_tiles;
    }
  };
  const bool is_dropped = num_early > 0 && !reserved.is_chosen;  // what was fetched before the wait
  ExpertTile at;

  if constexpr (kGathers) {
    if (warp == kWarps + 1) return copy_tokens<N, W>(memory, args, blocks, tokens_full, tokens_empty, find);
  }
  if (warp > kWarps) return;
  if (warp == kWarps) {
    const uint64_t keep = evict_last_policy();
    int unit = 0, chunk = 0;
    uint32_t parity = 1, tokens_parity = 1;
    bool is_waiting = kIsDown;
    int fewer = 0;
    if constexpr (kPermutes) fewer = reserved.fewer_units(all_tiles, kUnits<N>);
    if (is_dropped) {
      unit = num_early % kUnits<N>;
      if (unit == 0) parity ^= 1;
      num_early = 0;
    }
#pragma unroll 1
    for (int t = 0; find(t, &at); ++t) {
      const int row = row_of(at.expert, at.row);
      const TileScales scales = scales_of(row);
      if (is_waiting) {
        num_early = min(kUnits<N>, units);
#pragma unroll 1
        for (int i = 0; i < num_early; ++i) fetch_unit(row, scales, i, i);
        wait_for_previous_kernel();
        is_waiting = false;
      }
#pragma unroll 1
      for (int i = 0; i < units; ++i) {
        if (!kGathers && i % 4 == 0) {
          if (lane == 0) {
            const uint32_t barrier = tokens_full + 8 * chunk;
            barrier_wait(tokens_empty + 8 * chunk, tokens_parity);
            barrier_expect_bytes(barrier, kTokenBytes);
            copy_tile(shared_address(memory.tokens[chunk]), &input, at.token, i / 4 * kGroups, barrier, keep);
            if (W::kIsQuantized) {
#pragma unroll
              for (int g = 0; g < kGroups; ++g) {
                copy_box(shared_address(memory.token_scales[chunk][g]), &input_scales, first_scale(at.token),
                         i / 4 * kGroups + g, 0, barrier);
              }
            }
          }
          if (++chunk == kChunks<N>) chunk = 0, tokens_parity ^= 1;
        }
        if (i >= num_early) {
          if (lane == 0) {
            barrier_wait(empty + 8 * unit, parity);
            const int later = unit + fewer, is_next_round = later >= kUnits<N>;
            if (fewer > 0) barrier_wait(empty + 8 * (later - is_next_round * kUnits<N>), parity ^ is_next_round);
          }
          fetch_unit(row, scales, i, unit);
        }
        __syncwarp();
        if (++unit == kUnits<N>) unit = 0, parity ^= 1;
      }
      num_early = 0;
    }
    if (is_waiting) wait_for_previous_kernel();
    return;
  }

  const int group = warp / 4, first_row = 64 * group + 16 * (warp % 4);  // the warp's, in each 128 rows
  int unit = group, chunk = 0, buffer = 0;
  uint32_t parity = 0, tokens_parity = 0;
  float sums[2][N / 2];
  if constexpr (kGathers) {
    if (is_dropped) {
#pragma unroll 1
      for (; unit < num_early; unit += 2) {
        barrier_wait(full + 8 * unit, parity);
        if (lane == 0) barrier_arrive(empty + 8 * unit);
      }
      if (unit >= kUnits<N>) unit -= kUnits<N>, parity ^= 1;
    }
  }
#pragma unroll 1
  for (int t = 0; find(t, &at); ++t) {
#pragma unroll 1
    for (int first_group = 0; first_group < blocks; first_group += kGroups) {
      barrier_wait(tokens_full + 8 * chunk, tokens_parity);
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        barrier_wait(full + 8 * unit, parity);
        add_unit<W, N>(sums[m], memory, unit, chunk, kGathers ? 0 : at.token, blocks - first_group, first_group == 0);
        __syncwarp();  // all lanes have read the scales
        if (lane == 0) barrier_arrive(empty + 8 * unit);
        if ((unit += 2) >= kUnits<N>) unit -= kUnits<N>, parity ^= 1;
      }
      if (lane == 0) barrier_arrive(tokens_empty + 8 * chunk);
      if (++chunk == kChunks<N>) chunk = 0, tokens_parity ^= 1;
    }
    const int num_tokens = at.last_token - at.token, row = at.row + first_row;
    const size_t first_number = static_cast<size_t>(at.token) * args.rows + row;
    if constexpr (kIsDown) {
      bf16* to = static_cast<bf16*>(args.out) + first_number;
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        store_rows<N>(to + m * kHalfRows, args.rows, sums[m], num_tokens, args.rows - row - m * kHalfRows);
      }
    } else {
      // A lane has rows lane / 4 and 8 further of tokens 2 * (lane % 4) and the next one, of each 8.
      float values[N / 2];
#pragma unroll
      for (int i = 0; i < N / 2; ++i) values[i] = silu(sums[0][i]) * sums[1][i];
      if constexpr (W::kIsQuantized) {
        float inverse[N / 4];
        auto& highest = memory.highest[buffer];
        buffer ^= 1;
#pragma unroll
        for (int t = 0; t < N / 4; ++t) {
          const float* of_token = values + t / 2 * 4 + t % 2;
          float most = fmaxf(fabsf(of_token[0]), fabsf(of_token[2]));
#pragma unroll
          for (int lanes = 4; lanes < 32; lanes *= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, lanes));
          if (lane < 4) highest[warp][t / 2 * 8 + 2 * lane + t % 2] = most;
        }
        sync_threads(1, kNarrowConsumers);
        auto scale_of_token = [&](int token) {
          float most = 0.0f;
#pragma unroll
          for (int w = 0; w < kWarps; ++w) most = fmaxf(most, highest[w][token]);
          return e4m3_scale(most);
        };
#pragma unroll
        for (int t = 0; t < N / 4; ++t) inverse[t] = 1.0f / scale_of_token(t / 2 * 8 + 2 * (lane % 4) + t % 2);
        store_rows<N>(static_cast<uint8_t*>(args.out) + first_number, args.rows, values, inverse, num_tokens);
        const int token = threadIdx.x;
        if (token < N && token < num_tokens) {
          const size_t slot = at.token + token;
          args.out_scales[static_cast<size_t>(at.row / kFp8Columns) * args.stride + slot] =
              scale_of_token(token) * (kPermutes ? 1.0f : args.share_of[slot]);
        }
      } else {
#pragma unroll
        for (int i = 0; i < N / 2; ++i) {
          const int token = i / 4 * 8 + lane % 4 * 2 + i % 2;
          if (!kPermutes) values[i] *= token < num_tokens ? args.share_of[at.token + token] : 0.0f;
        }
        store_rows<N>(static_cast<bf16*>(args.out) + first_number, args.rows, values, num_tokens, args.rows - row);
      }
    }
  }
}

}  // namespace experts
}  // namespace meshserve
