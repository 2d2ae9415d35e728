// Prepares what no earlier kernel of a call has computed: x * gain, the sums of squares of x, the cosines and sines of
// the rotary embedding, zeroed counters, and which part of a context is where in attention. One block per token.
#pragma once
#include "attention/context_parts.cuh"

namespace meshserve {

constexpr int kPrepareThreads = 256;

struct PrepareArgs {
  const bf16* x;     // [B, columns]
  const bf16* gain;  // [columns]
  bf16* scaled;      // [B, columns], for quantized weights in the form of weight_formats.cuh
  float* sums;       // [B, columns / 128]
  int columns;
  const int* positions;  // null: skip the rotary angles
  const float* inverse_frequencies;
  float* cos_sin;  // [B, head_dim]
  float rotary_scale;
  int head_dim;
  int* num_arrived;  // [B, arrivals]
  int arrivals;
  int* cleared;  // [num_cleared]
  int num_cleared;
  ContextCuts cuts;
  PlannedPart* plan;  // [cuts.num_clusters] parts of decode attention; null: skip them
  int* claims;        // two counters
};

// W: the format of the weights of the layer's first projection.
template <class W = Bf16Weights>
__global__ void __launch_bounds__(kPrepareThreads) prepare_kernel(const __grid_constant__ PrepareArgs args) {
  const int token = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) let_next_kernel_start();
  wait_for_previous_kernel();
  const size_t row = static_cast<size_t>(token) * args.columns;
  uint8_t* exponents = exponents_of(args.scaled, gridDim.x, args.columns) + row / kExponentColumns;
  for (int tile = warp; tile < args.columns / 128; tile += kPrepareThreads / 32) {
    int column = tile * 128 + 4 * lane;
    float4 x = unpack_bf16(*reinterpret_cast<const uint2*>(args.x + row + column));
    float4 gain = unpack_bf16(*reinterpret_cast<const uint2*>(args.gain + column));
    store_activations<W>(args.scaled + row, exponents, column,
                         make_float4(x.x * gain.x, x.y * gain.y, x.z * gain.z, x.w * gain.w));
    float sum = sum_over_lanes(x.x * x.x + x.y * x.y + x.z * x.z + x.w * x.w, 32);
    if (lane == 0) args.sums[token * (args.columns / 128) + tile] = sum;
  }
  for (int i = threadIdx.x; i < args.arrivals; i += kPrepareThreads) args.num_arrived[token * args.arrivals + i] = 0;
  if (token == 0 && threadIdx.x < args.num_cleared) args.cleared[threadIdx.x] = 0;
  if (args.plan != nullptr) {
    for (int i = token + warp * gridDim.x; i < args.cuts.num_clusters; i += kPrepareThreads / 32 * gridDim.x) {
      const ContextPart part = find_part(i, lane, args.cuts);
      const int num_tokens = part.request < 0 ? 0 : args.cuts.positions[part.request] + 1;
      if (lane == 0) args.plan[i] = {part.request, part.index, part.num_parts, num_tokens};
    }
    if (token == 0 && threadIdx.x < 2) args.claims[threadIdx.x] = 0;
  }
  const int half = args.head_dim / 2;
  if (args.positions != nullptr && threadIdx.x < half) {
    float angle = static_cast<float>(max(args.positions[token], 0)) * args.inverse_frequencies[threadIdx.x];
    float* to = args.cos_sin + static_cast<size_t>(token) * args.head_dim + threadIdx.x;
    to[0] = cosf(angle) * args.rotary_scale;
    to[half] = sinf(angle) * args.rotary_scale;
  }
}

// Converts activations [B, columns] for a product with weights of the format. One block per token.
template <class W>
__global__ void __launch_bounds__(kPrepareThreads) convert_kernel(const bf16* from, bf16* to, int columns) {
  if (threadIdx.x == 0) let_next_kernel_start();
  wait_for_previous_kernel();
  const size_t row = static_cast<size_t>(blockIdx.x) * columns;
  uint8_t* exponents = exponents_of(to, gridDim.x, columns) + row / kExponentColumns;
  for (int column = 4 * threadIdx.x; column < columns; column += 4 * kPrepareThreads) {
    store_activations<W>(to + row, exponents, column,
                         unpack_bf16(*reinterpret_cast<const uint2*>(from + row + column)));
  }
}

}  // namespace meshserve
