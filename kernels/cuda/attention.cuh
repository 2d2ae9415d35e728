// Paged decode attention: each new token attends to its request's pages. A request may have several in a row (drafts).
//
// A token is called a request here: a request with several new tokens has as many rows of equal pages. A cluster of
// blocks processes one (request, kv head), or a part of a long context (see context_parts.cuh). The G
// query heads of the kv head are processed together, so that each page is read once. The context is split into tiles
// of 16 tokens, assigned round-robin to the warps of all clusters of the request. Each warp streams its tiles through
// its own ring of stages with the bulk tensor copy engine and keeps its own online softmax, without block-wide barriers
// in the loop. The results of warps are merged through shared memory, those of blocks through the cluster's shared
// memory, and those of parts through global memory by the block that ends last.
//
// Tokens are the rows of the matrix instruction and queries its 8 columns:
//   scores [16 tokens, 8 queries] = K Q^T;  out [H, 8 queries] += V^T P^T
// A lane therefore holds the same two queries in both, and one transposition of the 16 x 8 scores connects them.
//
// With a cache in 8 bits, a tile may have 32 tokens, of which 16 are attended to at a time: the copy engine takes
// longer for two copies of 2 KB than for one of 4 KB. Tiles stay in 8 bits in shared memory and are converted between
// ldmatrix and the product. A lane then reads four neighboring elements of a key at once, and the queries' elements
// have the same order; the transposed rows of values come in pairs, so that row r of 16 of the result is element 2 r,
// and row r + 8 is element 2 r + 1.
//
// Pages of earlier tokens were written by earlier steps, so they are fetched before the wait for the previous kernel.
// Only the current token's row comes from that kernel: it is read after the wait and replaces the fetched row. Where
// several new tokens belong to one request, the tiles with those before the current one are fetched after the wait.
// Page contents beyond the request's length are masked (keys) or overwritten with zeros (values), so NaN is harmless.
#pragma once
#include "context_parts.cuh"
#include "e4m3_cache.cuh"
#include "ptx.cuh"

