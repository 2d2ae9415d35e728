// What lies around the experts' products: the router of a decode step, the copy of tokens in order of their experts,
// and the sum of each token's experts.
#pragma once
#include "common/rounding.cuh"
#include "common/sm90/ptx.cuh"
#include "experts/row_products.cuh"

namespace meshserve {
namespace experts {

// ---- normed tokens -------------------------------------------------------------------------------------------------
// Tokens in the order that the weights need, with a finished RMSNorm, each at some slots.
struct GatherRowsArgs {
  const bf16* x;     // [T, D]
  const int* slots;  // for each choice [T, k]
  void* rows;        // [slots, D]: bf16, or for 8-bit weights e4m3
  float* scales;     // scales of e4m3 [D / 128, stride]
  int stride;
  const float* sums;  // sums of squares of the tokens [T, norm_tiles]; null: x is normed
  int norm_tiles;
  float inverse_dim, epsilon;
  int num_tokens, num_chosen, columns;
  int token_warps;  // that copy a token, each to some of its slots
  bool is_ordered;  // whether x has that order already
};

__device__ __forceinline__ uint2 times(uint2 v, float factor) {
  const float4 x = unpack_bf16(v);
  return make_uint2(pack_bf16(x.x * factor, x.y * factor), pack_bf16(x.z * factor, x.w * factor));
}

// 8 columns of a token as they are stored: bf16, or e4m3 numbers in the first two words, and their scale.
struct StoredColumns {
  uint4 words;
  float scale;
};

// Rounds 8 of a row's columns to e4m3, with a scale for the 128 columns that 16 lanes have.
__device__ __forceinline__ StoredColumns round_columns(uint4 v, bool is_ordered) {
  const float4 low = unpack_bf16(make_uint2(v.x, v.y)), high = unpack_bf16(make_uint2(v.z, v.w));
  const float most = fmaxf(fmaxf(fmaxf(fabsf(low.x), fabsf(low.y)), fmaxf(fabsf(low.z), fabsf(low.w))),
                           fmaxf(fmaxf(fabsf(high.x), fabsf(high.y)), fmaxf(fabsf(high.z), fabsf(high.w))));
  const float scale = e4m3_scale(largest_of_16_lanes(most)), inverse = 1.0f / scale;
  auto pair = [&](float a, float b) -> uint32_t {
    return to_e4m3(divided(a, scale, inverse), divided(b, scale, inverse));
  };
  uint2 numbers =
      make_uint2(pair(low.x, low.y) | pair(low.z, low.w) << 16, pair(high.x, high.y) | pair(high.z, high.w) << 16);
  if (is_ordered) {  // an even lane has the even columns of 16, the next lane the odd ones
    const bool is_odd = threadIdx.x % 2 == 1;
    const uint32_t other = __shfl_xor_sync(0xffffffffu, is_odd ? numbers.x : numbers.y, 1);
    const uint32_t even = is_odd ? other : numbers.x, odd = is_odd ? numbers.y : other;
    numbers = make_uint2(__byte_perm(even, odd, 0x5140), __byte_perm(even, odd, 0x7362));
  }
  return {make_uint4(numbers.x, numbers.y, 0, 0), scale};
}

// Returns 8 columns of a row, which are `v` before the norm's `factor`. All lanes of a warp call it, with consecutive
// columns.
template <class W>
__device__ __forceinline__ StoredColumns normed_columns(const GatherRowsArgs& args, uint4 v, float factor) {
  const uint2 low = times(make_uint2(v.x, v.y), factor), high = times(make_uint2(v.z, v.w), factor);
  const uint4 normed = make_uint4(low.x, low.y, high.x, high.y);
  if constexpr (W::kIsQuantized) return round_columns(normed, args.is_ordered);
  return {normed, 1.0f};
}

// Stores them as columns 8 * vector to + 7 of a slot.
template <class W>
__device__ __forceinline__ void store_columns(const GatherRowsArgs& args, int vector, const StoredColumns& columns,
                                              size_t slot) {
  const uint4 v = columns.words;
  if (vector >= args.columns / 8) return;
  if constexpr (W::kIsQuantized) {
    static_cast<uint2*>(args.rows)[slot * (args.columns / 8) + vector] = make_uint2(v.x, v.y);
    if (vector % 16 == 0) args.scales[static_cast<size_t>(vector / 16) * args.stride + slot] = columns.scale;
  } else {
    static_cast<uint4*>(args.rows)[slot * (args.columns / 8) + vector] = v;
  }
}

// ---- the router --------------------------------------------------------------------------------------------------
constexpr int kRouterBlocks = 8;    // blocks of a cluster, which has 8 tokens
constexpr int kRouterTokens = 8;    // a block chooses for one of them
constexpr int kRouterExperts = 16;  // experts that a block scores
static_assert(kRouterBlocks * kRouterExperts == kMostRouted);

struct RouterArgs {
  const bf16* scaled;    // [T, D]: tokens times the gain of the norm, in the order that the layers' weights need
  const bf16* router;    // one layer's [E, D]
  const float* sums;     // sums of squares of the tokens [T, norm_tiles]
  const int* positions;  // [T]: -1 is padding, which chooses no expert
  int norm_tiles;
  float inverse_dim, epsilon;
  int num_tokens, num_experts, num_chosen, columns;
  bool is_normalized;     // the shares of a token add up to 1
  int* experts;           // written [T, k]
  float* shares;          // written [T, k]
  GatherRowsArgs normed;  // where it stores each token, at the token's number; `rows` may be null
};

// Exchanges the halves of 16 columns in their own order, which two neighboring lanes have, for those of ordered
// activations: the even columns go to the lower lane, and the odd ones to its neighbor.
template <class W>
__device__ __forceinline__ uint4 reordered(uint4 v) {
  if constexpr (!W::kIsQuantized) return v;
  const bool is_odd = threadIdx.x % 2 == 1;
  const uint32_t kept = is_odd ? 0x7632 : 0x5410, sent = is_odd ? 0x5410 : 0x7632;
  const uint32_t low = __byte_perm(v.x, v.y, kept), high = __byte_perm(v.z, v.w, kept);
  const uint32_t other_low = __shfl_xor_sync(0xffffffffu, __byte_perm(v.x, v.y, sent), 1);
  const uint32_t other_high = __shfl_xor_sync(0xffffffffu, __byte_perm(v.z, v.w, sent), 1);
  return is_odd ? make_uint4(other_low, other_high, low, high) : make_uint4(low, high, other_low, other_high);
}

// The router's weights of a lane: rows of two experts, at the columns of some steps, in the order of activations.
template <class W, int U>
struct RouterWeights {
  const bf16* from;  // the first expert's; the second is 8 further
  int columns;
  bool has_first, has_second;
  uint4 rows[U][2];

