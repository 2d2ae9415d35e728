// Paged decode attention of many requests by persistent blocks: one on each SM, which beside the other half of a batch
// leaves room there for a block of another kernel.
//
// A work item is what a cluster has in decode_attention.cuh: a part of a request, and a KV head. Its tiles are assigned
// round-robin to the warps of a block. A block begins with the item of its own number, then claims the next by a
// counter while it attends to the last, until there is none. Each warp fetches the first tiles of its next item during
// the last tiles of this one, so its pipeline is never empty: one block on an SM then reads as fast as two that end and
// begin, and requests of any lengths keep all SMs busy.
//
// The parts are planned once for all layers (prepare.cuh). No token may depend on another one of its step.
#pragma once
#include "attention/sm90/decode_attention.cuh"

namespace meshserve {

constexpr int kMaxPersistentStages = 4;
constexpr int kPersistentHeadDim = 128;  // elements
constexpr int kPersistentTileBytes = kProductTokens * kPersistentHeadDim * sizeof(bf16);
constexpr int kResultStride = kPersistentHeadDim + 4;  // floats: a query's result, its largest score and its sum

struct PersistentArgs : AttentionArgs {
  const PlannedPart* plan;    // [cuts.num_clusters]
  int *claims, *next_claims;  // counters of this layer, which is 0 at the start, and of the next layer
};

// What follows the pipelines. The warps' results follow it: two times [warps, group, kResultStride].
template <int kWarps>
struct __align__(16) PersistentMemory {
  uint64_t full[kWarps * kMaxPersistentStages];
  int claimed[4];  // number of the block's i-th item, at i % 4; negative: not known yet
  bool is_last;    // whether this block is the last of the request's parts
};

template <int kWarps>
size_t persistent_bytes(int stages, int group) {
  const size_t warp_bytes = stages * 2 * kPersistentTileBytes + 2 * group * kResultStride * sizeof(float);
  return kWarps * warp_bytes + sizeof(PersistentMemory<kWarps>);
}

// A part of a request and a KV head, and where its tiles are.
template <int kWarps>
struct WorkItem {
  PlannedPart part = {};
  int cluster = 0, kv_head = 0;
  int page_of_lane = 0;  // page of the warp's tile looked_up + lane
  int looked_up = 0;

  __device__ int num_tiles() const { return (part.num_tokens + kProductTokens - 1) / kProductTokens; }
  __device__ int tile(int i, int warp) const { return (part.num_parts * i + part.index) * kWarps + warp; }
  __device__ int count(int warp) const {  // the number of the warp's tiles
    const int first = tile(0, warp), step = kWarps * part.num_parts;
    return num_tiles() > first ? (num_tiles() - first - 1) / step + 1 : 0;
  }
  __device__ void look_up_pages(const PersistentArgs& args, int first, int warp, int lane) {
    const int index = tile(first + lane, warp) * kProductTokens / args.page_size;
    const size_t row = static_cast<size_t>(part.request) * args.max_pages;
    page_of_lane = index < args.max_pages ? args.page_table[row + index] : 0;
    looked_up = first;
  }
};

// Returns the item of a number, without its pages. Its request is negative if there is no such item.
template <int kWarps>
__device__ __forceinline__ WorkItem<kWarps> work_item(const PersistentArgs& args, int number, int num_items) {
  WorkItem<kWarps> item;
  item.cluster = number / args.kv_heads;
  item.kv_head = number - item.cluster * args.kv_heads;
  item.part = number < num_items ? args.plan[item.cluster] : PlannedPart{-1, 0, 1, 0};
  return item;
}

// Stores a warp's results for the queries of the group.
__device__ __forceinline__ void store_results(float* to, const WarpState<kPersistentHeadDim>& state, int group,
                                              int lane) {
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    float sum = state.sum[c];
    for (int offset = 4; offset < 32; offset *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    const int query = 2 * (lane % 4) + c;
    if (query >= group) continue;
    float* row = to + query * kResultStride;
    if (lane < 4) *reinterpret_cast<float2*>(row + kPersistentHeadDim) = make_float2(state.largest[c], sum);
#pragma unroll
    for (int h = 0; h < kPersistentHeadDim / 16; ++h) {
      row[16 * h + lane / 4] = state.out[h][c];
      row[16 * h + lane / 4 + 8] = state.out[h][c + 2];
    }
  }
}

// Merges the results of a block's warps for 4 elements of a query; `stride` floats are between those of two warps.
template <int kWarps>
__device__ __forceinline__ Merged merge_results(const float* row, int stride, int element) {
  Merged merged;
  auto stats = [&](int warp) { return *reinterpret_cast<const float2*>(row + warp * stride + kPersistentHeadDim); };
#pragma unroll
  for (int w = 0; w < kWarps; ++w) merged.largest = fmaxf(merged.largest, stats(w).x);
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    const float4 v = *reinterpret_cast<const float4*>(row + w * stride + element);
    merged.add(v, stats(w).y, rescale(stats(w).x, merged.largest));
  }
  return merged;
}

