// Logits of 128 tokens at a time by an FP8 output head with a scale for each row, in one pass over the head. The
// weights are wgmma's left operand and the tokens its right one. Tokens are as precise as bfloat16: two e4m3 numbers
// for each element, the nearest one and the nearest of what it leaves over, with a power of two for each 128 columns of
// a token.
//
// A block multiplies a tile of 192 rows by all tokens, over all columns, 128 at a time, and goes on to its next tile.
// One thread fetches weights and tokens with the bulk tensor copy engine to pipelines of their own. Weights come from
// memory, and their pipeline is filled before the wait for the previous kernel; tokens come from the L2. Sums of 128
// columns are scaled and added up in float32: the tensor cores' accumulators keep fewer bits.
#pragma once
#include "common/scales.cuh"
#include "common/sm90/ptx.cuh"
#include "common/sm90/wgmma_e4m3.cuh"
#include "common/sm90/wgmma_registers.cuh"

namespace meshserve {
namespace wide_head {

constexpr int kMostTokens = 128, kRowBytes = 128, kNumbers = 2;  // e4m3 numbers of an element of a token
constexpr int kComputeWarps = 12, kTileRows = 16 * kComputeWarps;
constexpr int kStages = 5, kStageBytes = kTileRows * kRowBytes;  // the pipeline of weights
constexpr int kInputStages = 3, kNumberBytes = kMostTokens * kRowBytes, kInputBytes = kNumbers * kNumberBytes;
// Sums take more registers than a thread has at its start; the warps that fetch, a warpgroup too, give up theirs.
constexpr int kThreads = 32 * (kComputeWarps + 4), kRegisters = 65536 / kThreads;
constexpr int kFetchRegisters = 32, kComputeRegisters = 160;

struct ProductArgs {
  const float* input_scales;  // [blocks, kMostTokens]
  Scales scales;              // the weights' scales
  int rows, tiles, num_tokens;
  int blocks;  // a block has 128 columns
  float* out;  // [tokens, rows]
};

struct ProductMemory {
  uint8_t weights[kStages][kStageBytes];
  uint8_t input[kInputStages][kNumbers][kNumberBytes];
  float input_scales[kInputStages][kMostTokens];
  uint64_t full[kStages], empty[kStages], input_full[kInputStages], input_empty[kInputStages];
};

// A position in the sequence of what a block fetches or multiplies, and in a pipeline of kLength stages.
template <int kLength>
struct Place {
  int tile, block = 0, stage = 0;
  uint32_t parity;
  __device__ __forceinline__ void advance(int blocks, int grid) {
    if (++block == blocks) block = 0, tile += grid;
    if (++stage == kLength) stage = 0, parity ^= 1;
  }
};

// Fetches the operands of `total` blocks of columns, with one thread.
__device__ __forceinline__ void fetch_operands(const CUtensorMap& weights, const CUtensorMap& input,
                                               const ProductArgs& args, ProductMemory& memory, int total) {
  const uint32_t full = shared_address(memory.full), empty = shared_address(memory.empty);
  const uint32_t input_full = shared_address(memory.input_full), input_empty = shared_address(memory.input_empty);
  const int grid = gridDim.x, first_tile = blockIdx.x;
  const uint64_t policy = evict_first_policy();
  Place<kStages> next = {first_tile, 0, 0, 1};
  Place<kInputStages> next_input = {first_tile, 0, 0, 1};
  const auto fetch_weights = [&] {
    const uint32_t barrier = full + 8 * next.stage;
    barrier_expect_bytes(barrier, kStageBytes);
    copy_bytes(shared_address(memory.weights[next.stage]), &weights, next.tile * kTileRows, next.block * kRowBytes,
               barrier, policy);
    next.advance(args.blocks, grid);
  };
  const auto fetch_input = [&] {
    const uint32_t barrier = input_full + 8 * next_input.stage;
    barrier_expect_bytes(barrier, kInputBytes + kMostTokens * 4);
#pragma unroll
    for (int n = 0; n < kNumbers; ++n) {
      const uint32_t to = shared_address(memory.input[next_input.stage][n]);
      copy_box(to, &input, 0, 0, kNumbers * next_input.block + n, barrier);
    }
    copy_row(shared_address(memory.input_scales[next_input.stage]), args.input_scales + next_input.block * kMostTokens,
             kMostTokens * 4, barrier);
    next_input.advance(args.blocks, grid);
  };
#pragma unroll 1
  for (int i = 0; i < min(kStages, total); ++i) fetch_weights();
  wait_for_previous_kernel();
#pragma unroll 1
  for (int i = 0; i < min(kInputStages, total); ++i) fetch_input();
#pragma unroll 1
  for (int i = 0; i < total; ++i) {  // what follows once the block's columns number i are multiplied
    if (i + kStages < total) {
      barrier_wait(empty + 8 * next.stage, next.parity);
      fetch_weights();
    }
    if (i + kInputStages < total) {
      barrier_wait(input_empty + 8 * next_input.stage, next_input.parity);
      fetch_input();
    }
  }
}

// Multiplies 64 rows of weights by all tokens, as two e4m3 numbers each: the float32 sums of 128 columns.
__device__ __forceinline__ void multiply(float (&sums)[kMostTokens / 2], uint32_t weights, uint32_t tokens) {
  const uint64_t a = tile_descriptor(weights);
  wgmma_begin();
#pragma unroll
  for (int n = 0; n < kNumbers; ++n) {
    const uint64_t b = tile_descriptor(tokens + n * kNumberBytes);
#pragma unroll
    for (int i = 0; i < kRowBytes / 32; ++i) {
      multiply_e4m3<kMostTokens>(sums, moved_on(a, 32 * i), moved_on(b, 32 * i), n + i > 0);
    }
  }
  wgmma_commit();
  wgmma_wait<0>();
  keep_in_place(sums);
}

// Grid: the blocks that run at the same time, or one for each tile if these are fewer.
__global__ void __maxnreg__(kRegisters)
    product_kernel(const __grid_constant__ CUtensorMap weights, const __grid_constant__ CUtensorMap input,
                   const __grid_constant__ ProductArgs args) {
  extern __shared__ __align__(1024) uint8_t shared[];
  ProductMemory& memory = *reinterpret_cast<ProductMemory*>(shared);
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const uint32_t full = shared_address(memory.full), empty = shared_address(memory.empty);
  const uint32_t input_full = shared_address(memory.input_full), input_empty = shared_address(memory.input_empty);
  const int grid = gridDim.x, first_tile = blockIdx.x;
  if (threadIdx.x == 32 * kComputeWarps) {
    prefetch_map(&weights);
    prefetch_map(&input);
    for (int s = 0; s < kStages; ++s) {
      barrier_init(full + 8 * s, 1);
      barrier_init(empty + 8 * s, kComputeWarps);
    }
    for (int s = 0; s < kInputStages; ++s) {
      barrier_init(input_full + 8 * s, 1);
      barrier_init(input_empty + 8 * s, kComputeWarps);
    }
    barrier_init_fence();
  }
  __syncthreads();

  if (warp >= kComputeWarps) {
    give_up_registers<kFetchRegisters>();
    const int num_tiles = (args.tiles - first_tile + grid - 1) / grid;
    if (warp == kComputeWarps && lane == 0) fetch_operands(weights, input, args, memory, num_tiles * args.blocks);
    return;
  }

  take_registers<kComputeRegisters>();
  Place<kStages> place = {first_tile, 0, 0, 0};
  Place<kInputStages> input_place = {first_tile, 0, 0, 0};
#pragma unroll 1
  for (int tile = first_tile; tile < args.tiles; tile += grid) {
    const int row = tile * kTileRows + warp * 16 + lane / 4;  // and the one 8 further
    ScaleInFlight scales[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) scales[half].load(args.scales, min(row + 8 * half, args.rows - 1));
    float sums[kMostTokens / 2];
#pragma unroll
    for (int j = 0; j < kMostTokens / 2; ++j) sums[j] = 0.0f;
#pragma unroll 1
    for (int block = 0; block < args.blocks; ++block) {
      barrier_wait(full + 8 * place.stage, place.parity);
      barrier_wait(input_full + 8 * input_place.stage, input_place.parity);
      float part[kMostTokens / 2];
      multiply(part, shared_address(memory.weights[place.stage]) + warp / 4 * 64 * kRowBytes,
               shared_address(memory.input[input_place.stage]));
      const float2* of_tokens = reinterpret_cast<const float2*>(memory.input_scales[input_place.stage]) + lane % 4;
#pragma unroll
      for (int j = 0; j < kMostTokens / 8; ++j) {
        const float2 two = of_tokens[4 * j];
#pragma unroll
        for (int k = 4 * j; k < 4 * j + 4; ++k) sums[k] = fmaf(k % 2 ? two.y : two.x, part[k], sums[k]);
      }
      __syncwarp();
      if (lane == 0) {
        barrier_arrive(empty + 8 * place.stage);
        barrier_arrive(input_empty + 8 * input_place.stage);
      }
      place.advance(args.blocks, grid);
      input_place.advance(args.blocks, grid);
    }

    // A lane has tokens 8 j + 2 (lane % 4) and the next.
    const float of_rows[2] = {scales[0].value(args.scales), scales[1].value(args.scales)};
#pragma unroll
    for (int k = 0; k < kMostTokens / 2; ++k) {
      const int token = k / 4 * 8 + lane % 4 * 2 + k % 2, further = k / 2 % 2 * 8;
      if (token < args.num_tokens && row + further < args.rows) {
        args.out[static_cast<size_t>(token) * args.rows + row + further] = sums[k] * of_rows[k / 2 % 2];
      }
    }
  }
}

}  // namespace wide_head
}  // namespace meshserve
