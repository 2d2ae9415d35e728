// The XLA FFI call that writes a step's tokens to pinned host memory, and what the host calls to read them.
#include "readback.cuh"

#include <algorithm>
#include <array>
#include <mutex>

#include "ffi_arguments.cuh"

namespace meshserve {
namespace {

constexpr int kMaxDevices = 64;
std::array<uint64_t*, kMaxDevices> rings{};  // of each device
std::mutex allocating;

ffi::Error write_tokens(cudaStream_t stream, In tokens, In step_number, Out out) {
  int device = 0;
  if (const cudaError_t status = cudaGetDevice(&device); status != cudaSuccess) return result(status);
  uint64_t* ring = device < kMaxDevices ? rings[device] : nullptr;
  const int num_tokens = size(tokens, 0);
  if (ring == nullptr || num_tokens > readback::kMaxTokens) {
    return result(std::string("this GPU has no pinned memory for the tokens of a step"));
  }
  readback::write_tokens_kernel<<<1, readback::kNumThreads, 0, stream>>>(
      data<uint32_t>(tokens), data<uint32_t>(step_number), data<uint32_t>(out), num_tokens, ring);
  return result(cudaGetLastError());
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(meshserve_write_tokens, write_tokens,
                              ffi::Ffi::Bind()
                                  .Ctx<Stream>()
                                  .Arg<In>()  // tokens, aliased with the result
                                  .Arg<In>()  // step number
                                  .Ret<In>(),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace meshserve

// Returns the ring of a GPU, which lasts as long as the process, or null if there is no pinned memory. Loads the
// kernel.
extern "C" uint64_t* meshserve_pinned_tokens(int device) {
  using namespace meshserve;
  if (device < 0 || device >= kMaxDevices) return nullptr;
  const std::lock_guard<std::mutex> lock(allocating);
  if (rings[device] != nullptr) return rings[device];
  int before = 0;
  cudaFuncAttributes attributes;
  void* memory = nullptr;
  const size_t num_bytes = sizeof(uint64_t) * readback::kNumSteps * readback::kMaxTokens;
  cudaError_t status = cudaGetDevice(&before);
  if (status == cudaSuccess) status = cudaSetDevice(device);
  if (status == cudaSuccess) status = cudaFuncGetAttributes(&attributes, readback::write_tokens_kernel);
  if (status == cudaSuccess) status = cudaHostAlloc(&memory, num_bytes, cudaHostAllocPortable | cudaHostAllocMapped);
  cudaSetDevice(before);
  if (status != cudaSuccess) return nullptr;
  std::fill_n(static_cast<uint64_t*>(memory), readback::kNumSteps * readback::kMaxTokens, 0);
  return rings[device] = static_cast<uint64_t*>(memory);
}

// See `readback::wait_for`.
extern "C" int meshserve_wait_for_tokens(const uint64_t* ring, uint32_t step_number, int num_tokens, uint32_t* tokens,
                                         double sleep_seconds, double seconds) {
  return meshserve::readback::wait_for(ring, step_number, num_tokens, tokens, sleep_seconds, seconds);
}
