// Runs the experts' kernels for all GPUs since Ampere on the host, one block after another.
#include "experts/sm80/schedule.cuh"

namespace meshserve::experts::sm80 {
constexpr size_t kSharedBytes = 99 << 10;
alignas(128) uint8_t shared_weights[kSharedBytes];
}  // namespace meshserve::experts::sm80

using namespace meshserve;
using namespace meshserve::experts;

namespace {

struct HostRun {
  int count;

  int num_multiprocessors() const { return count; }

  template <class... Parameters, class... Arguments>
  void operator()(Kernel<Parameters...> kernel, sm80::Grid grid, int num_threads, size_t shared_bytes,
                  const Arguments&... arguments) {
    if (shared_bytes > sm80::kSharedBytes || grid.x == 0 || grid.y == 0 || grid.y > 65535) __trap();
    Block state(num_threads);
    shared_base = sm80::shared_weights;
    CudaThreads threads(threadIdx, blockIdx, gridDim, block);
    for (int t = 0; t < num_threads; ++t) {
      threads.emplace_back([&, t] {
        threadIdx = {static_cast<unsigned>(t)};
        gridDim = {grid.x, grid.y};
        block = &state;
        for (unsigned y = 0; y < grid.y; ++y) {
          for (unsigned x = 0; x < grid.x; ++x) {
            blockIdx = {x, y};
            __syncthreads();
            if (t == 0) std::memset(sm80::shared_weights, 0xFF, sm80::kSharedBytes);  // NaN: nothing is read before
            __syncthreads();                                                          // it is written
            kernel.function(arguments...);
            if (has_copies()) __trap();  // a block ends with copies on their way
          }
        }
      });
    }
  }
};

}  // namespace

extern "C" size_t scratch_bytes(const sm80::Shapes* shapes) { return sm80::Scratch().carve(*shapes, nullptr); }

extern "C" void run_experts(const sm80::Shapes* shapes, const sm80::Call* call, int num_multiprocessors) {
  HostRun run = {num_multiprocessors};
  sm80::with_format(*shapes, *call, [&](auto format) {
    sm80::Schedule<HostRun>(*shapes, *call, run).template experts<decltype(format)>();
  });
}
