// The experts of a step of at most 8 tokens: bound by streaming the chosen experts' weights.
//
// A warp multiplies 16 rows of weights by the 8 tokens with mma.m16n8k16, rows of weights as M. Both operands go from
// global memory to registers in loads of 16 bytes: since a sum does not depend on the order of its terms, a lane's 8
// consecutive columns serve as its 4 pairs of columns in two instructions, for weights and tokens alike. Tokens that
// did not choose the expert are zeros. A ring of loads is always in flight, over the ends of tiles and experts.
//
//   gate_up_kernel  items of (expert, tile of rows) in equal ranges for each block, whose warps split the columns. 8
//   rows
//                   of gate lie on 8 rows of up, so that a lane gets both of a token. Writes share * silu(gate) * up
//                   for each choice, at its place (see expert_choices.cuh).
//   down_kernel     a block owns 16 columns of the output and adds up all experts in registers: there is no second
//   pass.
#pragma once
#include "expert_choices.cuh"

namespace meshserve {
namespace experts {

constexpr int kFewTokens = 8;
constexpr int kStep = 32;     // columns of a row that the 4 lanes of a load have
constexpr int kGateRows = 8;  // rows of gate, and of up, of a tile

struct RowsArgs {
  const bf16* input;    // gate_up: [T, columns]; down: [places, columns]
  const bf16* weights;  // one layer's [E, 2, rows, columns] or [E, rows, columns]
  const int* experts;   // [T, k]
  const float* shares;  // [T, k]
  const float* sums;    // gate_up: sums of squares of the input's RMSNorm [T, norm_tiles]; null: the input is normed
  int norm_tiles;
  float inverse_dim, epsilon;
  bf16* out;  // gate_up: [places, rows]; down: [T, rows]
  int num_tokens, num_chosen, num_experts, rows, columns;
  // down: out = residual + result; scaled_out = out * next_gain.
  const bf16* residual;   // may be null
  const bf16* next_gain;  // null: scaled_out and sums_out are not written
  bf16* scaled_out;
  float* sums_out;  // [T, rows / 16]
};

// c += 16 rows of weights (rows `low`, then rows `high`) times 8 tokens, over 32 columns.
__device__ __forceinline__ void multiply(float (&c)[4], uint4 low, uint4 high, uint4 token) {
  const uint32_t first[4] = {low.x, high.x, low.y, high.y}, second[4] = {low.z, high.z, low.w, high.w};
  multiply_16x8x16(c, first, token.x, token.y);
  multiply_16x8x16(c, second, token.z, token.w);
}

__device__ __forceinline__ float silu(float v) { return __fdividef(v, 1.0f + __expf(-v)); }

// Computes 1 / rms of a token with one warp.
__device__ __forceinline__ float inverse_rms_of(const float* sums, int norm_tiles, float inverse_dim, float epsilon) {
  float sum = 0.0f;
  for (int i = threadIdx.x % 32; i < norm_tiles; i += 32) sum += sums[i];
  return rsqrtf(sum_over_lanes(sum, 32) * inverse_dim + epsilon);
}

struct GateUpMemory {
  Choices choices;
  float shares[kFewTokens][kMaxExperts];
  float inverse_rms[kFewTokens];
  alignas(16) float parts[2][kWarps][16][kFewTokens];
};

// Grid: any number of blocks.
__global__ void __launch_bounds__(kThreads, 2) gate_up_kernel(const __grid_constant__ RowsArgs args) {
  constexpr int U = 4;
  extern __shared__ __align__(16) uint8_t shared_rows[];
  auto& memory = *reinterpret_cast<GateUpMemory*>(shared_rows);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const uint64_t policy = evict_first_policy();
  let_next_kernel_start();
  clear(memory.choices);
  touch_parameters(args);
  wait_for_previous_kernel();
  arrange(memory.choices, args.experts, args.num_tokens, args.num_chosen, args.num_experts);

  const int tiles = args.rows / kGateRows, num_items = memory.choices.num_active * tiles;
  const int first_item = num_items * static_cast<int>(blockIdx.x) / static_cast<int>(gridDim.x);
  const int last_item = num_items * static_cast<int>(blockIdx.x + 1) / static_cast<int>(gridDim.x);
  if (first_item == last_item) return;
  const int columns = args.columns, steps = columns / kStep;
  const int begin = steps * warp / kWarps, end = steps * (warp + 1) / kWarps;
  const int to_up = args.rows * columns;
  auto weights_of = [&](int item) {  // this lane's row of gate
    const int row = memory.choices.active[item / tiles] * 2 * args.rows + item % tiles * kGateRows + lane / 4;
    return args.weights + static_cast<size_t>(row) * columns + 8 * (lane % 4);
  };
  uint4 a[U][2];
  auto fetch = [&](int u, const bf16* from, int step) {
    if (step >= end) return;
    a[u][0] = load_weights(from + step * kStep, policy);
    a[u][1] = load_weights(from + step * kStep + to_up, policy);
  };
  const bf16* current = weights_of(first_item);
#pragma unroll
  for (int u = 0; u < U; ++u) fetch(u, current, begin + u);

  for (int i = threadIdx.x; i < args.num_tokens * args.num_chosen; i += kThreads) {
    const int expert = args.experts[i];
    if (expert >= 0 && expert < args.num_experts) memory.shares[i / args.num_chosen][expert] = args.shares[i];
  }
  if (warp < args.num_tokens) {
    const float* sums = args.sums + warp * args.norm_tiles;
    const float inverse =
        args.sums == nullptr ? 1.0f : inverse_rms_of(sums, args.norm_tiles, args.inverse_dim, args.epsilon);
    if (lane == 0) memory.inverse_rms[warp] = inverse;
  }
  const bf16* token_row = args.input + lane / 4 * columns + 8 * (lane % 4);
#pragma unroll 1
  for (int item = first_item; item < last_item; ++item) {
    const int expert = memory.choices.active[item / tiles];
    const uint32_t tokens = memory.choices.tokens[expert][0];
    const bool is_chosen = tokens >> lane / 4 & 1;
    const bf16* next = item + 1 < last_item ? weights_of(item + 1) : nullptr;
    float c[2][4] = {};
#pragma unroll 1
    for (int step = begin; step < end; step += U) {
      uint4 b[U];
#pragma unroll
      for (int u = 0; u < U; ++u) {
        b[u] = make_uint4(0, 0, 0, 0);
        if (is_chosen && step + u < end) b[u] = *reinterpret_cast<const uint4*>(token_row + (step + u) * kStep);
      }
      const bool is_last = step + U >= end;
      const bf16* refill = is_last ? next : current;
      const int refill_step = is_last ? begin : step + U;
#pragma unroll
      for (int u = 0; u < U; ++u) {
        if (step + u < end) multiply(c[u % 2], a[u][0], a[u][1], b[u]);
        if (refill != nullptr) fetch(u, refill, refill_step + u);
      }
    }
    current = next;

    auto& parts = memory.parts[item % 2];  // two, so that one barrier an item suffices
    float* to = &parts[warp][lane / 4][2 * (lane % 4)];
    *reinterpret_cast<float2*>(to) = make_float2(c[0][0] + c[1][0], c[0][1] + c[1][1]);
    *reinterpret_cast<float2*>(to + 8 * kFewTokens) = make_float2(c[0][2] + c[1][2], c[0][3] + c[1][3]);
    __syncthreads();
    const int row = threadIdx.x % kGateRows, token = threadIdx.x / kGateRows;
    if (token < kFewTokens && (tokens >> token & 1)) {
      float gate = 0.0f, up = 0.0f;
#pragma unroll
      for (int p = 0; p < kWarps; ++p) {
        gate += parts[p][row][token];
        up += parts[p][row + 8][token];
      }
      const float scale = memory.inverse_rms[token];
      const size_t place = memory.choices.first[expert] + __popc(tokens & ((1u << token) - 1));
      args.out[place * args.rows + item % tiles * kGateRows + row] =
          __float2bfloat16(silu(gate * scale) * (up * scale) * memory.shares[token][expert]);
    }
  }
}

struct DownMemory {
  Choices choices;
  alignas(16) float parts[kWarps][16][kFewTokens];
};

// Grid: rows / 16 blocks. A warp takes every eighth unit of (expert, U steps of columns).
__global__ void __launch_bounds__(kThreads, 1) down_kernel(const __grid_constant__ RowsArgs args) {
  constexpr int U = 8;
  extern __shared__ __align__(16) uint8_t shared_rows[];
  auto& memory = *reinterpret_cast<DownMemory*>(shared_rows);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const uint64_t policy = evict_first_policy();
  let_next_kernel_start();
  clear(memory.choices);
  touch_parameters(args);
  wait_for_previous_kernel();
  arrange(memory.choices, args.experts, args.num_tokens, args.num_chosen, args.num_experts);

  const int steps = args.columns / kStep, units_each = (steps + U - 1) / U;
  const int num_units = memory.choices.num_active * units_each;
  const size_t columns = args.columns;
  uint4 a[U][2];
  auto fetch = [&](int u, int unit) {
    const int step = unit % units_each * U + u;
    if (step >= steps) return;
    const size_t row = memory.choices.active[unit / units_each] * static_cast<size_t>(args.rows) + blockIdx.x * 16;
    const bf16* from = args.weights + (row + lane / 4) * columns + step * kStep + 8 * (lane % 4);
    a[u][0] = load_weights(from, policy);
    a[u][1] = load_weights(from + 8 * columns, policy);
  };
  if (warp < num_units) {
#pragma unroll
    for (int u = 0; u < U; ++u) fetch(u, warp);
  }
  float c[4] = {};
#pragma unroll 1
  for (int unit = warp; unit < num_units; unit += kWarps) {
    const int expert = memory.choices.active[unit / units_each], first_step = unit % units_each * U;
    const int rank = rank_of(memory.choices, expert, lane / 4);
    const bf16* row = args.input + (memory.choices.first[expert] + max(rank, 0)) * columns + 8 * (lane % 4);
    uint4 b[U];
#pragma unroll
    for (int u = 0; u < U; ++u) {
      b[u] = make_uint4(0, 0, 0, 0);
      if (rank >= 0 && first_step + u < steps) b[u] = *reinterpret_cast<const uint4*>(row + (first_step + u) * kStep);
    }
#pragma unroll
    for (int u = 0; u < U; ++u) {
      if (first_step + u < steps) multiply(c, a[u][0], a[u][1], b[u]);
      if (unit + kWarps < num_units) fetch(u, unit + kWarps);
    }
  }
  float* to = &memory.parts[warp][lane / 4][2 * (lane % 4)];
  *reinterpret_cast<float2*>(to) = make_float2(c[0], c[1]);
  *reinterpret_cast<float2*>(to + 8 * kFewTokens) = make_float2(c[2], c[3]);
  __syncthreads();
  // 16 neighboring lanes have the rows of a token.
  const int row = threadIdx.x % 16, token = threadIdx.x / 16;
  if (token >= kFewTokens) return;
  float sum = 0.0f;
#pragma unroll
  for (int p = 0; p < kWarps; ++p) sum += memory.parts[p][row][token];
  const bool is_token = token < args.num_tokens;
  const size_t at = static_cast<size_t>(is_token ? token : 0) * args.rows + blockIdx.x * 16 + row;
  if (args.residual != nullptr) sum += __bfloat162float(args.residual[at]);
  const bf16 rounded = __float2bfloat16(sum);
  if (is_token) args.out[at] = rounded;
  if (args.next_gain == nullptr) return;
  const float x = __bfloat162float(rounded), gain = __bfloat162float(args.next_gain[blockIdx.x * 16 + row]);
  const float squares = sum_over_lanes(x * x, 16);
  if (!is_token) return;
  args.scaled_out[at] = __float2bfloat16(x * gain);
  if (row == 0) args.sums_out[token * (args.rows / 16) + blockIdx.x] = squares;
}

}  // namespace experts
}  // namespace meshserve
