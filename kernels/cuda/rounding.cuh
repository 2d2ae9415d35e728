// Rounding of activations to e4m3 with a scale for some columns of a token: their largest absolute value / 448, or 1 if
// all are 0.
#pragma once
#include "ptx.cuh"

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

}  // namespace meshserve
