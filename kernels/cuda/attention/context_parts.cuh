// Splits each request's context into parts for decode attention, and merges their results. The lengths change with
// every step but the grid does not, so every warp computes from the lengths which part of which request its cluster of
// blocks processes.
//
// The step's tokens are divided into equal shares: one share per request, or more if there are so few requests that the
// GPU has clusters to spare. A request with at least 1.5 shares is split into as many parts as it has shares (rounded).
// With one share per request, requests of equal length are not split. There are fewer shares, and therefore fewer
// parts, for persistent blocks (persistent_attention.cuh), because unequal work items do not keep them waiting. Parts
// come first, then whole requests, then requests of at most half a share, so that the work that ends last is short. The
// remaining clusters are idle.
#pragma once
#include "common/rounding.cuh"
#include "common/weight_formats.cuh"

namespace meshserve {

struct ContextCuts {
  const int* positions;  // [B]: of the current tokens; -1: no request
  int batch;
  int num_clusters;           // per KV head; if equal to `batch`, no request is split
  int fewest_shares;          // minimum number of shares
  int least_share;            // minimum tokens per share
  int most_shares = 1 << 30;  // maximum number of shares
};

// The part that a cluster processes.
struct ContextPart {
  int request;  // -1: nothing
  int index, num_parts;
};

// The same, and the request's tokens, as written by prepare_kernel.
struct __align__(16) PlannedPart {
  int request, index, num_parts, num_tokens;
};

// The unmerged results of parts, and how many parts have stored theirs.
struct Unmerged {
  float* rows;       // [clusters, K, G, H + 4]
  int* num_arrived;  // [B, K, blocks per cluster]; 0 at the start
};

// Returns the number of parts of `num_tokens` tokens if a share has `share` tokens.
__host__ __device__ __forceinline__ int num_parts_of(int num_tokens, int share) {
  return max(1, (num_tokens + share / 2) / share);
}

// Returns the maximum number of clusters per KV head for any mix of lengths. Rounding the number of a request's parts
// adds at most half a share.
__host__ __device__ __forceinline__ int most_clusters(int batch, int fewest_shares) {
  return batch + max(batch, fewest_shares) - 1;
}
// The same if no request is longer than `max_context`.
__host__ __device__ __forceinline__ int most_clusters(int batch, int fewest_shares, int least_share, int max_context) {
  return min(batch * num_parts_of(max_context, least_share), most_clusters(batch, fewest_shares));
}

// Returns the part that a cluster processes; called by a whole warp. Instructions are loaded from memory at every
// launch, so the path without split requests must execute few instructions before the first fetch.
__device__ __forceinline__ ContextPart find_part(int cluster, int lane, const ContextCuts& cuts) {
  if (cuts.num_clusters == cuts.batch) return {cluster, 0, 1};
  constexpr uint32_t kAll = 0xffffffffu;
  int num_tokens = 0, num_requests = 0, longest = 0;
#pragma unroll 1
  for (int request = lane; request < cuts.batch; request += 32) {
    const int tokens = cuts.positions[request] + 1;
    num_tokens += tokens;
    num_requests += tokens > 0;
    longest = max(longest, tokens);
  }
  const int num_shares = min(max(__reduce_add_sync(kAll, num_requests), cuts.fewest_shares), cuts.most_shares);
  const int share = max((__reduce_add_sync(kAll, num_tokens) + num_shares - 1) / num_shares, cuts.least_share);
  const int least_cut = 2 * share - share / 2;  // tokens; follows the rounding of num_parts_of
  auto tokens_of = [&](int request) { return request < cuts.batch ? cuts.positions[request] + 1 : -1; };

  int first_cluster = 0;
#pragma unroll 1
  for (int first = 0; first < cuts.batch && __reduce_max_sync(kAll, longest) >= least_cut; first += 32) {
    const int tokens = tokens_of(first + lane);
    int parts = tokens >= least_cut ? num_parts_of(tokens, share) : 0, end = parts;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {  // `end`: end of the request's parts after first_cluster
      const int before = __shfl_up_sync(kAll, end, distance);
      if (lane >= distance) end += before;
    }
    if (const uint32_t behind = __ballot_sync(kAll, first_cluster + end > cluster); behind != 0) {
      const int owner = __ffs(static_cast<int>(behind)) - 1;
      parts = __shfl_sync(kAll, parts, owner);
      return {first + owner, cluster - first_cluster - __shfl_sync(kAll, end, owner) + parts, parts};
    }
    first_cluster += __shfl_sync(kAll, end, 31);
  }
#pragma unroll 1
  for (int is_short = 0; is_short < 2; ++is_short) {
#pragma unroll 1
    for (int first = 0; first < cuts.batch; first += 32) {
      const int tokens = tokens_of(first + lane);
      const bool is_next = tokens >= 0 && tokens < least_cut && (tokens <= share / 2) == is_short;
      const uint32_t next = __ballot_sync(kAll, is_next);
      const bool is_it = is_next && first_cluster + __popc(next & ((1u << lane) - 1)) == cluster;
      if (const uint32_t found = __ballot_sync(kAll, is_it); found != 0) {
        return {first + __ffs(static_cast<int>(found)) - 1, 0, 1};
      }
      first_cluster += __popc(next);
    }
  }
  return {-1, 0, 0};
}

// Returns 2^(a - b); both may be -inf (no position seen yet).
__device__ __forceinline__ float rescale(float a, float b) { return a == -INFINITY ? 0.0f : exp2f(a - b); }

// Four elements of a query's result, relative to exp2(largest) and not yet divided by the sum.
struct Merged {
  float4 out = {0.0f, 0.0f, 0.0f, 0.0f};
  float largest = -INFINITY, sum = 0.0f;
  __device__ __forceinline__ void add(const float4& v, float v_sum, float scale) {
    out = make_float4(out.x + v.x * scale, out.y + v.y * scale, out.z + v.z * scale, out.w + v.w * scale);
    sum += v_sum * scale;
  }
};

// Returns the result divided by its sum. A request without tokens gets zeros.
__device__ __forceinline__ float4 divided_by_sum(const Merged& merged) {
  const float divisor = merged.sum > 0.0f ? 1.0f / merged.sum : 0.0f;
  const float4& out = merged.out;
  return make_float4(out.x * divisor, out.y * divisor, out.z * divisor, out.w * divisor);
}

// Rounds a query's result to e4m3, with a scale for all of it. `numbers` are the query's; its warp must call it
// together. Values are rounded to bf16 first, as if a kernel of its own rounded a result in bf16.
template <int H>
__device__ __forceinline__ void store_rounded(uint8_t* numbers, float* scale, int element, float4 v) {
  static_assert(H == 4 * 32, "a warp has a query");
  v = unpack_bf16(make_uint2(pack_bf16(v.x, v.y), pack_bf16(v.z, v.w)));
  const float mine = fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w)));
  const float highest = __uint_as_float(__reduce_max_sync(0xffffffffu, __float_as_uint(mine)));
  const float own = e4m3_scale(highest);
  *reinterpret_cast<uint32_t*>(numbers + element) = rounded_to_e4m3(v, own, 1.0f / own);
  if (element == 0) *scale = own;
}

