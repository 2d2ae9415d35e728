// Rounds activations to FP8 for a product, with the operation before it: nothing, RMS norm, or SiLU times a factor.
//
// One block handles one token. It keeps the whole row in registers as float32, so x is read once, and a norm needs no
// second kernel. Values are rounded to bfloat16 before they are quantised, as if the operation before had been a kernel
// of its own. A scale is the largest absolute value of its columns / 448, or 1 if all are 0.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>
#include <stdint.h>

namespace meshserve::fp8 {

using bf16 = __nv_bfloat16;

enum class Before : int { kNothing, kRmsNorm, kSiluProduct };

constexpr int kMaxThreads = 512;
constexpr int kWidth = 8;                // columns that a thread handles together: 16 bytes of bfloat16
constexpr int kBlockColumns = 128;       // columns that share a scale with block scales
constexpr float kLargest = 448.0f;       // the largest e4m3 number
constexpr int kMaxColumns = kMaxThreads * kWidth * 8;

struct QuantiseArgs {
  const bf16* x;      // [tokens, columns]; kSiluProduct: [tokens, 2 columns], gates and then their factors
  const bf16* gain;   // [columns], of kRmsNorm
  uint8_t* numbers;   // [rows, columns] e4m3
  float* scales;      // [columns / 128, rows], or [rows] with one scale for each token
  int tokens, rows;   // rows from `tokens` on are padding and become zeros
  int columns;
  float epsilon;
};

__device__ __forceinline__ void unpack(const uint4& packed, float (&values)[kWidth]) {
  const __nv_bfloat162* pairs = reinterpret_cast<const __nv_bfloat162*>(&packed);
#pragma unroll
  for (int i = 0; i < kWidth / 2; ++i) {
    const float2 pair = __bfloat1622float2(pairs[i]);
    values[2 * i] = pair.x;
    values[2 * i + 1] = pair.y;
  }
}

__device__ __forceinline__ float rounded(float value) { return __bfloat162float(__float2bfloat16_rn(value)); }

__device__ __forceinline__ uint2 to_e4m3(const float (&values)[kWidth], float scale) {
  uint32_t words[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float2 low = make_float2(__fdiv_rn(values[4 * i], scale), __fdiv_rn(values[4 * i + 1], scale));
    const float2 high = make_float2(__fdiv_rn(values[4 * i + 2], scale), __fdiv_rn(values[4 * i + 3], scale));
    words[i] = static_cast<uint32_t>(__nv_cvt_float2_to_fp8x2(low, __NV_SATFINITE, __NV_E4M3)) |
               static_cast<uint32_t>(__nv_cvt_float2_to_fp8x2(high, __NV_SATFINITE, __NV_E4M3)) << 16;
  }
  return make_uint2(words[0], words[1]);
}

// Returns the sum or the maximum over all threads of the block. `shared` has 32 floats.
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

// kVectors: groups of 8 columns that a thread handles.
template <Before kBefore, bool kPerToken, int kVectors>
__global__ void __launch_bounds__(kMaxThreads) quantise_kernel(QuantiseArgs args) {
  __shared__ float shared[32];
  const int token = blockIdx.x, thread = threadIdx.x, num_vectors = args.columns / kWidth;
  const bool is_padding = token >= args.tokens;
  const size_t width = kBefore == Before::kSiluProduct ? 2 * num_vectors : num_vectors;
  const uint4* row = reinterpret_cast<const uint4*>(args.x) + (is_padding ? 0 : token) * width;

  float values[kVectors][kWidth];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int vector = i * blockDim.x + thread;
    const bool is_used = vector < num_vectors && !is_padding;
    unpack(is_used ? row[vector] : make_uint4(0, 0, 0, 0), values[i]);
    if constexpr (kBefore == Before::kSiluProduct) {
      float factors[kWidth];
      unpack(is_used ? row[num_vectors + vector] : make_uint4(0, 0, 0, 0), factors);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        values[i][j] = rounded(values[i][j] / (1.0f + __expf(-values[i][j])) * factors[j]);
      }
    }
  }

  if constexpr (kBefore == Before::kRmsNorm) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
