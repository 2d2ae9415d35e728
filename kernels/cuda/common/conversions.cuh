// Conversion of 8-bit and 4-bit numbers to bf16, without rounding.
//
// e4m3 to bf16: sign, exponent and mantissa are moved to their places, which gives 2^-120 of the number (a bf16
// subnormal if the e4m3 is one), and multiplied by 2^120. 4-bit integers to bf16: as the low bits of the mantissa of
// 128, which gives 128 + q, from which 128 + zero is subtracted.
#pragma once
#include "common/ptx.cuh"

namespace meshserve {

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

}  // namespace meshserve