  // Loads those of `count` steps.
  __device__ __forceinline__ void load(int count) {
    constexpr int kStep = RowFormat<Bf16Weights>::kStep;
#pragma unroll
    for (int u = 0; u < U; ++u) {
      rows[u][0] = rows[u][1] = make_uint4(0, 0, 0, 0);
      if (has_first && u < count) rows[u][0] = __ldg(reinterpret_cast<const uint4*>(from + u * kStep));
      if (has_second && u < count) rows[u][1] = __ldg(reinterpret_cast<const uint4*>(from + 8 * columns + u * kStep));
    }
#pragma unroll
    for (int u = 0; u < U; ++u) rows[u][0] = reordered<W>(rows[u][0]), rows[u][1] = reordered<W>(rows[u][1]);
  }
};

// Grid: a cluster of 8 blocks for each 8 tokens. A block scores 16 experts for all 8 tokens, its warps splitting the
// columns, and sends each token's scores to the block that chooses for it. After the wait the memory is busy with
// weights of gate and up, and the code is not in the instruction caches: all that is read is asked for at once, by
// addresses known before, and few instructions follow.
struct RouterMemory {
  float parts[kWarps][kRouterExperts][kRouterTokens];
  alignas(16) uint32_t keys[kMostRouted];  // order as the scores do; 0: no expert
  float chosen[32];                        // scores of the choices
  uint64_t received;                       // barrier that counts the bytes of the keys
};

template <class W>
__global__ void __launch_bounds__(kThreads, 2) router_kernel(const __grid_constant__ RouterArgs args) {
  constexpr int U = 8, kStep = RowFormat<Bf16Weights>::kStep;
  constexpr int kHalf = kWarps / 2, kRows = 2, kStride = 32 * kHalf;  // warps that store the block's token; see below
  extern __shared__ __align__(16) uint8_t shared_rows[];
  auto& memory = *reinterpret_cast<RouterMemory*>(shared_rows);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int rank = blockIdx.x % kRouterBlocks, first_token = blockIdx.x / kRouterBlocks * kRouterTokens;
  const int steps = args.columns / kStep, begin = steps * warp / kWarps;
  const int first_column = begin * kStep + 8 * (lane % 4);
  int left = steps * (warp + 1) / kWarps - begin;
  let_next_kernel_start();
  const int expert = rank * kRouterExperts + lane / 4;
  const bf16* from = args.router + static_cast<size_t>(expert) * args.columns + first_column;
  RouterWeights<W, U> weights = {from, args.columns, expert < args.num_experts, expert + 8 < args.num_experts};
  weights.load(left);
  const int chooser = first_token + rank;  // the token that this block chooses for
  const bool has_token = chooser < args.num_tokens, is_padding = has_token && args.positions[chooser] < 0;
  const uint32_t received = shared_address(&memory.received);
  if (threadIdx.x == 0) {
    barrier_init(received, 1);
    barrier_init_fence();
    barrier_expect_bytes(received, sizeof(memory.keys));
  }
  cluster_arrive();
  // The last token is read in place of those that do not exist, whose scores are not used.
  auto row_of = [&](int token) {
    return args.scaled + static_cast<size_t>(min(token, args.num_tokens - 1)) * args.columns;
  };
  const bf16* row = row_of(first_token + lane / 4) + first_column;
  const uint4* own_row = reinterpret_cast<const uint4*>(row_of(chooser));
  const bool is_storing = warp >= kHalf && args.normed.rows != nullptr && has_token;
  const float* sums = args.sums + static_cast<size_t>(min(chooser, args.num_tokens - 1)) * args.norm_tiles;
  wait_for_previous_kernel();
  uint4 normed[kRows];
  auto load_normed = [&](int first) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int vector = first + threadIdx.x % kStride + kStride * i;
      normed[i] = vector < args.columns / 8 ? own_row[vector] : make_uint4(0, 0, 0, 0);
    }
  };
  float squares = lane_squares(sums, args.norm_tiles);
  float c[2][4] = {};
#pragma unroll 1
  while (true) {
    uint4 b[U][1];
#pragma unroll
    for (int u = 0; u < U; ++u) {
      b[u][0] = make_uint4(0, 0, 0, 0);
      if (u < left) b[u][0] = *reinterpret_cast<const uint4*>(row + u * kStep);
    }
#pragma unroll
    for (int u = 0; u < U; ++u) multiply(c[u % 2], weights.rows[u][0], weights.rows[u][1], b[u]);
    left -= U;
    if (left <= 0) break;
    row += U * kStep, weights.from += U * kStep;
    weights.load(left);
  }
  if (is_storing) load_normed(0);
  float* to = &memory.parts[warp][lane / 4][2 * (lane % 4)];
  to[0] = c[0][0] + c[1][0], to[1] = c[0][1] + c[1][1];
  to[8 * kRouterTokens] = c[0][2] + c[1][2], to[8 * kRouterTokens + 1] = c[0][3] + c[1][3];
  __syncthreads();
  cluster_wait();  // all blocks have started
  if (threadIdx.x < kRouterExperts * kRouterTokens) {
    const int local_expert = threadIdx.x % kRouterExperts, local = threadIdx.x / kRouterExperts;
    float score = 0.0f;
#pragma unroll
    for (int p = 0; p < kWarps; ++p) score += memory.parts[p][local_expert][local];
    const bool is_real = rank * kRouterExperts + local_expert < args.num_experts;
    const float key = __uint_as_float(is_real ? max(order_of(score), 1u) : 0u);
    auto of_lane = [&](int distance) { return __shfl_xor_sync(0xffffffffu, key, distance); };
    const float4 four = make_float4(key, of_lane(1), of_lane(2), of_lane(3));  // in order in every fourth lane
    const uint32_t to = address_in_cluster(shared_address(&memory.keys[rank * kRouterExperts + local_expert]), local);
    if (local_expert % 4 == 0) send_float4(to, four, address_in_cluster(received, local));
  }
  const float inverse_rms = inverse_rms_of(squares, args.inverse_dim, args.epsilon);
  if (warp >= kHalf) {  // meanwhile, the others wait and choose
    if (!is_storing) return;
#pragma unroll 1
    for (int first = 0; first < args.columns / 8; first += kRows * kStride) {
      if (first > 0) load_normed(first);
#pragma unroll 1
      for (int i = 0; i < kRows; ++i) {
        const int warp_first = first + 32 * (warp - kHalf) + kStride * i;
        if (warp_first >= args.columns / 8) continue;
        const uint4 v = i == 0 ? normed[0] : normed[1];
        store_columns<W>(args.normed, warp_first + lane, normed_columns<W>(args.normed, v, inverse_rms), chooser);
      }
    }
    return;
  }
  static_assert(32 * kHalf == kMostRouted);
  barrier_wait(received, 0);  // also without a token: the others store here until then
  if (!has_token) return;
  const size_t at = static_cast<size_t>(chooser) * args.num_chosen;
  const uint32_t key = memory.keys[threadIdx.x];
  const int slot = rank_of_key(memory.keys);
  if (key > 0 && slot < args.num_chosen) {
    args.experts[at + slot] = is_padding ? -1 : static_cast<int>(threadIdx.x);
    memory.chosen[slot] = value_of(key);
  }
  sync_threads(1, kMostRouted);
  if (warp != 0) return;
  const uint4 found = *reinterpret_cast<const uint4*>(memory.keys + kScoresEach * lane);
  const float scores[kScoresEach] = {value_of(found.x), value_of(found.y), value_of(found.z), value_of(found.w)};
  const float share =
      share_of_choice(scores, memory.chosen[lane], inverse_rms, args.num_experts, args.num_chosen, args.is_normalized);
  if (lane < args.num_chosen) args.shares[at + lane] = share;
}

