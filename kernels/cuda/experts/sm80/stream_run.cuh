// Launches the kernels of schedule.cuh. Each format of weights has a file, so that they are compiled at the same time.
#pragma once
#include <string>

#include "experts/sm80/schedule.cuh"

namespace meshserve::experts::sm80 {

// Launches kernels on a stream until one fails.
class StreamRun {
 public:
  explicit StreamRun(cudaStream_t stream) : stream_(stream) {}

  const std::string& error() const { return error_; }

  int num_multiprocessors() const {
    int device = 0, count = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
    return count;
  }

  template <class... Parameters, class... Arguments>
  void operator()(Kernel<Parameters...> kernel, Grid grid, int threads, size_t shared_bytes,
                  const Arguments&... arguments) {
    if (!error_.empty()) return;
    const void* function = reinterpret_cast<const void*>(kernel.function);
    cudaError_t status = cudaSuccess;
    if (shared_bytes > 48 << 10) {
      status =
          cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes));
    }
    // All kernels use the same split of L1 and shared memory, because a multiprocessor must be idle to change it.
    if (status == cudaSuccess) {
      status = cudaFuncSetAttribute(function, cudaFuncAttributePreferredSharedMemoryCarveout,
                                    cudaSharedmemCarveoutMaxShared);
    }
    if (status == cudaSuccess) {
      kernel.function<<<dim3(grid.x, grid.y), threads, shared_bytes, stream_>>>(arguments...);
      status = cudaGetLastError();
    }
    if (status != cudaSuccess) error_ = std::string("launching the experts failed: ") + cudaGetErrorString(status);
  }

 private:
  const cudaStream_t stream_;
  std::string error_;
};

// Runs the kernels of a layer's experts in a format.
template <class W>
void run_format(const Shapes& shapes, const Call& call, StreamRun& run);

#define MESHSERVE_EXPERTS(format)                                                   \
  template <>                                                                       \
  void run_format<format>(const Shapes& shapes, const Call& call, StreamRun& run) { \
    Schedule<StreamRun>(shapes, call, run).template experts<format>();              \
  }

}  // namespace meshserve::experts::sm80
