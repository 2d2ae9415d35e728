// Products of quantised weights with ordered activations (weight_formats.cuh). Weights stay in 8 or 4 bits in shared
// memory; each warp reads its 16 rows with ldmatrix, converts them to bf16 without rounding, and multiplies them with
// wgmma from registers. The scales are applied to the float32 sums over the columns that share one.
//
// e4m3 to bf16: sign, exponent and mantissa are moved to their places, which gives 2^-120 of the number (a bf16
// subnormal if the e4m3 is one), and multiplied by 2^120. 4-bit integers to bf16: as the low bits of the mantissa of
// 128, which gives 128 + q, from which 128 + zero is subtracted.
#pragma once
#include "weight_formats.cuh"
#include "wgmma.cuh"
#include "wgmma_registers.cuh"

namespace meshserve {

// ---- scales in shared memory -------------------------------------------------------------------------------------
// A block keeps the scales of its tile and its range of columns as a table [groups, entries]. An entry is for each row
// of the tile, or for each 16 rows (a warp's) if these always share a scale. The lowest 4 bits of a scale of 4-bit
// integers, which have at most 16 bits, are zero and hold the zero point.
constexpr int kSymmetricZero = 8;

__host__ __device__ constexpr int scale_entries(int rows_each) { return rows_each % 16 == 0 ? 8 : 128; }
// Returns the number of groups of columns that a range of blocks can touch.
__host__ __device__ constexpr int scale_groups(int blocks, int block_columns, int columns_log2) {
  return (blocks * block_columns >> columns_log2) + 1;
}

struct ScaleTable {
  uint32_t address;  // of this lane's first row
  int second;        // bytes from there to its second row's entry
  int group_bytes, columns_log2, first_group, last_group;
  // With split or integer activations, the table of their exponents follows, [range of columns / 64, N]:
  uint32_t exponents;  // address of this lane's first token
  int first_column;    // of the exponents
  int num_tokens;      // with integer activations: that there are, at most N or more
  bool has_zero;       // likewise: whether the scales hold zero points other than kSymmetricZero
};

struct RowScales {  // of a lane's two rows
  uint32_t words[2];
};

// A scale on its way from memory. Nothing computes with it before it is used: a conversion right after the load would
// wait for it, and so would the loads of the next steps.
struct ScaleInFlight {
  uint32_t word, selector;  // the aligned word that holds it, and which of its bytes do

