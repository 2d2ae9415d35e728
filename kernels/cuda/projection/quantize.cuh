// Rounds activations to FP8 for a product, with the operation before it: nothing, RMS norm, or SiLU times a factor.
//
// Where a statistic of the whole row is needed (a norm, or one scale for each token), a block handles a token and keeps
// its row in registers, so x is read once. Else every thread handles 8 columns. Values are rounded to bfloat16 before
// they are quantized, as if the operation before had been a kernel of its own. A scale is the largest absolute value of
// its columns / 448, or 1 if all are 0. Further blocks of the same launch lay out the scales of weights. The kernels
// may be launched early (see ptx.cuh): the scales of weights do not depend on earlier kernels.
#pragma once
#include "common/rounding.cuh"

namespace meshserve::fp8 {

enum class Before : int { kNothing, kRmsNorm, kSiluProduct };

constexpr int kMaxThreads = 512;
constexpr int kFewRows = 264;  // up to two blocks for each multiprocessor: a row gets as many threads as possible
constexpr int kManyRowsThreads = 128;  // else several rows share a multiprocessor
constexpr int kChunkThreads = 256;
constexpr int kMaxEarlyGains = 2;   // gains that a thread loads with the values; more would cost registers
constexpr int kWidth = 8;           // columns that a thread handles together: 16 bytes of bfloat16
constexpr int kBlockColumns = 128;  // columns that share a scale with block scales
constexpr int kScalesEach = 4;      // scales of weights that a thread lays out
constexpr int kMaxArranged = 3;     // matrices whose scales a launch lays out
constexpr int kMaxColumns = kMaxThreads * kWidth * 8;

// Scales of weights [rows / repeats, columns], laid out anew: [rows, stride], or [columns, rows] if transposed.
struct ScaleArgs {
  const void* scales;  // float32 or bfloat16; with `source_columns` 1, a row's scale is that of all columns
  float* out;          // nullptr: nothing to do
  int rows, columns;   // size of `out`, without padding
  int source_columns, stride, repeats;
  bool is_bfloat16, is_transposed;

  __host__ __device__ int num_threads() const {
    return out == nullptr ? 0 : (rows * columns + kScalesEach - 1) / kScalesEach;
  }
};

struct QuantizeArgs {
  const bf16* x;     // [tokens, columns]; kSiluProduct: [tokens, 2 columns], gates and then their factors
  const bf16* gain;  // [columns], of kRmsNorm
  uint8_t* numbers;  // [rows, columns] e4m3
  float* scales;     // [columns / 128, rows], or [copies, rows] with one scale for each token
  int tokens, rows;  // rows from `tokens` on are padding and become zeros
  int columns, copies;
  float epsilon;
  ScaleArgs weights[kMaxArranged];
};

// Lays out scales kScalesEach * index and the following ones. The number of rows is a multiple of kScalesEach.
__device__ __forceinline__ void lay_out_scales(const ScaleArgs& args, int index) {
  const auto scale_of = [&](int row, int column) {
    const size_t from =
        static_cast<size_t>(row / args.repeats) * args.source_columns + min(column, args.source_columns - 1);
    return args.is_bfloat16 ? __bfloat162float(static_cast<const bf16*>(args.scales)[from])
                            : static_cast<const float*>(args.scales)[from];
  };
  const int first = kScalesEach * index;
  if (args.is_transposed) {
    const int column = first / args.rows, row = first - column * args.rows;
    float4 scales;
    if (args.repeats % kScalesEach == 0) {
      scales.x = scales.y = scales.z = scales.w = scale_of(row, column);
    } else {
      scales = make_float4(scale_of(row, column), scale_of(row + 1, column), scale_of(row + 2, column),
                           scale_of(row + 3, column));
    }
    reinterpret_cast<float4*>(args.out)[index] = scales;
    return;
  }
#pragma unroll
  for (int i = 0; i < kScalesEach; ++i) {
    const int row = (first + i) / args.columns, column = (first + i) % args.columns;
    if (row < args.rows) args.out[static_cast<size_t>(row) * args.stride + column] = scale_of(row, column);
  }
}

// Returns whether the block is one of those behind the rows; it has then laid out its part of the weights' scales.
__device__ __forceinline__ bool is_scale_block(const QuantizeArgs& args) {
  if (blockIdx.x < args.rows) return false;
  int index = ((blockIdx.x - args.rows) * gridDim.y + blockIdx.y) * blockDim.x + threadIdx.x;
#pragma unroll
  for (int i = 0; i < kMaxArranged; ++i) {
    const int num_threads = args.weights[i].num_threads();
    if (index >= 0 && index < num_threads) lay_out_scales(args.weights[i], index);
    index -= num_threads;
  }
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

__device__ __forceinline__ void store(const QuantizeArgs& args, int token, int vector, const float (&values)[kWidth],
                                      float scale) {
  const size_t index = static_cast<size_t>(token) * (args.columns / kWidth) + vector;
  const float inverse = 1.0f / scale;
  reinterpret_cast<uint2*>(args.numbers)[index] =
      make_uint2(rounded_to_e4m3(make_float4(values[0], values[1], values[2], values[3]), scale, inverse),
                 rounded_to_e4m3(make_float4(values[4], values[5], values[6], values[7]), scale, inverse));
}

// Returns the largest value of the 16 threads that have the 128 columns of a scale.
__device__ __forceinline__ float over_scale(float highest) {
#pragma unroll
  for (int step = kBlockColumns / kWidth / 2; step > 0; step /= 2) {
    highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, step));
  }
  return highest;
}

