// The host side of the pass between the QKV projection and attention.
#pragma once
#include "attention/qk_norm_rope.cuh"
#include "common/launch.cuh"

namespace meshserve {
namespace rope {

// Launches the pass on a stream, or as one of the kernels of a call.
cudaError_t launch(const Args& args, int head_dim, bool is_fp8, cudaStream_t stream);
void launch(const Args& args, int head_dim, bool is_fp8, LaunchSequence& sequence);

}  // namespace rope
}  // namespace meshserve
