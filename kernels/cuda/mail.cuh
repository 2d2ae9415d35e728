// The way of a step's tokens to the host, if its next step waits for them: the step's last kernel writes them to pinned
// memory, where the host looks for them. Otherwise XLA's callbacks tell the host that the step has ended, and then that
// a copy has, which takes 0.45 ms (docs/log).
#pragma once
#include <cuda_runtime.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <thread>

namespace meshserve {
namespace mail {

constexpr int kNumBoxes = 8;      // of so many consecutive numbers, the tokens are kept
constexpr int kMaxTokens = 1024;  // of a step
constexpr int kNumThreads = 128;

// Copies the tokens, and writes each with the step's number to the step's box: one store of 8 bytes, which the host
// sees whole. Steps of number 0 are not written. `out` may be `tokens`.
__global__ void __launch_bounds__(kNumThreads)
    mail_kernel(const uint32_t* tokens, const uint32_t* number, uint32_t* out, int num_tokens, uint64_t* boxes) {
  const uint32_t its_number = *number;
  volatile uint64_t* box = boxes + static_cast<size_t>(its_number % kNumBoxes) * kMaxTokens;
  for (int i = threadIdx.x; i < num_tokens; i += blockDim.x) {
    const uint32_t token = tokens[i];
    out[i] = token;
    if (its_number != 0) box[i] = static_cast<uint64_t>(its_number) << 32 | token;
  }
}

// Waits on the host until the tokens of a step have come, and copies them. Sleeps for `sleep_seconds`, then looks again
// and again until `seconds` have passed. Returns whether they have come.
inline bool take(const uint64_t* boxes, uint32_t number, int num_tokens, uint32_t* tokens, double sleep_seconds,
                 double seconds) {
  using Clock = std::chrono::steady_clock;
  const auto began = Clock::now();
  if (sleep_seconds > 0) std::this_thread::sleep_for(std::chrono::duration<double>(sleep_seconds));
  const volatile uint64_t* box = boxes + static_cast<size_t>(number % kNumBoxes) * kMaxTokens;
  for (int i = 0; i < num_tokens; ++i) {
    for (int looks = 1;; ++looks) {
      const uint64_t found = box[i];
      if (found >> 32 == number) {
        tokens[i] = static_cast<uint32_t>(found);
        break;
      }
      if (looks % 1024 == 0 && std::chrono::duration<double>(Clock::now() - began).count() > seconds) return false;
    }
  }
  return true;
}

}  // namespace mail
}  // namespace meshserve