namespace meshserve {

constexpr int kTileTokens = 16;      // that a warp attends to at a time
constexpr int kMostTileTokens = 32;  // fetched at a time from a cache in 8 bits
constexpr int kAttentionWarps = 4;
constexpr int kAttentionThreads = 32 * kAttentionWarps;
constexpr int kMaxGroup = 8;
constexpr int kMaxWarpRingBytes = 24 * 1024;  // 4 warps x 24 KB: two blocks per SM, 192 KB in flight
template <class C>
constexpr int least_stages = C::kIsFp8 ? 2 : 1;  // of a warp's ring

struct AttentionArgs {
  const bf16* q;          // [B, K, G, H]
  const void* cache;      // this layer's [P, K, 2, S, H]
  const int* page_table;  // [B, max_pages]
  ContextCuts cuts;
  bf16* out;  // [B, K, G, H]
  Unmerged unmerged;
  long long first_row;  // the layer's first row in the whole cache, viewed as [L P K 2 S, H]
  int max_pages, page_size, kv_heads, group, log2_splits;
  int stages;        // in a warp's ring
  int tile_tokens;   // fetched at a time: kTileTokens, or kMostTileTokens if the cache is in 8 bits
  float scale_log2;  // softmax scale * log2(e)
};

// A warp's partial result. `out` is relative to exp2(largest) and not yet divided by `sum`.
template <int H>
struct Partial {
  static constexpr int kStride = H + 4;  // floats; the extra 4 avoid bank conflicts
  float out[kMaxGroup * kStride];
  float largest[kMaxGroup], sum[kMaxGroup];
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

// Address of the 16-byte chunk of a token's row in a tile [H / 64 halves, 16 tokens, 128 bytes], swizzled.
__device__ __forceinline__ uint32_t chunk_address(uint32_t tile, int token, int chunk) {
  return tile + (chunk / 8) * (kTileTokens * 128) + token * 128 + (((chunk % 8) ^ (token % 8)) * 16);
}

// The same in a tile [16 tokens, H] of e4m3, whose swizzle is as wide as a row.
template <int H>
__device__ __forceinline__ uint32_t fp8_chunk_address(uint32_t tile, int token, int chunk) {
  const uint32_t offset = token * H + chunk * 16;
  return tile + (offset ^ (offset / 128 % (H / 16) * 16));
}

// Returns how many of the request's first tiles may be fetched before the previous kernel ends. Rows of consecutive
// positions may be new tokens of one request; if they are not, some tiles are only fetched later than possible.
__device__ __forceinline__ int count_early_tiles(const int* positions, int request, int num_tiles, int tile_tokens) {
  const int position = positions[request];
  int num_new = 1;
#pragma unroll 1
  while (num_new <= request && positions[request - num_new] == position - num_new) ++num_new;
  return num_new > 1 ? (position + 1 - num_new) / tile_tokens : num_tiles;
}

template <int H>
struct WarpState {
  uint32_t q[H / 16][2];     // queries as the B operand: query lane / 4, elements 16 k + 2 (lane % 4) ..
  float out[H / 16][4];      // elements 16 h + lane / 4 (+ 8) of queries 2 (lane % 4), + 1; see above for 8 bits
  float largest[2], sum[2];  // of the two queries; `sum` covers only this lane's tokens
};

template <int H, class C>
__device__ __forceinline__ void attend_tile(WarpState<H>& state, uint32_t k_tile, uint32_t v_tile, int first_token,
                                            int num_tokens, float scale_log2, int lane) {
  float even[4] = {}, odd[4] = {};  // two chains of multiplications hide each other's latency
  if constexpr (C::kIsFp8) {
#pragma unroll
    for (int k = 0; k < H / 16; k += 2) {
      uint32_t raw[4];
      load_matrices(raw, fp8_chunk_address<H>(k_tile, lane % 16, k + lane / 16));
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        uint32_t a[4];
        convert_e4m3(raw[2 * i], a[0], a[2]);
        convert_e4m3(raw[2 * i + 1], a[1], a[3]);
        multiply_16x8x16(i ? odd : even, a, state.q[k + i][0], state.q[k + i][1]);
      }
    }
  } else {
#pragma unroll
    for (int k = 0; k < H / 16; ++k) {
      uint32_t a[4];
      load_matrices(a, chunk_address(k_tile, lane % 16, 2 * k + lane / 16));
      multiply_16x8x16(k % 2 ? odd : even, a, state.q[k][0], state.q[k][1]);
    }
  }
  float score[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    int token = first_token + lane / 4 + 8 * (i / 2);
    score[i] = token < num_tokens ? (even[i] + odd[i]) * scale_log2 : -INFINITY;
  }
  float shrink[2];
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    float largest = fmaxf(score[c], score[c + 2]);
    for (int offset = 4; offset < 32; offset *= 2) {
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, offset));
    }
    largest = fmaxf(largest, state.largest[c]);
    shrink[c] = rescale(state.largest[c], largest);
    state.largest[c] = largest;
    score[c] = exp2f(score[c] - largest);
    score[c + 2] = exp2f(score[c + 2] - largest);
    state.sum[c] = state.sum[c] * shrink[c] + score[c] + score[c + 2];
  }
  uint32_t p0 = transpose_8x8(pack_bf16(score[0], score[1]));
  uint32_t p1 = transpose_8x8(pack_bf16(score[2], score[3]));
  auto add_values = [&](float (&out)[4], const uint32_t (&a)[4]) {
    out[0] *= shrink[0];
    out[1] *= shrink[1];
    out[2] *= shrink[0];
    out[3] *= shrink[1];
    multiply_16x8x16(out, a, p0, p1);
  };
  if constexpr (C::kIsFp8) {
#pragma unroll
    for (int h = 0; h < H / 16; h += 2) {
      uint32_t raw[4];  // of each 16 elements, tokens 0 to 7 and 8 to 15
      load_matrices_transposed(raw, fp8_chunk_address<H>(v_tile, lane % 16, h + lane / 16));
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        uint32_t a[4];
        convert_e4m3(raw[2 * i], a[0], a[1]);
        convert_e4m3(raw[2 * i + 1], a[2], a[3]);
        add_values(state.out[h + i], a);
      }
    }
  } else {
#pragma unroll
    for (int h = 0; h < H / 16; ++h) {
      uint32_t a[4];
      load_matrices_transposed(a, chunk_address(v_tile, lane % 8 + 8 * (lane / 16), 2 * h + (lane / 8) % 2));
      add_values(state.out[h], a);
    }
  }
}

