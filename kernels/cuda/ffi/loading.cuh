// Loads the kernels of a library onto devices.
#pragma once
#include <cuda_runtime.h>
#include <stdio.h>

#include "common/kernels.cuh"

namespace meshserve {

// Loads all kernels, after `prepare` on each device, which may be null. Writes a failure to `error`; returns whether
// loading succeeded. The calling thread's current device does not change.
inline bool load_kernels(const int* ordinals, int num, char* error, int size, cudaError_t (*prepare)()) {
  int before = 0;
  cudaError_t status = cudaGetDevice(&before);
  for (int i = 0; i < num && status == cudaSuccess; ++i) {
    status = cudaSetDevice(ordinals[i]);
    if (status == cudaSuccess && prepare != nullptr) status = prepare();
    for (const void* kernel : listed_kernels()) {
      cudaFuncAttributes attributes;
      if (status == cudaSuccess) status = cudaFuncGetAttributes(&attributes, kernel);
    }
  }
  const cudaError_t restored = cudaSetDevice(before);
  if (status == cudaSuccess) status = restored;
  const bool is_loaded = status == cudaSuccess;
  snprintf(error, size, "%s%s",
           is_loaded ? "" : "the kernels could not be loaded: ", is_loaded ? "" : cudaGetErrorString(status));
  return is_loaded;
}

}  // namespace meshserve
