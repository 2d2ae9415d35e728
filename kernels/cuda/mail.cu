// The XLA FFI call that mails a step's tokens, and what the host calls to receive them.
#include "mail.cuh"

#include <algorithm>
#include <array>
#include <mutex>

#include "ffi_arguments.cuh"

namespace meshserve {
namespace {

constexpr int kMaxDevices = 64;
std::array<uint64_t*, kMaxDevices> boxes_of_device{};
std::mutex opening;

ffi::Error mail_tokens(cudaStream_t stream, In tokens, In number, Out out) {
  int device = 0;
  if (const cudaError_t status = cudaGetDevice(&device); status != cudaSuccess) return result(status);
  uint64_t* boxes = device < kMaxDevices ? boxes_of_device[device] : nullptr;
  const int num_tokens = size(tokens, 0);
  if (boxes == nullptr || num_tokens > mail::kMaxTokens) return result(std::string("this GPU has no boxes for tokens"));
  mail::mail_kernel<<<1, mail::kNumThreads, 0, stream>>>(data<uint32_t>(tokens), data<uint32_t>(number),
                                                         data<uint32_t>(out), num_tokens, boxes);
  return result(cudaGetLastError());
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(meshserve_mail_tokens, mail_tokens,
                              ffi::Ffi::Bind()
                                  .Ctx<Stream>()
                                  .Arg<In>()  // tokens, aliased with the result
                                  .Arg<In>()  // number
                                  .Ret<In>(),
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace meshserve

// Returns the boxes of a GPU, which last as long as the process, or null if there is no pinned memory. Loads the
// kernel.
extern "C" uint64_t* meshserve_mail_boxes(int device) {
  using namespace meshserve;
  if (device < 0 || device >= kMaxDevices) return nullptr;
  const std::lock_guard<std::mutex> lock(opening);
  if (boxes_of_device[device] != nullptr) return boxes_of_device[device];
  int before = 0;
  cudaFuncAttributes attributes;
  void* memory = nullptr;
  const size_t num_bytes = sizeof(uint64_t) * mail::kNumBoxes * mail::kMaxTokens;
  cudaError_t status = cudaGetDevice(&before);
  if (status == cudaSuccess) status = cudaSetDevice(device);
  if (status == cudaSuccess) status = cudaFuncGetAttributes(&attributes, mail::mail_kernel);
  if (status == cudaSuccess) status = cudaHostAlloc(&memory, num_bytes, cudaHostAllocPortable | cudaHostAllocMapped);
  cudaSetDevice(before);
  if (status != cudaSuccess) return nullptr;
  std::fill_n(static_cast<uint64_t*>(memory), mail::kNumBoxes * mail::kMaxTokens, 0);
  return boxes_of_device[device] = static_cast<uint64_t*>(memory);
}

// See `mail::take`.
extern "C" int meshserve_take_mail(const uint64_t* boxes, uint32_t number, int num_tokens, uint32_t* tokens,
                                   double sleep_seconds, double seconds) {
  return meshserve::mail::take(boxes, number, num_tokens, tokens, sleep_seconds, seconds);
}
