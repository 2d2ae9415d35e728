// The host side of the rounding of activations to FP8.
#pragma once
#include "common/launch.cuh"
#include "projection/quantize.cuh"

namespace meshserve::fp8 {

// Rounds activations on a stream, or as one of the kernels of a call. `per_token`: with one scale for each token.
cudaError_t launch(const QuantizeArgs& args, Before before, bool per_token, cudaStream_t stream);
void launch(const QuantizeArgs& args, Before before, LaunchSequence& sequence);

}  // namespace meshserve::fp8
