// The kernel of heads.cuh on a host, a block after the other.
#include "heads.cuh"

#include <thread>
#include <vector>

using namespace meshserve;

extern "C" void prepare_heads(int head_dim, const heads::Args* args) {
  const auto kernel = head_dim == 128 ? heads::prepare_kernel<128> : heads::prepare_kernel<64>;
  const int num_threads = args->num_tokens * args->kv_heads * (head_dim / 4);
  Block state(heads::kThreads);
  std::vector<std::jthread> threads;
  for (unsigned t = 0; t < heads::kThreads; ++t) {
    threads.emplace_back([&, t] {
      threadIdx = {t};
      block = &state;
      for (int first = 0; first < num_threads; first += heads::kThreads) {
        blockIdx = {static_cast<unsigned>(first / heads::kThreads)};
        kernel(*args);
        __syncthreads();
      }
    });
  }
}
