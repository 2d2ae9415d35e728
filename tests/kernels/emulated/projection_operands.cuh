// The operands of projections on the host: activations in a format's form, and the tensor map of its weights.
#pragma once
#include "common/ptx.cuh"

namespace meshserve {
inline uint8_t* pipeline_memory = nullptr;  // takes the place of the kernel's shared memory, a part for each block
}

#include "projection/sm90/projection.cuh"

#include <vector>

namespace meshserve {

// Converts x [batch, columns] to the activations that a format takes.
template <class W>
std::vector<bf16> activations_of(const float* x, int batch, int columns) {
  constexpr int kThreads = 256;
  std::vector<bf16> result(activation_bytes(batch, columns) / 2 + 64, bf16{0xFFFF});
  uint8_t* exponents = exponents_of(result.data(), batch, columns);
  Block state(kThreads);
  CudaThreads threads(threadIdx, blockIdx, block);
  for (unsigned t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      threadIdx = {t};
      block = &state;
      for (int token = 0; token < batch; ++token) {
        const size_t row = static_cast<size_t>(token) * columns;
        for (int column = 4 * t; column < columns; column += 4 * kThreads) {
          const float* v = x + row + column;
          store_activations<W>(result.data() + row, exponents + row / kExponentColumns, column,
                               float4{v[0], v[1], v[2], v[3]});
        }
      }
    });
  }
  return result;
}

// Maps weights [rows, columns], of all layers, in boxes of 64 rows.
template <class W>
CUtensorMap map_of_weights(const void* data, int rows, int columns) {
  const int row_bytes = columns * 128 / W::kBlockColumns, element_bytes = W::kIsQuantized ? 1 : 2;
  CUtensorMap map = {static_cast<const uint8_t*>(data), {}, {}, element_bytes};
  const int quantized_sizes[3] = {row_bytes / element_bytes, rows, 1}, sizes[3] = {kBlockK, rows, row_bytes / 128};
  std::copy_n(W::kIsQuantized ? quantized_sizes : sizes, 3, map.sizes);
  const int box[3] = {128 / element_bytes, 64, 1};
  std::copy_n(box, 3, map.box);
  return map;
}

}  // namespace meshserve
