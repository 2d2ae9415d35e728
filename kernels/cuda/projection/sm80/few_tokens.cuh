// Products of up to 64 tokens with weights in 8 or 4 bits for all GPUs since Ampere: out[T, N] = x[T, K] w[N, K]^T.
//
// Reading the weights is the limit, so each is read once, from memory to the registers of the lane that converts it to
// bf16, without rounding. A block computes 16 or 32 rows for all tokens. Its warps share the columns in chunks, in
// turn: 64 bytes of each row, 16 of them for each of the four lanes that hold the row in the matrix instructions.
// Weights are the left operand of these instructions, 16 rows at a time, and the activations of 8 tokens are the right
// one. A lane holds other columns of a chunk than the instructions expect; the sum over columns does not depend on
// their order if the activations have the same one. Sums are scaled in float32 for each group of columns with a scale,
// and added up over the warps in a fixed order, so a token's result does not depend on the others.
#pragma once
#include "common/conversions.cuh"
#include "common/scales.cuh"

namespace meshserve {
namespace portable {

constexpr int kMaxTokens = 64;
constexpr int kProductWarps = 8, kProductThreads = 32 * kProductWarps;

struct ProductArgs {
  const bf16* x;           // [T, K]
  const uint8_t* weights;  // [N, K], or with 4-bit integers [N, K / 2]
  Scales scales;
  const void* residual;  // [T, N] of the result's type, or null
  void* out;             // [T, N]
  int num_tokens, rows, columns;
  bool is_float;  // whether the result is float32 and not bf16
};

// Weights in e4m3. A scale is for a multiple of 64 columns.
struct E4m3Chunks {
  static constexpr int kColumns = 64, kGroups = 1;  // of a chunk
  static constexpr bool kHasZeros = false;
};
// 4-bit integers; a scale is for a multiple of 128 columns, or else for a multiple of 32.
template <int kGroups_>
struct Int4Chunks {
  static constexpr int kColumns = 128, kGroups = kGroups_;
  static constexpr bool kHasZeros = true;
};

// kRowTiles times 16 rows of a block, kTokenTiles times 8 tokens.
template <class W_, int kRowTiles_, int kTokenTiles_>
struct ProductForm {
  using W = W_;
  static constexpr int kRowTiles = kRowTiles_, kTokenTiles = kTokenTiles_;
  static constexpr int kRows = 16 * kRowTiles, kTokens = 8 * kTokenTiles;
  static constexpr int kPieces = W::kColumns / 32;            // of a chunk: 8 columns of each of the four lanes
  static constexpr int kAhead = kTokenTiles > 2 ? 1 : 3;      // chunks that are on their way from memory
  static constexpr int kStride = kRows + 1;                   // between tokens of the result in shared memory
  static constexpr int kSums = 32 * kRowTiles * kTokenTiles;  // of a warp, four floats each
  static constexpr int kSumBytes = kProductWarps / 2 * kSums * static_cast<int>(sizeof(float4));
  static constexpr int kResultBytes = kTokens * kStride * static_cast<int>(sizeof(float));
  static constexpr int kSharedBytes = kSumBytes > kResultBytes ? kSumBytes : kResultBytes;
};

// Of four lanes with four words each: gives lane i word i of each of them.
__device__ __forceinline__ void exchange_words(uint32_t (&w)[4], int lane) {
  const bool is_odd = lane & 1, is_upper = lane & 2;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const uint32_t other = __shfl_xor_sync(~0u, is_odd ? w[i] : w[i + 1], 1);
    (is_odd ? w[i] : w[i + 1]) = other;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t other = __shfl_xor_sync(~0u, is_upper ? w[i] : w[i + 2], 2);
    (is_upper ? w[i] : w[i + 2]) = other;
  }
}

// A lane's part of a chunk: rows g and g + 8 of each tile, where g is the lane's number / 4.
template <class F>
struct Chunk {
  uint32_t words[F::kRowTiles][2][4];
};

template <class F>
class BlockProduct {
 public:
  using W = typename F::W;

  __device__ __forceinline__ BlockProduct(const ProductArgs& args, int first_row)
      : args_(args), lane_(threadIdx.x % 32), num_chunks_(args.columns / W::kColumns), policy_(evict_first_policy()) {
#pragma unroll
    for (int tile = 0; tile < F::kRowTiles; ++tile) {
      for (int half = 0; half < 2; ++half) {  // the last block may exceed the matrix
        rows_[tile][half] = min(first_row + 16 * tile + 8 * half + lane_ / 4, args.rows - 1);
      }
    }
  }

