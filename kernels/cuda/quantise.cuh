// Rounds activations to FP8 for a product, with the operation before it: nothing, RMS norm, or SiLU times a factor.
//
// Where a statistic of the whole row is needed (a norm, or one scale for each token), a block handles a token and keeps
// its row in registers, so x is read once. Else every thread handles 8 columns. Values are rounded to bfloat16 before
// they are quantised, as if the operation before had been a kernel of its own. A scale is the largest absolute value of
// its columns / 448, or 1 if all are 0. Further blocks of the same launch lay out the scales of the weights.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>
#include <stdint.h>

#include <algorithm>

namespace meshserve::fp8 {

using bf16 = __nv_bfloat16;

enum class Before : int { kNothing, kRmsNorm, kSiluProduct };

constexpr int kMaxThreads = 512;
constexpr int kFewRows = 264;  // up to two blocks for each multiprocessor: a row gets as many threads as possible
constexpr int kManyRowsThreads = 128;  // else several rows share a multiprocessor
constexpr int kChunkThreads = 256;
constexpr int kMaxEarlyGains = 2;   // gains that a thread loads with the values; more would cost registers
constexpr int kWidth = 8;           // columns that a thread handles together: 16 bytes of bfloat16
constexpr int kBlockColumns = 128;  // columns that share a scale with block scales
constexpr float kNegligible = 1e-30f;
constexpr float kLargest = 448.0f;  // the largest e4m3 number
constexpr int kMaxColumns = kMaxThreads * kWidth * 8;

// Scales of weights [rows / repeats, columns], laid out anew: [rows, stride], or [columns, rows] if transposed.
struct ScaleArgs {
  const void* scales;  // float32 or bfloat16; with `source_columns` 1, a row's scale is that of all columns
  float* out;          // nullptr: nothing to do
  int rows, columns;   // of `out`, without padding
  int source_columns, stride, repeats;
  bool is_bfloat16, is_transposed;
};

struct QuantiseArgs {
  const bf16* x;     // [tokens, columns]; kSiluProduct: [tokens, 2 columns], gates and then their factors
  const bf16* gain;  // [columns], of kRmsNorm
  uint8_t* numbers;  // [rows, columns] e4m3
  float* scales;     // [columns / 128, rows], or [copies, rows] with one scale for each token
  int tokens, rows;  // rows from `tokens` on are padding and become zeros
  int columns, copies;
  float epsilon;
  ScaleArgs weights;
};

__device__ __forceinline__ void lay_out_scales(const ScaleArgs& args, int index) {
  if (index >= args.rows * args.columns) return;
  const int row = args.is_transposed ? index % args.rows : index / args.columns;
  const int column = args.is_transposed ? index / args.rows : index % args.columns;
  const size_t from =
      static_cast<size_t>(row / args.repeats) * args.source_columns + min(column, args.source_columns - 1);
  const float scale = args.is_bfloat16 ? __bfloat162float(static_cast<const bf16*>(args.scales)[from])
                                       : static_cast<const float*>(args.scales)[from];
  args.out[args.is_transposed ? static_cast<size_t>(index) : static_cast<size_t>(row) * args.stride + column] = scale;
}

// Returns whether the block is one of those behind the rows; it has then laid out its part of the weights' scales.
__device__ __forceinline__ bool is_scale_block(const QuantiseArgs& args) {
  if (blockIdx.x < args.rows) return false;
  const int block = (blockIdx.x - args.rows) * gridDim.y + blockIdx.y;
  lay_out_scales(args.weights, block * blockDim.x + threadIdx.x);
  return true;
}

__device__ __forceinline__ void unpack(const uint4& packed, float (&values)[kWidth]) {
  const __nv_bfloat162* pairs = reinterpret_cast<const __nv_bfloat162*>(&packed);
#pragma unroll
  for (int i = 0; i < kWidth / 2; ++i) {
    const float2 pair = __bfloat1622float2(pairs[i]);
    values[2 * i] = pair.x;
    values[2 * i + 1] = pair.y;
  }
}

__device__ __forceinline__ uint4 pack(const float (&values)[kWidth]) {
  uint4 packed;
  __nv_bfloat162* pairs = reinterpret_cast<__nv_bfloat162*>(&packed);
#pragma unroll
  for (int i = 0; i < kWidth / 2; ++i) pairs[i] = __floats2bfloat162_rn(values[2 * i], values[2 * i + 1]);
  return packed;
}

__device__ __forceinline__ float highest_of(const float (&values)[kWidth]) {
  float highest = 0.0f;
#pragma unroll
  for (int i = 0; i < kWidth; ++i) highest = fmaxf(highest, fabsf(values[i]));
  return highest;
}

// Where all values are far below what a division by the scale could take, they become 0.
__device__ __forceinline__ float scale_for(float highest) {
  return highest <= kNegligible ? 1.0f : __fdiv_rn(highest, kLargest);
}

// Returns value / scale, correctly rounded, given 1 / scale: values often lie half-way between two e4m3 numbers.
__device__ __forceinline__ float divided(float value, float scale, float inverse) {
  const float quotient = value * inverse;
  return fmaf(fmaf(-quotient, scale, value), inverse, quotient);
}

__device__ __forceinline__ uint2 to_e4m3(const float (&values)[kWidth], float scale) {
  const float inverse = __frcp_rn(scale);
  uint32_t words[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float* four = values + 4 * i;
    const float2 low = make_float2(divided(four[0], scale, inverse), divided(four[1], scale, inverse));
    const float2 high = make_float2(divided(four[2], scale, inverse), divided(four[3], scale, inverse));
    words[i] = static_cast<uint32_t>(__nv_cvt_float2_to_fp8x2(low, __NV_SATFINITE, __NV_E4M3)) |
               static_cast<uint32_t>(__nv_cvt_float2_to_fp8x2(high, __NV_SATFINITE, __NV_E4M3)) << 16;
  }
  return make_uint2(words[0], words[1]);
}

// Returns 8 values of a row of x, with SiLU and the factors if they are the operation before.
template <Before kBefore>
__device__ __forceinline__ uint4 load_values(const uint4* row, int vector, int num_vectors) {
  const uint4 packed = __ldcs(row + vector);
  if constexpr (kBefore != Before::kSiluProduct) return packed;
  float gates[kWidth], factors[kWidth];
  unpack(__ldcs(row + num_vectors + vector), factors);
  unpack(packed, gates);
#pragma unroll
  for (int i = 0; i < kWidth; ++i) gates[i] = __fdividef(gates[i], 1.0f + __expf(-gates[i])) * factors[i];
  return pack(gates);
}

__device__ __forceinline__ void store(const QuantiseArgs& args, int token, int vector, const float (&values)[kWidth],
                                      float scale) {
  const size_t index = static_cast<size_t>(token) * (args.columns / kWidth) + vector;
  reinterpret_cast<uint2*>(args.numbers)[index] = to_e4m3(values, scale);
}

// Returns the largest value of the 16 threads that have the 128 columns of a scale.
__device__ __forceinline__ float over_scale(float highest) {
#pragma unroll
  for (int step = kBlockColumns / kWidth / 2; step > 0; step /= 2) {
    highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, step));
  }
  return highest;
}

