// e4m3 numbers on the host, for the files that replace CUDA.
#pragma once
#include <array>
#include <cmath>
#include <cstdint>

namespace meshserve {

inline float from_e4m3(uint32_t bits) {
  static const auto values = [] {
    std::array<float, 256> all;
    for (int i = 0; i < 256; ++i) {
      const int exponent = i >> 3 & 15, mantissa = i & 7;
      const float size = exponent == 15 && mantissa == 7 ? NAN
                         : exponent == 0                 ? std::ldexp(mantissa, -9)
                                                         : std::ldexp(8 + mantissa, exponent - 10);
      all[i] = i & 128 ? -size : size;
    }
    return all;
  }();
  return values[bits];
}
// Returns the nearest e4m3 number, of two equally near ones the even one; beyond the range the largest.
inline uint8_t nearest_e4m3(float value) {
  const uint8_t sign = std::signbit(value) ? 128 : 0;
  if (std::isnan(value)) return sign | 127;
  const float size = std::fabs(value);
  int bits = 0;
  while (bits < 126 && from_e4m3(bits + 1) <= size) ++bits;
  const float below = size - from_e4m3(bits), above = bits < 126 ? from_e4m3(bits + 1) - size : INFINITY;
  return sign | (bits + (above < below || (above == below && bits % 2)));
}
inline uint16_t to_e4m3(float low, float high) {
  return static_cast<uint16_t>(nearest_e4m3(low) | nearest_e4m3(high) << 8);
}
struct E4m3Pair {
  uint16_t first, second;
};
inline E4m3Pair split_e4m3(float low, float high) {
  const uint8_t first[2] = {nearest_e4m3(low), nearest_e4m3(high)};
  const uint8_t second[2] = {nearest_e4m3(low - from_e4m3(first[0])), nearest_e4m3(high - from_e4m3(first[1]))};
  return {static_cast<uint16_t>(first[0] | first[1] << 8), static_cast<uint16_t>(second[0] | second[1] << 8)};
}

}  // namespace meshserve
