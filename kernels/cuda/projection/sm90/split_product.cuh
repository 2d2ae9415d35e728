// Products of FP8 weights with split activations, or with those of one number (weight_formats.cuh): the FP8 tensor
// cores multiply the weights as they lie in shared memory. They cut off what is far smaller than a sum, so the sums of
// 64 columns are added up in float32.
//
// With 64 tokens, split activations' two products for each weight and as many more additions take longer than the
// conversion to bf16 in registers (converted_product.cuh).
#pragma once
#include "common/sm90/wgmma_e4m3.cuh"
#include "projection/sm90/converted_product.cuh"

namespace meshserve {

// Fills the table of exponents [groups, N] with `num_threads` threads. Columns and tokens that do not exist get 0.
// `exponents` is that of the first token and the first column; `num_real` of the groups exist.
template <int N>
__device__ __forceinline__ void load_exponents(const uint8_t* exponents, int row_groups, int num_tokens, int num_real,
                                               int num_groups, int num_threads, uint32_t to) {
  constexpr int kTogether = 4;  // loads in flight at a time
  constexpr int kAtOnce = 8;    // groups of a token
  if (num_real == num_groups && num_groups % kAtOnce == 0 && reinterpret_cast<size_t>(exponents) % kAtOnce == 0 &&
      row_groups % kAtOnce == 0) {
#pragma unroll 1
    for (int i = threadIdx.x; i < num_groups / kAtOnce * N; i += num_threads) {
      const int token = i * kAtOnce / num_groups, group = i * kAtOnce % num_groups;
      uint2 bytes = make_uint2(0, 0);
      if (token < num_tokens) {
        bytes = *reinterpret_cast<const uint2*>(exponents + static_cast<size_t>(token) * row_groups + group);
      }
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        store_shared_byte(to + (group + j) * N + token, (j < 4 ? bytes.x : bytes.y) >> 8 * (j % 4));
      }
    }
    return;
  }
  const int total = num_groups * N;
#pragma unroll 1
  for (int first = threadIdx.x; first < total; first += kTogether * num_threads) {
    uint8_t bytes[kTogether];
#pragma unroll
    for (int u = 0; u < kTogether; ++u) {
      const int i = first + u * num_threads, token = i % N, group = i / N;
      const bool is_real = token < num_tokens && group < num_real;
      bytes[u] = is_real ? exponents[static_cast<size_t>(token) * row_groups + group] : 0;
    }
#pragma unroll
    for (int u = 0; u < kTogether; ++u) {
      const int i = first + u * num_threads;
      if (i < total) store_shared_byte(to + i, bytes[u]);
    }
  }
}

// Splits ordered activations of a token, of which `num_columns` begin at `from`, as the first row of tiles [N, 64] at
// `to` and of the exponents [groups, N]. A thread splits 4 columns, so that all of it is done in few instructions.
template <int N>
__device__ __forceinline__ void split_ordered(const bf16* from, int num_columns, int num_threads, uint32_t to,
                                              uint32_t exponents) {
  static_assert(N % 8 == 0);  // so that the first row of a tile is not swizzled
  constexpr int kWidth = 4;
  constexpr uint32_t kLargest = 7;  // as store_activations
#pragma unroll 1
  for (int column = kWidth * threadIdx.x; column < num_columns; column += kWidth * num_threads) {
    const uint32_t* words = reinterpret_cast<const uint32_t*>(from) + ordered_pair<Fp8Weights>(column);
    const uint32_t even = __ldcg(words), odd = __ldcg(words + 4);  // columns 0 and 2, 1 and 3
    const uint32_t mine = max(max(even & 0x7FFFu, odd & 0x7FFFu), max(even >> 16 & 0x7FFFu, odd >> 16 & 0x7FFFu));
    const uint32_t largest = __float_as_uint(largest_of_16_lanes(__uint_as_float(mine)));
    const uint32_t exponent = max(largest >> 7, kLargest);
    const float factor = power_of(254 + kLargest - exponent);
    const E4m3Pair low = split_e4m3(__uint_as_float(even << 16) * factor, __uint_as_float(odd << 16) * factor);
    const E4m3Pair high =
        split_e4m3(__uint_as_float(even & 0xFFFF0000u) * factor, __uint_as_float(odd & 0xFFFF0000u) * factor);
    const int group = column / kExponentColumns, at = column % kExponentColumns;
    store_shared_word(to + group * N * 128 + at, __byte_perm(low.first, high.first, 0x5410));
    store_shared_word(to + group * N * 128 + 64 + at, __byte_perm(low.second, high.second, 0x5410));
    if (at == 0) store_shared_byte(exponents + group * N, exponent == 255 ? 255 : exponent - kLargest);
  }
}

// Multiplies one block of columns: sums += scale * 2^exponent * (weights input), in units of 64 columns. kNumbers: e4m3
// numbers for each activation.
template <int N, int kNumbers>
struct E4m3BlockProduct {
  static constexpr int kBuffers = N <= 32 ? 2 : 1;  // units in flight, as registers allow
  static constexpr int kInputBytes = N * 128;       // a tile's: 64 columns of two numbers, or 128 of one

