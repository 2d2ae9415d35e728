// Zero-copy readback of a step's sampled tokens, for steps whose next one waits for them: the step's last kernel writes
// them to pinned host memory, which the host polls. Otherwise XLA's callbacks tell the host that the step has ended,
// and then that a copy has, which takes 0.45 ms (docs/log).
#pragma once
#include <cuda_runtime.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <thread>

namespace meshserve {
namespace readback {

constexpr int kNumSteps = 8;      // whose tokens the ring buffer in pinned memory holds
constexpr int kMaxTokens = 1024;  // in a step
constexpr int kNumThreads = 128;

// Copies the tokens, and writes each with the step's number to the step's entry of the ring: one store of 8 bytes,
// which the host sees whole. Steps of number 0 are not written. `out` may be `tokens`.
__global__ void __launch_bounds__(kNumThreads) write_tokens_kernel(const uint32_t* tokens, const uint32_t* step_number,
                                                                   uint32_t* out, int num_tokens, uint64_t* ring) {
  const uint32_t number = *step_number;
  volatile uint64_t* entry = ring + static_cast<size_t>(number % kNumSteps) * kMaxTokens;
  for (int i = threadIdx.x; i < num_tokens; i += blockDim.x) {
    const uint32_t token = tokens[i];
    out[i] = token;
    if (number != 0) entry[i] = static_cast<uint64_t>(number) << 32 | token;
  }
}

// Waits on the host until the tokens of a step are in the ring, and copies them. Sleeps for `sleep_seconds`, then polls
// until `seconds` have passed. Returns whether they are there.
inline bool wait_for(const uint64_t* ring, uint32_t step_number, int num_tokens, uint32_t* tokens, double sleep_seconds,
                     double seconds) {
  using Clock = std::chrono::steady_clock;
  const auto began = Clock::now();
  if (sleep_seconds > 0) std::this_thread::sleep_for(std::chrono::duration<double>(sleep_seconds));
  const volatile uint64_t* entry = ring + static_cast<size_t>(step_number % kNumSteps) * kMaxTokens;
  for (int i = 0; i < num_tokens; ++i) {
    for (int polls = 1;; ++polls) {
      const uint64_t found = entry[i];
      if (found >> 32 == step_number) {
        tokens[i] = static_cast<uint32_t>(found);
        break;
      }
      if (polls % 1024 == 0 && std::chrono::duration<double>(Clock::now() - began).count() > seconds) return false;
    }
  }
  return true;
}

}  // namespace readback
}  // namespace meshserve