// Patches the last tile with the current token's row that the previous kernel wrote (lanes 0..15 the key, 16..31 the
// value, 16 bytes each), and with zeros for values beyond the request's last token.
template <int H, class C>
__device__ __forceinline__ void patch_tile(uint32_t k_tile, uint32_t v_tile, int last_token, int tile_tokens,
                                           uint4 current, int lane) {
  constexpr int kChunks = H * sizeof(typename C::Element) / 16;
  auto address = [](uint32_t tile, int token, int chunk) {
    return C::kIsFp8 ? fp8_chunk_address<H>(tile, token, chunk) : chunk_address(tile, token, chunk);
  };
  if (lane % 16 < kChunks) store_shared(address(lane < 16 ? k_tile : v_tile, last_token, lane % 16), current);
#pragma unroll 1
  for (int i = lane; i < (tile_tokens - 1 - last_token) * kChunks; i += 32) {
    store_shared(address(v_tile, last_token + 1 + i / kChunks, i % kChunks), make_uint4(0, 0, 0, 0));
  }
  __syncwarp();
}

// Merges the warps' results and sends them to the block that finishes the query: 4 elements per thread.
template <int H>
__device__ __forceinline__ void merge_warps(const uint8_t* memory, int warp_bytes, const Received<H>* received,
                                            int group, int log2_splits) {
  const int splits = 1 << log2_splits, queries_per_block = (group + splits - 1) >> log2_splits;
#pragma unroll 1
  for (int i = threadIdx.x; i < group * H / 4; i += kAttentionThreads) {
    int query = i / (H / 4), element = i % (H / 4) * 4;
    float largest = -INFINITY, sum = 0.0f;
    float4 out = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int w = 0; w < kAttentionWarps; ++w) {
      largest = fmaxf(largest, reinterpret_cast<const Partial<H>*>(memory + w * warp_bytes)->largest[query]);
    }
#pragma unroll
    for (int w = 0; w < kAttentionWarps; ++w) {
      const Partial<H>* part = reinterpret_cast<const Partial<H>*>(memory + w * warp_bytes);
      float scale = rescale(part->largest[query], largest);
      float4 v = *reinterpret_cast<const float4*>(part->out + query * Partial<H>::kStride + element);
      out = make_float4(out.x + v.x * scale, out.y + v.y * scale, out.z + v.z * scale, out.w + v.w * scale);
      sum += part->sum[query] * scale;
    }
    int row = blockIdx.x * queries_per_block + (query >> log2_splits), to = query & (splits - 1);
    const uint32_t at = shared_address(received->out + row * H + element);
    const uint32_t stats_at = shared_address(received->largest_and_sum + row);
    const float4 stats = make_float4(largest, sum, 0.0f, 0.0f);
    if (log2_splits > 0) {
      const uint32_t barrier = address_in_cluster(shared_address(&received->barrier), to);
      send_float4(address_in_cluster(at, to), out, barrier);
      if (element == 0) send_float4(address_in_cluster(stats_at, to), stats, barrier);
    } else {
      store_shared_float4(at, out);
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
  constexpr int kElementBytes = sizeof(typename C::Element), kPartBytes = kTileTokens * H * kElementBytes;
  static_assert(sizeof(Partial<H>) <= least_stages<C> * 2 * kPartBytes, "a warp's result takes the place of its ring");
  const int tile_tokens = C::kIsFp8 ? args.tile_tokens : kTileTokens, tile_bytes = tile_tokens * H * kElementBytes;
  extern __shared__ __align__(1024) uint8_t memory[];
  const int warp_bytes = args.stages * 2 * tile_bytes;
  Received<H>* received = reinterpret_cast<Received<H>*>(memory + kAttentionWarps * warp_bytes);

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const ContextPart part = find_part(blockIdx.z, lane, args.cuts);
  if (part.request < 0) return;
  const int kv_head = blockIdx.y, request = part.request, num_tokens = args.cuts.positions[request] + 1;
  const int num_tiles = (num_tokens + tile_tokens - 1) / tile_tokens;
  const int num_workers = kAttentionWarps * part.num_parts << args.log2_splits;
  const int worker = ((part.index << args.log2_splits) + blockIdx.x) * kAttentionWarps + warp;
  const int my_tiles = num_tiles > worker ? (num_tiles - worker - 1) / num_workers + 1 : 0;
  const uint32_t ring = shared_address(memory) + warp * warp_bytes;
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
    return tile < my_tiles ? my_pages[(worker + tile * num_workers) * tile_tokens / args.page_size] : 0;
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
      int offset = (worker + i * num_workers) * tile_tokens % args.page_size;
      long long slab = (static_cast<long long>(page) * args.kv_heads + kv_head) * 2;
      int row = static_cast<int>(args.first_row + slab * args.page_size + offset);
      uint32_t to = ring + s * 2 * tile_bytes;
      barrier_expect_bytes(full + 8 * s, 2 * tile_bytes);
      copy_tile(to, &pages, row, 0, full + 8 * s, policy);
      copy_tile(to + tile_bytes, &pages, row + args.page_size, 0, full + 8 * s, policy);
    }
  };
  const int num_early = count_early_tiles(args.cuts.positions, request, num_tiles, tile_tokens);
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
#pragma unroll
  for (int k = 0; k < H / 16; ++k) {
    bool is_head = lane / 4 < args.group && num_tokens > 0;
    const uint32_t* words = reinterpret_cast<const uint32_t*>(q + (lane / 4) * H + 16 * k);
    constexpr int kFirst = C::kIsFp8 ? 2 : 1, kSecond = C::kIsFp8 ? 1 : 4;
    const uint32_t first = is_head ? words[kFirst * (lane % 4)] : 0;
    const uint32_t second = is_head ? words[kFirst * (lane % 4) + kSecond] : 0;
    state.q[k][0] = C::kIsFp8 ? __byte_perm(first, second, 0x5410) : first;
    state.q[k][1] = C::kIsFp8 ? __byte_perm(first, second, 0x7632) : second;
#pragma unroll
    for (int i = 0; i < 4; ++i) state.out[k][i] = 0.0f;
  }
  state.largest[0] = state.largest[1] = -INFINITY;
  state.sum[0] = state.sum[1] = 0.0f;
  uint4 current = make_uint4(0, 0, 0, 0);
  if (current_row != nullptr) current = *current_row;

