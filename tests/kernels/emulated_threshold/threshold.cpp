// Runs the kernel of threshold.cuh on the host, one row of logits after another.
#include "sampling/threshold.cuh"

using namespace meshserve::sampling;

// The shared memory of a block whose GPU allows it `block_bytes`.
extern "C" int shared_bytes(int block_bytes) {
  return static_cast<int>(sizeof(Shared) + listed_keys(block_bytes) * sizeof(uint32_t));
}

extern "C" void find_thresholds(int num_rows, int vocab, const float* logits, const float* temperature,
                                const int* top_k, const float* top_p, const float* min_p, uint32_t* threshold) {
  const Args args = {logits, temperature, top_p, min_p, top_k, threshold, vocab, kMaxListed};
  Block state(kThreads);
  CudaThreads threads(threadIdx, blockIdx, block);
  for (unsigned t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      threadIdx = {t};
      block = &state;
      for (int i = 0; i < num_rows; ++i) {
        blockIdx = {static_cast<unsigned>(i)};
        threshold_kernel(args);
        __syncthreads();
      }
    });
  }
}