  __device__ __forceinline__ void load(const Scales& scales, size_t at) {
    const bool is_word = scales.type == kFloat32Scale;
    const size_t byte = at * (is_word ? 4 : 2);
    word = __ldg(reinterpret_cast<const uint32_t*>(static_cast<const uint8_t*>(scales.values) + (byte & ~size_t{3})));
    const uint32_t half = scales.type == kBfloat16Scale ? 0x1044u : 0x4410u;  // to the upper or the lower half
    const uint32_t second = scales.type == kBfloat16Scale ? 0x3244u : 0x4432u;
    selector = is_word ? 0x3210u : byte % 4 == 0 ? half : second;
  }
  __device__ __forceinline__ float value(const Scales& scales) const {
    const uint32_t bits = __byte_perm(word, 0u, selector);
    const uint16_t low = static_cast<uint16_t>(bits);
    const float of_half = __half2float(*reinterpret_cast<const __half*>(&low));
    return scales.type == kFloat16Scale ? of_half : __uint_as_float(bits);
  }
};

// Fills the table with `num_threads` threads. `row` is the first row of the tile in the stacked matrix; its second 64
// rows begin `second_half` further.
template <class W>
__device__ __forceinline__ void load_scales(const Scales& scales, int row, int second_half, int first_group,
                                            int num_groups, int num_threads, uint32_t to) {
  // Loads in flight at a time. Of 8-bit weights there are few scales, and blocks that begin late have no time for more
  // instructions.
  constexpr int kTogether = W::kIsInt4 ? 8 : 1;
  const int entries = scale_entries(scales.rows_each), rows = 128 / entries, total = entries * num_groups;
#pragma unroll 1
  for (int first = threadIdx.x; first < total; first += kTogether * num_threads) {
    ScaleInFlight values[kTogether];
    uint32_t zeros[kTogether];
#pragma unroll
    for (int u = 0; u < kTogether; ++u) {
      const int i = min(first + u * num_threads, total - 1), entry = i / num_groups, group = i % num_groups;
      const int local = entry * rows, at_row = row + (local < 64 ? local : second_half + local - 64);
      const int grid_row = min(at_row / scales.rows_each, scales.grid_rows - 1);  // a tile may exceed the matrix
      const size_t at =
          static_cast<size_t>(grid_row) * scales.grid_columns + min(first_group + group, scales.grid_columns - 1);
      values[u].load(scales, at);
      zeros[u] = scales.zero != nullptr ? scales.zero[at] : kSymmetricZero;
    }
#pragma unroll
    for (int u = 0; u < kTogether; ++u) {
      const int i = first + u * num_threads, entry = i / num_groups, group = i % num_groups;
      uint32_t word = __float_as_uint(values[u].value(scales));
      if (W::kBlockColumns == Int4Weights::kBlockColumns) word |= zeros[u];
      if (i < total) store_shared_word(to + (group * entries + entry) * 4, word);
    }
  }
}

__device__ __forceinline__ RowScales scales_at(const ScaleTable& table, int column) {
  const int group = min(column >> table.columns_log2, table.last_group) - table.first_group;
  const uint32_t at = table.address + group * table.group_bytes;
  return {{load_shared_word(at), load_shared_word(at + table.second)}};
}

template <class W>
__device__ __forceinline__ float scale_of(uint32_t word) {
  return __uint_as_float(W::kBlockColumns == Int4Weights::kBlockColumns ? word & ~15u : word);
}

// ---- conversion --------------------------------------------------------------------------------------------------
// Converts e4m3 bytes 0 and 2 of a word to `even`, 1 and 3 to `odd`.
__device__ __forceinline__ void convert_e4m3(uint32_t x, uint32_t& even, uint32_t& odd) {
  constexpr uint32_t k2To120 = 0x7B807B80u;
  odd = multiply_bf16x2((x >> 4 & 0x07F007F0u) | (x & 0x80008000u), k2To120);
  even = multiply_bf16x2((x << 4 & 0x07F007F0u) | (x << 8 & 0x80008000u), k2To120);
}

// Converts 4-bit integers 0 and 2 of a word's half to `even`, 1 and 3 to `odd`. `zero` is twice 128 + zero in bf16.
template <int kHalf>
__device__ __forceinline__ void convert_int4(uint32_t x, uint32_t zero, uint32_t& even, uint32_t& odd) {
  constexpr uint32_t kExponent = 0x43434343u, kSelected = kHalf == 0 ? 0x4140 : 0x4342;
  even = subtract_bf16x2(__byte_perm(x & 0x0F0F0F0Fu, kExponent, kSelected), zero);
  odd = subtract_bf16x2(__byte_perm(x >> 4 & 0x0F0F0F0Fu, kExponent, kSelected), zero);
}

// ---- the product -------------------------------------------------------------------------------------------------
template <class W>
constexpr int kStepsPerLoad = W::kBlockColumns == Int4Weights::kBlockColumns ? 4 : 2;  // an ldmatrix has 32 bytes a row

// Converts step kStep of a block (16 columns) from what ldmatrix loaded.
template <class W, int kStep>
__device__ __forceinline__ void convert_step(uint32_t* a, const uint32_t (&raw)[4], const RowScales& scales) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {  // the lane's two rows
    if constexpr (kStepsPerLoad<W> == 2) {
      convert_e4m3(raw[kStep % 2 * 2 + half], a[half], a[2 + half]);
    } else {
      const uint32_t zero = (scales.words[half] & 15u) * 0x00010001u + 0x43004300u;
      convert_int4<kStep % 2>(raw[kStep / 2 % 2 * 2 + half], zero, a[half], a[2 + half]);
    }
  }
}

