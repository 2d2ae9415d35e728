// Rounding of activations to e4m3 with a scale for some columns of a token: their largest absolute value / 448, or 1 if
// all are 0.
#pragma once
#include "common/ptx.cuh"

namespace meshserve {

constexpr float kLargestE4m3 = 448.0f;
constexpr float kNegligible = 1e-30f;  // far below what a division by the scale could take: becomes 0

__device__ __forceinline__ float e4m3_scale(float highest) {
  return highest <= kNegligible ? 1.0f : highest / kLargestE4m3;
}

// Returns value / scale, correctly rounded, given 1 / scale: values often lie half-way between two e4m3 numbers.
__device__ __forceinline__ float divided(float value, float scale, float inverse) {
  const float quotient = value * inverse;
  return fmaf(fmaf(-quotient, scale, value), inverse, quotient);
}

// Returns four values / scale as e4m3, the first one in the lowest byte. `inverse` is 1 / scale.
__device__ __forceinline__ uint32_t rounded_to_e4m3(float4 v, float scale, float inverse) {
  const uint32_t low = to_e4m3(divided(v.x, scale, inverse), divided(v.y, scale, inverse));
  return low | static_cast<uint32_t>(to_e4m3(divided(v.z, scale, inverse), divided(v.w, scale, inverse))) << 16;
}

}  // namespace meshserve
