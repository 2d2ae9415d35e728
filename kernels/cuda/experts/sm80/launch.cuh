// The host side of experts for all GPUs since Ampere.
#pragma once
#include <stddef.h>

#include <string>

#include "experts/sm80/schedule.cuh"

namespace meshserve::experts::sm80 {

// Returns the bytes of scratch memory that a step needs in either form.
size_t scratch_bytes(const Shapes& shapes);

// Computes the experts of a layer. Returns an empty string or an error.
std::string launch(const Shapes& shapes, const Call& call, cudaStream_t stream);

}  // namespace meshserve::experts::sm80
