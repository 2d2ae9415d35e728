// The host side of decode layers of more tokens than the products of projection.cuh take, with FP8 weights.
//
// cuBLASLt multiplies (cublas_lt.cuh), by activations that are rounded to e4m3 with a scale for each 128 columns of a
// token. A kernel between two products does all that is between them: the norm, or SiLU, with the rounding
// (quantize.cuh); or the norms, rotation and writing of heads (qk_norm_rope.cuh), beside which attention already
// fetches earlier tokens' pages. Attention rounds its result itself. Our kernels are launched early behind cuBLASLt's,
// so that the latency of their launch is hidden.
#pragma once
#include <string>

#include "layers/step.cuh"
#include "projection/fp8_matrix.cuh"

namespace meshserve {
namespace wide {

constexpr int kProducts = 4;  // in a layer: QKV, output, gate and up, down

struct Call {
  fp8::Matrix qkv, o, gate_up, down;                     // the first layer's, of stacks
  const bf16 *input_norm, *q_norm, *k_norm, *post_norm;  // stacked over layers
  const int* candidates;                                 // numbers of cuBLASLt's algorithms, for each matrix
  Cache cache;
  const float *cosines, *sines;  // [B, H / 2]
  float epsilon, scale;
};

// Returns the bytes of scratch memory that a step needs.
size_t scratch_bytes(const Shapes& shapes);

// Runs layers. The batch is a multiple of 16 tokens, of a request each. Returns an empty string or the first error.
std::string run_layers(const Call& call, const Shapes& shapes, const Tuning& tuning, uint8_t* scratch, const bf16* x,
                       bf16* out, int first, int num_layers, cudaStream_t stream);

}  // namespace wide
}  // namespace meshserve