// Merges the results of a query's parts in order, so that the bits do not depend on which block merges. `row_of`
// returns the address of a part's row: H elements, the largest score and the sum.
template <int H, class RowOf>
__device__ __forceinline__ Merged merge_rows(int num_parts, int element, RowOf row_of) {
  constexpr int kTogether = 8;  // loads in flight at a time
  Merged merged;
#pragma unroll 1
  for (int first = 0; first < num_parts; first += kTogether) {
    float4 v[kTogether];
    float2 stats[kTogether];
    float largest = merged.largest;
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const float* row = row_of(min(first + i, num_parts - 1));
      v[i] = __ldcg(reinterpret_cast<const float4*>(row + element));
      stats[i] = __ldcg(reinterpret_cast<const float2*>(row + H));
    }
#pragma unroll
    for (int i = 0; i < kTogether; ++i) largest = fmaxf(largest, stats[i].x);
    const Merged before = merged;
    merged = Merged{.largest = largest};
    merged.add(before.out, before.sum, rescale(before.largest, largest));
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      if (first + i < num_parts) merged.add(v[i], stats[i].y, rescale(stats[i].x, largest));
    }
  }
  return merged;
}

// Stores a part's results for the queries of this block. `for_mine` calls a function for every 4 elements of these
// queries, `merged_of` returns their values, and `row_of` the address to store them at. The block that is the last of
// the parts to do so merges all parts and calls `store(query, element, merged)`.
template <int H, class Arrive, class ForMine, class MergedOf, class RowOf, class Store>
__device__ __forceinline__ void merge_parts(const ContextPart& part, Arrive arrive, bool* is_last, ForMine for_mine,
                                            MergedOf merged_of, RowOf row_of, Store store) {
  for_mine([&](int query, int element) {
    const Merged merged = merged_of(query, element);
    float* row = row_of(part.index, query);
    *reinterpret_cast<float4*>(row + element) = merged.out;
    if (element == 0) *reinterpret_cast<float2*>(row + H) = make_float2(merged.largest, merged.sum);
  });
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    *is_last = (arrive() + 1) % part.num_parts == 0;  // all parts arrive once a layer
    __threadfence();
  }
  __syncthreads();
  if (!*is_last) return;
  for_mine([&](int query, int element) {
    const auto row_of_part = [&](int index) { return row_of(index, query); };
    store(query, element, merge_rows<H>(part.num_parts, element, row_of_part));
  });
}

}  // namespace meshserve
