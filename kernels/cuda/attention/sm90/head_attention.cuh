// Attention in the clusters of the QKV projection, for a few tokens, so that a layer has one kernel less.
//
// A cluster computes the heads of a kv head: 128 rows and a range of k per block. Every block attends to a token, or to
// a part of its context, and gets the sums of all blocks for this token. It adds them up, applies norm and rotation,
// and attends: one hop through distributed shared memory in place of the start of another kernel.
//
// The blocks of a cluster are divided among the tokens by the lengths of their contexts, which only the device knows.
// Pages are fetched to pipelines as in decode_attention.cuh, before the wait for the previous kernel. When the weights
// have been multiplied, their memory gets further tiles. If tokens belong to one request, tiles with new tokens are
// fetched when the cluster has written them.
#pragma once
#include "attention/sm90/decode_tiles.cuh"

namespace meshserve {

constexpr int kHeadWarps = 8, kHeadThreads = 32 * kHeadWarps;
constexpr int kHeadBlocks = 8;      // most per cluster
constexpr int kHeadSlots = 6;       // most heads of a cluster, with key and value: a warp finishes one
constexpr int kHeadTokens = 8;      // most tokens of a step
constexpr int kMaxHeadStages = 16;  // in a warp's pipeline
constexpr int kHeadDim = 128;

struct HeadArgs {
  CUtensorMap pages;
  long long first_row;  // as in AttentionArgs
  bf16* attended;       // [batch, K, G, H]
  int blocks;           // per cluster
  int page_offset;      // bytes from the pipeline of weights to that of pages
  int early_stages, stages;
  int least_tiles;  // per part of a context
  float scale_log2;
};

// The results of other parts, right before the pipeline of pages, where activations were.
struct HeadParts {
  float out[kHeadBlocks * kHeadDim];
  float4 largest_and_sum[kHeadBlocks];
};
constexpr int kHeadPartsBytes = (sizeof(HeadParts) + 1023) / 1024 * 1024;

// Shared memory of a block behind the sums that it receives.
struct HeadMemory {
  uint64_t full[kHeadWarps * kMaxHeadStages];
  uint64_t parts_full;
  bf16 q[(kHeadSlots - 2) * kHeadDim];
  alignas(16) uint8_t current[2 * kHeadDim * sizeof(bf16)];  // key and value, elements of the cache
};

// What a block attends to.
struct HeadPart {
  int token, index, num_parts;  // token -1: nothing
  int first_block;              // the first of the token's parts
  int token_of_lane;            // the token of the cluster's block `lane`, or -1
  bool has_drafts;              // whether tokens may belong to one request
};

// Divides the blocks of a cluster among tokens, by the lengths of their contexts: at least one for each. Called by a
// whole warp. Args: those of a projection, with `heads`.
template <class Args>
__device__ __forceinline__ HeadPart find_head_part(const Args& args, int rank, int lane) {
  constexpr uint32_t kAll = 0xffffffffu;
  const int batch = args.batch, position = lane < batch ? args.positions[lane] : -1;
  const int before = __shfl_up_sync(kAll, position, 1);
  bool is_draft = lane > 0 && before >= 0 && position == before + 1;
  if (is_draft) {  // only tokens of one request write to the same page
    const int* page = args.page_table + lane * args.max_pages + before / args.page_size;
    is_draft = page[0] == page[-args.max_pages];
  }
  const int tiles = (position + kProductTokens) / kProductTokens, shares = args.heads.blocks - batch + 1;
  const int share = max((__reduce_add_sync(kAll, tiles) + shares - 1) / shares, args.heads.least_tiles);
  const int parts = lane < batch ? max(1, (tiles + share - 1) / share) : 0;
  int end = parts;
#pragma unroll
  for (int distance = 1; distance < kHeadTokens; distance *= 2) {
    const int others = __shfl_up_sync(kAll, end, distance);
    if (lane >= distance) end += others;
  }
  HeadPart part = {};
  part.has_drafts = __ballot_sync(kAll, is_draft) != 0;
#pragma unroll
  for (int token = 0; token < kHeadTokens; ++token) {
    const int token_end = __shfl_sync(kAll, end, token);
    if (token < batch && lane >= token_end) ++part.token_of_lane;
  }
  if (part.token_of_lane >= batch) part.token_of_lane = -1;
  part.token = __shfl_sync(kAll, part.token_of_lane, rank);
  const int owner = max(part.token, 0);
  part.num_parts = __shfl_sync(kAll, parts, owner);
  part.first_block = __shfl_sync(kAll, end, owner) - part.num_parts;
  part.index = rank - part.first_block;
  return part;
}

// Args: those of a projection, with `heads`.
template <class C, class Args>
class HeadAttention {
 public:
  static constexpr int H = kHeadDim, kTokens = kProductTokens;
  static constexpr int kTileBytes = kTokens * H * sizeof(typename C::Element);

