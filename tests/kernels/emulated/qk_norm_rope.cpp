// Runs the kernel of qk_norm_rope.cuh on the host, one block after another.
#include "attention/qk_norm_rope.cuh"

#include <vector>

using namespace meshserve;

extern "C" void qk_norm_rope(int head_dim, int is_fp8, const rope::Args* args) {
  auto kernel = head_dim == 128 ? rope::qk_norm_rope_kernel<128> : rope::qk_norm_rope_kernel<64>;
  if (is_fp8) {
    kernel = head_dim == 128 ? rope::qk_norm_rope_kernel<128, Fp8Cache> : rope::qk_norm_rope_kernel<64, Fp8Cache>;
  }
  const int num_threads = args->num_tokens * args->kv_heads * (head_dim / 4);
  Block state(rope::kThreads);
  CudaThreads threads(threadIdx, blockIdx, gridDim, block);
  for (unsigned t = 0; t < rope::kThreads; ++t) {
    threads.emplace_back([&, t] {
      threadIdx = {t};
      block = &state;
      for (int first = 0; first < num_threads; first += rope::kThreads) {
        blockIdx = {static_cast<unsigned>(first / rope::kThreads)};
        kernel(*args);
        __syncthreads();
      }
    });
  }
}
