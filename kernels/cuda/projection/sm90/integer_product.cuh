// Products of 4-bit weights with integer activations (weight_formats.cuh), on the integer tensor cores.
//
// Half a byte, moved to the upper half of a byte with its highest bit inverted, is 16 (q - 8) as an 8-bit integer: four
// weights take one or two operations, where bf16 takes six. Each warp multiplies its 16 rows by itself (mma.sync), so
// no product waits for the other warps of a group, and a narrow one is not rounded up to 64 rows. Sums are exact.
//
// A lane holds 4 bytes of 32 columns of a row: the even columns in their lower halves are one operand of 16 columns,
// the odd ones in the upper halves the other. The two integers of an activation are neighboring columns of the result,
// which one lane holds. A zero point z subtracts (z - 8) times the sum of the activations, which is a product with
// ones.
#pragma once
#include "projection/sm90/split_product.cuh"

namespace meshserve {

// At most 8 tokens: with more, the rate of these products, far below that of wgmma, decides.
template <>
struct BlockProduct<8, IntegerInt4Weights> {
  static constexpr int kTokens = 8, kInputBytes = kTokens * 128;  // a tile is [8, 64]

  float (&sums)[kTokens / 2];
  uint32_t weights;  // this lane's address for ldmatrix; the next 32 bytes of the rows are at weights ^ 32
  uint32_t input;    // tiles [8, 64]
  const ScaleTable& table;
  int column;  // the block's first column

  __device__ __forceinline__ BlockProduct(float (&sums)[kTokens / 2], uint32_t weights, uint32_t input,
                                          const ScaleTable& table, int column)
      : sums(sums), weights(weights), input(input), table(table), column(column) {}

  __device__ __forceinline__ void run() {
    if (table.columns_log2 < 6) {
      multiply<2, true, 2>();
    } else if (table.has_zero) {
      multiply<1, true, 2>();
    } else if (table.num_tokens > 1) {
      multiply<1, false, 2>();
    } else {
      multiply<1, false, 1>();  // one token is an even one
    }
  }

 private:
  // Returns four weights as integers, times 16, from the upper and from the lower halves of bytes.
  static __device__ __forceinline__ uint32_t upper_halves(uint32_t x) { return and_xor(x, 0xF0F0F0F0u, 0x80808080u); }
  static __device__ __forceinline__ uint32_t lower_halves(uint32_t x) { return upper_halves(x << 4); }

  // kScales: for each 64 columns. kParities: one product takes the even tokens, another one the odd ones.
  template <int kScales, bool kHasZero, int kParities>
  __device__ __forceinline__ void multiply() {
    const int lane = threadIdx.x % 32, pair = lane / 8 * 2;
    const uint32_t even = input + pair * 128 + (lane % 8 ^ pair) * 16, odd = (even + 128) ^ 16;
    const uint32_t ones[4] = {0x10101010u, 0x10101010u, 0x10101010u, 0x10101010u};
    const uint32_t exponents = table.exponents + (column - table.first_column) / kExponentColumns * kTokens;
#pragma unroll
    for (int unit = 0; unit < 4; ++unit) {
      uint32_t raw[4];
      load_matrices(raw, weights ^ (unit * 32));
      RowScales scales[kScales];
#pragma unroll
      for (int s = 0; s < kScales; ++s) scales[s] = scales_at(table, column + 64 * unit + 32 * s);
      const uint32_t a[2][4] = {
          {lower_halves(raw[0]), lower_halves(raw[1]), upper_halves(raw[0]), upper_halves(raw[1])},
          {lower_halves(raw[2]), lower_halves(raw[3]), upper_halves(raw[2]), upper_halves(raw[3])}};
      const uint32_t two = load_shared_half(exponents + unit * kTokens);  // the exponents of the lane's two tokens
#pragma unroll
      for (int parity = 0; parity < kParities; ++parity) {
        const uint4 b = load_shared((parity == 0 ? even : odd) + unit * kInputBytes);
        const float power = power_of(parity == 0 ? two & 255 : two >> 8);
        int products[kScales][4] = {}, inputs[kScales][4] = {};
        multiply_16x8x32(products[0], a[0], b.x, b.y);
        multiply_16x8x32(products[kScales - 1], a[1], b.z, b.w);
        if (kHasZero) {
          multiply_16x8x32(inputs[0], ones, b.x, b.y);
          multiply_16x8x32(inputs[kScales - 1], ones, b.z, b.w);
        }
#pragma unroll
        for (int s = 0; s < kScales; ++s) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {  // the lane's two rows
            const uint32_t word = scales[s].words[half];
            int product = products[s][2 * half] * 256 + products[s][2 * half + 1];
            if (kHasZero) {
              product -= (static_cast<int>(word & 15u) - kSymmetricZero) * (inputs[s][0] * 256 + inputs[s][1]);
            }
            float& sum = sums[2 * half + parity];
            sum = fmaf(scale_of<IntegerInt4Weights>(word) * power, static_cast<float>(product), sum);
          }
        }
      }
    }
  }
};

}  // namespace meshserve
