// The experts of a step of at most 256 tokens, each of which gets few: bound by streaming the chosen experts' weights.
//
// A warp multiplies tiles of 16 rows of weights by 8 tokens with mma.m16n8k16, rows of weights as M. Both operands go
// from global memory to registers in loads of 16 bytes: since a sum does not depend on the order of its terms, a lane's
// 8 consecutive columns serve as its 4 pairs of columns in two instructions, for weights and tokens alike. A ring of
// loads is always in flight, over the ends of tiles and experts.
//
//   gate_up   rows_kernel: items of (expert, tile of rows) in equal ranges for each block; a block's warps split the
//             columns. In a tile, 8 rows of gate lie on 8 rows of up, so that a lane gets both of a token. Writes
//             share * silu(gate) * up for each choice, at its place (see expert_choices.cuh).
//   down      up to 16 tokens: down_kernel. A block owns 16 columns of the output and adds up all experts in registers:
//             no second pass. More tokens: rows_kernel writes each choice's result, and combine_kernel adds them up.
#pragma once
#include "expert_choices.cuh"

namespace meshserve {
namespace experts {

constexpr int kStep = 32;  // columns of a row that the 4 lanes of a load have

struct RowsArgs {
  const bf16* input;    // gate_up: [T, columns]; down: [places, columns]
  const bf16* weights;  // one layer's [E, 2, rows, columns] or [E, rows, columns]
  const int* experts;   // [T, k]
  const float* shares;  // [T, k]
  const float* sums;    // gate_up: sums of squares of the input's RMSNorm [T, norm_tiles]; null: the input is normed
  int norm_tiles;
  float inverse_dim, epsilon;
  bf16* out;    // [places, rows]; down_kernel: [T, rows]
  int* places;  // [T, k], written by gate_up; may be null
  int num_tokens, num_chosen, num_experts, rows, columns;
  // down_kernel: out = residual + result; scaled_out = out * next_gain.
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

__device__ __forceinline__ float inverse_rms_of(const float* sums, int norm_tiles, float inverse_dim, float epsilon) {
  float sum = 0.0f;
#pragma unroll 16
  for (int i = 0; i < norm_tiles; ++i) sum += sums[i];
  return rsqrtf(sum * inverse_dim + epsilon);
}

// MT tiles of 16 rows a warp, NT groups of 8 tokens at once, a ring of U loads a row, KW warps that split the columns.
template <int MT, int NT, int U, int KW, bool kIsDown>
struct Rows {
  static constexpr int kTileRows = kIsDown ? 16 : 8;               // output rows of a tile of 16 rows of weights
  static constexpr int kItemRows = kWarps / KW * MT * kTileRows;   // output rows of an item
  static constexpr int kTokens = 8 * NT;                           // of a pass
  static constexpr int kStride = NT == 1 ? kTokens : kTokens + 8;  // floats; this one avoids bank conflicts
  struct Memory {
    Choices choices;
    int tokens[kMaxTokens];  // of the current expert, in order
    float shares[kMaxTokens], inverse_rms[kMaxTokens];
    alignas(16) float parts[kWarps][MT * 16][kStride];
  };
};

// Lists the tokens of an expert; returns their number.
template <class Memory>
__device__ __forceinline__ int list_tokens(Memory& memory, const RowsArgs& args, int expert, bool is_down) {
  const int token = threadIdx.x;
  __syncthreads();
  const int rank = token < args.num_tokens ? rank_of(memory.choices, expert, token) : -1;
  if (rank >= 0) {
    memory.tokens[rank] = token;
    if (!is_down) {
      const int* chosen = args.experts + token * args.num_chosen;
      int slot = 0;
      while (chosen[slot] != expert) ++slot;
      memory.shares[rank] = args.shares[token * args.num_chosen + slot];
      memory.inverse_rms[rank] = args.sums == nullptr ? 1.0f
                                                      : inverse_rms_of(args.sums + token * args.norm_tiles,
                                                                       args.norm_tiles, args.inverse_dim, args.epsilon);
    }
  }
  __syncthreads();
  return count_tokens(memory.choices, expert);
}

// Grid: any number of blocks.
template <int MT, int NT, int U, int KW, bool kIsDown>
__global__ void __launch_bounds__(kThreads, MT == 1 ? 3 : 2) rows_kernel(const __grid_constant__ RowsArgs args) {
  using Shape = Rows<MT, NT, U, KW, kIsDown>;
  extern __shared__ __align__(16) uint8_t shared_rows[];
  auto& memory = *reinterpret_cast<typename Shape::Memory*>(shared_rows);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, part = warp % KW, group = warp / KW;
  const uint64_t policy = evict_first_policy();
  let_next_kernel_start();
  clear(memory.choices);
  touch_parameters(args);
  wait_for_previous_kernel();
  arrange(memory.choices, args.experts, args.num_tokens, args.num_chosen, args.num_experts);
  if (!kIsDown && args.places != nullptr && blockIdx.x == 0) {
    for (int i = threadIdx.x; i < args.num_tokens * args.num_chosen; i += kThreads) {
      const int expert = args.experts[i];
      const bool is_here = expert >= 0 && expert < args.num_experts;
      args.places[i] =
          is_here ? memory.choices.first[expert] + rank_of(memory.choices, expert, i / args.num_chosen) : -1;
    }
  }

  const int tiles = args.rows / Shape::kItemRows, num_items = memory.choices.num_active * tiles;
  const int first_item = num_items * static_cast<int>(blockIdx.x) / static_cast<int>(gridDim.x);
  const int last_item = num_items * static_cast<int>(blockIdx.x + 1) / static_cast<int>(gridDim.x);
  if (first_item == last_item) return;
  const int steps = args.columns / kStep, begin = steps * part / KW, end = steps * (part + 1) / KW;
  const int columns = args.columns;
  const int to_high = kIsDown ? 8 * columns : args.rows * columns;  // from row r of a tile to row r + 8
  auto weights_of = [&](int item) {                                 // this lane's, in the first tile's rows `low`
    const int expert = memory.choices.active[item / tiles];
    const int row = item % tiles * Shape::kItemRows + group * MT * Shape::kTileRows + lane / 4;
    const int expert_rows = args.rows * (kIsDown ? 1 : 2);
    return args.weights + static_cast<size_t>(expert * expert_rows + row) * columns + 8 * (lane % 4);
  };
  uint4 a[U][MT][2];
  auto fetch = [&](int u, const bf16* from, int step) {
    if (step >= end) return;
#pragma unroll
    for (int m = 0; m < MT; ++m) {
      const bf16* row = from + (m * Shape::kTileRows * columns + step * kStep);
      a[u][m][0] = load_weights(row, policy);
      a[u][m][1] = load_weights(row + to_high, policy);
    }
  };

  const bf16* current = weights_of(first_item);
#pragma unroll
  for (int u = 0; u < U; ++u) fetch(u, current, begin + u);
  int listed = -1, count = 0;
#pragma unroll 1
  for (int item = first_item; item < last_item; ++item) {
    const int expert = memory.choices.active[item / tiles], first_place = memory.choices.first[expert];
    if (expert != listed) count = list_tokens(memory, args, expert, kIsDown);
    listed = expert;
    const bf16* next = item + 1 < last_item ? weights_of(item + 1) : nullptr;
#pragma unroll 1
    for (int base = 0; base < count; base += Shape::kTokens) {
      const int num_groups = min(NT, (count - base + 7) / 8);
      const bf16* refill_after = base + Shape::kTokens < count ? current : next;
      int input_row[NT];  // -1: none
#pragma unroll
      for (int n = 0; n < NT; ++n) {
        const int index = base + 8 * n + lane / 4;
        input_row[n] = index >= count ? -1 : kIsDown ? first_place + index : memory.tokens[index];
      }
      float c[MT][NT][4] = {};
#pragma unroll 1
      for (int step = begin; step < end; step += U) {
        uint4 b[U][NT];
#pragma unroll
        for (int n = 0; n < NT; ++n) {
          const bf16* row = args.input + static_cast<size_t>(input_row[n]) * columns;
#pragma unroll
          for (int u = 0; u < U; ++u) {
            b[u][n] = make_uint4(0, 0, 0, 0);
            if (input_row[n] >= 0 && step + u < end) {
              b[u][n] = *reinterpret_cast<const uint4*>(row + ((step + u) * kStep + 8 * (lane % 4)));
            }
          }
        }
        const bool is_last = step + U >= end;
        const bf16* refill = is_last ? refill_after : current;
        const int refill_step = is_last ? begin : step + U;
#pragma unroll
        for (int u = 0; u < U; ++u) {
          if (step + u < end) {
#pragma unroll
            for (int n = 0; n < NT; ++n) {
              if (n >= num_groups) continue;
#pragma unroll
              for (int m = 0; m < MT; ++m) multiply(c[m][n], a[u][m][0], a[u][m][1], b[u][n]);
            }
          }
          if (refill != nullptr) fetch(u, refill, refill_step + u);
        }
      }

#pragma unroll
      for (int n = 0; n < NT; ++n) {
        if (n >= num_groups) continue;
#pragma unroll
        for (int m = 0; m < MT; ++m) {
          float* to = &memory.parts[warp][16 * m + lane / 4][8 * n + 2 * (lane % 4)];
          *reinterpret_cast<float2*>(to) = make_float2(c[m][n][0], c[m][n][1]);
          *reinterpret_cast<float2*>(to + 8 * Shape::kStride) = make_float2(c[m][n][2], c[m][n][3]);
        }
      }
      __syncthreads();
      // A thread writes two neighboring rows of a token.
      const int num_here = min(Shape::kTokens, count - base);
      for (int i = threadIdx.x; i < num_here * (Shape::kItemRows / 2); i += kThreads) {
        const int token = i / (Shape::kItemRows / 2), row = i % (Shape::kItemRows / 2) * 2;
        const int tile = row / Shape::kTileRows, from = tile / MT * KW;
        const int at = tile % MT * 16 + row % Shape::kTileRows;
        float low[2] = {}, high[2] = {};
#pragma unroll
        for (int p = 0; p < KW; ++p) {
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            low[r] += memory.parts[from + p][at + r][token];
            if (!kIsDown) high[r] += memory.parts[from + p][at + r + 8][token];
          }
        }
        if (!kIsDown) {
          const float scale = memory.inverse_rms[base + token], share = memory.shares[base + token];
#pragma unroll
          for (int r = 0; r < 2; ++r) low[r] = silu(low[r] * scale) * (high[r] * scale) * share;
        }
        const size_t place = first_place + base + token;
        bf16* to = args.out + place * args.rows + item % tiles * Shape::kItemRows + row;
        *reinterpret_cast<uint32_t*>(to) = pack_bf16(low[0], low[1]);
      }
      __syncthreads();
    }
    current = next;
  }
}

template <int NT>
struct DownMemory {
  Choices choices;
  alignas(16) float parts[kWarps][16][8 * NT];
};

// Grid: rows / 16 blocks. A warp takes every eighth unit of (expert, U steps of columns).
template <int NT, int U>
__global__ void __launch_bounds__(kThreads, 1) down_kernel(const __grid_constant__ RowsArgs args) {
  extern __shared__ __align__(16) uint8_t shared_rows[];
  auto& memory = *reinterpret_cast<DownMemory<NT>*>(shared_rows);
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
  float c[NT][4] = {};
#pragma unroll 1
  for (int unit = warp; unit < num_units; unit += kWarps) {
    const int expert = memory.choices.active[unit / units_each], first_step = unit % units_each * U;
    uint4 b[U][NT];
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      const int rank = rank_of(memory.choices, expert, 8 * n + lane / 4);
      const bf16* row = args.input + (memory.choices.first[expert] + max(rank, 0)) * columns + 8 * (lane % 4);
#pragma unroll
      for (int u = 0; u < U; ++u) {
        b[u][n] = make_uint4(0, 0, 0, 0);
        if (rank >= 0 && first_step + u < steps) {
          b[u][n] = *reinterpret_cast<const uint4*>(row + (first_step + u) * kStep);
        }
      }
    }
#pragma unroll
    for (int u = 0; u < U; ++u) {
      if (first_step + u < steps) {
#pragma unroll
        for (int n = 0; n < NT; ++n) multiply(c[n], a[u][0], a[u][1], b[u][n]);
      }
      if (unit + kWarps < num_units) fetch(u, unit + kWarps);
    }
  }
#pragma unroll
  for (int n = 0; n < NT; ++n) {
    float* to = &memory.parts[warp][lane / 4][8 * n + 2 * (lane % 4)];
    *reinterpret_cast<float2*>(to) = make_float2(c[n][0], c[n][1]);
    *reinterpret_cast<float2*>(to + 8 * 8 * NT) = make_float2(c[n][2], c[n][3]);
  }
  __syncthreads();
  // 16 neighboring lanes have the rows of a token.
  const int row = threadIdx.x % 16, token = threadIdx.x / 16;
  if (token >= 8 * NT) return;
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
