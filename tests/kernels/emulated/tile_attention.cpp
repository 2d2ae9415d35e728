// Runs the kernels of tile_attention.cuh on the host, one block after another.
#include "attention/sm80/tile_attention.cuh"

#include <vector>

namespace meshserve::portable {
constexpr size_t kSharedBytes = 99 << 10;
alignas(1024) uint8_t raw[kSharedBytes];
}  // namespace meshserve::portable

using namespace meshserve;
using namespace meshserve::portable;

namespace {

template <class F>
void run(const bf16* q, const void* pages, const Args& args) {
  static_assert(sizeof(Memory<F>) <= kSharedBytes);
  Block state(kThreads);
  shared_base = raw;
  gridDim = {static_cast<unsigned>(args.num_parts * args.kv_heads)};
  const unsigned num_blocks = gridDim.x;
  CudaThreads threads(threadIdx, blockIdx, gridDim, block);
  for (unsigned t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      threadIdx = {t};
      block = &state;
      gridDim = {num_blocks};
      for (unsigned i = 0; i < num_blocks; ++i) {
        blockIdx = {i};
        __syncthreads();
        if (t == 0) std::memset(raw, 0xFF, kSharedBytes);  // NaN: nothing may be read before it is written
        __syncthreads();
        attention_kernel<F>(q, pages, args);
      }
    });
  }
}

template <int H, class C>
void run_with(int tile_rows, int num_keys, const bf16* q, const void* pages, const Args& args) {
  if (tile_rows == FewRows<H, C>::kRows) return run<FewRows<H, C>>(q, pages, args);
  return num_keys == 64 ? run<ManyRows<H, C, 64>>(q, pages, args) : run<ManyRows<H, C, 32>>(q, pages, args);
}

}  // namespace

// `num_keys` are those of a block of keys.
extern "C" void attend(int head_dim, int is_fp8, int tile_rows, int num_keys, const bf16* q, const void* pages,
                       const Args* args) {
  if (is_fp8) {
    head_dim == 128 ? run_with<128, Fp8Cache>(tile_rows, num_keys, q, pages, *args)
                    : run_with<64, Fp8Cache>(tile_rows, num_keys, q, pages, *args);
  } else {
    head_dim == 128 ? run_with<128, Bf16Cache>(tile_rows, num_keys, q, pages, *args)
                    : run_with<64, Bf16Cache>(tile_rows, num_keys, q, pages, *args);
  }
}
