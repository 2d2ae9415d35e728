// One projection of a decode step, out[b, row] = sum_k input[b, k] weights[row, k], fused with the operations after it.
//
// A step reads every weight once, so the kernel is bound by streaming the weights. A block processes 128 rows of the
// weights (two groups of 64, one per warpgroup) and one of `splits` ranges of k. The splits of a tile form a cluster
// and add their results through distributed shared memory. One warp fetches [64, 64] tiles of weights and [N, 64] tiles
// of activations with the bulk tensor copy engine into a pipeline of stages. Two warpgroups multiply with wgmma, with
// the batch as its N. One more warp loads per-token data for the epilogue. The weights of the whole pipeline are
// fetched before the wait for the previous kernel, which hides the launch latency.
//
// RMSNorm is split over kernels: the kernel that writes the residual stream also writes x * gain (bf16) and, per tile
// of 128 columns, the sum of squares; the kernel that reads it scales its result by 1 / rms. No block has to normalize
// its input, so the copy engine can load activations unchanged.
//
// For few tokens, the compute warps read the activations themselves, all at once: the copy engine would deliver them
// late, behind the copies of weights that the next kernels have already queued.
//
// Quantized weights differ in the product (converted_product.cuh) and in the form of activations (weight_formats.cuh).
// Their blocks have 128 bytes of each row, too, which are more columns, and a stage has one block.
#pragma once
#include <type_traits>

#include "projection/sm90/exchange.cuh"
#include "projection/sm90/producer.cuh"
#include "projection/sm90/products.cuh"
#include "projection/sm90/qkv_epilogue.cuh"

namespace meshserve {

template <Epilogue E, class W>
using EpilogueOf = std::conditional_t<
    E == Epilogue::kQkv, QkvEpilogue<W>,
    std::conditional_t<
        kAttends<E>, AttendEpilogue<E, W>,
        std::conditional_t<
            E == Epilogue::kRouted, RoutedEpilogue<E, W>,
            std::conditional_t<
                E == Epilogue::kResidual, ResidualEpilogue<E, W>,
                std::conditional_t<E == Epilogue::kGateUp, GateUpEpilogue<W>,
                                   std::conditional_t<E == Epilogue::kShare, ShareEpilogue<W>, LogitsEpilogue<W>>>>>>>;

// What the compute warps do: multiply the block's range of columns, add up the ranges, and finish tokens.
template <int N, Epilogue E, class W>
__device__ __forceinline__ void run_consumers(const ProjectionBlock<N, E, W>& block) {
  touch_parameters(block.args);
  EpilogueOf<E, W> epilogue(block);
  ProductOf<N, E, W> product(block);
  epilogue.begin();
  wait_for_previous_kernel();
  ExchangeOf<N, E, W, EpilogueOf<E, W>> exchange(block, epilogue);
  if constexpr (!kHasTokenRows<W>) exchange.tokens.fetch(exchange.tokens.first);
  product.load_input();
  float sums[product.kChains][N / 2];
  product.multiply(sums);
  if (block.is_cluster) cluster_wait();
  if constexpr (kHasTokenRows<W>) exchange.tokens.fetch(exchange.tokens.first);  // whose registers the products needed
  if (!exchange.give(sums[0])) return;
  exchange.synchronize();
  exchange.finish();
  epilogue.end();
}

// The same of clusters that attend: each block gets the sums of all blocks for one token, and attends to it.
template <int N, Epilogue E, class W>
__device__ __forceinline__ void run_attending_consumers(const ProjectionBlock<N, E, W>& block) {
  touch_parameters(block.args);
  const HeadPart part = block.head_part();
  HeadAttention<CacheOf<E>, ArgsOf<E, W>> attention;
  attention.begin(block.args, part, block.pipeline, block.head_memory(), block.warp, block.lane);
  if (threadIdx.x == 0 && part.token >= 0) {
    barrier_expect_bytes(block.sums_full, block.args.heads.blocks * kTileRows * 4);
  }
  EpilogueOf<E, W> epilogue(block);
  ProductOf<N, E, W> product(block);
  wait_for_previous_kernel();
  typename EpilogueOf<E, W>::Operands operands = {};
  if (part.token >= 0) operands = epilogue.load(part.token);
  product.load_input();
  float sums[product.kChains][N / 2];
  product.multiply(sums);
  cluster_wait();
  give_heads(block, part, sums[0]);
  sync_threads(2, kConsumers + 32);  // with the helper warp
  if (!part.has_drafts) attention.fetch_more();
  if (part.token >= 0) {
    barrier_wait(block.sums_full, 0);
    if (block.warp < block.args.group + 2) epilogue.finish_head(block, part, operands);
    sync_threads(1, kConsumers);
  }
  if (part.has_drafts) {
    cluster_sync_global();
    attention.fetch_more();
  }
  if (part.token >= 0) attention.attend();
}

// Grid: (splits, batch / N rounded up, tiles), with clusters of (splits, 1, 1). kAttend: (heads * splits, 1, K).
// Stage: [blocks, 64, 64] weights of the tile's first rows, the same of its second rows, then [blocks, N, 64]
// activations unless these are resident.
template <int N, Epilogue E, class W = Bf16Weights>
__global__ void __launch_bounds__(kProjectionThreads, 2)
    projection_kernel(const __grid_constant__ CUtensorMap weights, const __grid_constant__ CUtensorMap input,
                      const __grid_constant__ ArgsOf<E, W> args) {
  extern __shared__ __align__(1024) uint8_t pipeline[];
  const ProjectionBlock<N, E, W> block(args, pipeline);
  if (threadIdx.x == kConsumers) {
    prefetch_map(&weights);
    prefetch_map(&input);
    block.init_barriers();
    if (!args.holds_back) let_next_kernel_start();
  }
  __syncthreads();
  // The blocks of a cluster write to each other's shared memory at the end, so all must have started by then.
  if (block.is_cluster) cluster_arrive();
  if (block.warp == kProducerWarp) return run_producer(block, weights, input);
  if (block.warp == kHelperWarp) return run_helper(block);
  if constexpr (kAttends<E>) {
    run_attending_consumers(block);
  } else {
    run_consumers(block);
  }
}

}  // namespace meshserve
