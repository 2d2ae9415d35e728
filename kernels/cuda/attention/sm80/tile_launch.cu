#include "attention/sm80/tile_launch.cuh"

#include <math.h>

#include "attention/sm80/tile_attention.cuh"
#include "common/kernels.cuh"

namespace meshserve {
namespace portable {
namespace {

// From which on two blocks of many rows with 64 keys share a multiprocessor: an A100 has 164 KB, an L40S 100.
constexpr int kLargeSharedBytes = 160 << 10;

std::string status_of(const char* what, cudaError_t status) {
  return status == cudaSuccess ? "" : std::string(what) + " failed: " + cudaGetErrorString(status);
}

bool has_large_shared_memory() {
  int device = 0, bytes = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
  return bytes >= kLargeSharedBytes;
}

template <class F>
std::string launch_form(const Call& call, const Args& args, cudaStream_t stream) {
  const auto kernel = kernel_of<attention_kernel<F>>().function;
  constexpr int kBytes = sizeof(Memory<F>);
  static_assert(kBytes <= 99 << 10, "what every GPU since Ampere offers a block");
  cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (status == cudaSuccess) {
    status =
        cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
  }
  if (status == cudaSuccess && call.num_slots > 0) {
    const size_t counter_bytes = static_cast<size_t>(call.num_slots) * args.kv_heads * 2 * sizeof(int);
    status = cudaMemsetAsync(call.counters, 0, counter_bytes, stream);
  }
  if (status != cudaSuccess) return status_of("preparing attention", status);
  kernel<<<args.num_parts * args.kv_heads, kThreads, kBytes, stream>>>(call.q, call.pages, args);
  return status_of("launching attention", cudaGetLastError());
}

template <int H, class C>
std::string launch_with(const Call& call, const Args& args, cudaStream_t stream) {
  if (call.tile_rows == FewRows<H, C>::kRows) return launch_form<FewRows<H, C>>(call, args, stream);
  const bool has_64_keys = call.tile_keys == 0 ? has_large_shared_memory() : call.tile_keys == 64;
  if (has_64_keys) return launch_form<ManyRows<H, C, 64>>(call, args, stream);
  return launch_form<ManyRows<H, C, 32>>(call, args, stream);
}

}  // namespace

std::string launch(const Call& call, float scale, cudaStream_t stream) {
  Args args = call.args;
  args.num_arrived = call.counters;
  args.tile_tokens = call.tile_rows / args.group;
  args.scale_log2 = scale * static_cast<float>(M_LOG2E);
  args.page_inverse = static_cast<uint32_t>(((uint64_t{1} << 32) + args.page_size - 1) / args.page_size);
  if (call.is_fp8) {
    return call.head_dim == 128 ? launch_with<128, Fp8Cache>(call, args, stream)
                                : launch_with<64, Fp8Cache>(call, args, stream);
  }
  return call.head_dim == 128 ? launch_with<128, Bf16Cache>(call, args, stream)
                              : launch_with<64, Bf16Cache>(call, args, stream);
}

}  // namespace portable
}  // namespace meshserve