// ---- tokens in order of their experts ----------------------------------------------------------------------------
// A row of x on its way from memory.
struct RowInFlight {
  static constexpr int kVectors = 8;  // vectors of 8 columns that a lane has at a time
  uint4 vectors[kVectors];
  float squares = 0.0f;  // a lane's sum of the token's sums of squares

  __device__ __forceinline__ void load(const GatherRowsArgs& args, size_t token, int first) {
    const uint4* from = reinterpret_cast<const uint4*>(args.x + token * args.columns);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int vector = first + 32 * i + threadIdx.x % 32;
      vectors[i] = vector < args.columns / 8 ? from[vector] : make_uint4(0, 0, 0, 0);
    }
  }
  __device__ __forceinline__ RowInFlight(const GatherRowsArgs& args, size_t token) {
    load(args, token, 0);
    if (args.sums != nullptr) squares = lane_squares(args.sums + token * args.norm_tiles, args.norm_tiles);
  }

  // Stores the row at slots, loading more of it where it is longer. `for_slots(use)` calls `use(slot)` for each.
  template <class W, class ForSlots>
  __device__ __forceinline__ void store(const GatherRowsArgs& args, size_t token, ForSlots for_slots) {
    const float factor = args.sums == nullptr ? 1.0f : inverse_rms_of(squares, args.inverse_dim, args.epsilon);
    const int num_vectors = args.columns / 8;
#pragma unroll 1
    for (int first = 0; first < num_vectors; first += 32 * kVectors) {
      if (first > 0) load(args, token, first);
      StoredColumns columns[kVectors];
#pragma unroll
      for (int i = 0; i < kVectors; ++i) columns[i] = normed_columns<W>(args, vectors[i], factor);
      for_slots([&](size_t slot) {
#pragma unroll
        for (int i = 0; i < kVectors; ++i) {
          store_columns<W>(args, first + 32 * i + threadIdx.x % 32, columns[i], slot);
        }
      });
    }
  }
};

