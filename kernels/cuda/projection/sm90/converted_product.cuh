// Products of quantized weights with ordered activations (weight_formats.cuh). Weights are kept in 8 or 4 bits in
// shared memory; each warp reads its 16 rows with ldmatrix, converts them to bf16 without rounding, and multiplies them
// with wgmma from registers. The scales are applied to the float32 sums over the columns that share one.
#pragma once
#include "common/conversions.cuh"
#include "common/scales.cuh"
#include "common/sm90/wgmma.cuh"
#include "common/sm90/wgmma_registers.cuh"

namespace meshserve {

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
