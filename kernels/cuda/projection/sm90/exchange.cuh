// How the blocks of a projection's cluster add up their sums. Tokens are assigned round-robin to the splits, then to a
// split's warps, which finish them.
//
// An exchange has three steps: `give` hands the block's sums to those that finish tokens, `synchronize` waits until all
// blocks have, and `finish` adds up the tokens of this warp and calls `finish_token(n, sum, operands)` for each.
#pragma once
#include "projection/sm90/block.cuh"

namespace meshserve {

// Transposes a 4 x 4 matrix over four lanes: lane i holds row i and gets column i. The lanes differ in bits 2 and 3.
__device__ __forceinline__ float4 transpose_4x4(float4 v, int i) {
  float low = __shfl_xor_sync(0xffffffffu, i % 2 ? v.x : v.y, 4);
  float high = __shfl_xor_sync(0xffffffffu, i % 2 ? v.z : v.w, 4);
  v = i % 2 ? make_float4(low, v.y, high, v.w) : make_float4(v.x, low, v.z, high);
  low = __shfl_xor_sync(0xffffffffu, i / 2 ? v.x : v.z, 8);
  high = __shfl_xor_sync(0xffffffffu, i / 2 ? v.y : v.w, 8);
  return i / 2 ? make_float4(low, high, v.z, v.w) : make_float4(v.x, v.y, low, high);
}

// Returns the sums of 4 rows for a token, of the products of 8 tokens from 8 j on, whose lanes have 2 rows of 2 tokens.
template <int N>
__device__ __forceinline__ float4 token_sums(const float (&sums)[N / 2], int j, int lane) {
  return transpose_4x4(make_float4(sums[4 * j], sums[4 * j + 1], sums[4 * j + 2], sums[4 * j + 3]), lane / 4 % 4);
}

// Sends a block's sums for the heads of a KV head to the blocks that attend, each of which gets those of its token.
template <int N, Epilogue E, class W>
__device__ __forceinline__ void give_heads(const ProjectionBlock<N, E, W>& block, const HeadPart& part,
                                           const float (&sums)[N / 2]) {
  static_assert(kHeadBlocks == 8);  // 4 lanes for each block
  const int warp = block.warp, lane = block.lane;
#pragma unroll
  for (int j = 0; j < N / 8; ++j) {
    float4 v = token_sums<N>(sums, j, lane);
    const int to = lane / 4, token = __shfl_sync(0xffffffffu, part.token_of_lane, to);
    const int of = max(token, 0), from = lane % 2 * 16 + lane / 2 % 2 * 8 + of % 2 * 4 + of / 2;
    const uint32_t at = block.received + (blockIdx.x * kSumStride + 16 * warp + 4 * (lane % 4)) * 4;
    v = make_float4(__shfl_sync(0xffffffffu, v.x, from), __shfl_sync(0xffffffffu, v.y, from),
                    __shfl_sync(0xffffffffu, v.z, from), __shfl_sync(0xffffffffu, v.w, from));
    if (to < block.args.heads.blocks && token >= 0) {
      send_float4(address_in_cluster(at, to), v, address_in_cluster(block.sums_full, to));
    }
  }
}

// The tokens of a block that a warp finishes, and their operands, of kTogether tokens at a time.
template <int N, Epilogue E, class W, class EpilogueType, int kTogether>
struct FinishedTokens {
  const ProjectionBlock<N, E, W>& block;
  const EpilogueType& epilogue;
  int step, first;
  typename EpilogueType::Operands operands[kTogether] = {};

  __device__ __forceinline__ FinishedTokens(const ProjectionBlock<N, E, W>& block, const EpilogueType& epilogue)
      : block(block),
        epilogue(epilogue),
        step(block.splits * kConsumerWarps),
        first(block.split + block.splits * block.warp) {}

  // Fetches the operands of tokens n, n + step ...
  __device__ __forceinline__ void fetch(int n) {
#pragma unroll
    for (int u = 0; u < kTogether; ++u) {
      if (n + u * step < N) operands[u] = epilogue.load(block.first_token + n + u * step);
    }
  }

  __device__ __forceinline__ bool has(int n) const { return n < N && block.first_token + n < block.args.batch; }

