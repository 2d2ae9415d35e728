// The experts of a step of at most 8 tokens: bound by streaming the chosen experts' weights.
//
// A warp multiplies 16 rows of weights by the 8 tokens with mma.m16n8k16, rows of weights as M. Weights go from global
// memory to registers in loads of 16 bytes: since a sum does not depend on the order of its terms, a lane's consecutive
// columns serve as its pairs of columns in several instructions, for weights and tokens alike. 8-bit weights are
// converted to bf16 in registers, and their scales multiply the sums. A ring of loads is always in flight, over the
// ends of tiles and experts.
//
//   gate_up_kernel  items of (expert, tile of rows) in equal ranges for each block, whose warps split the columns. 8
//                   rows of gate lie on 8 rows of up, so that a lane gets both of a token. The tokens are in shared
//                   memory; a token that did not choose the expert is multiplied, too, and its result is not stored.
//                   Writes share * silu(gate) * up for each choice, at its place (see expert_choices.cuh).
//   down_kernel     a block owns 16 columns of the output and adds up all experts in registers: there is no second
//                   pass. It finds its experts and fetches their first weights while gate_up_kernel still runs.
#pragma once
#include "expert_choices.cuh"
#include "quantised.cuh"

namespace meshserve {
namespace experts {

constexpr int kFewTokens = 8;
constexpr int kStepBytes = 64;  // of a row that the 4 lanes of a load have
constexpr int kGateRows = 8;    // rows of gate, and of up, of a tile

// How a lane's 16 bytes of weights meet the tokens.
template <class W>
struct RowFormat {
  static_assert(W::kBlockColumns <= Fp8Weights::kBlockColumns, "4-bit experts have no kernel");
  static constexpr int kStep = kStepBytes * W::kBlockColumns / 128;  // columns of a step
  static constexpr int kTokenLoads = W::kIsQuantised ? 2 : 1;        // of 16 bytes, of a token's columns
  // Steps whose loads are in flight, of gate and up and of down, whose tokens are in registers, too.
  static constexpr int kInFlight = W::kIsQuantised ? 4 : 8, kDownInFlight = W::kIsQuantised ? 4 : 6;
  // Bytes between rows of tokens in shared memory, so that 8 lanes of two rows read from different banks.
  static constexpr int kPadding = W::kIsQuantised ? 16 : 64;
};

struct RowsArgs {
  const bf16* input;    // gate_up: [T, columns]; down: [places, columns], in the order that the weights need
  const void* weights;  // one layer's [E, 2, rows, columns] or [E, rows, columns]
  Scales scales;        // of 8-bit weights of all layers
  int first_row;        // of the layer in the stack of all layers
  const int* experts;   // [T, k]
  const float* shares;  // [T, k]
  const float* sums;    // gate_up: sums of squares of the input's RMSNorm [T, norm_tiles]; null: the input is normed
  int norm_tiles;
  float inverse_dim, epsilon;
  bf16* out;  // gate_up: [places, rows]; down: [T, rows]
  int num_tokens, num_chosen, num_experts, rows, columns;
  bool is_ordered;  // gate_up: the input has the order that 8-bit weights need
  // down: out = residual + result; scaled_out = out * next_gain.
  const bf16* residual;   // may be null
  const bf16* next_gain;  // null: scaled_out and sums_out are not written
  bf16* scaled_out;
  float* sums_out;  // [T, rows / 16]
};

// c += 16 rows of weights (rows `low`, then rows `high`) times 8 tokens, over the columns of a step.
__device__ __forceinline__ void multiply(float (&c)[4], uint4 low, uint4 high, const uint4 (&token)[1]) {
  const uint32_t first[4] = {low.x, high.x, low.y, high.y}, second[4] = {low.z, high.z, low.w, high.w};
  multiply_16x8x16(c, first, token[0].x, token[0].y);
  multiply_16x8x16(c, second, token[0].z, token[0].w);
}
// The same with e4m3 weights. The tokens' 16 columns are in the order of weight_formats.cuh: even pairs, odd pairs.
__device__ __forceinline__ void multiply(float (&c)[4], uint4 low, uint4 high, const uint4 (&token)[2]) {
  const uint32_t lows[4] = {low.x, low.y, low.z, low.w}, highs[4] = {high.x, high.y, high.z, high.w};
  const uint32_t even[4] = {token[0].x, token[0].y, token[0].z, token[0].w};
  const uint32_t odd[4] = {token[1].x, token[1].y, token[1].z, token[1].w};
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    uint32_t a[4];
    convert_e4m3(lows[j], a[0], a[2]);
    convert_e4m3(highs[j], a[1], a[3]);
    multiply_16x8x16(c, a, even[j], odd[j]);
  }
}

// Multiplies a step; the scales are those of the rows `low` and `high`.
template <class W>
__device__ __forceinline__ void multiply_step(float (&c)[4], const uint4 (&a)[2],
                                              const uint4 (&token)[RowFormat<W>::kTokenLoads], const Scales& scales,
                                              const ScaleInFlight& low, const ScaleInFlight& high) {
  if constexpr (W::kIsQuantised) {
    float part[4] = {};
    multiply(part, a[0], a[1], token);
    const float scale[2] = {low.value(scales), high.value(scales)};
#pragma unroll
    for (int i = 0; i < 4; ++i) c[i] = fmaf(scale[i / 2], part[i], c[i]);
  } else {
    multiply(c, a[0], a[1], token);
  }
}

// Where a column of activations lies in the order that the weights need.
template <class W>
__device__ __forceinline__ int ordered_column(int column) {
  if constexpr (W::kIsQuantised) return 2 * ordered_pair<W>(column & ~3) + column % 2 * 8 + column % 4 / 2;
  return column;
}

// Of 16-byte aligned columns of a token, stores 8 in shared memory in the order that the weights need.
template <class W>
__device__ __forceinline__ void store_token(uint8_t* row, int column, uint4 v, bool is_ordered) {
  uint8_t* to = row + 2 * column;
  if (!W::kIsQuantised || is_ordered) {
    *reinterpret_cast<uint4*>(to) = v;
    return;
  }
  to = row + 2 * (column & ~15) + column % 16;  // 8 bytes of even pairs, and of odd pairs 16 bytes further
  *reinterpret_cast<uint2*>(to) = make_uint2(__byte_perm(v.x, v.y, 0x5410), __byte_perm(v.z, v.w, 0x5410));
  *reinterpret_cast<uint2*>(to + 16) = make_uint2(__byte_perm(v.x, v.y, 0x7632), __byte_perm(v.z, v.w, 0x7632));
}

__device__ __forceinline__ float silu(float v) { return __fdividef(v, 1.0f + __expf(-v)); }

// Computes 1 / rms of a token with one warp.
__device__ __forceinline__ float inverse_rms_of(const float* sums, int norm_tiles, float inverse_dim, float epsilon) {
  float sum = 0.0f;
  for (int i = threadIdx.x % 32; i < norm_tiles; i += 32) sum += sums[i];
  return rsqrtf(sum_over_lanes(sum, 32) * inverse_dim + epsilon);
}

// The rows of weights that a lane loads: two rows, and the first scales of both.
struct LanePlace {
  const uint8_t *low, *high;
  size_t low_scale, high_scale;
};

template <class W>
__device__ __forceinline__ LanePlace lane_place(const RowsArgs& args, int low, int high) {
  const size_t row_bytes = static_cast<size_t>(args.columns) * 128 / W::kBlockColumns;
  const int lane = threadIdx.x % 32;
  const uint8_t* weights = static_cast<const uint8_t*>(args.weights) + 16 * (lane % 4);
  LanePlace place = {weights + (low + lane / 4) * row_bytes, weights + (high + lane / 4) * row_bytes, 0, 0};
  if constexpr (W::kIsQuantised) {
    const Scales& scales = args.scales;
    place.low_scale = static_cast<size_t>((args.first_row + low) / scales.rows_each) * scales.grid_columns;
    place.high_scale = static_cast<size_t>((args.first_row + high) / scales.rows_each) * scales.grid_columns;
  }
  return place;
}

// Loads a step of both rows, with one scale if they share it.
template <class W, int kScales>
__device__ __forceinline__ void load_step(const RowsArgs& args, const LanePlace& place, int step, uint64_t policy,
                                          uint4 (&a)[2], ScaleInFlight (&scale)[kScales]) {
  a[0] = load_weights(reinterpret_cast<const bf16*>(place.low + step * kStepBytes), policy);
  a[1] = load_weights(reinterpret_cast<const bf16*>(place.high + step * kStepBytes), policy);
  if constexpr (W::kIsQuantised) {
    const int group = step * RowFormat<W>::kStep >> args.scales.columns_log2;
    scale[0].load(args.scales, place.low_scale + group);
    if (kScales > 1) scale[kScales - 1].load(args.scales, place.high_scale + group);
  }
}

struct GateUpMemory {
  Choices choices;
  float shares[kFewTokens][kMaxExperts];
  float inverse_rms[kFewTokens];
  alignas(16) float parts[2][kWarps][16][kFewTokens];
};

// Bytes between tokens in shared memory, and of the kernel's shared memory.
template <class W>
__host__ __device__ constexpr int token_stride(int columns) {
  return 2 * columns + RowFormat<W>::kPadding;
}
template <class W>
constexpr size_t gate_up_bytes(int columns, int tokens) {
  return sizeof(GateUpMemory) + static_cast<size_t>(tokens) * token_stride<W>(columns);
}

// Grid: any number of blocks.
template <class W>
__global__ void __launch_bounds__(kThreads, 2) gate_up_kernel(const __grid_constant__ RowsArgs args) {
  using Format = RowFormat<W>;
  constexpr int U = Format::kInFlight;
  extern __shared__ __align__(16) uint8_t shared_rows[];
  auto& memory = *reinterpret_cast<GateUpMemory*>(shared_rows);
  uint8_t* tokens_at = shared_rows + sizeof(GateUpMemory);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, columns = args.columns, stride = token_stride<W>(columns);
  const uint64_t policy = evict_first_policy();
  clear(memory.choices);
  touch_parameters(args);
  wait_for_previous_kernel();
  let_next_kernel_start();  // only now, since down_kernel reads the choices before its wait
  arrange(memory.choices, args.experts, args.num_tokens, args.num_chosen, args.num_experts);

  const int tiles = args.rows / kGateRows, num_items = memory.choices.num_active * tiles;
  const int first_item = num_items * static_cast<int>(blockIdx.x) / static_cast<int>(gridDim.x);
  const int last_item = num_items * static_cast<int>(blockIdx.x + 1) / static_cast<int>(gridDim.x);
  if (first_item == last_item) return;
  const int steps = columns / Format::kStep, begin = steps * warp / kWarps, end = steps * (warp + 1) / kWarps;
  auto place_of = [&](int item) {
    const int row = memory.choices.active[item / tiles] * 2 * args.rows + item % tiles * kGateRows;
    return lane_place<W>(args, row, row + args.rows);
  };
  uint4 a[U][2];
  ScaleInFlight scale[U][2];
  auto fetch = [&](int u, const LanePlace& from, int step) {
    if (step < end) load_step<W>(args, from, step, policy, a[u], scale[u]);
  };
  LanePlace current = place_of(first_item);
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
#pragma unroll 4
  for (int i = threadIdx.x; i < args.num_tokens * (columns / 8); i += kThreads) {
    const int token = i / (columns / 8), column = i % (columns / 8) * 8;
    const uint4 v = *reinterpret_cast<const uint4*>(args.input + static_cast<size_t>(token) * columns + column);
    store_token<W>(tokens_at + token * stride, column, v, args.is_ordered);
  }
  __syncthreads();
  // Lanes of tokens that the step does not have read another one's.
  const uint8_t* token_row = tokens_at + min(lane / 4, args.num_tokens - 1) * stride + lane % 4 * Format::kStep / 2;
#pragma unroll 1
  for (int item = first_item; item < last_item; ++item) {
    const int expert = memory.choices.active[item / tiles];
    const uint32_t tokens = memory.choices.tokens[expert][0];
    const bool has_next = item + 1 < last_item;
    const LanePlace next = has_next ? place_of(item + 1) : current;
    float c[2][4] = {};
#pragma unroll 1
    for (int step = begin; step < end; step += U) {
      const bool is_last = step + U >= end;
      const LanePlace refill = is_last ? next : current;
      const int refill_step = is_last ? begin : step + U;
#pragma unroll
      for (int u = 0; u < U; ++u) {
        if (step + u < end) {
          const uint4* from = reinterpret_cast<const uint4*>(token_row + (step + u) * 2 * Format::kStep);
          uint4 b[Format::kTokenLoads];
#pragma unroll
          for (int i = 0; i < Format::kTokenLoads; ++i) b[i] = from[i];
          multiply_step<W>(c[u % 2], a[u], b, args.scales, scale[u][0], scale[u][1]);
        }
        if (has_next || !is_last) fetch(u, refill, refill_step + u);
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
      const float inverse = memory.inverse_rms[token];
      const size_t place = memory.choices.first[expert] + __popc(tokens & ((1u << token) - 1));
      args.out[place * args.rows + ordered_column<W>(item % tiles * kGateRows + row)] =
          __float2bfloat16(silu(gate * inverse) * (up * inverse) * memory.shares[token][expert]);
    }
  }
}

// Adds up the warps' sums of 16 columns of the output, and stores them. All threads call it.
template <class W>
__device__ __forceinline__ void store_down(const RowsArgs& args, const float (&parts)[kWarps][16][kFewTokens]) {
  // 16 neighboring lanes have the rows of a token.
  const int row = threadIdx.x % 16, token = threadIdx.x / 16;
  if (token >= kFewTokens) return;
  float sum = 0.0f;
#pragma unroll
  for (int p = 0; p < kWarps; ++p) sum += parts[p][row][token];
  const bool is_token = token < args.num_tokens;
  const size_t base = static_cast<size_t>(is_token ? token : 0) * args.rows;
  const int column = blockIdx.x * 16 + row;
  if (args.residual != nullptr) sum += __bfloat162float(args.residual[base + column]);
  const bf16 rounded = __float2bfloat16(sum);
  if (is_token) args.out[base + column] = rounded;
  if (args.next_gain == nullptr) return;
  const float x = __bfloat162float(rounded), gain = __bfloat162float(args.next_gain[column]);
  const float squares = sum_over_lanes(x * x, 16);
  if (!is_token) return;
  args.scaled_out[base + ordered_column<W>(column)] = __float2bfloat16(x * gain);
  if (row == 0) args.sums_out[token * (args.rows / 16) + blockIdx.x] = squares;
}

struct DownMemory {
  Choices choices;
  alignas(16) float parts[kWarps][16][kFewTokens];
};

// Grid: rows / 16 blocks. A warp takes every eighth unit of (expert, U steps of columns).
template <class W>
__global__ void __launch_bounds__(kThreads, 2) down_kernel(const __grid_constant__ RowsArgs args) {
  using Format = RowFormat<W>;
  constexpr int U = Format::kDownInFlight;
  extern __shared__ __align__(16) uint8_t shared_rows[];
  auto& memory = *reinterpret_cast<DownMemory*>(shared_rows);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const uint64_t policy = evict_first_policy();
  let_next_kernel_start();
  clear(memory.choices);
  touch_parameters(args);
  // Before the wait: gate_up_kernel lets this kernel start when the choices have been written.
  arrange(memory.choices, args.experts, args.num_tokens, args.num_chosen, args.num_experts);

  const int steps = args.columns / Format::kStep, units_each = (steps + U - 1) / U;
  const int num_units = memory.choices.num_active * units_each;
  uint4 a[U][2], b[U][Format::kTokenLoads];
  ScaleInFlight scale[U][1];  // 16 rows from a multiple of 16 on are in one block of 128
  auto fetch_weights = [&](int unit) {
    const int row = memory.choices.active[unit / units_each] * args.rows + blockIdx.x * 16;
    return lane_place<W>(args, row, row + 8);
  };
  // The lane's token among those of the unit's expert; null if it did not choose the expert.
  auto token_row = [&](int unit) -> const bf16* {
    const int expert = memory.choices.active[unit / units_each];
    const uint32_t tokens = memory.choices.tokens[expert][0];
    if ((tokens >> lane / 4 & 1) == 0) return nullptr;
    const size_t place = memory.choices.first[expert] + __popc(tokens & ((1u << lane / 4) - 1));
    return args.input + place * args.columns + lane % 4 * (Format::kStep / 4);
  };
  auto fetch_token = [&](int u, const bf16* row, int step) {
#pragma unroll
    for (int i = 0; i < Format::kTokenLoads; ++i) {
      b[u][i] = make_uint4(0, 0, 0, 0);
      if (row != nullptr && step < steps) b[u][i] = reinterpret_cast<const uint4*>(row + step * Format::kStep)[i];
    }
  };
  if (warp < num_units) {
    const LanePlace place = fetch_weights(warp);
    const int first = warp % units_each * U;
#pragma unroll
    for (int u = 0; u < U; ++u) {
      if (first + u < steps) load_step<W>(args, place, first + u, policy, a[u], scale[u]);
    }
  }
  wait_for_previous_kernel();
  if (warp < num_units) {
    const bf16* row = token_row(warp);
#pragma unroll
    for (int u = 0; u < U; ++u) fetch_token(u, row, warp % units_each * U + u);
  }
  float c[2][4] = {};
#pragma unroll 1
  for (int unit = warp; unit < num_units; unit += kWarps) {
    const int step = unit % units_each * U, next = unit + kWarps, next_step = next % units_each * U;
    const bool has_next = next < num_units;
    LanePlace place = {};
    const bf16* row = nullptr;
    if (has_next) place = fetch_weights(next), row = token_row(next);
#pragma unroll
    for (int u = 0; u < U; ++u) {
      if (step + u < steps) multiply_step<W>(c[u % 2], a[u], b[u], args.scales, scale[u][0], scale[u][0]);
      if (has_next && next_step + u < steps) load_step<W>(args, place, next_step + u, policy, a[u], scale[u]);
      if (has_next) fetch_token(u, row, next_step + u);
    }
  }
  float* to = &memory.parts[warp][lane / 4][2 * (lane % 4)];
  *reinterpret_cast<float2*>(to) = make_float2(c[0][0] + c[1][0], c[0][1] + c[1][1]);
  *reinterpret_cast<float2*>(to + 8 * kFewTokens) = make_float2(c[0][2] + c[1][2], c[0][3] + c[1][3]);
  __syncthreads();
  store_down<W>(args, memory.parts);
}

}  // namespace experts
}  // namespace meshserve