__device__ __forceinline__ void store_block_scale(const QuantiseArgs& args, int token, int vector, float scale) {
  constexpr int kSharers = kBlockColumns / kWidth;
  if (vector % kSharers == 0) args.scales[static_cast<size_t>(vector / kSharers) * args.rows + token] = scale;
}

// Block scales, without a norm. Grid: rows, chunks of 8 columns for each thread.
template <Before kBefore>
__global__ void __launch_bounds__(kChunkThreads) quantise_chunk_kernel(QuantiseArgs args) {
  if (is_scale_block(args)) return;
  const int token = blockIdx.x, vector = blockIdx.y * blockDim.x + threadIdx.x, num_vectors = args.columns / kWidth;
  const bool is_inside = vector < num_vectors;
  const size_t width = kBefore == Before::kSiluProduct ? 2 * num_vectors : num_vectors;
  float values[kWidth] = {};
  if (is_inside && token < args.tokens) {
    unpack(load_values<kBefore>(reinterpret_cast<const uint4*>(args.x) + token * width, vector, num_vectors), values);
  }
  const float scale = scale_for(over_scale(highest_of(values)));
  if (!is_inside) return;
  store(args, token, vector, values, scale);
  store_block_scale(args, token, vector, scale);
}

// Returns the sum or the maximum over all threads of the block. `shared` has 16 floats.
template <bool kIsMax>
__device__ __forceinline__ float over_block(float value, float* shared) {
  const auto join = [](float a, float b) { return kIsMax ? fmaxf(a, b) : a + b; };
#pragma unroll
  for (int step = 16; step > 0; step /= 2) value = join(value, __shfl_xor_sync(~0u, value, step));
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
  __syncthreads();
  float total = shared[0];
  for (int warp = 1; warp < static_cast<int>(blockDim.x / 32); ++warp) total = join(total, shared[warp]);
  return total;
}

