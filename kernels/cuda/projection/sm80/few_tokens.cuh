// Products of up to 64 tokens with weights in 8 or 4 bits for all GPUs since Ampere: out[T, N] = x[T, K] w[N, K]^T.
//
// Reading the weights is the limit, so each is read once, from memory to the registers of the lane that converts it to
// bf16, without rounding. The warps of a block share the columns of the same rows, 128 bytes of each row in turn, as
// two chunks: 64 bytes of each row, 16 of them for each of the four lanes that hold the row in the matrix instructions.
// Weights are the left operand of these instructions, 16 rows at a time, and the activations of 8 tokens are the right
// one. A lane holds other columns of a chunk than the instructions expect; the sum over columns does not depend on
// their order if the activations have the same one. What a warp adds up of columns with the same scale is scaled in
// float32, and the warps' sums are added up in a fixed order, which is the same in all forms, so a token's result does
// not depend on the others.
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

// A warp has kRowTiles times 16 rows and kTokenTiles times 8 tokens.
template <class W_, int kRowTiles_, int kTokenTiles_, int kBlocks_>
struct ProductForm {
  using W = W_;
  static constexpr int kRowTiles = kRowTiles_, kTokenTiles = kTokenTiles_;
  static constexpr int kBlocks = kBlocks_;  // that a multiprocessor has registers for
  static constexpr int kRows = 16 * kRowTiles, kTokens = 8 * kTokenTiles;
  static constexpr int kPieces = W::kColumns / 32;            // of a chunk: 8 columns of each of the four lanes
  static constexpr int kStride = kRows + 1;                   // between tokens of the result in shared memory
  static constexpr int kSums = 32 * kRowTiles * kTokenTiles;  // of a warp, four floats each
  static constexpr int kSumBytes = kProductWarps / 2 * kSums * static_cast<int>(sizeof(float4));
  static constexpr int kResultBytes = kTokens * kStride * static_cast<int>(sizeof(float));
  static constexpr int kSharedBytes = kSumBytes > kResultBytes ? kSumBytes : kResultBytes;
};

// A lane's part of a chunk: rows g and g + 8 of each tile, where g is the lane's number / 4.
template <class F>
struct Chunk {
  uint32_t words[F::kRowTiles][2][4];
  uint32_t zeros[F::kRowTiles][2];  // of 4-bit integers whose scale is for the whole chunk
};

template <class F>
class BlockProduct {
 public:
  using W = typename F::W;

  __device__ __forceinline__ BlockProduct(const ProductArgs& args, int first_row)
      : args_(args),
        lane_(threadIdx.x % 32),
        warp_(threadIdx.x / 32),
        row_bytes_(args.columns / W::kColumns * kChunkBytes),
        tokens_(args.x + static_cast<size_t>(lane_ / 4) * args.columns + lane_ % 4 * kLaneColumns),
        policy_(evict_first_policy()) {
    for_each_row([&](int tile, int half) {  // the last block may exceed the matrix
      const int row = min(first_row + 16 * tile + 8 * half + lane_ / 4, args.rows - 1);
      weights_[tile][half] = args.weights + static_cast<size_t>(row) * row_bytes_ + lane_ % 4 * 16;
      const size_t scale_row = static_cast<size_t>(row / args.scales.rows_each) * args.scales.grid_columns;
      scale_rows_[tile][half] = static_cast<const uint8_t*>(args.scales.values) + scale_row * scale_bytes();
      if constexpr (W::kHasZeros) zero_rows_[tile][half] = args.scales.zero + (has_zeros() ? scale_row : 0);
    });
  }

  // Multiplies the chunks of this warp: two side by side of each 2 * kProductWarps. While one of them is multiplied,
  // the other is on its way from memory.
  __device__ __forceinline__ void multiply() {
    constexpr int kStep = 2 * kProductWarps * kChunkBytes;
    int first = warp_ * 2 * kChunkBytes, second = first + kChunkBytes;  // the bytes of each row at which they begin
    Chunk<F> even, odd;
    load(even, first);
    load(odd, second);
#pragma unroll 1
    while (first < row_bytes_) {
      multiply(even, first, second);
      first += kStep;
      load(even, first);
      if (second < row_bytes_) multiply(odd, second, first);
      second += kStep;
      load(odd, second);
    }
  }

