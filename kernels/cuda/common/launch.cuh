// Launches the kernels of one call, each of which may start before its predecessor ends.
#pragma once
#include <cuda.h>
#include <cuda_runtime.h>

#include <string>

#include "common/kernels.cuh"

namespace meshserve {

// Returns the number of multiprocessors of the calling thread's device.
int num_multiprocessors();

struct LaunchShape {
  dim3 grid;
  int threads;
  size_t shared_bytes = 0;
  int cluster = 1;   // blocks per cluster
  int priority = 0;  // over kernels of other streams, whose priority is 0; a lower number is preferred
};

class LaunchSequence {
 public:
  explicit LaunchSequence(cudaStream_t stream) : stream_(stream) {}

  cudaStream_t stream() const { return stream_; }
  // Returns an empty string or the first error, after which nothing is launched.
  const std::string& error() const { return error_; }
  // Notes an error, unless there is one already.
  void note(const std::string& error) {
    if (error_.empty()) error_ = error;
  }

  // Encodes a tensor map of three dimensions. Returns whether there has been no error.
  bool encode(CUtensorMap* map, const void* data, const cuuint64_t* sizes, const cuuint64_t* strides,
              const cuuint32_t* box, CUtensorMapDataType type = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
              CUtensorMapSwizzle swizzle = CU_TENSOR_MAP_SWIZZLE_128B);

  // The first kernel waits for all earlier work of the stream; each later one may start when its predecessor has.
  template <class... Parameters, class... Arguments>
  void launch(const char* name, Kernel<Parameters...> kernel, const LaunchShape& shape, const Arguments&... arguments) {
    cudaLaunchConfig_t config = {};
    cudaLaunchAttribute attributes[3] = {};
    if (!configure(name, reinterpret_cast<const void*>(kernel.function), shape, &config, attributes)) return;
    check(name, cudaLaunchKernelEx(&config, kernel.function, arguments...));
  }

 private:
  bool configure(const char* name, const void* function, const LaunchShape& shape, cudaLaunchConfig_t* config,
                 cudaLaunchAttribute* attributes);
  void check(const char* name, cudaError_t status);

  cudaStream_t stream_;
  bool is_first_ = true;
  std::string error_;
};

}  // namespace meshserve