  // Begins to fetch pages, if the previous kernel cannot have written them. Called by all consumers.
  __device__ __forceinline__ void begin(const Args& args, const HeadPart& part, uint8_t* pipeline, HeadMemory* memory,
                                        int warp, int lane) {
    args_ = &args;
    part_ = part;
    pipeline_ = pipeline;
    memory_ = memory;
    kv_head_ = blockIdx.z;
    warp_ = warp;
    lane_ = lane;
    if (threadIdx.x == 0 && part.token >= 0 && part.num_parts > 1) {
      const int rows = num_mine() * part.num_parts;
      barrier_expect_bytes(shared_address(&memory->parts_full), rows * (H + 4) * 4);
    }
    if (part.token < 0) return;
    full_ = shared_address(memory->full + warp * kMaxHeadStages);
    if (lane == 0) {
#pragma unroll 1
      for (int s = 0; s < args.heads.stages; ++s) barrier_init(full_ + 8 * s, 1);
      barrier_init_fence();
    }
    __syncwarp();
    num_tokens_ = args.positions[part.token] + 1;
    num_tiles_ = (num_tokens_ + kTokens - 1) / kTokens;
    num_workers_ = kHeadWarps * part.num_parts;
    worker_ = part.index * kHeadWarps + warp;
    my_tiles_ = num_tiles_ > worker_ ? (num_tiles_ - worker_ - 1) / num_workers_ + 1 : 0;
    page_of_lane_ = look_up_pages(0);
    const int num_early =
        part.has_drafts ? count_early_tiles(args.positions, part.token, num_tiles_, kTokens) : num_tiles_;
    const int most = min(args.heads.early_stages, my_tiles_);
#pragma unroll 1
    while (num_fetched_ < most && worker_ + num_fetched_ * num_workers_ < num_early) fetch_next();
  }

  // Fetches further tiles to the memory of the weights. All consumers have read these, and with drafts, all blocks have
  // written their keys and values.
  __device__ __forceinline__ void fetch_more() {
    if (part_.token < 0) return;
    const int most = min(args_->heads.stages, my_tiles_);
#pragma unroll 1
    while (num_fetched_ < most) fetch_next();
  }

  // Attends, and stores the result. Queries, key and value are in shared memory. Called by all consumers.
  __device__ __forceinline__ void attend() {
    WarpState<H> state;
    load_queries<H, C>(state, memory_->q, num_tokens_ > 0 ? args_->group : 0, lane_);
#pragma unroll 1
    for (int i = 0, s = 0, parity = 0; i < my_tiles_; ++i) {
      const int tile = worker_ + i * num_workers_;
      const uint32_t k_tile = stage(s), v_tile = k_tile + kTileBytes;
      barrier_wait(full_ + 8 * s, parity);
      if (tile == num_tiles_ - 1) {
        constexpr int kChunks = H * sizeof(typename C::Element) / 16;
        const int chunk = lane_ / 16 * kChunks + lane_ % 16 % kChunks;
        const uint4 current = load_shared(shared_address(memory_->current) + 16 * chunk);
        patch_tile<H, C>(k_tile, v_tile, (num_tokens_ - 1) % kTokens, current, lane_);
      }
      attend_tile<H, C>(state, k_tile, v_tile, tile * kTokens, num_tokens_, args_->heads.scale_log2, lane_);
      __syncwarp();
      if (num_fetched_ < my_tiles_) fetch_next();
      if (++s == args_->heads.stages) s = 0, parity ^= 1;
    }
    const int warp_bytes = args_->heads.early_stages * 2 * kTileBytes;
    uint8_t* results = pipeline_ + args_->heads.page_offset;
    store_partial<H, C>(reinterpret_cast<Partial<H>*>(results + warp_ * warp_bytes), state, lane_);
    sync_threads(1, kHeadThreads);
    if (part_.num_parts == 1) {
#pragma unroll 1
      for (int i = threadIdx.x; i < args_->group * H / 4; i += kHeadThreads) {
        const int query = i / (H / 4), element = i % (H / 4) * 4;
        store(query, element, merge_partials<H, kHeadWarps>(results, warp_bytes, query, element));
      }
    } else {
      merge_with_others(results, warp_bytes);
    }
  }

 private:
  // The queries that this block finishes: index, index + num_parts ..
  __device__ __forceinline__ int num_mine() const {
    return (args_->group - part_.index + part_.num_parts - 1) / part_.num_parts;
  }

