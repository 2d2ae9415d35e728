// A second stream on each GPU, for kernels that run beside those on XLA's stream.
//
// Work forks from XLA's stream and joins it again within one call. While XLA captures a command buffer, both become
// dependencies of its graph, and no event is recorded.
#pragma once
#include <cuda_runtime.h>

#include <functional>

namespace meshserve {

// Creates what the current device needs, once. Call it before any program runs, because a capture forbids it.
cudaError_t open_side_stream();

// Calls `launch(side)`, which launches kernels on the side stream. They start after the work that `stream` has now, and
// what `stream` gets after this call starts after them. `beside(stream)` launches what runs at the same time.
cudaError_t run_beside(cudaStream_t stream, const std::function<void(cudaStream_t)>& launch,
                       const std::function<void(cudaStream_t)>& beside);

}  // namespace meshserve
