#include "layers/side_stream.cuh"

#include <map>
#include <mutex>

namespace meshserve {
namespace {

class SideStreams {
 public:
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

  cudaError_t run(cudaStream_t stream, const std::function<void(cudaStream_t)>& launch,
                  const std::function<void(cudaStream_t)>& beside) {
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

SideStreams& all_streams() {
  static SideStreams streams;
  return streams;
}

}  // namespace

cudaError_t open_side_stream() { return all_streams().open(); }

cudaError_t run_beside(cudaStream_t stream, const std::function<void(cudaStream_t)>& launch,
                       const std::function<void(cudaStream_t)>& beside) {
  return all_streams().run(stream, launch, beside);
}

}  // namespace meshserve
