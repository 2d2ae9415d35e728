// The XLA FFI calls of sampling. sampling_threshold finds the smallest key that the filters keep. write_tokens writes a
// step's tokens to pinned host memory, beside what the host calls to read them.
#include <algorithm>
#include <array>
#include <mutex>

#include "common/kernels.cuh"
#include "ffi/buffers.cuh"
#include "sampling/readback.cuh"
#include "sampling/threshold.cuh"

namespace meshserve {
namespace {

ffi::Error sampling_threshold(cudaStream_t stream, In logits, In temperature, In top_k, In top_p, In min_p,
                              Out threshold) {
  int device = 0, block_bytes = 0;
  cudaError_t status = cudaGetDevice(&device);
  if (status == cudaSuccess) {
    status = cudaDeviceGetAttribute(&block_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  }
  const int max_listed = sampling::listed_keys(block_bytes);
  const int list_bytes = max_listed * static_cast<int>(sizeof(uint32_t));
  const sampling::Args args = {data<float>(logits), data<float>(temperature),  data<float>(top_p), data<float>(min_p),
                               data<int>(top_k),    data<uint32_t>(threshold), size(logits, 1),    max_listed};
  const auto kernel = kernel_of<sampling::threshold_kernel>().function;
  if (status == cudaSuccess) {
    status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, list_bytes);
  }
  if (status == cudaSuccess) {
    kernel<<<size(logits, 0), sampling::kThreads, list_bytes, stream>>>(args);
    status = cudaGetLastError();
  }
  return result(status);
}

constexpr int kMaxDevices = 64;
std::array<uint64_t*, kMaxDevices> rings{};  // one for each device
std::mutex allocating;

ffi::Error write_tokens(cudaStream_t stream, In tokens, In step_number, Out out) {
  int device = 0;
  if (const cudaError_t status = cudaGetDevice(&device); status != cudaSuccess) return result(status);
  uint64_t* ring = device < kMaxDevices ? rings[device] : nullptr;
  const int num_tokens = size(tokens, 0);
  if (ring == nullptr || num_tokens > readback::kMaxTokens) {
    return result(std::string("this GPU has no pinned memory for the tokens of a step"));
  }
  kernel_of<readback::write_tokens_kernel>().function<<<1, readback::kNumThreads, 0, stream>>>(
      data<uint32_t>(tokens), data<uint32_t>(step_number), data<uint32_t>(out), num_tokens, ring);
  return result(cudaGetLastError());
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(meshserve_sampling_threshold, sampling_threshold, bind(operands<5>, results<1>),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(meshserve_write_tokens, write_tokens, bind(operands<2>, results<1>),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace meshserve

// Returns the ring of a GPU, which lasts as long as the process, or null if there is no pinned memory.
extern "C" uint64_t* meshserve_pinned_tokens(int device) {
  using namespace meshserve;
  if (device < 0 || device >= kMaxDevices) return nullptr;
  const std::lock_guard<std::mutex> lock(allocating);
  if (rings[device] != nullptr) return rings[device];
  int before = 0;
  void* memory = nullptr;
  const size_t num_bytes = sizeof(uint64_t) * readback::kNumSteps * readback::kMaxTokens;
  cudaError_t status = cudaGetDevice(&before);
  if (status == cudaSuccess) status = cudaSetDevice(device);
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
