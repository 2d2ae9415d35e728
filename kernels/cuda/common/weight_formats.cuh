// The formats of weights, and the forms of the activations that they are multiplied with.
//
// Split activations are for products on the FP8 tensor cores: two e4m3 numbers for each activation, the nearest one and
// the nearest of what it leaves over, which together have as many bits as bf16. A power of two for each 64 columns of a
// token keeps them within e4m3's range. A row takes as many bytes as in bf16: for each 64 columns, 64 first numbers and
// 64 second ones. Behind the rows follow the exponents of the powers, a byte for each 64 columns of a token.
//
// Single activations are the first of these numbers alone, rounded (W8A8): of each 128 columns, as many numbers and 128
// bytes that are not used. Both halves of the 128 columns have the same exponent, but for what gate and up leave.
//
// Integer activations are for 4-bit weights on the integer tensor cores: 16 bits in fixed point, as two 8-bit integers
// that stand for 256 h + l, with a power of two for each 64 columns of a token. A row takes as many bytes as split
// activations, with h in place of the first numbers and l in place of the second; within each 64 columns they have the
// order in which the weights' halves of bytes are multiplied (integer_product.cuh).
//
// Ordered activations are bf16, for weights that are converted to bf16 in registers. A lane reads 4 bytes of a row from
// shared memory at once, so the columns that it holds of each 16 are not those that wgmma expects. The sum over columns
// does not depend on their order if the activations have the same one.
#pragma once
#include <type_traits>

#include "common/ptx.cuh"