// Copies each token to the slots of its choices.
template <class W>
__global__ void __launch_bounds__(kThreads) scatter_rows_kernel(const __grid_constant__ GatherRowsArgs args) {
  const int warp = blockIdx.x * kWarps + threadIdx.x / 32, token = warp / args.token_warps;
  if (token >= args.num_tokens) return;
  wait_for_previous_kernel();
  let_next_kernel_start();  // gate_up, which finds the experts' slots written
  RowInFlight row(args, token);
  const int* slots = args.slots + token * args.num_chosen;
  row.template store<W>(args, token, [&](auto use) {
#pragma unroll 1
    for (int j = warp % args.token_warps; j < args.num_chosen; j += args.token_warps) {
      const int slot = slots[j];
      if (slot >= 0) use(slot);
    }
  });
}

// The same for a step of at most kMaxTokens tokens, a block a token, which also finds the slots of its choices.
template <class W>
__global__ void __launch_bounds__(kThreads)
    permute_kernel(const __grid_constant__ ArrangeArgs args, const __grid_constant__ GatherRowsArgs rows) {
  extern __shared__ __align__(16) uint8_t shared_rows[];
  auto& choices = *reinterpret_cast<Choices*>(shared_rows);
  let_next_kernel_start();
  clear(choices);
  wait_for_previous_kernel();
  const int token = blockIdx.x;
  RowInFlight row(rows, token);
  mark(choices, args.experts, args.num_tokens, args.num_chosen, args.num_experts);
  const int expert = threadIdx.x, count = count_tokens(choices, expert);
  const int before = sum_of_lower(count, choices.totals);
  choices.first[expert] = before;
  if (blockIdx.x == 0) {
    args.first[expert] = before;
    if (expert < 2) args.num_taken[expert] = 0;
    if (expert == kMaxExperts - 1) args.first[kMaxExperts] = before + count;
  }
  __syncthreads();
  for (int i = threadIdx.x / 32; i < args.num_chosen; i += kWarps) {
    const int choice = token * args.num_chosen + i, chosen = args.experts[choice];
    const bool is_here = chosen >= 0 && chosen < args.num_experts;
    const int slot = is_here ? choices.first[chosen] + rank_of(choices, chosen, token) : -1;
    if (threadIdx.x % 32 == 0) {
      args.slots[choice] = slot;
      if (is_here) args.share_of[slot] = args.shares[choice];
    }
    if (is_here) row.template store<W>(rows, token, [&](auto use) { use(slot); });
  }
}