#pragma unroll
      for (int j = 0; j < kWidth; ++j) sum += values[i][j] * values[i][j];
    }
    const float inverse = rsqrtf(over_block<false>(sum, shared) / args.columns + args.epsilon);
    if constexpr (kPerToken) __syncthreads();  // `shared` is written again below
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int vector = i * blockDim.x + thread;
      float gains[kWidth];
      unpack(vector < num_vectors ? reinterpret_cast<const uint4*>(args.gain)[vector] : make_uint4(0, 0, 0, 0), gains);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) values[i][j] = rounded(values[i][j] * inverse * gains[j]);
    }
  }

  float highest[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    highest[i] = 0.0f;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) highest[i] = fmaxf(highest[i], fabsf(values[i][j]));
  }
  if constexpr (kPerToken) {
    float most = highest[0];
#pragma unroll
    for (int i = 1; i < kVectors; ++i) most = fmaxf(most, highest[i]);
    most = over_block<true>(most, shared);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) highest[i] = most;
  } else {  // 16 threads have the 128 columns of a scale
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
#pragma unroll
      for (int step = 8; step > 0; step /= 2) highest[i] = fmaxf(highest[i], __shfl_xor_sync(~0u, highest[i], step));
    }
  }
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    const int vector = i * blockDim.x + thread;
    if (vector >= num_vectors) continue;
    const float scale = highest[i] > 0.0f ? __fdiv_rn(highest[i], kLargest) : 1.0f;
    reinterpret_cast<uint2*>(args.numbers)[static_cast<size_t>(token) * num_vectors + vector] =
        to_e4m3(values[i], scale);
    if constexpr (kPerToken) {
      if (vector == 0) args.scales[token] = scale;
    } else {
      constexpr int kSharers = kBlockColumns / kWidth;
      if (vector % kSharers == 0) args.scales[static_cast<size_t>(vector / kSharers) * args.rows + token] = scale;
    }
  }
}

using QuantiseKernel = void (*)(QuantiseArgs);

template <Before kBefore, bool kPerToken>
QuantiseKernel quantise_kernel_for(int num_vectors) {
  return num_vectors <= 1   ? quantise_kernel<kBefore, kPerToken, 1>
         : num_vectors <= 2 ? quantise_kernel<kBefore, kPerToken, 2>
         : num_vectors <= 4 ? quantise_kernel<kBefore, kPerToken, 4>
                            : quantise_kernel<kBefore, kPerToken, 8>;
}

template <Before kBefore>
QuantiseKernel quantise_kernel_for(bool per_token, int num_vectors) {
  return per_token ? quantise_kernel_for<kBefore, true>(num_vectors)
                   : quantise_kernel_for<kBefore, false>(num_vectors);
}

inline QuantiseKernel quantise_kernel_for(Before before, bool per_token, int num_vectors) {
  return before == Before::kRmsNorm       ? quantise_kernel_for<Before::kRmsNorm>(per_token, num_vectors)
         : before == Before::kSiluProduct ? quantise_kernel_for<Before::kSiluProduct>(per_token, num_vectors)
                                          : quantise_kernel_for<Before::kNothing>(per_token, num_vectors);
}

inline cudaError_t quantise(const QuantiseArgs& args, Before before, bool per_token, cudaStream_t stream) {
  const int num_vectors = args.columns / kWidth;
  int share = 1;
  while (share * kMaxThreads < num_vectors) share *= 2;
  const int threads = ((num_vectors + share - 1) / share + 31) / 32 * 32;
  quantise_kernel_for(before, per_token, share)<<<args.rows, threads, 0, stream>>>(args);
  return cudaGetLastError();
}

// ---- scales of weights -------------------------------------------------------------------------------------------
struct ScaleArgs {
  const void* scales;  // [rows, columns] float32 or bfloat16
  float* out;          // [rows, stride]; if transposed, [columns, rows * repeats]
  int rows, columns;
  int stride;          // of `out`, at least `columns`
  int repeats;         // rows of the matrix that share a scale, if transposed
  bool is_bfloat16, is_transposed;
};

// Lays out the scales of weights as cuBLASLt reads them.
__global__ void arrange_scales_kernel(ScaleArgs args) {
  const int index = blockIdx.x * blockDim.x + threadIdx.x;
  const int rows = args.is_transposed ? args.rows * args.repeats : args.rows;
  if (index >= rows * args.columns) return;
  const int row = args.is_transposed ? index % rows : index / args.columns;
  const int column = args.is_transposed ? index / rows : index % args.columns;
  const size_t from = static_cast<size_t>(row / args.repeats) * args.columns + column;
  const float scale = args.is_bfloat16 ? __bfloat162float(static_cast<const bf16*>(args.scales)[from])
                                       : static_cast<const float*>(args.scales)[from];
  args.out[args.is_transposed ? static_cast<size_t>(index) : static_cast<size_t>(row) * args.stride + column] = scale;
}

inline cudaError_t arrange_scales(const ScaleArgs& args, cudaStream_t stream) {
  const int total = args.rows * args.repeats * args.columns;
  arrange_scales_kernel<<<(total + 255) / 256, 256, 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace meshserve::fp8