namespace meshserve {

// Scales of a stacked matrix [rows, columns], one for `rows_each` rows and 2^columns_log2 columns.
struct Scales {
  const void* values;   // [grid_rows, grid_columns]
  const uint8_t* zero;  // the same of 4-bit integers; null: 8
  int type;             // the values': see ScaleType
  int rows_each, columns_log2, grid_rows, grid_columns;
};
enum ScaleType : int { kFloat32Scale, kBfloat16Scale, kFloat16Scale };

struct ScaledMatrix {
  const void* data;
  Scales scales;
};

struct Bf16Weights {
  using Matrix = const bf16*;
  static constexpr bool kIsQuantized = false, kIsInt4 = false, kIsSplit = false;
  static constexpr int kBlockColumns = 64;  // 128 bytes, the swizzle's width
};
// e4m3, multiplied with ordered activations.
struct Fp8Weights {
  using Matrix = ScaledMatrix;
  static constexpr bool kIsQuantized = true, kIsInt4 = false, kIsSplit = false;
  static constexpr int kBlockColumns = 128;
};
// e4m3, multiplied with split activations.
struct SplitFp8Weights {
  using Matrix = ScaledMatrix;
  static constexpr bool kIsQuantized = true, kIsInt4 = false, kIsSplit = true;
  static constexpr int kBlockColumns = 128;
};
// The same for a layer with a router and experts.
struct RoutedFp8Weights : SplitFp8Weights {};
// The same for a single token, whose ordered activations the product's kernel splits itself.
struct OneTokenFp8Weights : SplitFp8Weights {};
// e4m3, multiplied with single activations.
struct SingleFp8Weights : SplitFp8Weights {};
// The same for a layer with a router and experts, whose tokens are the rows of the product.
struct RoutedSingleFp8Weights : SingleFp8Weights {};
// Unsigned, two in a byte: column 2j is the low half of byte j. Multiplied with ordered activations.
struct Int4Weights {
  using Matrix = ScaledMatrix;
  static constexpr bool kIsQuantized = true, kIsInt4 = true, kIsSplit = false;
  static constexpr int kBlockColumns = 256;
};
// The same, multiplied with integer activations.
struct IntegerInt4Weights {
  using Matrix = ScaledMatrix;
  static constexpr bool kIsQuantized = true, kIsInt4 = true, kIsSplit = true;
  static constexpr int kBlockColumns = 256;
};
// e4m3, multiplied by cuBLASLt with activations that are rounded to e4m3, with a scale for each 128 columns of a token.
struct RoundedFp8Weights {
  using Matrix = ScaledMatrix;
  static constexpr bool kIsQuantized = true, kIsInt4 = false, kIsSplit = false;
};

template <class W>
constexpr bool kHasTokenRows = std::is_same_v<W, RoutedSingleFp8Weights>;
template <class W>
constexpr bool kIsSingle = std::is_same_v<W, SingleFp8Weights> || kHasTokenRows<W>;
// Tiles [N, 64] of activations for a block of columns, 128 bytes of each token.
template <class W>
constexpr int kTilesPerBlock = kIsSingle<W> ? 1 : W::kBlockColumns / 64;

template <class W>
constexpr bool kSplitsInput = std::is_same_v<W, OneTokenFp8Weights>;

template <class W>
constexpr bool kIsRouted = std::is_same_v<W, RoutedFp8Weights> || kHasTokenRows<W>;
// The format whose activations a format takes as input, and the one whose activations its output projection leaves.
template <class W>
using InputFormat = std::conditional_t<
    std::is_same_v<W, RoutedFp8Weights>, SplitFp8Weights,
    std::conditional_t<kHasTokenRows<W>, SingleFp8Weights, std::conditional_t<kSplitsInput<W>, Fp8Weights, W>>>;
template <class W>
using OutputFormat = std::conditional_t<kIsRouted<W> || kSplitsInput<W>, Fp8Weights, W>;

// The format of the QKV projection, whose results are the same whatever follows the layer.
template <class W>
using QkvFormat = std::conditional_t<std::is_same_v<W, RoutedFp8Weights>, SplitFp8Weights, W>;

// What a format has beside projections for QKV and with a residual: gate and up; calls of parts of a layer and meshes;
// the output projection with a router; the output head; QKV merged with attention.
template <class W>
constexpr bool kHasMlp = !kIsRouted<W> && !kSplitsInput<W>;
template <class W>
constexpr bool kHasParts = kHasMlp<W> && !kIsSingle<W>;
template <class W>
constexpr bool kHasRouter = std::is_same_v<W, Bf16Weights> || std::is_same_v<W, Fp8Weights> || kSplitsInput<W>;
template <class W>
constexpr bool kHasLogits = std::is_same_v<W, SplitFp8Weights>;
template <class W>
constexpr bool kHasMergedHeads = std::is_same_v<W, Bf16Weights>;

// Returns the width of the products of a step, in tokens: the N of their wgmma instructions.
constexpr int width_of(int tokens) { return tokens <= 8 ? 8 : tokens <= 16 ? 16 : tokens <= 32 ? 32 : 64; }

constexpr int kExponentColumns = 64;  // that share an exponent

// Returns the exponents behind activations [tokens, columns].
template <class Activations>
__host__ __device__ __forceinline__ auto exponents_of(Activations* activations, size_t tokens, size_t columns) {
  using Byte = std::conditional_t<std::is_const_v<Activations>, const uint8_t, uint8_t>;
  return reinterpret_cast<Byte*>(activations + tokens * columns);
}

// Returns the bytes of activations in any form.
inline size_t activation_bytes(size_t tokens, size_t columns) {
  return tokens * (columns * 2 + columns / kExponentColumns);
}

// Returns what an exponent stands for: 2^(exponent - 127), 0 for 0, infinity for 255.
__device__ __forceinline__ float power_of(uint32_t exponent) { return __uint_as_float(exponent << 23); }

// Returns where the first two of columns `column` to `column` + 3 (a multiple of 4) are stored in ordered activations,
// in pairs of elements; the other two are 4 pairs further. 8-bit weights reorder each 16 columns, 4-bit weights
// each 32.
template <class W>
__device__ __forceinline__ int ordered_pair(int column) {
  const int chunk = column / 4;
  if (!W::kIsInt4) return chunk / 4 * 8 + chunk % 4;
  return chunk / 8 * 16 + chunk % 2 * 8 + chunk / 2 % 4;
}

// Stores four columns of integer activations, and the exponent that their 64 columns share; see `store_activations`.
__device__ __forceinline__ void store_integers(bf16* row, uint8_t* exponents, int column, float4 v) {
  // The largest number gets 15 bits and a sign. The product has the weights times 16, which the exponent takes back.
  constexpr uint32_t kBits = 14, kLeast = kBits + 4;
  constexpr int kMost = 127 * 256 + 127;                                // that two 8-bit integers can stand for
  const float sum = fabsf(v.x) + fabsf(v.y) + fabsf(v.z) + fabsf(v.w);  // neither finite with infinity nor with NaN
  const float mine = fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w)));
  const float largest = largest_of_16_lanes(sum < INFINITY ? mine : INFINITY);
  const uint32_t exponent = max(__float_as_uint(largest) >> 23, kLeast);
  const float factor = power_of(254 + kBits - exponent);
  auto integer = [&](float x) { return static_cast<uint32_t>(min(__float2int_rn(x * factor), kMost)); };
  const uint32_t a = integer(v.x), b = integer(v.y), c = integer(v.z), d = integer(v.w);
  const int chunk = column / kExponentColumns, at = column % kExponentColumns;
  uint16_t* to =
      reinterpret_cast<uint16_t*>(row + chunk * kExponentColumns) + at / 8 % 4 * 8 + at / 32 * 4 + at / 4 % 2;
  to[0] = static_cast<uint16_t>(__byte_perm(a + 128, c + 128, 0x51));
  to[2] = static_cast<uint16_t>(__byte_perm(b + 128, d + 128, 0x51));
  to[32] = static_cast<uint16_t>(__byte_perm(a, c, 0x40));
  to[34] = static_cast<uint16_t>(__byte_perm(b, d, 0x40));
  if (at == 0) exponents[chunk] = static_cast<uint8_t>(exponent == 255 ? 255 : exponent - kLeast);
}

