// What the kernels of experts share: the arguments of those for few tokens, products of 16 rows of weights by 8 tokens,
// and the order of activations.
//
// Products are mma.m16n8k16, with rows of weights as M. A lane has 16 consecutive bytes of a row: since a sum does not
// depend on the order of its terms, these serve as its pairs of columns in several instructions, for weights and tokens
// alike.
#pragma once
#include "common/conversions.cuh"
#include "common/scales.cuh"
#include "experts/permutation.cuh"

namespace meshserve {
namespace experts {

constexpr int kFewTokens = 8;
constexpr int kMostChosen = 32;  // experts of one of few tokens
constexpr int kStepBytes = 64;   // the bytes of a row of weights that its 4 lanes have at a time

// How a lane's 16 bytes of weights meet the tokens.
template <class W>
struct RowFormat {
  static_assert(W::kBlockColumns <= Fp8Weights::kBlockColumns, "4-bit experts have no kernel");
  static constexpr int kStep = kStepBytes * W::kBlockColumns / 128;  // columns of a step
  static constexpr int kTokenLoads = W::kIsQuantized ? 2 : 1;        // loads of 16 bytes for a token's columns
};

struct RowsArgs {
  const bf16* input;    // gate_up: [T, columns]; down: [slots, columns], in the order that the weights need
  Scales scales;        // scales of 8-bit weights, of all layers
  int first_row;        // the layer's first row in the stack of all layers
  const int* experts;   // [T, k]
  const float* shares;  // [T, k]
  const float* sums;    // gate_up: sums of squares of the input's RMSNorm [T, norm_tiles]; null: the input is normed
  int norm_tiles;
  float inverse_dim, epsilon;
  bf16* out;  // gate_up: [slots, rows]; down: [T, rows]
  int num_tokens, num_chosen, num_experts, rows, columns;
  bool is_ordered;  // gate_up: the input has the order that 8-bit weights need
  // down: out = residual + result; scaled_out = out * next_gain.
  const bf16* residual;   // may be null
  const bf16* next_gain;  // null: scaled_out and sums_out are not written
  bf16* scaled_out;
  float* sums_out;  // [T, rows / 16]
  // The kernels choose by themselves if they are given scores; `experts` and `shares` are not read then.
  const float* scores;  // parts that add up [T, num_parts, kMostRouted]; null: the choices are given
  int num_parts;
  const int* positions;  // [T]: -1 is padding
  int* chosen;           // gate_up: the choices, written if scores are given [T, k]
  bool is_normalized;    // the shares of a token add up to 1
  // With a single token, gate_up's choices for down [k], plus 1: 0 before they are known, -1 for padding; and the next
  // layer's, which gate_up clears.
  int *published, *unpublished;
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

// Where a column of activations lies in the order that the weights need.
template <class W>
__device__ __forceinline__ int ordered_column(int column) {
  if constexpr (W::kIsQuantized) return 2 * ordered_pair<W>(column & ~3) + column % 2 * 8 + column % 4 / 2;
  return column;
}

// Stores 8 columns of a token, 16-byte aligned, in shared memory in the order that the weights need.
template <class W>
__device__ __forceinline__ void store_token(uint8_t* row, int column, uint4 v, bool is_ordered) {
  uint8_t* to = row + 2 * column;
  if (!W::kIsQuantized || is_ordered) {
    *reinterpret_cast<uint4*>(to) = v;
    return;
  }
  to = row + 2 * (column & ~15) + column % 16;  // 8 bytes of even pairs, and of odd pairs 16 bytes further
  *reinterpret_cast<uint2*>(to) = make_uint2(__byte_perm(v.x, v.y, 0x5410), __byte_perm(v.z, v.w, 0x5410));
  *reinterpret_cast<uint2*>(to + 16) = make_uint2(__byte_perm(v.x, v.y, 0x7632), __byte_perm(v.z, v.w, 0x7632));
}

__device__ __forceinline__ float silu(float v) { return __fdividef(v, 1.0f + __expf(-v)); }

// Returns a lane's sum of a token's sums of squares. If there are few, the load is not waited for.
__device__ __forceinline__ float lane_squares(const float* sums, int norm_tiles) {
  const int lane = threadIdx.x % 32;
  float sum = lane < norm_tiles ? sums[lane] : 0.0f;
#pragma unroll 1
  for (int i = lane + 32; i < norm_tiles; i += 32) sum += sums[i];
  return sum;
}
// Computes 1 / rms of a token with one warp, of which each lane has a sum of squares.
__device__ __forceinline__ float inverse_rms_of(float squares, float inverse_dim, float epsilon) {
  return rsqrtf(sum_over_lanes(squares, 32) * inverse_dim + epsilon);
}
__device__ __forceinline__ float inverse_rms_of(const float* sums, int norm_tiles, float inverse_dim, float epsilon) {
  return inverse_rms_of(lane_squares(sums, norm_tiles), inverse_dim, epsilon);
}

// What a thread adds to, and multiplies, its number of the output with: thread 16 * t + r has column r of token t.
struct DownAddends {
  bf16 residual, gain;
};
// Loads them before the wait: the residual is complete since gate_up let down start, after its own wait.
__device__ __forceinline__ DownAddends load_down_addends(const RowsArgs& args) {
  const int token = threadIdx.x / 16, column = blockIdx.x * 16 + threadIdx.x % 16;
  DownAddends addends = {};
  if (token >= kFewTokens) return addends;
  const bf16* residual = args.residual + static_cast<size_t>(token < args.num_tokens ? token : 0) * args.rows + column;
  if (args.residual != nullptr) addends.residual = __ldcg(residual);
  if (args.next_gain != nullptr) addends.gain = args.next_gain[column];
  return addends;
}

// Adds up the warps' sums of 16 columns of the output, and stores them if `is_real`. All threads call it.
template <class W, int kTokens>
__device__ __forceinline__ void store_down(const RowsArgs& args, const float (&parts)[kWarps][16][kTokens],
                                           const DownAddends& addends, bool is_real = true) {
  // 16 neighboring lanes have the rows of a token.
  const int row = threadIdx.x % 16, token = threadIdx.x / 16;
  if (token >= (kTokens < 2 ? 2 : kTokens)) return;  // whole warps
  float sum = 0.0f;
#pragma unroll
  for (int p = 0; p < kWarps; ++p) sum += parts[p][row][kTokens == 1 ? 0 : token];
  const bool is_token = is_real && token < args.num_tokens;
  const size_t base = static_cast<size_t>(is_token ? token : 0) * args.rows;
  const int column = blockIdx.x * 16 + row;
  if (args.residual != nullptr) sum += __bfloat162float(addends.residual);
  const bf16 rounded = __float2bfloat16(sum);
  if (is_token) args.out[base + column] = rounded;
  if (args.next_gain == nullptr) return;
  const float x = __bfloat162float(rounded), gain = __bfloat162float(addends.gain);
  const float squares = sum_over_lanes(x * x, 16);
  if (!is_token) return;
  args.scaled_out[base + ordered_column<W>(column)] = __float2bfloat16(x * gain);
  if (row == 0) args.sums_out[token * (args.rows / 16) + blockIdx.x] = squares;
}

}  // namespace experts
}  // namespace meshserve