  __device__ __forceinline__ void finish(int n, float4 sum, int u = 0) const {
    if (block.args.sums_in != nullptr) {
      float scale = block.inverse_rms[n];
      sum = make_float4(sum.x * scale, sum.y * scale, sum.z * scale, sum.w * scale);
    }
    epilogue.finish(n, block.first_token + n, sum, operands[u]);
  }
};

// A single token, which the first block finishes.
template <int N, Epilogue E, class W, class EpilogueType>
struct OneTokenExchange {
  const ProjectionBlock<N, E, W>& block;
  FinishedTokens<N, E, W, EpilogueType, 1> tokens;

  __device__ __forceinline__ OneTokenExchange(const ProjectionBlock<N, E, W>& block, const EpilogueType& epilogue)
      : block(block), tokens(block, epilogue) {}

  // Returns whether this block has tokens to finish.
  __device__ __forceinline__ bool give(const float (&sums)[N / 2]) const {
    const int lane = block.lane;
    const uint32_t at = block.received + (block.split * kSumStride + 16 * block.warp + lane / 4) * 4;
    if (block.is_cluster) {
      const uint32_t to = address_in_cluster(at, 0), barrier = address_in_cluster(block.sums_full, 0);
      if (lane % 4 == 0) {
        send_float(to, sums[0], barrier);
        send_float(to + 8 * 4, sums[2], barrier);
      }
      if (block.split > 0) return arrive_threads(2, kConsumers + 32), false;
    } else if (lane % 4 == 0) {
      store_shared_word(at, __float_as_uint(sums[0]));
      store_shared_word(at + 8 * 4, __float_as_uint(sums[2]));
    }
    return true;
  }

  __device__ __forceinline__ void synchronize() const {
    sync_threads(2, kConsumers + 32);  // with the helper warp
    if (block.is_cluster) barrier_wait(block.sums_full, 0);
  }

  __device__ __forceinline__ void finish() {
    if (block.warp != 0) return;
    float4 total = {};
#pragma unroll 1
    for (int first = 0; first < block.splits; first += 4) {
      float4 parts[4] = {};
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        if (first + r < block.splits) {
          parts[r] = load_shared_float4(block.received + ((first + r) * kSumStride + 4 * block.lane) * 4);
        }
      }
#pragma unroll
      for (int r = 0; r < 4; ++r) total = add(total, parts[r]);
    }
    tokens.finish(0, total);
  }
};

// Few tokens: each block sends a token's sums to the block that finishes the token, which counts the received bytes.
template <int N, Epilogue E, class W, class EpilogueType>
struct NarrowExchange {
  const ProjectionBlock<N, E, W>& block;
  FinishedTokens<N, E, W, EpilogueType, 1> tokens;

  __device__ __forceinline__ NarrowExchange(const ProjectionBlock<N, E, W>& block, const EpilogueType& epilogue)
      : block(block), tokens(block, epilogue) {}

  __device__ __forceinline__ bool give(const float (&sums)[N / 2]) const {
    const int warp = block.warp, lane = block.lane, splits = block.splits;
    const unsigned num = splits;     // unsigned division takes fewer instructions
    const int index = lane / 4 % 4;  // the lane's number among the four that exchange values
    const int row = 16 * warp + 8 * (index / 2) + 4 * (lane / 16);
#pragma unroll
    for (int j = 0; j < N / 8; ++j) {
      const float4 v = token_sums<N>(sums, j, lane);
      const unsigned token = 8 * j + 2 * (lane % 4) + index % 2, to = token % num;
      int slot = block.split * split_tokens(N, splits) + token / num;
      uint32_t at = block.received + (slot * kSumStride + row) * 4;
      if (block.is_cluster) {
        send_float4(address_in_cluster(at, to), v, address_in_cluster(block.sums_full, to));
      } else {
        store_shared_float4(at, v);
      }
    }
    return true;
  }

  __device__ __forceinline__ void synchronize() const {
    sync_threads(2, kConsumers + 32);  // with the helper warp
    if (block.is_cluster) barrier_wait(block.sums_full, 0);
  }

  __device__ __forceinline__ void finish() {
    const int splits = block.splits;
    int n = tokens.first;
#pragma unroll 1
    while (tokens.has(n)) {
      float4 total = {};
#pragma unroll 1
      for (int r = 0; r < splits; ++r) {
        int slot = r * split_tokens(N, splits) + n / splits;
        total = add(total, load_shared_float4(block.received + (slot * kSumStride + 4 * block.lane) * 4));
      }
      tokens.finish(n, total);
      n += tokens.step;
      tokens.fetch(n);
    }
  }
};

