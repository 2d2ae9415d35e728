// Runs the kernels of expert_rows.cuh on the host, one block after another.
#include "expert_rows.cuh"

#include <thread>
#include <vector>

namespace meshserve::experts {
constexpr size_t kSharedBytes = 96 << 10;
alignas(16) uint8_t shared_rows[kSharedBytes];
}  // namespace meshserve::experts

using namespace meshserve;

namespace {

// Runs a kernel's blocks in order, each with kThreads host threads.
template <class Kernel>
void run(Kernel kernel, unsigned blocks, const experts::RowsArgs& args) {
  Block state(experts::kThreads);
  std::vector<std::jthread> threads;
  for (unsigned t = 0; t < experts::kThreads; ++t) {
    threads.emplace_back([&, t] {
      threadIdx = {t};
      gridDim = {blocks};
      block = &state;
      for (unsigned b = 0; b < blocks; ++b) {
        blockIdx = {b};
        __syncthreads();
        if (t == 0)
          std::memset(experts::shared_rows, 0xFF,
                      experts::kSharedBytes);  // NaN: nothing may be read before it is written
        __syncthreads();
        kernel(args);
      }
    });
  }
}

}  // namespace

extern "C" void gate_up(int is_small, unsigned blocks, const experts::RowsArgs* args) {
  is_small ? run(experts::rows_kernel<1, 1, 4, 8, false>, blocks, *args)
           : run(experts::rows_kernel<2, 4, 2, 8, false>, blocks, *args);
}
extern "C" void down(unsigned blocks, const experts::RowsArgs* args) {
  run(experts::rows_kernel<2, 4, 2, 4, true>, blocks, *args);
}
extern "C" void down_added(int is_small, const experts::RowsArgs* args) {
  is_small ? run(experts::down_kernel<1, 8>, args->rows / 16, *args)
           : run(experts::down_kernel<2, 4>, args->rows / 16, *args);
}
