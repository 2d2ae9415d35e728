// Into how many parts decode attention cuts each request's context. The lengths change with every step and the grid
// does not, so every warp finds out from the lengths which part of which request its cluster of blocks has.
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

// By a whole warp.
__device__ __forceinline__ ContextPart find_part(int cluster, int lane, const ContextCuts& cuts) {
  if (cuts.num_clusters == cuts.batch) return {cluster, 0, 1};
  constexpr uint32_t kAll = 0xffffffffu;
  int num_tokens = 0, num_requests = 0;
#pragma unroll 1
  for (int request = lane; request < cuts.batch; request += 32) {
    const int tokens = cuts.positions[request] + 1;
    num_tokens += tokens;
    num_requests += tokens > 0;
  }
  const int num_shares = max(__reduce_add_sync(kAll, num_requests), cuts.fewest_shares);
  const int share = max((__reduce_add_sync(kAll, num_tokens) + num_shares - 1) / num_shares, cuts.least_share);

  int first_cluster = 0;
#pragma unroll 1
  for (int first = 0; first < cuts.batch; first += 32) {
    const int request = first + lane;
    int parts = request < cuts.batch ? num_parts_of(cuts.positions[request] + 1, share) : 0;
    if (parts == 1) parts = 0;
    if (!__any_sync(kAll, parts > 0)) continue;
    int end = parts;  // of its parts, counted from first_cluster
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
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
      const int request = first + lane, tokens = request < cuts.batch ? cuts.positions[request] + 1 : 0;
      const bool is_next =
          request < cuts.batch && num_parts_of(tokens, share) == 1 && (tokens <= share / 2) == is_short;
      const uint32_t next = __ballot_sync(kAll, is_next);
      if (cluster < first_cluster + __popc(next)) {
        const bool is_it = is_next && first_cluster + __popc(next & ((1u << lane) - 1)) == cluster;
        return {first + __ffs(static_cast<int>(__ballot_sync(kAll, is_it))) - 1, 0, 1};
      }
      first_cluster += __popc(next);
    }
  }
  return {-1, 0, 0};
}

}  // namespace meshserve
