// Looks up the driver's tensor map encoder through the CUDA runtime, without linking against the driver.
#pragma once
#include <cuda.h>
#include <cuda_runtime.h>

namespace meshserve {

using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

inline EncodeTiled encode_tiled() {
  static const EncodeTiled function = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
    cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result);
    return error == cudaSuccess ? reinterpret_cast<EncodeTiled>(found) : nullptr;
  }();
  return function;
}

}  // namespace meshserve