__device__ __forceinline__ void store_block_scale(const QuantizeArgs& args, int token, int vector, float scale) {
  constexpr int kSharers = kBlockColumns / kWidth;
  if (vector % kSharers == 0) args.scales[static_cast<size_t>(vector / kSharers) * args.rows + token] = scale;
}

// Block scales, without a norm. Grid: rows, chunks of 8 columns for each thread.
template <Before kBefore>
__global__ void __launch_bounds__(kChunkThreads) quantize_chunk_kernel(const __grid_constant__ QuantizeArgs args) {
  if (is_scale_block(args)) return;
  wait_for_previous_kernel();
  const int token = blockIdx.x, vector = blockIdx.y * blockDim.x + threadIdx.x, num_vectors = args.columns / kWidth;
  const bool is_inside = vector < num_vectors;
  const size_t width = kBefore == Before::kSiluProduct ? 2 * num_vectors : num_vectors;
  float values[kWidth] = {};
  if (is_inside && token < args.tokens) {
    unpack(load_values<kBefore>(reinterpret_cast<const uint4*>(args.x) + token * width, vector, num_vectors), values);
  }
  const float scale = e4m3_scale(over_scale(highest_of(values)));
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
__global__ void __launch_bounds__(kMaxThreads) quantize_row_kernel(const __grid_constant__ QuantizeArgs args) {
  extern __shared__ float shared[];
  float *sums = shared, *highests = shared + kMaxThreads / 32;
  if (is_scale_block(args)) return;
  const int token = blockIdx.x, thread = threadIdx.x, num_vectors = args.columns / kWidth;
  const bool is_padding = token >= args.tokens;
  const size_t width = kBefore == Before::kSiluProduct ? 2 * num_vectors : num_vectors;
  const uint4* row = reinterpret_cast<const uint4*>(args.x) + (is_padding ? 0 : token) * width;
  const auto vector_of = [&](int i) { return i * static_cast<int>(blockDim.x) + thread; };

  uint4 packed[kVectors], gains[kVectors];
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    packed[i] = gains[i] = make_uint4(0, 0, 0, 0);
    if (kBefore == Before::kRmsNorm && kVectors <= kMaxEarlyGains && vector_of(i) < num_vectors) {
      gains[i] = __ldg(reinterpret_cast<const uint4*>(args.gain) + vector_of(i));
    }
  }
  wait_for_previous_kernel();
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    if (vector_of(i) < num_vectors && !is_padding) packed[i] = load_values<kBefore>(row, vector_of(i), num_vectors);
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
      args.scales[static_cast<size_t>(copy) * args.rows + token] = e4m3_scale(most);
    }
  }
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    float values[kWidth];
    unpack(packed[i], values);
    const float scale = e4m3_scale(kPerToken ? most : over_scale(highest_of(values)));
    if (vector_of(i) >= num_vectors) continue;
    store(args, token, vector_of(i), values, scale);
    if constexpr (!kPerToken) store_block_scale(args, token, vector_of(i), scale);
  }
}

}  // namespace meshserve::fp8