// Stores columns `column` to `column` + 3 (a multiple of 4) of a row of activations for a product with weights of the
// format. `row` and `exponents`, which split and single activations have, may begin at any multiple of 64 columns, of
// 128 for single ones. The lanes of a warp with the same 64 columns must call it together, or those with the same
// kColumns of single activations, which then share a power.
template <class W, int kColumns = 128>
__device__ __forceinline__ void store_activations(bf16* row, uint8_t* exponents, int column, float4 v) {
  if constexpr (W::kIsSplit && W::kIsInt4) {
    store_integers(row, exponents, column, v);
  } else if constexpr (W::kIsSplit) {
    // The largest number is scaled to 128 and more, below 256. e4m3 reaches 448.
    constexpr uint32_t kLargest = 7;
    float largest = largest_of_16_lanes(fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w))));
    if (kIsSingle<W> && kColumns == 128) largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 16));
    const uint32_t exponent = max(__float_as_uint(largest) >> 23, kLargest);
    const float factor = power_of(254 + kLargest - exponent);
    const E4m3Pair low = split_e4m3(v.x * factor, v.y * factor), high = split_e4m3(v.z * factor, v.w * factor);
    const int chunk = column / kExponentColumns, at = column % kExponentColumns;
    if constexpr (kIsSingle<W>) {
      reinterpret_cast<uint32_t*>(row + column / 128 * 128)[column % 128 / 4] =
          __byte_perm(low.first, high.first, 0x5410);
    } else {
      uint32_t* to = reinterpret_cast<uint32_t*>(row + chunk * kExponentColumns) + at / 4;
      to[0] = __byte_perm(low.first, high.first, 0x5410);
      to[kExponentColumns / 4] = __byte_perm(low.second, high.second, 0x5410);
    }
    // Infinity stays infinite, and NaN is a number of e4m3.
    if (at == 0) exponents[chunk] = static_cast<uint8_t>(exponent == 255 ? 255 : exponent - kLargest);
  } else if constexpr (W::kIsQuantized) {
    uint32_t* to = reinterpret_cast<uint32_t*>(row) + ordered_pair<W>(column);
    to[0] = pack_bf16(v.x, v.z);
    to[4] = pack_bf16(v.y, v.w);
  } else {
    *reinterpret_cast<uint2*>(row + column) = make_uint2(pack_bf16(v.x, v.y), pack_bf16(v.z, v.w));
  }
}

}  // namespace meshserve
