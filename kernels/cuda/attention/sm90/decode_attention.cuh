// Paged decode attention: each new token attends to its request's pages. A request may have several in a row (drafts).
//
// A token is called a request here: a request with several new tokens has as many rows of equal pages. A cluster of
// blocks processes one (request, kv head), or a part of a long context (see context_parts.cuh). The G query heads of
// the kv head are processed together, so that each page is read once. The context is split into tiles of 16 or 32
// tokens (see decode_tiles.cuh), assigned round-robin to the warps of all clusters of the request. Each warp streams
// its tiles through its own pipeline of stages with the bulk tensor copy engine and keeps its own online softmax,
// without block-wide barriers in the loop. The results of warps are merged through shared memory, those of blocks
// through the cluster's shared memory, and those of parts through global memory by the block that ends last.
//
// Pages of earlier tokens were written by earlier steps, so they are fetched before the wait for the previous kernel.
// Only the current token's row comes from that kernel: it is read after the wait and replaces the fetched row. Where
// several new tokens belong to one request, the tiles with those before the current one are fetched after the wait.
#pragma once
#include "attention/sm90/decode_tiles.cuh"

namespace meshserve {

template <class C>
constexpr int least_stages = C::kIsFp8 ? 2 : 1;  // in a warp's pipeline

struct AttentionArgs {
  const bf16* q;          // [B, K, G, H]
  const void* cache;      // this layer's [P, K, 2, S, H]
  const int* page_table;  // [B, max_pages]
  ContextCuts cuts;
  bf16* out;              // [B, K, G, H]; with RoundedFp8Weights e4m3
  float* rounded_scales;  // [K, G, B], of the result with RoundedFp8Weights
  Unmerged unmerged;
  long long first_row;  // the layer's first row in the whole cache, viewed as [L P K 2 S, H]
  int max_pages, page_size, kv_heads, group, log2_splits;
  int stages;        // in a warp's pipeline
  float scale_log2;  // softmax scale * log2(e)
};

// Results that the blocks of a cluster send to the block that finishes a query: one row per block and query.
template <int H>
struct Received {
  static constexpr int kRows = 16;  // at most splits + group - 1
  float out[kRows * H];
  float4 largest_and_sum[kRows];
  uint64_t barrier;  // counts the received bytes
  bool is_last;      // whether this block is the last of the request's parts
};

// Merges the warps' results and sends them to the block that finishes the query: 4 elements per thread.
template <int H>
__device__ __forceinline__ void merge_warps(const uint8_t* memory, int warp_bytes, const Received<H>* received,
                                            int group, int log2_splits) {
  const int splits = 1 << log2_splits, queries_per_block = (group + splits - 1) >> log2_splits;
#pragma unroll 1
  for (int i = threadIdx.x; i < group * H / 4; i += kAttentionThreads) {
    int query = i / (H / 4), element = i % (H / 4) * 4;
    const Merged merged = merge_partials<H>(memory, warp_bytes, query, element);
    int row = blockIdx.x * queries_per_block + (query >> log2_splits), to = query & (splits - 1);
    const uint32_t at = shared_address(received->out + row * H + element);
    const uint32_t stats_at = shared_address(received->largest_and_sum + row);
    const float4 stats = make_float4(merged.largest, merged.sum, 0.0f, 0.0f);
    if (log2_splits > 0) {
      const uint32_t barrier = address_in_cluster(shared_address(&received->barrier), to);
      send_float4(address_in_cluster(at, to), merged.out, barrier);
      if (element == 0) send_float4(address_in_cluster(stats_at, to), stats, barrier);
    } else {
      store_shared_float4(at, merged.out);
      if (element == 0) store_shared_float4(stats_at, stats);
    }
  }
}

// Calls `merge(query, element)` for every 4 elements of the queries that this block finishes.
template <int H, class Merge>
__device__ __forceinline__ void for_my_queries(int group, int log2_splits, Merge merge) {
  const int queries_per_block = (group + (1 << log2_splits) - 1) >> log2_splits;
#pragma unroll 1
  for (int i = threadIdx.x; i < queries_per_block * (H / 4); i += kAttentionThreads) {
    const int query = (i / (H / 4) << log2_splits) + blockIdx.x;
    if (query >= group) return;
    merge(query, i % (H / 4) * 4);
  }
}

// Merges the results of the cluster's blocks.
template <int H>
__device__ __forceinline__ Merged merge_blocks(const Received<H>* received, int query, int element, int group,
                                               int log2_splits) {
  const int splits = 1 << log2_splits, queries_per_block = (group + splits - 1) >> log2_splits;
  auto row_of = [&](int r) { return r * queries_per_block + (query >> log2_splits); };
  Merged merged;
#pragma unroll 1
  for (int r = 0; r < splits; ++r) merged.largest = fmaxf(merged.largest, received->largest_and_sum[row_of(r)].x);
#pragma unroll 1
  for (int r = 0; r < splits; ++r) {
    const float4 stats = received->largest_and_sum[row_of(r)];
    const float4 v = *reinterpret_cast<const float4*>(received->out + row_of(r) * H + element);
    merged.add(v, stats.y, rescale(stats.x, merged.largest));
  }
  return merged;
}

// Grid: (blocks per cluster, K, clusters per KV head). W: the format of the output projection's weights.
template <int H, class W = Bf16Weights, class C = Bf16Cache>
__global__ void __launch_bounds__(kAttentionThreads, 2)
    attention_kernel(const __grid_constant__ CUtensorMap pages, const __grid_constant__ AttentionArgs args) {
  constexpr int kElementBytes = sizeof(typename C::Element), kTokens = kTileTokens<C>;
  constexpr int kTileBytes = kTokens * H * kElementBytes;
  static_assert(sizeof(Partial<H>) <= least_stages<C> * 2 * kTileBytes,
                "a warp's result takes the place of its pipeline");
  extern __shared__ __align__(1024) uint8_t memory[];
  const int warp_bytes = args.stages * 2 * kTileBytes;
  Received<H>* received = reinterpret_cast<Received<H>*>(memory + kAttentionWarps * warp_bytes);

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const ContextPart part = find_part(blockIdx.z, lane, args.cuts);
  if (part.request < 0) return;
  const int kv_head = blockIdx.y, request = part.request, num_tokens = args.cuts.positions[request] + 1;
  const int num_tiles = (num_tokens + kTokens - 1) / kTokens;
  const int num_workers = kAttentionWarps * part.num_parts << args.log2_splits;
  const int worker = ((part.index << args.log2_splits) + blockIdx.x) * kAttentionWarps + warp;
  const int my_tiles = num_tiles > worker ? (num_tiles - worker - 1) / num_workers + 1 : 0;
  const uint32_t pipeline = shared_address(memory) + warp * warp_bytes;
  const uint32_t full = shared_address(received + 1) + warp * args.stages * 8;

  touch_parameters(args);
  if (lane == 0) {
    for (int s = 0; s < args.stages; ++s) barrier_init(full + 8 * s, 1);
    barrier_init_fence();
  }
  // This block receives one row per block for each query that it finishes.
  const uint32_t all_received = shared_address(&received->barrier);
  if (threadIdx.x == 0) {
    const int splits = 1 << args.log2_splits, rank = blockIdx.x;
    const int rows = args.group > rank ? ((args.group - rank + splits - 1) >> args.log2_splits) << args.log2_splits : 0;
    barrier_init(all_received, 1);
    barrier_init_fence();
    barrier_expect_bytes(all_received, rows * (H + 4) * 4);
  }
  __syncthreads();
  if (args.log2_splits > 0) cluster_arrive();  // the blocks write into each other's memory at the end
  if (threadIdx.x == 0) {
    prefetch_map(&pages);
    let_next_kernel_start();
  }
  __syncwarp();

  // Lane i holds the page number of the warp's tile 32 j + i.
  const int* my_pages = args.page_table + static_cast<size_t>(request) * args.max_pages;
  auto look_up_pages = [&](int first) {
    int tile = first + lane;
    return tile < my_tiles ? my_pages[(worker + tile * num_workers) * kTokens / args.page_size] : 0;
  };
  int looked_up = 0, page_of_lane = look_up_pages(0);
  const uint64_t policy = evict_first_policy();
  auto fetch = [&](int i, int s) {  // fetches tile i of this warp to stage s; called by all lanes
    if (i - looked_up >= 32) {
      looked_up = i;
      page_of_lane = look_up_pages(i);
    }
    int page = __shfl_sync(0xffffffffu, page_of_lane, i - looked_up);
    if (lane == 0) {
      int offset = (worker + i * num_workers) * kTokens % args.page_size;
      long long slab = (static_cast<long long>(page) * args.kv_heads + kv_head) * 2;
      int row = static_cast<int>(args.first_row + slab * args.page_size + offset);
      uint32_t to = pipeline + s * 2 * kTileBytes;
      barrier_expect_bytes(full + 8 * s, 2 * kTileBytes);
      copy_tile(to, &pages, row, 0, full + 8 * s, policy);
      copy_tile(to + kTileBytes, &pages, row + args.page_size, 0, full + 8 * s, policy);
    }
  };
  const int num_early = count_early_tiles(args.cuts.positions, request, num_tiles, kTokens);
  int num_fetched = 0;
#pragma unroll 1
  for (; num_fetched < min(args.stages, my_tiles) && worker + num_fetched * num_workers < num_early; ++num_fetched) {
    fetch(num_fetched, num_fetched);
  }
  // Address of the current token's key and value: 16 bytes per lane of the warp that has the last tile.
  const uint4* current_row = nullptr;
  if (my_tiles > 0 && worker + (my_tiles - 1) * num_workers == num_tiles - 1 && lane % 16 < H * kElementBytes / 16) {
    int page = my_pages[(num_tokens - 1) / args.page_size], offset = (num_tokens - 1) % args.page_size;
    size_t slab = (static_cast<size_t>(page) * args.kv_heads + kv_head) * 2 + lane / 16;
    const uint8_t* cache = static_cast<const uint8_t*>(args.cache);
    current_row =
        reinterpret_cast<const uint4*>(cache + (slab * args.page_size + offset) * H * kElementBytes + 16 * (lane % 16));
  }

  wait_for_previous_kernel();
#pragma unroll 1
  for (; num_fetched < min(args.stages, my_tiles); ++num_fetched) fetch(num_fetched, num_fetched);
  WarpState<H> state;
  const bf16* q = args.q + (static_cast<size_t>(request) * args.kv_heads + kv_head) * args.group * H;
  load_queries<H, C>(state, q, num_tokens > 0 ? args.group : 0, lane);
  uint4 current = make_uint4(0, 0, 0, 0);
  if (current_row != nullptr) current = *current_row;

#pragma unroll 1
  for (int i = 0, s = 0, parity = 0; i < my_tiles; ++i) {
    int tile = worker + i * num_workers;
    uint32_t k_tile = pipeline + s * 2 * kTileBytes, v_tile = k_tile + kTileBytes;
    barrier_wait(full + 8 * s, parity);
    if (tile == num_tiles - 1) {
      patch_tile<H, C>(k_tile, v_tile, (num_tokens - 1) % kTokens, current, lane);
    }
    attend_tile<H, C>(state, k_tile, v_tile, tile * kTokens, num_tokens, args.scale_log2, lane);
    __syncwarp();
    if (i + args.stages < my_tiles) fetch(i + args.stages, s);
    if (++s == args.stages) s = 0, parity ^= 1;
  }

  Partial<H>* mine = reinterpret_cast<Partial<H>*>(memory + warp * warp_bytes);
  store_partial<H, C>(mine, state, lane);
  __syncthreads();
  if (args.log2_splits > 0) cluster_wait();
  merge_warps<H>(memory, warp_bytes, received, args.group, args.log2_splits);
  if (args.log2_splits > 0) {
    barrier_wait(all_received, 0);
  } else {
    __syncthreads();
  }
  const size_t first_head = (static_cast<size_t>(request) * args.kv_heads + kv_head) * args.group;
  const auto store = [&](int query, int element, const Merged& merged) {
    const float4 v = divided_by_sum(merged);
    if constexpr (std::is_same_v<W, RoundedFp8Weights>) {
      store_rounded<H>(reinterpret_cast<uint8_t*>(args.out) + (first_head + query) * H,
                       args.rounded_scales + (kv_head * args.group + query) * args.cuts.batch + request, element, v);
    } else {
      uint8_t* exponents = nullptr;
      if constexpr (W::kIsSplit) {
        exponents = exponents_of(args.out, args.cuts.batch, args.kv_heads * args.group * H) +
                    (first_head + query) * (H / kExponentColumns);
      }
      store_activations<W>(args.out + (first_head + query) * H, exponents, element, v);
    }
  };
  auto merged_of = [&](int query, int element) {
    return merge_blocks(received, query, element, args.group, args.log2_splits);
  };
  auto for_mine = [&](auto use) { for_my_queries<H>(args.group, args.log2_splits, use); };
  if (part.num_parts > 1) {
    auto row_of = [&](int index, int query) {
      const size_t cluster = blockIdx.z - part.index + index;
      return args.unmerged.rows + ((cluster * args.kv_heads + kv_head) * args.group + query) * (H + 4);
    };
    auto arrive = [&] {
      return atomicAdd(args.unmerged.num_arrived + (request * args.kv_heads + kv_head) * gridDim.x + blockIdx.x, 1);
    };
    return merge_parts<H>(part, arrive, &received->is_last, for_mine, merged_of, row_of, store);
  }
  for_mine([&](int query, int element) { store(query, element, merged_of(query, element)); });
}

}  // namespace meshserve
