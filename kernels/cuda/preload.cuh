// Loads every kernel onto the GPUs that will run it, and creates their side streams, before any program runs.
//
// Otherwise CUDA would load a kernel at its first launch. That may happen while XLA captures a command buffer, or when
// XLA has taken all device memory. Loading also waits for the device, which on a mesh may itself be waiting for another
// whose kernels are launched later.
#pragma once
#include <string>
#include <type_traits>
#include <vector>

#include "experts_launch.cuh"
#include "launch.cuh"
#include "prefill_launch.cuh"
#include "qk_norm_rope.cuh"
#include "side_stream.cuh"
#include "threshold.cuh"
#include "two_shot.cuh"

namespace meshserve {

inline std::vector<const void*> all_kernels() {
  std::vector<const void*> kernels;
  add_projections<Bf16Weights>(kernels);
  auto add = [&](auto* kernel) { kernels.push_back(reinterpret_cast<const void*>(kernel)); };
  add(attention_kernel<64>);
  add(attention_kernel<128>);
  add(attention_kernel<64, Bf16Weights, Fp8Cache>);
  add(attention_kernel<128, Bf16Weights, Fp8Cache>);
  add(attention_kernel<128, Bf16Weights, LongFp8Cache>);
  add(staying_attention_kernel<kStayingWarps>);
  add(staying_attention_kernel<kLoneWarps>);
  add(prefill::attention_kernel<64>);
  add(prefill::attention_kernel<128>);
  add(rope::qk_norm_rope_kernel<64>);
  add(rope::qk_norm_rope_kernel<128>);
  add(prefill::attention_kernel<64, Fp8Cache>);
  add(prefill::attention_kernel<128, Fp8Cache>);
  add(rope::qk_norm_rope_kernel<64, Fp8Cache>);
  add(rope::qk_norm_rope_kernel<128, Fp8Cache>);
  add(prepare_kernel<>);
  add(gather_kernel<>);
  add(one_shot_kernel<true>);
  add(one_shot_kernel<false>);
  add(two_shot_kernel<2>);
  add(two_shot_kernel<4>);
  add(sampling::threshold_kernel);
  for (const void* kernel : experts::kernels_of<Bf16Weights>()) kernels.push_back(kernel);
  return kernels;
}

// Loads `all_kernels` and others. Returns an empty string or an error. The calling thread's current device does not
// change.
inline std::string load_kernels(const int* ordinals, int num, std::vector<const void*> kernels = {}) {
  const std::vector<const void*> ours = all_kernels();
  kernels.insert(kernels.end(), ours.begin(), ours.end());
  int before = 0;
  cudaError_t status = cudaGetDevice(&before);
  for (int i = 0; i < num && status == cudaSuccess; ++i) {
    status = cudaSetDevice(ordinals[i]);
    if (status == cudaSuccess) status = SideStreams::all().open();
    for (const void* kernel : kernels) {
      cudaFuncAttributes attributes;
      if (status == cudaSuccess) status = cudaFuncGetAttributes(&attributes, kernel);
    }
  }
  const cudaError_t restored = cudaSetDevice(before);
  if (status == cudaSuccess) status = restored;
  return status == cudaSuccess ? "" : std::string("the kernels could not be loaded: ") + cudaGetErrorString(status);
}

}  // namespace meshserve