// ---- the sum of a token's experts --------------------------------------------------------------------------------
// out = residual + the rows at the token's slots, a warp for each 128 columns of a token.
struct CombineArgs {
  const bf16* rows;       // [slots, D]
  const float* shares;    // [T, k]; null: the rows are multiplied by them already
  const int* slots;       // [T, k]
  const bf16* residual;   // may be null
  const bf16* next_gain;  // null: scaled_out and sums_out are not written
  bf16 *out, *scaled_out;
  float* sums_out;  // [T, D / 128]
  int num_tokens, num_chosen, columns;
};

template <class W>
__global__ void __launch_bounds__(kThreads) combine_kernel(const __grid_constant__ CombineArgs args) {
  constexpr int kTogether = 8;  // rows in flight
  let_next_kernel_start();
  const int lane = threadIdx.x % 32, tiles = args.columns / 128;
  const int item = blockIdx.x * kWarps + threadIdx.x / 32;
  if (item >= args.num_tokens * tiles) return;
  const int token = item / tiles, column = item % tiles * 128 + 4 * lane;
  const int* slots = args.slots + token * args.num_chosen;
  const size_t at = static_cast<size_t>(token) * args.columns + column;
  // The choices, the residual and the gain are complete since gate_up let down start, after its own wait.
  float4 sum = {};
  uint2 gain = {};
  if (args.residual != nullptr) sum = unpack_bf16(__ldcg(reinterpret_cast<const uint2*>(args.residual + at)));
  if (args.next_gain != nullptr) gain = *reinterpret_cast<const uint2*>(args.next_gain + column);
  float shares[kTogether];
  auto load_shares = [&](int first) {
#pragma unroll
    for (int u = 0; u < kTogether; ++u) {
      const int j = first + u;
      shares[u] = 1.0f;
      if (args.shares != nullptr && j < args.num_chosen) shares[u] = __ldcg(args.shares + token * args.num_chosen + j);
    }
  };
  load_shares(0);
  wait_for_previous_kernel();
#pragma unroll 1
  for (int first = 0; first < args.num_chosen; first += kTogether) {
    if (first > 0) load_shares(first);
    int found[kTogether];
    uint2 rows[kTogether];
#pragma unroll
    for (int u = 0; u < kTogether; ++u) found[u] = first + u < args.num_chosen ? slots[first + u] : -1;
#pragma unroll
    for (int u = 0; u < kTogether; ++u) {
      rows[u] = make_uint2(0, 0);
      const bf16* row = args.rows + static_cast<size_t>(max(found[u], 0)) * args.columns + column;
      if (found[u] >= 0) rows[u] = *reinterpret_cast<const uint2*>(row);
    }
#pragma unroll
    for (int u = 0; u < kTogether; ++u) {
      if (found[u] < 0) continue;
      const float4 v = unpack_bf16(rows[u]);
      sum = add(sum, make_float4(v.x * shares[u], v.y * shares[u], v.z * shares[u], v.w * shares[u]));
    }
  }
  const uint2 rounded = make_uint2(pack_bf16(sum.x, sum.y), pack_bf16(sum.z, sum.w));
  *reinterpret_cast<uint2*>(args.out + at) = rounded;
  if (args.next_gain == nullptr) return;
  const float4 x = unpack_bf16(rounded), g = unpack_bf16(gain);
  const size_t row = static_cast<size_t>(token) * args.columns;
  uint8_t* exponents = exponents_of(args.scaled_out, args.num_tokens, args.columns) + row / kExponentColumns;
  store_activations<W>(args.scaled_out + row, exponents, column,
                       make_float4(x.x * g.x, x.y * g.y, x.z * g.z, x.w * g.w));
  const float squares = sum_over_lanes(x.x * x.x + x.y * x.y + x.z * x.z + x.w * x.w, 32);
  if (lane == 0) args.sums_out[item] = squares;
}

