// The host side of products of few tokens for all GPUs since Ampere.
#pragma once
#include <string>

#include "projection/sm80/few_tokens.cuh"

namespace meshserve {
namespace portable {

// Multiplies weights in e4m3, or else in 4-bit integers. Returns an empty string or an error.
std::string launch_product(const ProductArgs& args, bool is_int4, cudaStream_t stream);

}  // namespace portable
}  // namespace meshserve