  float (&sums)[N / 2];
  uint32_t weights, input;  // the tile, and tiles of activations
  const ScaleTable& table;
  int column;  // the block's first column

  float partial[kBuffers][N / 2];

  __device__ __forceinline__ E4m3BlockProduct(float (&sums)[N / 2], uint32_t weights, uint32_t input,
                                              const ScaleTable& table, int column)
      : sums(sums), weights(weights), input(input), table(table), column(column) {}

  __device__ __forceinline__ void run() {
    if constexpr (kBuffers == 2) {
      multiply<0>();
      multiply<1>();
      wgmma_wait<1>();
      add<0>();
      wgmma_wait<0>();
      add<1>();
    } else {
      multiply<0>();
      wgmma_wait<0>();
      add<0>();
      multiply<1>();
      wgmma_wait<0>();
      add<1>();
    }
  }

 private:
  template <int kUnit>
  __device__ __forceinline__ void multiply() {
    wgmma_begin();
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int step = 2 * kUnit + j;  // a step has 32 columns
      const uint64_t a = moved_on(tile_descriptor(weights), 32 * step);
      const uint64_t b = moved_on(tile_descriptor(input), kNumbers == 2 ? kUnit * kInputBytes + 32 * j : 32 * step);
      multiply_e4m3<N>(partial[kUnit % kBuffers], a, b, j);
      if constexpr (kNumbers == 2) multiply_e4m3<N>(partial[kUnit % kBuffers], a, moved_on(b, 64), 1);
    }
    wgmma_commit();
  }

  template <int kUnit>
  __device__ __forceinline__ void add() {
    float (&of)[N / 2] = partial[kUnit % kBuffers];
    keep_in_place(of);
    const RowScales found = scales_at(table, column + 64 * kUnit);
    const float scale[2] = {__uint_as_float(found.words[0]), __uint_as_float(found.words[1])};
    const uint32_t at = table.exponents + ((column - table.first_column) / kExponentColumns + kUnit) * N;
#pragma unroll
    for (int j = 0; j < N / 8; ++j) {
      const uint32_t two = load_shared_half(at + 8 * j);  // the exponents of the lane's two tokens
      const float power[2] = {power_of(two & 255), power_of(two >> 8)};
#pragma unroll
      for (int i = 4 * j; i < 4 * j + 4; ++i) sums[i] = fmaf(power[i % 2], scale[i / 2 % 2] * of[i], sums[i]);
    }
  }
};

template <int N>
struct BlockProduct<N, SplitFp8Weights> : E4m3BlockProduct<N, 2> {
  using E4m3BlockProduct<N, 2>::E4m3BlockProduct;
};
template <int N>
struct BlockProduct<N, RoutedFp8Weights> : E4m3BlockProduct<N, 2> {
  using E4m3BlockProduct<N, 2>::E4m3BlockProduct;
};
template <int N>
struct BlockProduct<N, OneTokenFp8Weights> : E4m3BlockProduct<N, 2> {
  using E4m3BlockProduct<N, 2>::E4m3BlockProduct;
};
template <int N>
struct BlockProduct<N, SingleFp8Weights> : E4m3BlockProduct<N, 1> {
  using E4m3BlockProduct<N, 1>::E4m3BlockProduct;
};

// The same of one number for each activation, with 64 tokens as the rows of the product: a lane has two tokens and 16
// rows of weights, so that 8 factors scale all of its sums. The block's columns share a scale and a power.
template <>
struct BlockProduct<64, RoutedSingleFp8Weights> {
  float (&sums)[32];
  uint32_t weights, input;  // 64 rows of the tile, and the tile of activations
  const ScaleTable& table;  // whose address is that of the first of 4 scales, each of 16 rows
  int column;               // the block's first column

  float partial[32];

  __device__ __forceinline__ BlockProduct(float (&sums)[32], uint32_t weights, uint32_t input, const ScaleTable& table,
                                          int column)
      : sums(sums), weights(weights), input(input), table(table), column(column) {}

  __device__ __forceinline__ void run() {
    wgmma_begin();
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      multiply_e4m3<64>(partial, moved_on(tile_descriptor(input), 32 * j), moved_on(tile_descriptor(weights), 32 * j),
                        j);
    }
    wgmma_commit();
    const int group = min(column >> table.columns_log2, table.last_group) - table.first_group;
    const float4 rows = load_shared_float4(table.address + group * table.group_bytes);
    const uint32_t at = table.exponents + (column - table.first_column);  // a byte of 64 tokens for each 64 columns
    const float power[2] = {power_of(load_shared_byte(at)), power_of(load_shared_byte(at + 8))};
    const float scale[4] = {rows.x, rows.y, rows.z, rows.w};
    wgmma_wait<0>();
    keep_in_place(partial);
#pragma unroll
    for (int i = 0; i < 32; ++i) sums[i] = fmaf(power[i / 2 % 2] * scale[i / 8], partial[i], sums[i]);
  }
};

}  // namespace meshserve