  __device__ __forceinline__ uint32_t stage(int s) const {
    const int early = args_->heads.early_stages;
    const uint32_t pipeline = shared_address(pipeline_);
    return s < early ? pipeline + args_->heads.page_offset + (warp_ * early + s) * 2 * kTileBytes
                     : pipeline + (warp_ * (args_->heads.stages - early) + s - early) * 2 * kTileBytes;
  }

  // Lane i holds the page number of the warp's tile 32 j + i.
  __device__ __forceinline__ int look_up_pages(int first) const {
    const int tile = first + lane_;
    const int* pages = args_->page_table + static_cast<size_t>(part_.token) * args_->max_pages;
    return tile < my_tiles_ ? pages[(worker_ + tile * num_workers_) * kTokens / args_->page_size] : 0;
  }

  __device__ __forceinline__ void fetch_next() {
    const int i = num_fetched_++;
    if (i > 0 && i % 32 == 0) page_of_lane_ = look_up_pages(i);
    const int page = __shfl_sync(0xffffffffu, page_of_lane_, i % 32);
    if (lane_ == 0) {
      const int offset = (worker_ + i * num_workers_) * kTokens % args_->page_size, s = i % args_->heads.stages;
      const long long slab = (static_cast<long long>(page) * args_->kv_heads + kv_head_) * 2;
      const int row = static_cast<int>(args_->heads.first_row + slab * args_->page_size + offset);
      const uint32_t to = stage(s), full = full_ + 8 * s;
      const uint64_t policy = evict_first_policy();
      barrier_expect_bytes(full, 2 * kTileBytes);
      copy_tile(to, &args_->heads.pages, row, 0, full, policy);
      copy_tile(to + kTileBytes, &args_->heads.pages, row + args_->page_size, 0, full, policy);
    }
  }

  __device__ __forceinline__ void store(int query, int element, const Merged& merged) {
    const size_t head = (static_cast<size_t>(part_.token) * args_->kv_heads + kv_head_) * args_->group + query;
    store_activations<Bf16Weights>(args_->heads.attended + head * H, nullptr, element, divided_by_sum(merged));
  }

  // Sends the block's results to the block that finishes a query, and finishes this block's queries.
  __device__ __forceinline__ void merge_with_others(const uint8_t* results, int warp_bytes) {
    HeadParts* parts = reinterpret_cast<HeadParts*>(pipeline_ + args_->heads.page_offset - kHeadPartsBytes);
    const uint32_t full = shared_address(&memory_->parts_full);
#pragma unroll 1
    for (int i = threadIdx.x; i < args_->group * H / 4; i += kHeadThreads) {
      const int query = i / (H / 4), element = i % (H / 4) * 4;
      const Merged merged = merge_partials<H, kHeadWarps>(results, warp_bytes, query, element);
      const int row = query / part_.num_parts * part_.num_parts + part_.index;
      const int to = part_.first_block + query % part_.num_parts;
      const uint32_t barrier = address_in_cluster(full, to);
      send_float4(address_in_cluster(shared_address(parts->out + row * H + element), to), merged.out, barrier);
      if (element == 0) {
        send_float4(address_in_cluster(shared_address(parts->largest_and_sum + row), to),
                    make_float4(merged.largest, merged.sum, 0.0f, 0.0f), barrier);
      }
    }
    if (num_mine() == 0) return;
    barrier_wait(full, 0);
#pragma unroll 1
    for (int i = threadIdx.x; i < num_mine() * H / 4; i += kHeadThreads) {
      const int first = i / (H / 4) * part_.num_parts, element = i % (H / 4) * 4;
      Merged merged;
#pragma unroll 1
      for (int r = 0; r < part_.num_parts; ++r)
        merged.largest = fmaxf(merged.largest, parts->largest_and_sum[first + r].x);
#pragma unroll 1
      for (int r = 0; r < part_.num_parts; ++r) {
        const float4 stats = parts->largest_and_sum[first + r];
        merged.add(*reinterpret_cast<const float4*>(parts->out + (first + r) * H + element), stats.y,
                   rescale(stats.x, merged.largest));
      }
      store(first + part_.index, element, merged);
    }
  }

  const Args* args_;
  HeadPart part_;
  uint8_t* pipeline_;
  HeadMemory* memory_;
  int kv_head_, warp_, lane_;
  uint32_t full_ = 0;
  int num_tokens_ = 0, num_tiles_ = 0, num_workers_ = 1, worker_ = 0, my_tiles_ = 0;
  int page_of_lane_ = 0, num_fetched_ = 0;
};

}  // namespace meshserve