// Many tokens: each block stores its sums where the pipeline was, and the others read them there.
template <int N, Epilogue E, class W, class EpilogueType>
struct WideExchange {
  static constexpr int kTogether = kHasTokenRows<W>            ? 4
                                   : N < 64 || W::kIsQuantized ? 1
                                                               : 2;  // a warp's tokens in flight
  static constexpr int kPartsTogether = kMaxSplits / kTogether;  // blocks per token whose sums are in flight together
  const ProjectionBlock<N, E, W>& block;
  FinishedTokens<N, E, W, EpilogueType, kTogether> tokens;

  __device__ __forceinline__ WideExchange(const ProjectionBlock<N, E, W>& block, const EpilogueType& epilogue)
      : block(block), tokens(block, epilogue) {}

  __device__ __forceinline__ bool give(const float (&sums)[N / 2]) const {
    const int warp = block.warp, lane = block.lane;
    sync_threads(1, kConsumers);  // both warpgroups have finished with the pipeline
    float* partial = reinterpret_cast<float*>(block.pipeline);
    const int row = 16 * warp + lane / 4, column = 2 * (lane % 4);
#pragma unroll
    for (int j = 0; j < N / 2; ++j) {
      if constexpr (kHasTokenRows<W>) {
        if (j % 2 != 0) continue;
        const int token_row = warp % 4 * 16 + lane / 4;  // the first of the lane's two
        float* to = partial + (token_row + j % 4 / 2 * 8) * kSumStride + warp / 4 * 64 + j / 4 * 8 + column;
        *reinterpret_cast<float2*>(to) = make_float2(sums[j], sums[j + 1]);
      } else {
        int token = 8 * (j / 4) + column + j % 2;
        partial[token * kSumStride + row + j % 4 / 2 * 8] = sums[j];
      }
    }
    return true;
  }

  __device__ __forceinline__ void synchronize() const {
    if (block.is_cluster) {
      cluster_sync_shared();
    } else {
      sync_threads(2, kConsumers + 32);  // with the helper warp
    }
  }

  // All parts of a token's sum are loaded at once; a single block is a cluster of one. A block remains until the others
  // have read its part, but does not wait until they have finished.
  __device__ __forceinline__ void finish() {
    const int splits = block.splits, step = tokens.step;
    bool is_waited_for = block.is_cluster;
    int n = tokens.first;
#pragma unroll 1
    while (tokens.has(n)) {
      float4 total[kTogether] = {};
#pragma unroll 1
      for (int first = 0; first < splits; first += kPartsTogether) {
        float4 parts[kTogether][kPartsTogether] = {};
#pragma unroll
        for (int r = 0; r < kPartsTogether; ++r) {
#pragma unroll
          for (int u = 0; u < kTogether; ++u) {
            if (first + r >= splits || n + u * step >= N) continue;
            uint32_t at = block.pipeline_address + ((n + u * step) * kSumStride + 4 * block.lane) * 4;
            parts[u][r] = load_cluster_float4(address_in_cluster(at, first + r));
          }
        }
#pragma unroll
        for (int r = 0; r < kPartsTogether; ++r) {
#pragma unroll
          for (int u = 0; u < kTogether; ++u) total[u] = add(total[u], parts[u][r]);
        }
      }
      const int next_n = n + kTogether * step;
      const bool is_last = !tokens.has(next_n);
      if (is_last && is_waited_for) {
        cluster_arrive_having(total[0].x + total[kTogether - 1].x);
        is_waited_for = false;
      }
#pragma unroll
      for (int u = 0; u < kTogether; ++u) {
        if (tokens.has(n + u * step)) tokens.finish(n + u * step, total[u], u);
      }
      n = next_n;
      if (!is_last) tokens.fetch(n);
    }
    if (is_waited_for) cluster_arrive();  // this warp had nothing to read
    if (block.is_cluster) cluster_wait();
  }
};

template <int N, Epilogue E, class W, class EpilogueType>
using ExchangeOf = std::conditional_t<
    kSplitsInput<W>, OneTokenExchange<N, E, W, EpilogueType>,
    std::conditional_t<kIsNarrow<N>, NarrowExchange<N, E, W, EpilogueType>, WideExchange<N, E, W, EpilogueType>>>;

}  // namespace meshserve