  // Adds up the warps' sums and stores the result.
  __device__ __forceinline__ void store(uint8_t* shared, int first_row) {
    float4* sums = reinterpret_cast<float4*>(shared) + lane_;
#pragma unroll 1
    for (int half = kProductWarps / 2; half > 0; half /= 2) {
      if (warp_ >= half && warp_ < 2 * half) {
        for_each_sum([&](int i, float (&sum)[4]) {
          sums[(warp_ - half) * F::kSums + 32 * i] = make_float4(sum[0], sum[1], sum[2], sum[3]);
        });
      }
      __syncthreads();
      if (warp_ < half) {
        for_each_sum([&](int i, float (&sum)[4]) {
          const float4 other = sums[warp_ * F::kSums + 32 * i];
          sum[0] += other.x, sum[1] += other.y, sum[2] += other.z, sum[3] += other.w;
        });
      }
      __syncthreads();
    }
    float* result = reinterpret_cast<float*>(shared);
    if (warp_ == 0) {
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

  // Loads the chunk that begins at a byte of each row.
  __device__ __forceinline__ void load(Chunk<F>& chunk, int begin) const {
    if (begin >= row_bytes_) return;
    for_each_row([&](int tile, int half) {
      const uint4 v = load_weights(reinterpret_cast<const bf16*>(weights_[tile][half] + begin), policy_);
      uint32_t (&words)[4] = chunk.words[tile][half];
      words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
      if constexpr (W::kHasZeros && W::kGroups == 1) {
        chunk.zeros[tile][half] = zero_at(tile, half, group_of(column_at(begin)));
      }
    });
  }

  // Multiplies the chunk that begins at a byte of each row; the warp's next one begins at `next`.
  __device__ __forceinline__ void multiply(Chunk<F>& chunk, int begin, int next) {
    if constexpr (W::kGroups > 1) {
      for_each_row([&](int tile, int half) { exchange_words(chunk.words[tile][half], lane_); });
      multiply_group<0>(chunk, column_at(begin));
    } else {
      multiply_whole(chunk, column_at(begin), next < row_bytes_ ? column_at(next) : -1);
    }
  }

  // Multiplies a chunk that begins at a column and has one scale for each row. The next one begins at `next`, or it is
  // the last one.
  __device__ __forceinline__ void multiply_whole(const Chunk<F>& chunk, int column, int next) {
    const int group = group_of(column);
    if (group != group_) {
      group_ = group;
      for_each_row([&](int tile, int half) { scales_[tile][half] = scale_at(tile, half, group); });
    }
    uint32_t zeros[F::kRowTiles][2];
    if constexpr (W::kHasZeros) {
      for_each_row([&](int tile, int half) { zeros[tile][half] = centre_of(chunk.zeros[tile][half]); });
    }
    multiply_pieces<0, F::kPieces>(partial_, chunk.words, zeros, column);
    if (next >= 0 && group_of(next) == group) return;
    add_scaled(scales_, partial_);
#pragma unroll
    for (int i = 0; i < F::kRowTiles * F::kTokenTiles * 4; ++i) {
      partial_[i / 4 / F::kTokenTiles][i / 4 % F::kTokenTiles][i % 4] = 0.0f;
    }
  }

  // Multiplies a chunk that begins at a column and has a scale for each 32 columns of a row, or for a multiple.
  template <int kGroup>
  __device__ __forceinline__ void multiply_group(const Chunk<F>& chunk, int column) {
    constexpr int kTogether = F::kPieces / W::kGroups;  // pieces whose columns share a scale
    uint32_t scales[F::kRowTiles][2], zeros[F::kRowTiles][2];
    const int group = group_of(column + kGroup * (W::kColumns / W::kGroups));
    for_each_row([&](int tile, int half) {
      scales[tile][half] = scale_at(tile, half, group);
      zeros[tile][half] = centre_of(zero_at(tile, half, group));
    });
    float partial[F::kRowTiles][F::kTokenTiles][4] = {};
    multiply_pieces<kGroup * kTogether, kTogether>(partial, chunk.words, zeros, column);
    add_scaled(scales, partial);
    if constexpr (kGroup + 1 < W::kGroups) multiply_group<kGroup + 1>(chunk, column);
  }

  // Multiplies pieces of a chunk that begins at a column.
  template <int kFirst, int kNum>
  __device__ __forceinline__ void multiply_pieces(float (&sums)[F::kRowTiles][F::kTokenTiles][4],
                                                  const uint32_t (&words)[F::kRowTiles][2][4],
                                                  const uint32_t (&zeros)[F::kRowTiles][2], int column) const {
#pragma unroll
    for (int piece = kFirst; piece < kFirst + kNum; ++piece) {
      uint4 tokens[F::kTokenTiles];
      load_tokens(tokens, column + (W::kGroups > 1 ? 32 : 8) * piece);
#pragma unroll
      for (int tile = 0; tile < F::kRowTiles; ++tile) {
        multiply_piece<0>(sums[tile], words[tile], zeros[tile], piece, tokens);
        multiply_piece<1>(sums[tile], words[tile], zeros[tile], piece, tokens);
      }
    }
  }

  __device__ __forceinline__ void add_scaled(const uint32_t (&scales)[F::kRowTiles][2],
                                             const float (&partial)[F::kRowTiles][F::kTokenTiles][4]) {
#pragma unroll
    for (int tile = 0; tile < F::kRowTiles; ++tile) {
      const float upper = scale_of_bits(scales[tile][0]), lower = scale_of_bits(scales[tile][1]);
#pragma unroll
      for (int n = 0; n < F::kTokenTiles; ++n) {
        float (&sum)[4] = sums_[tile][n];
        const float (&added)[4] = partial[tile][n];
        sum[0] += upper * added[0], sum[1] += upper * added[1];
        sum[2] += lower * added[2], sum[3] += lower * added[3];
      }
    }
  }

  template <class Function>
  __device__ __forceinline__ static void for_each_row(Function function) {
#pragma unroll
    for (int i = 0; i < 2 * F::kRowTiles; ++i) function(i / 2, i % 2);
  }

  // Returns the group of columns with a scale of their own that a column belongs to.
  __device__ __forceinline__ int group_of(int column) const {
    return min(column >> args_.scales.columns_log2, args_.scales.grid_columns - 1);
  }

  __device__ __forceinline__ bool has_zeros() const { return args_.scales.zero != nullptr; }
  __device__ __forceinline__ int scale_bytes() const { return args_.scales.type == kFloat32Scale ? 4 : 2; }

  // Loads the bits of a scale. Nothing computes with them before they are used, which would wait for them.
  __device__ __forceinline__ uint32_t scale_at(int tile, int half, int group) const {
    const uint8_t* row = scale_rows_[tile][half];
    if (args_.scales.type == kFloat32Scale) return __ldg(reinterpret_cast<const uint32_t*>(row) + group);
    return __ldg(reinterpret_cast<const uint16_t*>(row) + group);
  }
  __device__ __forceinline__ float scale_of_bits(uint32_t bits) const {
    const uint16_t low = static_cast<uint16_t>(bits);
    if (args_.scales.type == kFloat16Scale) return __half2float(*reinterpret_cast<const __half*>(&low));
    return __uint_as_float(args_.scales.type == kFloat32Scale ? bits : bits << 16);
  }
  __device__ __forceinline__ uint32_t zero_at(int tile, int half, int group) const {
    return has_zeros() ? zero_rows_[tile][half][group] : kSymmetricZero;
  }

  // Returns twice 128 + zero in bf16.
  __device__ __forceinline__ static uint32_t centre_of(uint32_t zero) { return 0x43004300u | zero << 16 | zero; }

  // Returns the column that a byte of each row is of.
  __device__ __forceinline__ static int column_at(int byte) { return byte * (W::kColumns / kChunkBytes); }

  // Loads 8 columns of this lane's token of each tile, at `column` from its first. Tokens that there are not are zero.
  __device__ __forceinline__ void load_tokens(uint4 (&tokens)[F::kTokenTiles], int column) const {
#pragma unroll
    for (int n = 0; n < F::kTokenTiles; ++n) {
      tokens[n] = make_uint4(0, 0, 0, 0);
      if (8 * n + lane_ / 4 < args_.num_tokens) {
        tokens[n] = *reinterpret_cast<const uint4*>(tokens_ + static_cast<size_t>(8 * n) * args_.columns + column);
      }
    }
  }

  // Multiplies the first or the second four of the 8 columns. Conversions put numbers 0 and 2 of a word into a pair, 1
  // and 3 into another: in e4m3 the bytes are put in order before, of integers the activations get the same order.
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
        convert_e4m3(__byte_perm(words[half][2 * piece + kHalf], 0, 0x3120), a[half], a[2 + half]);
      }
    }
#pragma unroll
    for (int n = 0; n < F::kTokenTiles; ++n) {
      const uint32_t low = kHalf == 0 ? tokens[n].x : tokens[n].z, high = kHalf == 0 ? tokens[n].y : tokens[n].w;
      if constexpr (W::kHasZeros) {
        multiply_16x8x16(sums[n], a, __byte_perm(low, high, 0x5410), __byte_perm(low, high, 0x7632));
      } else {
        multiply_16x8x16(sums[n], a, low, high);
      }
    }
  }

  static constexpr int kChunkBytes = 64;
  // Between the first columns of lanes: a lane has 16 bytes of a chunk, or of their words one for each scale.
  static constexpr int kLaneColumns = W::kGroups > 1 ? 8 : W::kColumns / 4;

  const ProductArgs& args_;
  const int lane_, warp_, row_bytes_;
  const bf16* const tokens_;  // this lane's first one, from its first column on
  const uint64_t policy_;
  const uint8_t* weights_[F::kRowTiles][2];              // this lane's rows, from its bytes of the first chunk on
  const uint8_t* scale_rows_[F::kRowTiles][2];           // their scales
  const uint8_t* zero_rows_[F::kRowTiles][2];            // and zero points, of 4-bit integers
  int group_ = -1;                                       // of the columns in `partial_`
  uint32_t scales_[F::kRowTiles][2] = {};                // the bits of its scales
  float partial_[F::kRowTiles][F::kTokenTiles][4] = {};  // sums of its columns, not scaled yet
  float sums_[F::kRowTiles][F::kTokenTiles][4] = {};
};

// Grid: a block for each kRows rows.
template <class F>
__global__ void __launch_bounds__(kProductThreads, F::kBlocks) product_kernel(const ProductArgs args) {
  extern __shared__ __align__(16) uint8_t shared_sums[];
  const int first_row = blockIdx.x * F::kRows;
  BlockProduct<F> product(args, first_row);
  product.multiply();
  product.store(shared_sums, first_row);
}

}  // namespace portable
}  // namespace meshserve