// Grid: any number of blocks, for example one on each SM. An item has number cluster * K + kv_head.
template <int kWarps>
__global__ void __launch_bounds__(32 * kWarps, 1)
    persistent_attention_kernel(const __grid_constant__ CUtensorMap pages,
                                const __grid_constant__ PersistentArgs args) {
  constexpr int H = kPersistentHeadDim, kTileBytes = kPersistentTileBytes;
  const int warp_bytes = args.stages * 2 * kTileBytes;
  extern __shared__ __align__(1024) uint8_t memory[];
  auto* shared = reinterpret_cast<PersistentMemory<kWarps>*>(memory + kWarps * warp_bytes);
  float* results = reinterpret_cast<float*>(shared + 1);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const uint32_t pipeline = shared_address(memory) + warp * warp_bytes;
  const uint32_t full = shared_address(shared->full + warp * args.stages);
  volatile int* claimed = shared->claimed;

  touch_parameters(args);
  if (lane == 0) {
    for (int s = 0; s < args.stages; ++s) barrier_init(full + 8 * s, 1);
    barrier_init_fence();
  }
  if (threadIdx.x == 0) prefetch_map(&pages);
  if (threadIdx.x < 4) claimed[threadIdx.x] = -1;
  __syncthreads();
  wait_for_previous_kernel();
  if (threadIdx.x == 0 && blockIdx.x == 0) *args.next_claims = 0;

  const int num_items = args.cuts.num_clusters * args.kv_heads;
  const uint64_t policy = evict_first_policy();
  WorkItem<kWarps> from = work_item<kWarps>(args, blockIdx.x, num_items);
  if (from.part.request >= 0) from.look_up_pages(args, 0, warp, lane);
  // The warp fetches tile `next` of its `count` tiles of `from` next, to stage `to_stage`.
  int next = 0, count = from.count(warp), to_stage = 0, num_fetched = 0;
  auto fetch_more = [&] {
#pragma unroll 1
    for (; num_fetched < args.stages && next < count; ++next, ++num_fetched) {
      if (next - from.looked_up >= 32) from.look_up_pages(args, next, warp, lane);
      const int page = __shfl_sync(0xffffffffu, from.page_of_lane, next - from.looked_up);
      if (lane == 0) {
        const int offset = from.tile(next, warp) * kProductTokens % args.page_size;
        const long long slab = (static_cast<long long>(page) * args.kv_heads + from.kv_head) * 2;
        const int row = static_cast<int>(args.first_row + slab * args.page_size + offset);
        const uint32_t to = pipeline + to_stage * 2 * kTileBytes, barrier = full + 8 * to_stage;
        barrier_expect_bytes(barrier, 2 * kTileBytes);
        copy_tile(to, &pages, row, 0, barrier, policy);
        copy_tile(to + kTileBytes, &pages, row + args.page_size, 0, barrier, policy);
      }
      if (++to_stage == args.stages) to_stage = 0;
    }
  };
  fetch_more();

  WarpState<H> state;
  int stage = 0, parity = 0;
#pragma unroll 1
  for (int n = 0; from.part.request >= 0; ++n) {
    const WorkItem<kWarps> item = from;
    const int num_tokens = item.part.num_tokens, num_tiles = item.num_tiles(), my_tiles = count;
    int claim = 0;
    if (threadIdx.x == 0) {
      claimed[(n + 2) % 4] = -1;
      claim = gridDim.x + atomicAdd(args.claims, 1);
    }
    const size_t first_head = (static_cast<size_t>(item.part.request) * args.kv_heads + item.kv_head) * args.group;
    load_queries<H, Bf16Cache>(state, args.q + first_head * H, num_tokens > 0 ? args.group : 0, lane);
    // The next item is opened in two steps, a tile apart, because the second needs what the first one loads.
    WorkItem<kWarps> then;
    int num_opened = 0;
    auto open_next = [&] {
      const int number = num_opened == 0 ? __shfl_sync(0xffffffffu, claimed[(n + 1) % 4], 0) : -1;
      if (number >= 0) {
        then = work_item<kWarps>(args, number, num_items);
        num_opened = 1;
      } else if (num_opened == 1) {
        if (then.part.request >= 0) then.look_up_pages(args, 0, warp, lane);
        if (then.part.request < 0 && threadIdx.x == 0) let_next_kernel_start();
        num_opened = 2;
      }
    };
    bool is_next_open = false;
    auto go_on = [&] {  // fetches further tiles of this item, or those of the next one
      if (!is_next_open && next == count && num_opened == 2) {
        is_next_open = true;
        from = then;
        next = 0;
        count = from.count(warp);
      }
      fetch_more();
    };
#pragma unroll 1
    for (int i = 0; i < my_tiles; ++i) {
      const uint32_t k_tile = pipeline + stage * 2 * kTileBytes, v_tile = k_tile + kTileBytes;
      const int tile = item.tile(i, warp);
      barrier_wait(full + 8 * stage, parity);
      if (tile == num_tiles - 1) clear_values<H, Bf16Cache>(v_tile, num_tokens - tile * kProductTokens, lane);
      attend_tile<H, Bf16Cache>(state, k_tile, v_tile, tile * kProductTokens, num_tokens, args.scale_log2, lane);
      __syncwarp();
      if (++stage == args.stages) stage = 0, parity ^= 1;
      --num_fetched;
      go_on();
      if (i == 0 && threadIdx.x == 0) claimed[(n + 1) % 4] = claim;
      if (i > 0) open_next();
    }
    if (my_tiles == 0 && threadIdx.x == 0) claimed[(n + 1) % 4] = claim;
#pragma unroll 1
    while (num_opened < 2) open_next();
    if (!is_next_open) go_on();
    float* of_warps = results + n % 2 * kWarps * args.group * kResultStride;
    const int stride = args.group * kResultStride;
    store_results(of_warps + warp * stride, state, args.group, lane);
    __syncthreads();
    auto for_mine = [&](auto use) {
#pragma unroll 1
      for (int i = threadIdx.x; i < args.group * (H / 4); i += 32 * kWarps) use(i / (H / 4), i % (H / 4) * 4);
    };
    auto merged_of = [&](int query, int element) {
      return merge_results<kWarps>(of_warps + query * kResultStride, stride, element);
    };
    auto store = [&](int query, int element, const Merged& merged) {
      store_activations<Bf16Weights>(args.out + (first_head + query) * H, nullptr, element, divided_by_sum(merged));
    };
    if (item.part.num_parts > 1) {
      auto row_of = [&](int index, int query) {
        const size_t cluster = item.cluster - item.part.index + index;
        return args.unmerged.rows + ((cluster * args.kv_heads + item.kv_head) * args.group + query) * (H + 4);
      };
      const int pair = item.part.request * args.kv_heads + item.kv_head;
      auto arrive = [&] { return atomicAdd(args.unmerged.num_arrived + pair, 1); };
      const ContextPart part = {item.part.request, item.part.index, item.part.num_parts};
      merge_parts<H>(part, arrive, &shared->is_last, for_mine, merged_of, row_of, store);
    } else {
      for_mine([&](int query, int element) { store(query, element, merged_of(query, element)); });
    }
  }
}

}  // namespace meshserve