// A norm, or one scale for each token. Grid: rows. kVectors: groups of 8 columns that a thread handles.
template <Before kBefore, bool kPerToken, int kVectors>
__global__ void __launch_bounds__(kMaxThreads) quantise_row_kernel(QuantiseArgs args) {
  __shared__ float sums[16], highests[16];
  if (is_scale_block(args)) return;
  const int token = blockIdx.x, thread = threadIdx.x, num_vectors = args.columns / kWidth;
  const bool is_padding = token >= args.tokens;
  const size_t width = kBefore == Before::kSiluProduct ? 2 * num_vectors : num_vectors;
  const uint4* row = reinterpret_cast<const uint4*>(args.x) + (is_padding ? 0 : token) * width;
  const auto vector_of = [&](int i) { return i * static_cast<int>(blockDim.x) + thread; };

  uint4 packed[kVectors], gains[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const bool is_inside = vector_of(i) < num_vectors;
    packed[i] = gains[i] = make_uint4(0, 0, 0, 0);
    if (is_inside && !is_padding) packed[i] = load_values<kBefore>(row, vector_of(i), num_vectors);
    if constexpr (kBefore == Before::kRmsNorm) {
      if (kVectors <= kMaxEarlyGains && is_inside)
        gains[i] = __ldg(reinterpret_cast<const uint4*>(args.gain) + vector_of(i));
    }
  }
  if constexpr (kBefore == Before::kRmsNorm) {
    float sum = 0.0f, values[kWidth], factors[kWidth];
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      unpack(packed[i], values);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) sum += values[j] * values[j];
    }
    const float inverse = rsqrtf(over_block<false>(sum, sums) / args.columns + args.epsilon);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      unpack(packed[i], values);
      if (kVectors > kMaxEarlyGains && vector_of(i) < num_vectors) {
        gains[i] = __ldg(reinterpret_cast<const uint4*>(args.gain) + vector_of(i));
      }
      unpack(gains[i], factors);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) values[j] *= inverse * factors[j];
      packed[i] = pack(values);
    }
  }
  float most = 0.0f;
  if constexpr (kPerToken) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      float values[kWidth];
      unpack(packed[i], values);
      most = fmaxf(most, highest_of(values));
    }
    most = over_block<true>(most, highests);
    for (int copy = thread; copy < args.copies; copy += blockDim.x) {
      args.scales[static_cast<size_t>(copy) * args.rows + token] = scale_for(most);
    }
  }
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    float values[kWidth];
    unpack(packed[i], values);
    const float scale = scale_for(kPerToken ? most : over_scale(highest_of(values)));
    if (vector_of(i) >= num_vectors) continue;
    store(args, token, vector_of(i), values, scale);
    if constexpr (!kPerToken) store_block_scale(args, token, vector_of(i), scale);
  }
}

using QuantiseKernel = void (*)(QuantiseArgs);

template <Before kBefore, bool kPerToken>
QuantiseKernel row_kernel_for(int num_vectors) {
  return num_vectors <= 1   ? quantise_row_kernel<kBefore, kPerToken, 1>
         : num_vectors <= 2 ? quantise_row_kernel<kBefore, kPerToken, 2>
         : num_vectors <= 4 ? quantise_row_kernel<kBefore, kPerToken, 4>
                            : quantise_row_kernel<kBefore, kPerToken, 8>;
}

// `num_vectors` is the number for each thread.
inline QuantiseKernel row_kernel_for(Before before, bool per_token, int num_vectors) {
  if (!per_token) return row_kernel_for<Before::kRmsNorm, false>(num_vectors);
  return before == Before::kRmsNorm       ? row_kernel_for<Before::kRmsNorm, true>(num_vectors)
         : before == Before::kSiluProduct ? row_kernel_for<Before::kSiluProduct, true>(num_vectors)
                                          : row_kernel_for<Before::kNothing, true>(num_vectors);
}

inline QuantiseKernel chunk_kernel_for(Before before) {
  return before == Before::kSiluProduct ? quantise_chunk_kernel<Before::kSiluProduct>
                                        : quantise_chunk_kernel<Before::kNothing>;
}

// Returns the blocks in a grid's first dimension that lay out the weights' scales.
inline int scale_blocks(const ScaleArgs& args, int chunks, int threads) {
  const int block = chunks * threads;
  return args.out == nullptr ? 0 : (args.rows * args.columns + block - 1) / block;
}

inline cudaError_t quantise(const QuantiseArgs& args, Before before, bool per_token, cudaStream_t stream) {
  const int num_vectors = args.columns / kWidth;
  const auto whole_warps = [](int threads) { return (threads + 31) / 32 * 32; };
  if (!per_token && before != Before::kRmsNorm) {
    const int threads = std::min(kChunkThreads, whole_warps(num_vectors)),
              chunks = (num_vectors + threads - 1) / threads;
    const dim3 grid(args.rows + scale_blocks(args.weights, chunks, threads), chunks);
    chunk_kernel_for(before)<<<grid, threads, 0, stream>>>(args);
    return cudaGetLastError();
  }
  const int most = args.rows <= kFewRows ? kMaxThreads : kManyRowsThreads;
  int share = 1;
  while (share < 8 && share * most < num_vectors) share *= 2;
  const int threads = whole_warps((num_vectors + share - 1) / share);
  const int blocks = args.rows + scale_blocks(args.weights, 1, threads);
  row_kernel_for(before, per_token, share)<<<blocks, threads, 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace meshserve::fp8
