// Runs the kernels of expert_rows.cuh on the host, one block after another.
#include "expert_router.cuh"

#include <thread>
#include <vector>

namespace meshserve::experts {
constexpr size_t kSharedBytes = 96 << 10;
alignas(16) uint8_t shared_rows[kSharedBytes];
}  // namespace meshserve::experts

using namespace meshserve;

namespace {

// Runs a kernel's blocks in order, each with kThreads host threads.
template <class Args>
void run(void (*kernel)(const Args), unsigned blocks, const Args& args) {
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

extern "C" void arrange(const experts::ArrangeArgs* args) {
  const unsigned chunks = (args->num_tokens + experts::kMaxTokens - 1) / experts::kMaxTokens;
  run(experts::count_kernel, chunks, *args);
  run(experts::place_kernel, chunks, *args);
}
extern "C" void gather(unsigned blocks, const experts::GatherRowsArgs* args) {
  run(experts::gather_rows_kernel, blocks, *args);
}
extern "C" void combine(const experts::CombineArgs* args) {
  const unsigned warps = args->num_tokens * (args->columns / 128);
  run(experts::combine_kernel, (warps + experts::kWarps - 1) / experts::kWarps, *args);
}

namespace {
void choose_all(const experts::RouterArgs args) {  // `sums` holds the scores [T, kMostRouted]
  for (int token = 0; token < args.num_tokens; ++token) {
    if (threadIdx.x < 32) experts::choose(args, args.sums + token * experts::kMostRouted, token, 0.5f);
  }
}
}  // namespace
extern "C" void choose(const experts::RouterArgs* args) { run(choose_all, 1, *args); }

extern "C" void gate_up(unsigned blocks, const experts::RowsArgs* args) { run(experts::gate_up_kernel, blocks, *args); }
extern "C" void down(const experts::RowsArgs* args) { run(experts::down_kernel, args->rows / 16, *args); }
