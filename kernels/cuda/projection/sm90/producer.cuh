// The warps of the projection kernel that do not multiply: one fetches weights and activations to the pipeline, the
// other loads per-token data for the epilogue while the others multiply.
#pragma once
#include "projection/sm90/block.cuh"

namespace meshserve {

// Fetches the tiles of the block's range with the bulk tensor copy engine, with one thread. The weights of the whole
// pipeline are fetched before the wait for the previous kernel.
template <int N, Epilogue E, class W>
__device__ __forceinline__ void fetch_tiles(const ProjectionBlock<N, E, W>& block, const CUtensorMap& weights,
                                            const CUtensorMap& input) {
  const auto& args = block.args;
  const uint64_t weights_policy = evict_first_policy(), input_policy = evict_last_policy();
  auto column_block = [&](int i) { return block.k_begin + block.stage_of(i) * block.per_stage; };
  const int row = args.row_base + block.tile * args.tile_step;
  auto fetch_weights = [&](int i, int s) {
    uint32_t to = block.pipeline_address + s * block.stage_bytes, full = block.full + 8 * s;
    int k = column_block(i);
    barrier_expect_bytes(full, block.stage_bytes);
    if constexpr (W::kIsQuantized) {
      copy_bytes(to, &weights, row, 128 * k, full, weights_policy);
      copy_bytes(to + block.half_bytes, &weights, row + args.second_half, 128 * k, full, weights_policy);
    } else {
      copy_tile(to, &weights, row, k, full, weights_policy);
      copy_tile(to + block.half_bytes, &weights, row + args.second_half, k, full, weights_policy);
    }
  };
  auto fetch_input = [&](int i, int s) {
    uint32_t to = block.pipeline_address + s * block.stage_bytes + 2 * block.half_bytes;
    const int column = column_block(i) * kTilesPerBlock<W>;
    if (!block.is_resident) copy_tile(to, &input, block.first_token, column, block.full + 8 * s, input_policy);
  };
  const int ahead = min(args.stages, block.iterations);
#pragma unroll 1
  for (int i = 0; i < ahead; ++i) fetch_weights(i, i);
  wait_for_previous_kernel();
  if (args.holds_back) let_next_kernel_start();
#pragma unroll 1
  for (int i = 0; i < ahead; ++i) fetch_input(i, i);
#pragma unroll 1
  for (int i = ahead, s = 0, parity = 0; i < block.iterations; ++i) {
    barrier_wait(block.empty + 8 * s, parity);
    fetch_weights(i, s);
    fetch_input(i, s);
    if (++s == args.stages) s = 0, parity ^= 1;
  }
}

// What the warp that fetches does: `fetch_tiles`, and its part in the synchronization of the cluster.
template <int N, Epilogue E, class W>
__device__ __forceinline__ void run_producer(const ProjectionBlock<N, E, W>& block, const CUtensorMap& weights,
                                             const CUtensorMap& input) {
  if (block.lane == 0) fetch_tiles(block, weights, input);
  __syncwarp();
  if (block.is_cluster) {
    cluster_wait();
    if (kAttends<E> && block.head_part().has_drafts) cluster_sync_global();
    if (!kIsNarrow<N>) cluster_sync_shared();
    if (!kIsNarrow<N>) cluster_sync();
  }
}

// Returns the offset of a token's key for KV head 0 in the layer's cache, in elements, or -1 for padding.
__device__ __forceinline__ long long cache_offset(const ProjectionArgs& args, int token) {
  int position = token < args.batch ? args.positions[token] : -1;
  if (position < 0) return -1;
  long long page = args.page_table[token * args.max_pages + position / args.page_size];
  return (page * args.kv_heads * 2 * args.page_size + position % args.page_size) * args.head_dim;
}

__device__ __forceinline__ float total_of(float v) { return v; }
__device__ __forceinline__ float total_of(float4 v) { return (v.x + v.y) + (v.z + v.w); }

// Adds up every kLanes-th of `count` elements from `first` on, with kTogether loads in flight.
template <int kLanes, int kTogether, class Element>
__device__ __forceinline__ float sum_of(const Element* elements, int first, int count) {
  float sum = 0.0f;
#pragma unroll 1
  for (int i = first; i < count; i += kTogether * kLanes) {
    Element found[kTogether];
#pragma unroll
    for (int u = 0; u < kTogether; ++u) {
      found[u] = {};
      if (i + u * kLanes < count) found[u] = elements[i + u * kLanes];
    }
#pragma unroll
    for (int u = 0; u < kTogether; ++u) sum += total_of(found[u]);
  }
  return sum;
}

// Computes 1 / rms of N tokens' inputs with one warp: a few neighboring lanes per token. Experts' kernels leave a sum
// for each 16 columns.
template <int N>
__device__ __forceinline__ void load_inverse_rms(const ProjectionArgs& args, int first_token, int lane,
                                                 float* inverse_rms) {
  constexpr int kLanes = N < 32 ? 32 / N : 1, kTogether = N < 64 ? 8 : 2;  // as registers allow
  for (int n = lane / kLanes; n < N; n += 32 / kLanes) {
    const float* sums = args.sums_in + static_cast<size_t>(first_token + n) * args.norm_tiles;
    float sum = 0.0f;
    if (first_token + n < args.batch) {
      sum = args.norm_tiles % 4 == 0
                ? sum_of<kLanes, kTogether>(reinterpret_cast<const float4*>(sums), lane % kLanes, args.norm_tiles / 4)
                : sum_of<kLanes, kTogether>(sums, lane % kLanes, args.norm_tiles);
    }
    sum = sum_over_lanes(sum, kLanes);
    if (lane % kLanes == 0) inverse_rms[n] = rsqrtf(sum * args.inverse_dim + args.epsilon);
  }
}

// What the helper warp does: it leaves the tokens' places in the cache and their norms in shared memory.
template <int N, Epilogue E, class W>
__device__ __forceinline__ void run_helper(const ProjectionBlock<N, E, W>& block) {
  if (kHasHeads<E>) {
    for (int i = block.lane; i < N; i += 32) block.cache_offsets[i] = cache_offset(block.args, block.first_token + i);
  }
  wait_for_previous_kernel();
  if (kHasHeads<E> || E == Epilogue::kGateUp) {
    load_inverse_rms<N>(block.args, block.first_token, block.lane, block.inverse_rms);
  }
  if (block.is_cluster) cluster_wait();
  if (block.is_cluster && !kIsNarrow<N>) {
    cluster_sync_shared();
    cluster_sync();
  } else {
    arrive_threads(2, kConsumers + 32);
    if (kAttends<E> && block.head_part().has_drafts) cluster_sync_global();
  }
}

}  // namespace meshserve
