// FP8 products by cuBLASLt, whose library is opened at run time: the kernels build and run without it.
#pragma once
#include <cuda_runtime.h>
#include <library_types.h>
#include <stdint.h>

#include <string>
#include <tuple>

namespace meshserve::cublas_lt {

constexpr size_t kWorkspaceBytes = 32 << 20;
enum ScaleMode : int { kPerRow = 3, kPer128 = 4, kPerBlock = 5 };  // OUTER_VEC_32F, VEC128_32F, BLK128x128_32F

// out [tokens, rows] = x [tokens, columns] weights [rows, columns]^T, in row-major order. For cuBLASLt, which counts by
// columns, this is out^T = weights x^T, with the weights as its A, stored transposed.
struct Product {
  int64_t tokens, rows, columns;
  ScaleMode weight_mode;
  cudaDataType_t out_type;
  // Which of cuBLASLt's algorithms, best first by its estimate. Or one that it does not propose, if it takes it: 256 *
  // a value of cublasLtMatmulTile_t + one of cublasLtClusterShape_t, which is below 256.
  int candidate;
  int tile() const { return candidate / 256; }

  auto key(int device) const {
    return std::make_tuple(device, tokens, rows, columns, static_cast<int>(weight_mode), static_cast<int>(out_type),
                           candidate);
  }
};

struct Operands {
  const void *weights, *x, *residual;  // a residual has the type and shape of `out`; nullptr: none
  const float *weight_scales, *x_scales;
  void *out, *workspace;
};

// Opens the library and creates a handle for each device. Returns an empty string or an error.
std::string open(const char* path, const int* ordinals, int num);

// Launches a product. A plan is made at the first one of a shape, and kept. Returns an empty string or an error.
std::string multiply(const Product& product, const Operands& operands, cudaStream_t stream);

}  // namespace meshserve::cublas_lt
