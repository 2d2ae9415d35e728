// Runs the kernel of readback.cuh on the host, and reads what it has written.
#include "sampling/readback.cuh"

using namespace meshserve::readback;

static uint64_t ring[kNumSteps * kMaxTokens];

extern "C" void write_tokens(const uint32_t* tokens, uint32_t step_number, uint32_t* out, int num_tokens) {
  write_tokens_kernel(tokens, &step_number, out, num_tokens, ring);
}

extern "C" int wait_for_tokens(uint32_t step_number, int num_tokens, uint32_t* tokens, double sleep_seconds,
                               double seconds) {
  return wait_for(ring, step_number, num_tokens, tokens, sleep_seconds, seconds);
}
