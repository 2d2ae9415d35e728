// Runs the product of wide_head.cuh on the host, one block after another.
#include "projection/sm90/wide_head.cuh"

namespace meshserve::wide_head {
alignas(1024) uint8_t shared[232 << 10];
}

using namespace meshserve;

// `input` is [blocks of columns, numbers, tokens, 128 bytes].
extern "C" void multiply(int grid, const uint8_t* weights, const uint8_t* input, const wide_head::ProductArgs* args) {
  using namespace wide_head;
  static_assert(sizeof(ProductMemory) <= 227 << 10);
  const CUtensorMap of_weights = {weights, {args->blocks * kRowBytes, args->rows, 1}, {kRowBytes, kTileRows, 1}, 1};
  const CUtensorMap of_input = {
      input, {kRowBytes, args->num_tokens, kNumbers * args->blocks}, {kRowBytes, kMostTokens, 1}, 1};
  shared_base = wide_head::shared;
  for (unsigned index = 0; index < static_cast<unsigned>(grid); ++index) {
    std::memset(wide_head::shared, 0xFF, sizeof wide_head::shared);  // NaN: nothing may be read before it is written
    Block state(kThreads);
    CudaThreads threads(threadIdx, blockIdx, gridDim, block);
    for (unsigned i = 0; i < kThreads; ++i) {
      threads.emplace_back([&, i, index] {
        threadIdx = {i};
        blockIdx = {index};
        gridDim = {static_cast<unsigned>(grid)};
        block = &state;
        product_kernel(of_weights, of_input, *args);
      });
    }
  }
}
