// One projection of a decode step: out[b, row] = sum_k input[b, k] weights[row, k], and what follows it, fused.
//
// The step reads every weight once, so the kernel is a weight stream. A block owns 128 rows of the weights (two groups
// of 64, one a warpgroup) and one of `splits` ranges of k; the splits of a tile form a cluster and add their results
// through distributed shared memory. One warp fetches [64, 64] tiles of weights and [N, 64] tiles of activations with
// the bulk tensor copy engine into a ring of stages; two warpgroups multiply with wgmma, the batch as its N.
// The weights of the whole ring are fetched before the wait for the previous kernel: that hides the launch.
//
// RMSNorm is split over kernels: who writes the residual stream also writes x * gain (bf16) and, a tile of 128 columns,
// the sum of squares; who reads it scales its result by 1 / rms. So no block normalises, and the activations come in by
// the copy engine.
//
// From batch 64 two neighbouring tiles form a pair in the cluster: each fetches half of the activations and the
// copy engine writes them to both. Else reading them would take as much L2 bandwidth as the weights.
#pragma once
#include "ptx.cuh"
#include "wgmma.cuh"

namespace meshserve {

constexpr int kTileRows = 128;
constexpr int kBlockK = 64;                 // bf16 columns of a tile: 128 bytes, the swizzle's width
constexpr int kMaxStages = 8;
constexpr int kConsumerWarps = 8;
constexpr int kProjectionThreads = 32 * (kConsumerWarps + 1);
constexpr int kHalfTileBytes = 64 * kBlockK * 2;
constexpr int kSumStride = kTileRows + 4;   // floats of a row of the partial sums: 4 more keep the banks apart

constexpr int kMaxSplits = 8;               // blocks of a cluster, on any Hopper GPU
// Whether the splits' sums go to a buffer of their own ([N, 132] floats), rather than to where the ring was.
template <int N>
constexpr bool kSendsSums = N <= 32;

enum class Epilogue : int { kQkv, kResidual, kGateUp };

struct ProjectionArgs {
  Epilogue epilogue;
  int batch;
  int splits, pair;           // the cluster: k ranges x neighbouring tiles
  int k_blocks;               // columns of the weights / 64
  int stages, blocks_per_stage;
  int ring_bytes;             // of the stages, or of the partial sums that follow them in the same memory
  int row_base;               // first row of this layer in the stacked weights
  int tile_step;              // rows from one tile to the next
  int second_half;            // rows from the tile's first 64 rows to its second 64
  // The input's RMSNorm: sums of squares [batch, norm_tiles]. No norm where null.
  const float* sums_in;
  int norm_tiles;
  float inverse_dim, epsilon;
  // kResidual: out = residual + result; scaled_out = out * next_gain. kGateUp: out = silu(gate) * up.
  const bf16* residual;       // may be null, may be `out`
  bf16* out;
  int out_columns;
  const bf16* next_gain;      // null: neither scaled_out nor sums_out is written
  bf16* scaled_out;
  float* sums_out;            // [batch, out_columns / 128]
  // kQkv: q [batch, K, G, H]; k and v go to their page.
  bf16* q_out;
  const bf16* q_gain;
  const bf16* k_gain;
  const float* cos_sin;       // [batch, H]: H/2 cosines, H/2 sines
  bf16* cache;                // this layer's [P, K, 2, S, H]
  const int* page_table;
  const int* positions;
  int max_pages, page_size, kv_heads, group, head_dim;
};

// What one token's epilogue reads from global memory; fetched ahead, so that its latency is hidden.
struct EpilogueOperands {
  uint2 gain;                 // kResidual: of the next norm. kQkv: of the head's norm
  bf16* cache_row;            // kQkv: the key's or value's place; null: not to be written
  float inverse_rms;
  uint2 residual;
  float4 cosine, sine;
};

struct QkvLane {              // which head and which 4 elements of it a lane holds
  int kv_head, slot, element; // slot: 0..G-1 query heads, G key, G+1 value
  bool is_valid;
};

__device__ __forceinline__ QkvLane qkv_lane(const ProjectionArgs& args, int tile, int lane) {
  int row = tile * kTileRows + 4 * lane;
  int head = row / args.head_dim;
  int heads_per_kv = args.group + 2;
  return {head / heads_per_kv, head % heads_per_kv, row % args.head_dim, head < args.kv_heads * heads_per_kv};
}

// The operands that no kernel of the call writes.
__device__ __forceinline__ void load_given_operands(EpilogueOperands& operands, const ProjectionArgs& args, int tile,
                                                    int token, int lane) {
  if (token >= args.batch) return;
  if (args.epilogue == Epilogue::kResidual) {
    if (args.next_gain != nullptr) {
      operands.gain = *reinterpret_cast<const uint2*>(args.next_gain + tile * kTileRows + 4 * lane);
    }
  } else if (args.epilogue == Epilogue::kQkv) {
    QkvLane where = qkv_lane(args, tile, lane);
    const bf16* gain = where.slot == args.group ? args.k_gain : args.q_gain;
    operands.gain = *reinterpret_cast<const uint2*>(gain + where.element);
    operands.cache_row = nullptr;
    int position = args.positions[token];
    if (where.is_valid && where.slot >= args.group && position >= 0) {
      int page = args.page_table[token * args.max_pages + position / args.page_size];
      size_t slab = (static_cast<size_t>(page) * args.kv_heads + where.kv_head) * 2 + (where.slot - args.group);
      operands.cache_row = args.cache + (slab * args.page_size + position % args.page_size) * args.head_dim;
    }
  }
}

// The operands that earlier kernels wrote.
__device__ __forceinline__ void load_made_operands(EpilogueOperands& operands, const ProjectionArgs& args, int tile,
                                                   int token, int lane) {
  if (token >= args.batch) return;
  if (args.epilogue == Epilogue::kResidual) {
    size_t at = static_cast<size_t>(token) * args.out_columns + tile * kTileRows + 4 * lane;
    operands.residual = make_uint2(0, 0);
    if (args.residual != nullptr) operands.residual = *reinterpret_cast<const uint2*>(args.residual + at);
  } else if (args.epilogue == Epilogue::kQkv) {
    int half = args.head_dim / 2;
    const float* angles = args.cos_sin + token * args.head_dim + 4 * lane % half;
    operands.cosine = *reinterpret_cast<const float4*>(angles);
    operands.sine = *reinterpret_cast<const float4*>(angles + half);
  }
  operands.inverse_rms = 1.0f;
  if (args.sums_in != nullptr) {
    float sum = 0.0f;
    for (int i = lane; i < args.norm_tiles; i += 32) sum += args.sums_in[token * args.norm_tiles + i];
    operands.inverse_rms = rsqrtf(sum_over_lanes(sum, 32) * args.inverse_dim + args.epsilon);
  }
}

__device__ __forceinline__ void store_bf16x4(bf16* to, float4 v) {
  *reinterpret_cast<uint2*>(to) = make_uint2(pack_bf16(v.x, v.y), pack_bf16(v.z, v.w));
}

__device__ __forceinline__ float sum_of_squares(float4 v) { return v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w; }

// out = residual + sum, rounded to bf16 as the residual stream is; the rest is made of the rounded value.
__device__ __forceinline__ void finish_residual(const ProjectionArgs& args, int tile, int token, int lane, float4 sum,
                                                const EpilogueOperands& operands) {
  float4 x = unpack_bf16(operands.residual);
  uint2 rounded = make_uint2(pack_bf16(x.x + sum.x, x.y + sum.y), pack_bf16(x.z + sum.z, x.w + sum.w));
  size_t at = static_cast<size_t>(token) * args.out_columns + tile * kTileRows + 4 * lane;
  *reinterpret_cast<uint2*>(args.out + at) = rounded;
  if (args.next_gain == nullptr) return;
  x = unpack_bf16(rounded);
  float4 gain = unpack_bf16(operands.gain);
  store_bf16x4(args.scaled_out + at, make_float4(x.x * gain.x, x.y * gain.y, x.z * gain.z, x.w * gain.w));
  float squares = sum_over_lanes(sum_of_squares(x), 32);
  if (lane == 0) args.sums_out[token * (args.out_columns / kTileRows) + tile] = squares;
}

// The lower half of the tile's rows is gate, the upper the same rows of up: 16 lanes each.
__device__ __forceinline__ void finish_gate_up(const ProjectionArgs& args, int tile, int token, int lane, float4 sum) {
  float4 up;
  up.x = __shfl_xor_sync(0xffffffffu, sum.x, 16);
  up.y = __shfl_xor_sync(0xffffffffu, sum.y, 16);
  up.z = __shfl_xor_sync(0xffffffffu, sum.z, 16);
  up.w = __shfl_xor_sync(0xffffffffu, sum.w, 16);
  if (lane >= 16) return;
  auto silu = [](float v) { return v / (1.0f + __expf(-v)); };
  bf16* to = args.out + static_cast<size_t>(token) * args.out_columns + tile * (kTileRows / 2) + 4 * lane;
  store_bf16x4(to, make_float4(silu(sum.x) * up.x, silu(sum.y) * up.y, silu(sum.z) * up.z, silu(sum.w) * up.w));
}

// RMSNorm and rotary position of a query or key head, then to q_out or to the token's page. A head is 16 or 32 lanes;
// the element that rotary pairs with a lane's lies half a head away, in another lane.
__device__ __forceinline__ void finish_qkv(const ProjectionArgs& args, int tile, int token, int lane, float4 sum,
                                           const EpilogueOperands& operands) {
  QkvLane where = qkv_lane(args, tile, lane);
  int lanes = args.head_dim / 4;
  float mean = sum_over_lanes(sum_of_squares(sum), lanes) / args.head_dim;
  float4 value = sum;
  if (where.slot <= args.group) {
    float scale = rsqrtf(mean + args.epsilon);
    float4 gain = unpack_bf16(operands.gain);
    value = make_float4(sum.x * scale * gain.x, sum.y * scale * gain.y, sum.z * scale * gain.z, sum.w * scale * gain.w);
  }
  float4 other;
  other.x = __shfl_xor_sync(0xffffffffu, value.x, lanes / 2);
  other.y = __shfl_xor_sync(0xffffffffu, value.y, lanes / 2);
  other.z = __shfl_xor_sync(0xffffffffu, value.z, lanes / 2);
  other.w = __shfl_xor_sync(0xffffffffu, value.w, lanes / 2);
  if (where.slot <= args.group) {
    float4 c = operands.cosine, s = operands.sine;
    float sign = where.element < args.head_dim / 2 ? -1.0f : 1.0f;
    value = make_float4(value.x * c.x + sign * other.x * s.x, value.y * c.y + sign * other.y * s.y,
                        value.z * c.z + sign * other.z * s.z, value.w * c.w + sign * other.w * s.w);
  }
  if (!where.is_valid) return;
  if (where.slot < args.group) {
    size_t head = (static_cast<size_t>(token) * args.kv_heads + where.kv_head) * args.group + where.slot;
    store_bf16x4(args.q_out + head * args.head_dim + where.element, value);
  } else if (operands.cache_row != nullptr) {
    store_bf16x4(operands.cache_row + where.element, value);
  }
}

// Grid (splits * pair, batch / N rounded up, tiles / pair), clusters of (splits * pair, 1, 1).
template <int N>
__global__ void __launch_bounds__(kProjectionThreads, 2)
    projection_kernel(const __grid_constant__ CUtensorMap weights, const __grid_constant__ CUtensorMap input,
                      const __grid_constant__ ProjectionArgs args) {
  constexpr int kBlockBytes = 2 * kHalfTileBytes + N * kBlockK * 2;
  constexpr bool kLoadsEarly = N < 128;  // wider, registers are short
  extern __shared__ __align__(1024) uint8_t ring[];

  // The shuffle tells the compiler that a warp does not diverge by its number, which wgmma needs.
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const int split = blockIdx.x % args.splits, side = blockIdx.x / args.splits;
  const int first_token = blockIdx.y * N;
  const int tile = blockIdx.z * args.pair + side;
  const int k_begin = args.k_blocks * split / args.splits, k_end = args.k_blocks * (split + 1) / args.splits;
  const int iterations = (k_end - k_begin + args.blocks_per_stage - 1) / args.blocks_per_stage;
  const uint32_t ring_address = shared_address(ring);
  const uint32_t full = ring_address + args.ring_bytes, empty = full + 8 * kMaxStages;
  const uint32_t received = empty + 8 * kMaxStages;
  const int stage_bytes = args.blocks_per_stage * kBlockBytes;

  if (threadIdx.x == 0) {
    for (int s = 0; s < args.stages; ++s) {
      barrier_init(full + 8 * s, 1);
      barrier_init(empty + 8 * s, kConsumerWarps * args.pair);
    }
    barrier_init_fence();
    let_next_kernel_start();
  }
  __syncthreads();
  // Other blocks of the cluster write into this one's shared memory: the stages (pairs), later the sums. Each thread
  // waits for their start just before it writes into theirs.
  const bool is_cluster = args.splits * args.pair > 1;
  if (is_cluster) cluster_arrive();

  if (warp == kConsumerWarps) {
    if (lane == 0) {
      prefetch_map(&weights);
      prefetch_map(&input);
      const uint64_t weights_policy = evict_first_policy(), input_policy = evict_last_policy();
      const int row = args.row_base + tile * args.tile_step;
      auto blocks_of = [&](int i) { return min(args.blocks_per_stage, k_end - k_begin - i * args.blocks_per_stage); };
      auto fetch_weights = [&](int i) {
        int s = i % args.stages, blocks = blocks_of(i);
        barrier_expect_bytes(full + 8 * s, blocks * kBlockBytes);
        for (int j = 0; j < blocks; ++j) {
          int column = (k_begin + i * args.blocks_per_stage + j) * kBlockK;
          uint32_t to = ring_address + s * stage_bytes + j * kBlockBytes;
          copy_tile_2d(to, &weights, column, row, full + 8 * s, weights_policy);
          copy_tile_2d(to + kHalfTileBytes, &weights, column, row + args.second_half, full + 8 * s, weights_policy);
        }
      };
      auto fetch_input = [&](int i) {
        int s = i % args.stages, blocks = blocks_of(i);
        for (int j = 0; j < blocks; ++j) {
          int column = (k_begin + i * args.blocks_per_stage + j) * kBlockK;
          uint32_t to = ring_address + s * stage_bytes + j * kBlockBytes + 2 * kHalfTileBytes;
          if (args.pair == 1) {
            copy_tile_2d(to, &input, column, first_token, full + 8 * s, input_policy);
          } else {  // half of the tokens, written to both sides
            uint16_t both = static_cast<uint16_t>((1u << split) | (1u << (split + args.splits)));
            copy_tile_2d_to_blocks(to + side * (N / 2) * kBlockK * 2, &input, column, first_token + side * (N / 2),
                                   full + 8 * s, both, input_policy);
          }
        }
      };
      const int ahead = min(args.stages, iterations);
      for (int i = 0; i < ahead; ++i) fetch_weights(i);
      wait_for_previous_kernel();
      fence_before_copies();
      if (is_cluster) cluster_wait();
      for (int i = 0; i < ahead; ++i) fetch_input(i);
      for (int i = ahead; i < iterations; ++i) {
        barrier_wait(empty + 8 * (i % args.stages), (i / args.stages + 1) & 1);
        fetch_weights(i);
        fetch_input(i);
      }
    }
    if (is_cluster) {
      if (lane > 0) cluster_wait();
      __syncwarp();
      cluster_sync();
      if (!kSendsSums<N>) cluster_sync();
    }
    return;
  }

  // Tokens are dealt to the splits, then to a split's warps.
  const int token_step = args.splits * kConsumerWarps;
  int n = split + args.splits * warp;
  EpilogueOperands next = {};
  if (kLoadsEarly && n < N) load_given_operands(next, args, tile, first_token + n, lane);
  wait_for_previous_kernel();
  if (kLoadsEarly && n < N) load_made_operands(next, args, tile, first_token + n, lane);

  float sums[N / 2];
  const uint32_t half_offset = (warp / 4) * kHalfTileBytes;
  const int num_blocks = k_end - k_begin;
  int stage = 0, parity = 0, block_of_stage = 0, freed = -1;
  for (int i = 0; i < num_blocks; ++i) {
    if (block_of_stage == 0) barrier_wait(full + 8 * stage, parity);
    uint32_t block = ring_address + stage * stage_bytes + block_of_stage * kBlockBytes;
    uint64_t a = tile_descriptor(block + half_offset), b = tile_descriptor(block + 2 * kHalfTileBytes);
    wgmma_begin();
#pragma unroll
    for (int k = 0; k < kBlockK / 16; ++k) wgmma<N>(sums, a + 2 * k, b + 2 * k, i + k > 0);
    wgmma_commit();
    wgmma_wait<1>();    // all but this block have been multiplied
    if (freed >= 0 && lane == 0) {
      barrier_arrive(empty + 8 * freed);
      if (args.pair > 1) barrier_arrive_in_cluster(empty + 8 * freed, split + args.splits * (1 - side));
    }
    freed = -1;
    if (++block_of_stage == args.blocks_per_stage) {
      block_of_stage = 0;
      freed = stage;
      if (++stage == args.stages) stage = 0, parity ^= 1;
    }
  }
  wgmma_wait<0>();
  if (is_cluster) cluster_wait();

  // Add up the splits. Few tokens: each block sends a token's sums to the block that finishes the token, and one
  // barrier ends it. Many tokens: each leaves its sums where the ring was, and the others read them there.
  const int row = 16 * warp + lane / 4, column = 2 * (lane % 4);
  if constexpr (kSendsSums<N>) {
    const int tokens_per_split = N / args.splits;
    const uint32_t to = received + split * tokens_per_split * kSumStride * 4 + row * 4;
#pragma unroll
    for (int j = 0; j < N / 2; ++j) {
      int token = 8 * (j / 4) + column + j % 2;
      uint32_t at = to + token / args.splits * kSumStride * 4 + (j % 4 / 2) * 32;
      store_cluster_float(address_in_cluster(at, token % args.splits), sums[j]);
    }
  } else {
    sync_threads(1, 32 * kConsumerWarps);  // both warpgroups have done with the ring
    float* partial = reinterpret_cast<float*>(ring);
#pragma unroll
    for (int j = 0; j < N / 2; ++j) {
      partial[(8 * (j / 4) + column + j % 2) * kSumStride + row + j % 4 / 2 * 8] = sums[j];
    }
  }
  if (is_cluster) {
    cluster_sync();
  } else {
    sync_threads(1, 32 * kConsumerWarps);
  }

  if (!kLoadsEarly) {
    load_given_operands(next, args, tile, first_token + n, lane);
    load_made_operands(next, args, tile, first_token + n, lane);
  }
  for (; n < N && first_token + n < args.batch; n += token_step) {
    EpilogueOperands operands = next;
    if (n + token_step < N) {
      load_given_operands(next, args, tile, first_token + n + token_step, lane);
      load_made_operands(next, args, tile, first_token + n + token_step, lane);
    }
    float4 parts[kMaxSplits];
#pragma unroll
    for (int r = 0; r < kMaxSplits; ++r) {  // unrolled: all loads are in flight together
      parts[r] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (r < args.splits) {
        if constexpr (kSendsSums<N>) {
          int slot = r * (N / args.splits) + n / args.splits;
          parts[r] = load_shared_float4(received + (slot * kSumStride + 4 * lane) * 4);
        } else {
          uint32_t at = ring_address + (n * kSumStride + 4 * lane) * 4;
          parts[r] = load_cluster_float4(address_in_cluster(at, r + args.splits * side));
        }
      }
    }
    float4 sum = parts[0];
#pragma unroll
    for (int r = 1; r < kMaxSplits; ++r) {
      sum = make_float4(sum.x + parts[r].x, sum.y + parts[r].y, sum.z + parts[r].z, sum.w + parts[r].w);
    }
    float scale = operands.inverse_rms;
    sum = make_float4(sum.x * scale, sum.y * scale, sum.z * scale, sum.w * scale);
    int token = first_token + n;
    if (args.epilogue == Epilogue::kResidual) {
      finish_residual(args, tile, token, lane, sum, operands);
    } else if (args.epilogue == Epilogue::kGateUp) {
      finish_gate_up(args, tile, token, lane, sum);
    } else {
      finish_qkv(args, tile, token, lane, sum, operands);
    }
  }
  if (!kSendsSums<N> && is_cluster) cluster_sync();  // other blocks have read this one's sums
}

}  // namespace meshserve
