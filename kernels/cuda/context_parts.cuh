// Into how many parts decode attention cuts each request's context, and how these are merged. The lengths change with
// every step and the grid does not, so every warp finds out from the lengths which part of which request its cluster of
// blocks has.
//
// The step's tokens are shared out evenly: one share a request, or more where requests are so few that the GPU has more
// clusters. Who has one and a half shares or more is cut into as many parts; among equals nobody is. Parts come first,
// then whole requests, then those of less than half a share, so that what ends last is short. The remaining clusters
// have nothing to do.
#pragma once
#include "ptx.cuh"

namespace meshserve {

constexpr int kLeastShareTokens = 512;  // of a block

struct ContextCuts {
  const int* positions;  // [B] of the current tokens; -1: no request
  int batch;
  int num_clusters;  // of a KV head; as many as requests: nobody is cut
  int fewest_shares;
  int least_share;  // tokens
};

// What a cluster has.
struct ContextPart {
  int request;  // -1: nothing
  int index, num_parts;
};

// What parts hand to the one that merges them, and how many have.
struct Unmerged {
  float* rows;       // [clusters, K, G, H + 4]
  int* num_arrived;  // [B, K, blocks of a cluster]; 0 at the start
};

// Parts of `num_tokens` where a share is as long as `share`.
__host__ __device__ __forceinline__ int num_parts_of(int num_tokens, int share) {
  return max(1, (num_tokens + share / 2) / share);
}

// Of a KV head, for the worst mix of lengths: half a share at most is added where a request's parts are rounded.
__host__ __device__ __forceinline__ int most_clusters(int batch, int fewest_shares) {
  return batch + max(batch, fewest_shares) - 1;
}
// And where no request is longer than `max_context`.
__host__ __device__ __forceinline__ int most_clusters(int batch, int fewest_shares, int least_share, int max_context) {
  return min(batch * num_parts_of(max_context, least_share), most_clusters(batch, fewest_shares));
}

// By a whole warp. The instructions come from memory at every launch: the fewer there are before the first fetch where
// nobody is cut, the better.
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
  const int num_shares = max(__reduce_add_sync(kAll, num_requests), cuts.fewest_shares);
  const int share = max((__reduce_add_sync(kAll, num_tokens) + num_shares - 1) / num_shares, cuts.least_share);
  const int least_cut = 2 * share - share / 2;  // tokens; as num_parts_of rounds
  auto tokens_of = [&](int request) { return request < cuts.batch ? cuts.positions[request] + 1 : -1; };

  int first_cluster = 0;
#pragma unroll 1
  for (int first = 0; first < cuts.batch && __reduce_max_sync(kAll, longest) >= least_cut; first += 32) {
    const int tokens = tokens_of(first + lane);
    int parts = tokens >= least_cut ? num_parts_of(tokens, share) : 0, end = parts;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {  // where its parts end, counted from first_cluster
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

// 2^(a - b) where both may be -inf (nothing seen yet).
__device__ __forceinline__ float rescale(float a, float b) { return a == -INFINITY ? 0.0f : exp2f(a - b); }

// Of a query, 4 elements: relative to exp2(largest), not yet divided by the sum.
struct Merged {
  float4 out = {0.0f, 0.0f, 0.0f, 0.0f};
  float largest = -INFINITY, sum = 0.0f;
  __device__ __forceinline__ void add(const float4& v, float v_sum, float scale) {
    out = make_float4(out.x + v.x * scale, out.y + v.y * scale, out.z + v.z * scale, out.w + v.w * scale);
    sum += v_sum * scale;
  }
};

// A request without tokens gives zeros.
__device__ __forceinline__ void store_divided(bf16* to, const Merged& merged) {
  const float divisor = merged.sum > 0.0f ? 1.0f / merged.sum : 0.0f;
  const float4& out = merged.out;
  *reinterpret_cast<uint2*>(to) =
      make_uint2(pack_bf16(out.x * divisor, out.y * divisor), pack_bf16(out.z * divisor, out.w * divisor));
}

// The result of a query's parts, in their order: the same bits whoever merges. `row_of` gives where a part has left its
// row: H elements, the largest score and the sum.
template <int H, class RowOf>
__device__ __forceinline__ Merged merge_rows(int num_parts, int element, RowOf row_of) {
  constexpr int kTogether = 8;  // loads on their way at once
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

// Leaves a part's queries in memory, as far as this block has them: `for_mine` calls a function for every 4 elements
// of these, `merged_of` gives them, `row_of` where they go. The block that is the last of the parts to do so merges
// them into `out` [G, H].
template <int H, class Arrive, class ForMine, class MergedOf, class RowOf>
__device__ __forceinline__ void merge_parts(const ContextPart& part, Arrive arrive, bool* is_last, bf16* out,
                                            ForMine for_mine, MergedOf merged_of, RowOf row_of) {
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
    store_divided(out + query * H + element, merge_rows<H>(part.num_parts, element, row_of_part));
  });
}

}  // namespace meshserve
