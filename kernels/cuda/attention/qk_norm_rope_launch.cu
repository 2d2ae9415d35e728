#include "attention/qk_norm_rope_launch.cuh"

namespace meshserve {
namespace rope {
namespace {

Kernel<Args> kernel_for(int head_dim, bool is_fp8) {
  if (is_fp8) {
    return head_dim == 128 ? kernel_of<qk_norm_rope_kernel<128, Fp8Cache>>()
                           : kernel_of<qk_norm_rope_kernel<64, Fp8Cache>>();
  }
  return head_dim == 128 ? kernel_of<qk_norm_rope_kernel<128, Bf16Cache>>()
                         : kernel_of<qk_norm_rope_kernel<64, Bf16Cache>>();
}

dim3 grid_for(const Args& args, int head_dim) {
  const int num_threads = args.num_tokens * args.kv_heads * (head_dim / 4);
  return dim3((num_threads + kThreads - 1) / kThreads);
}

}  // namespace

cudaError_t launch(const Args& args, int head_dim, bool is_fp8, cudaStream_t stream) {
  kernel_for(head_dim, is_fp8).function<<<grid_for(args, head_dim), kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

void launch(const Args& args, int head_dim, bool is_fp8, LaunchSequence& sequence) {
  sequence.launch("heads", kernel_for(head_dim, is_fp8), {grid_for(args, head_dim), kThreads}, args);
}

}  // namespace rope
}  // namespace meshserve