// The same for a step of many tokens, without shares and a next norm: a warp a token, 16 bytes a lane.
template <class W>
__global__ void __launch_bounds__(kThreads) sum_rows_kernel(const __grid_constant__ CombineArgs args) {
  constexpr int kTogether = 8;  // rows in flight
  let_next_kernel_start();
  const int token = blockIdx.x * kWarps + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (token >= args.num_tokens) return;
  const int* slots = args.slots + token * args.num_chosen;
  int found[kTogether];
#pragma unroll
  for (int u = 0; u < kTogether; ++u) found[u] = u < args.num_chosen ? __ldcg(slots + u) : -1;
  wait_for_previous_kernel();
  const size_t at = static_cast<size_t>(token) * args.columns;
#pragma unroll 1
  for (int column = 8 * lane; column < args.columns; column += 256) {
    float4 low = {}, high = {};
    auto add_up = [&](uint4 v) {
      low = add(low, unpack_bf16(make_uint2(v.x, v.y)));
      high = add(high, unpack_bf16(make_uint2(v.z, v.w)));
    };
    if (args.residual != nullptr) add_up(__ldcg(reinterpret_cast<const uint4*>(args.residual + at + column)));
    uint4 rows[kTogether];
#pragma unroll
    for (int u = 0; u < kTogether; ++u) {
      const bf16* row = args.rows + static_cast<size_t>(max(found[u], 0)) * args.columns + column;
      rows[u] = __ldcs(reinterpret_cast<const uint4*>(row));  // without a branch, so that all are in flight
    }
#pragma unroll
    for (int u = 0; u < kTogether; ++u) add_up(found[u] >= 0 ? rows[u] : make_uint4(0, 0, 0, 0));
#pragma unroll 1
    for (int j = kTogether; j < args.num_chosen; ++j) {
      const int slot = slots[j];
      if (slot < 0) continue;
      add_up(*reinterpret_cast<const uint4*>(args.rows + static_cast<size_t>(slot) * args.columns + column));
    }
    *reinterpret_cast<uint4*>(args.out + at + column) = make_uint4(
        pack_bf16(low.x, low.y), pack_bf16(low.z, low.w), pack_bf16(high.x, high.y), pack_bf16(high.z, high.w));
  }
}

}  // namespace experts
}  // namespace meshserve