// Multiplies one block of columns: sums += scale * (weights input). A unit is what is converted while the unit before
// it is multiplied. Few tokens: units of 64 columns, in two chains; those of 4-bit weights each have scales of their
// own. Many tokens, for lack of registers: units of 32 columns that add to one chain until the scale changes or the
// block ends.
template <int N, class W>
struct BlockProduct {
  static constexpr int kSteps = W::kBlockColumns / 16;
  static constexpr int kUnitSteps = N <= 16 ? 4 : 2, kChains = N <= 16 ? 2 : 1, kBuffers = N <= 32 ? 2 : 1;
  static constexpr int kUnits = kSteps / kUnitSteps, kInputBytes = N * 128;
  static constexpr int kScales = kStepsPerLoad<W> == 4 ? kChains : 1;  // per unit

  float (&sums)[N / 2];
  uint32_t weights;  // this lane's address for ldmatrix; the next 32 bytes of the rows are at weights ^ 32
  uint32_t input;    // tiles [N, 64]
  const ScaleTable& table;
  int column;       // the block's first column
  int later_units;  // with one chain: units less one after which its sums are scaled, a power of two less one

  uint32_t raw[4];
  uint32_t a[kBuffers][4 * kUnitSteps];
  float partial[kChains][N / 2];
  RowScales scales[kBuffers][kScales];

  __device__ __forceinline__ BlockProduct(float (&sums)[N / 2], uint32_t weights, uint32_t input,
                                          const ScaleTable& table, int column)
      : sums(sums),
        weights(weights),
        input(input),
        table(table),
        column(column),
        later_units(max(1, min(kUnits, (1 << min(table.columns_log2, 16)) / (16 * kUnitSteps))) - 1) {}

  __device__ __forceinline__ void run() { unit<0>(); }

 private:
  template <int kUnit>
  __device__ __forceinline__ void unit() {
    if constexpr (kUnit < kUnits) {
      constexpr int kBuffer = kUnit % kBuffers;
      if (kBuffers == 1) finish<kUnit - 1>();
#pragma unroll
      for (int c = 0; c < kScales; ++c) {
        scales[kBuffer][c] = scales_at(table, column + 16 * (kUnit * kUnitSteps + c * (kUnitSteps / kScales)));
      }
      convert<kUnit, 0>();
      if (kBuffers > 1) finish<kUnit - 1>();
      wgmma_begin();
#pragma unroll
      for (int j = 0; j < kUnitSteps; ++j) {
        constexpr int kPerChain = kUnitSteps / kChains;
        const int step = kUnit * kUnitSteps + j;
        const int accumulate = j % kPerChain > 0 || (kChains == 1 && (kUnit & later_units) != 0);
        multiply_registers<N>(partial[j / kPerChain], a[kBuffer] + 4 * j,
                              tile_descriptor(input + step / 4 * kInputBytes) + 2 * (step % 4), accumulate);
      }
      wgmma_commit();
      unit<kUnit + 1>();
    } else {
      finish<kUnits - 1>();
    }
  }

  template <int kUnit, int kStep>
  __device__ __forceinline__ void convert() {
    if constexpr (kStep < kUnitSteps) {
      constexpr int kAt = kUnit * kUnitSteps + kStep;
      if (kAt % kStepsPerLoad<W> == 0) load_matrices(raw, weights ^ (kAt / kStepsPerLoad<W> * 32));
      convert_step<W, kAt>(a[kUnit % kBuffers] + 4 * kStep, raw,
                           scales[kUnit % kBuffers][kStep / (kUnitSteps / kScales)]);
      convert<kUnit, kStep + 1>();
    }
  }

  // Waits for a unit's product, and scales it if the next unit begins anew.
  template <int kUnit>
  __device__ __forceinline__ void finish() {
    if constexpr (kUnit >= 0) {
      wgmma_wait<0>();
      if (kChains == 1 && ((kUnit + 1) & later_units) != 0) return;
#pragma unroll
      for (int c = 0; c < kChains; ++c) {
        keep_in_place(partial[c]);
        const RowScales& of = scales[kUnit % kBuffers][c % kScales];
        const float scale[2] = {scale_of<W>(of.words[0]), scale_of<W>(of.words[1])};
#pragma unroll
        for (int i = 0; i < N / 2; ++i) sums[i] = fmaf(scale[i / 2 % 2], partial[c][i], sums[i]);
      }
    }
  }
};

}  // namespace meshserve