  // Multiplies the chunks of this warp.
  __device__ __forceinline__ void multiply() {
    Chunk<F> ahead[F::kAhead];
    const int warp = threadIdx.x / 32;
#pragma unroll
    for (int i = 0; i < F::kAhead; ++i) load(ahead[i], warp + i * kProductWarps);
#pragma unroll 1
    for (int first = warp; first < num_chunks_; first += F::kAhead * kProductWarps) {
#pragma unroll
      for (int i = 0; i < F::kAhead; ++i) {
        const int chunk = first + i * kProductWarps;
        if (chunk >= num_chunks_) break;
        Chunk<F> weights = ahead[i];
        load(ahead[i], chunk + F::kAhead * kProductWarps);
        multiply(weights, chunk * W::kColumns);
      }
    }
  }

  // Adds up the warps' sums and stores the result.
  __device__ __forceinline__ void store(uint8_t* shared, int first_row) {
    const int warp = threadIdx.x / 32;
    float4* sums = reinterpret_cast<float4*>(shared) + lane_;
#pragma unroll 1
    for (int half = kProductWarps / 2; half > 0; half /= 2) {
      if (warp >= half && warp < 2 * half) {
        for_each_sum([&](int i, float (&sum)[4]) {
          sums[(warp - half) * F::kSums + 32 * i] = make_float4(sum[0], sum[1], sum[2], sum[3]);
        });
      }
      __syncthreads();
      if (warp < half) {
        for_each_sum([&](int i, float (&sum)[4]) {
          const float4 other = sums[warp * F::kSums + 32 * i];
          sum[0] += other.x, sum[1] += other.y, sum[2] += other.z, sum[3] += other.w;
        });
      }
      __syncthreads();
    }
    float* result = reinterpret_cast<float*>(shared);
    if (warp == 0) {
      for_each_sum([&](int i, float (&sum)[4]) {
        const int tile = i / F::kTokenTiles, token = i % F::kTokenTiles * 8 + lane_ % 4 * 2;
        float* to = result + token * F::kStride + 16 * tile + lane_ / 4;
        to[0] = sum[0], to[F::kStride] = sum[1], to[8] = sum[2], to[F::kStride + 8] = sum[3];
      });
    }
    __syncthreads();
    const int num_rows = min(F::kRows, args_.rows - first_row);
    for (int i = threadIdx.x; i < args_.num_tokens * F::kRows; i += kProductThreads) {
      const int token = i / F::kRows, row = i % F::kRows;
      if (row < num_rows) {
        store_result(static_cast<size_t>(token) * args_.rows + first_row + row, result[token * F::kStride + row]);
      }
    }
  }

 private:
  template <class Function>
  __device__ __forceinline__ void for_each_sum(Function function) {
#pragma unroll
    for (int i = 0; i < F::kRowTiles * F::kTokenTiles; ++i) {
      function(i, sums_[i / F::kTokenTiles][i % F::kTokenTiles]);
    }
  }

  __device__ __forceinline__ void store_result(size_t at, float value) const {
    if (args_.is_float) {
      const float* residual = static_cast<const float*>(args_.residual);
      static_cast<float*>(args_.out)[at] = residual == nullptr ? value : residual[at] + value;
      return;
    }
    const bf16* residual = static_cast<const bf16*>(args_.residual);
    bf16 rounded = __float2bfloat16(value);
    if (residual != nullptr) rounded = __float2bfloat16(__bfloat162float(residual[at]) + __bfloat162float(rounded));
    static_cast<bf16*>(args_.out)[at] = rounded;
  }

  __device__ __forceinline__ void load(Chunk<F>& chunk, int index) const {
    if (index >= num_chunks_) return;
    const size_t row_bytes = static_cast<size_t>(num_chunks_) * 64;
    const uint8_t* from = args_.weights + static_cast<size_t>(index) * 64 + lane_ % 4 * 16;
#pragma unroll
    for (int tile = 0; tile < F::kRowTiles; ++tile) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint4 v = load_weights(reinterpret_cast<const bf16*>(from + rows_[tile][half] * row_bytes), policy_);
        uint32_t (&words)[4] = chunk.words[tile][half];
        words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
      }
    }
  }

  // Multiplies a chunk that begins at a column.
  __device__ __forceinline__ void multiply(Chunk<F>& chunk, int column) {
    constexpr int kTogether = F::kPieces / W::kGroups;  // pieces whose columns share a scale
#pragma unroll
    for (int group = 0; group < W::kGroups; ++group) {
      const int at_column = column + group * (W::kColumns / W::kGroups);
      ScaleInFlight scales[F::kRowTiles][2];
      uint32_t zeros[F::kRowTiles][2];
#pragma unroll
      for (int tile = 0; tile < F::kRowTiles; ++tile) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if (W::kGroups > 1 && group == 0) exchange_words(chunk.words[tile][half], lane_);
          const size_t at = scale_at(rows_[tile][half], at_column);
          scales[tile][half].load(args_.scales, at);
          if (W::kHasZeros) {
            const uint32_t zero = args_.scales.zero != nullptr ? args_.scales.zero[at] : kSymmetricZero;
            zeros[tile][half] = 0x43004300u | zero << 16 | zero;
          }
        }
      }
      float partial[F::kRowTiles][F::kTokenTiles][4] = {};
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const int piece = group * kTogether + i;
        uint4 tokens[F::kTokenTiles];
        load_tokens(tokens, column + column_of(piece));
