// Where a block of the projection kernel is in the matrix, and what its shared memory holds.
#pragma once
#include "common/sm90/ptx.cuh"
#include "projection/sm90/arguments.cuh"

namespace meshserve {

template <int N, Epilogue E, class W>
struct ProjectionBlock {
  static constexpr int kInputTiles = W::kBlockColumns / kBlockK;  // per block of k
  static constexpr int kInputBytes = kTilesPerBlock<W> * N * kBlockK * 2;

  const ArgsOf<E, W>& args;
  uint8_t* const pipeline;  // shared memory, which begins with the pipeline's stages
  // The shuffle tells the compiler that the warp index is uniform within a warp, which wgmma requires.
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const int splits = args.splits;
  const int split = kAttends<E> ? blockIdx.x % splits : blockIdx.x;
  const int tile = kAttends<E> ? blockIdx.z * (args.group + 2) + blockIdx.x / splits : blockIdx.z;
  const int first_token = blockIdx.y * N;
  const int k_begin = first_block(split), k_end = first_block(split + 1);  // the range of this split, in blocks of k
  const int per_stage = W::kIsQuantized ? 1 : args.blocks_per_stage;       // blocks of k, which divide the range
  const int iterations = (k_end - k_begin) / per_stage;
  const uint32_t pipeline_address = shared_address(pipeline);
  const uint32_t full = pipeline_address + args.pipeline_bytes,
                 empty = full + 8 * kMaxStages;       // barriers of each stage
  const uint32_t sums_full = empty + 8 * kMaxStages;  // the barrier of the sums of other blocks
  long long* const cache_offsets = reinterpret_cast<long long*>(pipeline + args.pipeline_bytes + 16 * kMaxStages + 16);
  float* const inverse_rms = reinterpret_cast<float*>(cache_offsets + N);  // both of each token
  const uint32_t received = shared_address(inverse_rms + 2 * N);  // sums of other blocks, if they have a buffer
  const bool is_resident = kIsNarrow<N> && args.resident_input != nullptr;
  const int half_bytes = per_stage * kHalfTileBytes;  // 64 rows of weights in a stage
  const int stage_bytes = 2 * half_bytes + (is_resident ? 0 : per_stage * kInputBytes);
  const uint32_t resident = pipeline_address + args.stages * stage_bytes;  // activations that are not fetched to stages
  // Tiles begin at different k, so that they do not all load the same activations at once.
  const int first_stage = kSplitsInput<W> ? 0 : blockIdx.z % iterations;
  const bool is_cluster = kAttends<E> || splits > 1;

  __device__ __forceinline__ ProjectionBlock(const ArgsOf<E, W>& args, uint8_t* pipeline)
      : args(args), pipeline(pipeline) {}

  // Returns the block of k with which a split begins.
  __device__ __forceinline__ int first_block(int of_split) const {
    const bool is_power = (splits & (splits - 1)) == 0;  // a division takes some 30 instructions
    const int n = args.k_blocks * of_split;
    return is_power ? n >> (31 - __clz(splits)) : n / splits;
  }

  // Returns what attention has behind the sums.
  __device__ __forceinline__ HeadMemory* head_memory() const {
    return reinterpret_cast<HeadMemory*>(inverse_rms + 2 * N + args.heads.blocks * kSumStride);
  }

  // Returns the stage of the range that iteration i multiplies.
  __device__ __forceinline__ int stage_of(int i) const {
    const int stage = first_stage + i;
    return stage < iterations ? stage : stage - iterations;
  }

  // Initializes the barriers, with one thread.
  __device__ __forceinline__ void init_barriers() const {
#pragma unroll 1
    for (int s = 0; s < args.stages; ++s) {
      barrier_init(full + 8 * s, 1);
      barrier_init(empty + 8 * s, kConsumerWarps);
    }
    barrier_init(sums_full, 1);
    if constexpr (kAttends<E>) barrier_init(shared_address(&head_memory()->parts_full), 1);
    barrier_init_fence();
    if (kIsNarrow<N> && !kAttends<E>) {
      const int tokens = kSplitsInput<W> ? split == 0 : split_tokens(N - split, splits);
      barrier_expect_bytes(sums_full, tokens * splits * kTileRows * 4);
    }
  }

  // Returns what the block attends to.
  __device__ __forceinline__ HeadPart head_part() const {
    HeadPart part = {};
    if constexpr (kAttends<E>) part = find_head_part(args, blockIdx.x, lane);
    return part;
  }
};

}  // namespace meshserve
