// A second stream on each GPU, for kernels that run beside those on XLA's stream.
//
// Work forks from XLA's stream and joins it again within one call. While XLA captures a command buffer, both become
// dependencies of its graph, and no event is recorded.
#pragma once
#include <cuda_runtime.h>

#include <map>
#include <mutex>
#include <string>

namespace meshserve {

class SideStreams {
 public:
  static SideStreams& all() {
    static SideStreams streams;
    return streams;
  }

  // Creates what the current device needs, once. Call it before any program runs, because a capture forbids it.
  cudaError_t open() {
    int ordinal = 0;
    cudaError_t status = cudaGetDevice(&ordinal);
    const std::lock_guard<std::mutex> lock(mutex_);
    if (status != cudaSuccess || sides_.count(ordinal) != 0) return status;
    Side side;
    status = cudaStreamCreateWithFlags(&side.stream, cudaStreamNonBlocking);
    for (cudaEvent_t* event : {&side.forked, &side.joined}) {
      if (status == cudaSuccess) status = cudaEventCreateWithFlags(event, cudaEventDisableTiming);
    }
    if (status == cudaSuccess) sides_[ordinal] = side;
    return status;
  }

  // Calls `launch(side)`, which launches kernels on the side stream. They start after the work that `stream` has now,
  // and what `stream` gets after this call starts after them. `beside(stream)` launches what runs at the same time.
  template <class Launch, class Beside>
  cudaError_t run(cudaStream_t stream, Launch launch, Beside beside) {
    int ordinal = 0;
    cudaError_t status = cudaGetDevice(&ordinal);
    const std::lock_guard<std::mutex> lock(mutex_);  // the events belong to one call at a time
    if (status != cudaSuccess) return status;
    const auto found = sides_.find(ordinal);
    if (found == sides_.end()) return cudaErrorInvalidResourceHandle;
    const Side& side = found->second;
    status = cudaEventRecord(side.forked, stream);
    if (status == cudaSuccess) status = cudaStreamWaitEvent(side.stream, side.forked, 0);
    if (status != cudaSuccess) return status;
    launch(side.stream);
    beside(stream);
    status = cudaEventRecord(side.joined, side.stream);
    return status == cudaSuccess ? cudaStreamWaitEvent(stream, side.joined, 0) : status;
  }

 private:
  struct Side {
    cudaStream_t stream = nullptr;
    cudaEvent_t forked = nullptr, joined = nullptr;
  };
  std::mutex mutex_;
  std::map<int, Side> sides_;
};

}  // namespace meshserve