#pragma unroll
        for (int tile = 0; tile < F::kRowTiles; ++tile) {
          multiply_piece<0>(partial[tile], chunk.words[tile], zeros[tile], piece, tokens);
          multiply_piece<1>(partial[tile], chunk.words[tile], zeros[tile], piece, tokens);
        }
      }
#pragma unroll
      for (int tile = 0; tile < F::kRowTiles; ++tile) {
        const float upper = scales[tile][0].value(args_.scales), lower = scales[tile][1].value(args_.scales);
#pragma unroll
        for (int n = 0; n < F::kTokenTiles; ++n) {
          float (&sum)[4] = sums_[tile][n];
          const float (&added)[4] = partial[tile][n];
          sum[0] += upper * added[0], sum[1] += upper * added[1];
          sum[2] += lower * added[2], sum[3] += lower * added[3];
        }
      }
    }
  }

  // Returns the first of this lane's 8 columns in a piece, counted from the chunk's.
  __device__ __forceinline__ int column_of(int piece) const {
    return W::kGroups > 1 ? 32 * piece + lane_ % 4 * 8 : lane_ % 4 * (W::kColumns / 4) + 8 * piece;
  }

  __device__ __forceinline__ size_t scale_at(int row, int column) const {
    const Scales& scales = args_.scales;
    const int group = min(column >> scales.columns_log2, scales.grid_columns - 1);
    return static_cast<size_t>(row / scales.rows_each) * scales.grid_columns + group;
  }

  // Loads 8 columns of this lane's token of each tile. Tokens that there are not are zero.
  __device__ __forceinline__ void load_tokens(uint4 (&tokens)[F::kTokenTiles], int column) const {
#pragma unroll
    for (int n = 0; n < F::kTokenTiles; ++n) {
      const int token = 8 * n + lane_ / 4;
      tokens[n] = make_uint4(0, 0, 0, 0);
      if (token < args_.num_tokens) {
        tokens[n] = *reinterpret_cast<const uint4*>(args_.x + static_cast<size_t>(token) * args_.columns + column);
      }
    }
  }

  // Multiplies the first or the second four of the 8 columns: columns 0 and 2 of them are the first pair of each
  // operand, 1 and 3 the second, as conversions leave them.
  template <int kHalf>
  __device__ __forceinline__ void multiply_piece(float (&sums)[F::kTokenTiles][4], const uint32_t (&words)[2][4],
                                                 const uint32_t (&zeros)[2], int piece,
                                                 const uint4 (&tokens)[F::kTokenTiles]) const {
    uint32_t a[4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {  // rows g and g + 8
      if constexpr (W::kHasZeros) {
        convert_int4<kHalf>(words[half][piece], zeros[half], a[half], a[2 + half]);
      } else {
        convert_e4m3(words[half][2 * piece + kHalf], a[half], a[2 + half]);
      }
    }
#pragma unroll
    for (int n = 0; n < F::kTokenTiles; ++n) {
      const uint32_t low = kHalf == 0 ? tokens[n].x : tokens[n].z, high = kHalf == 0 ? tokens[n].y : tokens[n].w;
      multiply_16x8x16(sums[n], a, __byte_perm(low, high, 0x5410), __byte_perm(low, high, 0x7632));
    }
  }

  const ProductArgs& args_;
  const int lane_, num_chunks_;
  const uint64_t policy_;
  int rows_[F::kRowTiles][2];
  float sums_[F::kRowTiles][F::kTokenTiles][4] = {};
};

// Grid: a block for each kRows rows.
template <class F>
__global__ void __launch_bounds__(kProductThreads) product_kernel(const ProductArgs args) {
  extern __shared__ __align__(16) uint8_t shared_sums[];
  const int first_row = blockIdx.x * F::kRows;
  BlockProduct<F> product(args, first_row);
  product.multiply();
  product.store(shared_sums, first_row);
}

}  // namespace portable
}  // namespace meshserve