#pragma unroll 1
  for (int i = 0, s = 0, parity = 0; i < my_tiles; ++i) {
    int tile = worker + i * num_workers;
    uint32_t k_tile = ring + s * 2 * tile_bytes, v_tile = k_tile + tile_bytes;
    barrier_wait(full + 8 * s, parity);
    if (tile == num_tiles - 1) {
      patch_tile<H, C>(k_tile, v_tile, (num_tokens - 1) % tile_tokens, tile_tokens, current, lane);
    }
#pragma unroll 1
    for (int part = 0; part < tile_tokens && tile * tile_tokens + part < num_tokens; part += kTileTokens) {
      const int offset = part / kTileTokens * kPartBytes;
      attend_tile<H, C>(state, k_tile + offset, v_tile + offset, tile * tile_tokens + part, num_tokens, args.scale_log2,
                        lane);
    }
    __syncwarp();
    if (i + args.stages < my_tiles) fetch(i + args.stages, s);
    if (++s == args.stages) s = 0, parity ^= 1;
  }

  Partial<H>* mine = reinterpret_cast<Partial<H>*>(memory + warp * warp_bytes);
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    float sum = state.sum[c];
    for (int offset = 4; offset < 32; offset *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    int query = 2 * (lane % 4) + c;
    if (lane < 4) {
      mine->largest[query] = state.largest[c];
      mine->sum[query] = sum;
    }
#pragma unroll
    for (int h = 0; h < H / 16; ++h) {
      float* to = mine->out + query * Partial<H>::kStride + 16 * h + (C::kIsFp8 ? 2 : 1) * (lane / 4);
      to[0] = state.out[h][c];
      to[C::kIsFp8 ? 1 : 8] = state.out[h][c + 2];
    }
  }
  __syncthreads();
  if (args.log2_splits > 0) cluster_wait();
  merge_warps<H>(memory, warp_bytes, received, args.group, args.log2_splits);
  if (args.log2_splits > 0) {
    barrier_wait(all_received, 0);
  } else {
    __syncthreads();
  }
  bf16* out = args.out + (static_cast<size_t>(request) * args.kv_heads + kv_head) * args.group * H;
  uint8_t* exponents = nullptr;
  if constexpr (W::kIsSplit) {
    const int first_chunk = (request * args.kv_heads + kv_head) * args.group * (H / kExponentColumns);
    exponents = exponents_of(args.out, args.cuts.batch, args.kv_heads * args.group * H) + first_chunk;
  }
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
    return merge_parts<H, W>(part, arrive, &received->is_last, out, for_mine, merged_of, row_of, exponents);
  }
  for_mine([&](int query, int element) {
    store_divided<W>(out + query * H + element, exponents + query * (H / kExponentColumns), element,
                     merged_of(query, element));
  });
}

}  // namespace meshserve
