// Runs the kernels of few_tokens.cuh on the host, one block after another.
#include "projection/sm80/few_tokens.cuh"

namespace meshserve::portable {
constexpr size_t kSharedBytes = 48 << 10;
alignas(16) uint8_t shared_sums[kSharedBytes];
}  // namespace meshserve::portable

using namespace meshserve;
using namespace meshserve::portable;

namespace {

template <class F>
void run(const ProductArgs& args) {
  static_assert(F::kSharedBytes <= kSharedBytes);
  Block state(kProductThreads);
  const unsigned num_blocks = (args.rows + F::kRows - 1) / F::kRows;
  CudaThreads threads(threadIdx, blockIdx, gridDim, block);
  for (unsigned t = 0; t < kProductThreads; ++t) {
    threads.emplace_back([&, t] {
      threadIdx = {t};
      block = &state;
      for (unsigned i = 0; i < num_blocks; ++i) {
        blockIdx = {i};
        __syncthreads();
        if (t == 0) std::memset(shared_sums, 0xFF, F::kSharedBytes);  // NaN: nothing may be read before it is written
        __syncthreads();
        product_kernel<F>(args);
      }
    });
  }
}

template <class W, int kRowTiles>
void run_tokens(const ProductArgs& args) {
  if (args.num_tokens <= 8) return run<ProductForm<W, kRowTiles, 1, 1>>(args);
  if (args.num_tokens <= 16) return run<ProductForm<W, kRowTiles, 2, 1>>(args);
  if (args.num_tokens <= 32) return run<ProductForm<W, kRowTiles, 4, 1>>(args);
  run<ProductForm<W, kRowTiles, 8, 1>>(args);
}

template <class W>
void run_rows(int row_tiles, const ProductArgs& args) {
  row_tiles == 1 ? run_tokens<W, 1>(args) : run_tokens<W, 2>(args);
}

}  // namespace

extern "C" void multiply(int row_tiles, int is_int4, const ProductArgs* args) {
  if (!is_int4) return run_rows<E4m3Chunks>(row_tiles, *args);
  args->scales.columns_log2 >= 7 ? run_rows<Int4Chunks<1>>(row_tiles, *args)
                                 : run_rows<Int4Chunks<4>>(row_tiles, *args);
}
