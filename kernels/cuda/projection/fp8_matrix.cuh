// FP8 weights as cuBLASLt multiplies them: how their scales lie, and whether they are laid out anew for it.
#pragma once
#include "projection/cublas_lt.cuh"
#include "projection/quantize.cuh"

namespace meshserve::fp8 {

struct Matrix {
  const uint8_t* numbers;  // [rows, columns] e4m3
  const void* scales;      // [scale_rows, scale_columns] float32 or bfloat16
  int rows, columns, scale_rows, scale_columns;
  bool is_bfloat16;
  cublas_lt::ScaleMode mode;  // in which cuBLASLt reads the scales

  // Describes how the scales are laid out; `scratch` has room for `num_arranged`. `out` of the result is nullptr if
  // they can be read as they are.
  ScaleArgs arrangement(float* scratch) const {
    ScaleArgs args = {};
    args.scales = scales;
    args.source_columns = scale_columns;
    args.is_bfloat16 = is_bfloat16;
    args.is_transposed = mode == cublas_lt::kPer128;
    args.rows = args.is_transposed ? rows : scale_rows;
    args.columns = args.is_transposed ? columns / kBlockColumns : scale_columns;
    args.stride = mode == cublas_lt::kPerBlock ? (args.columns + 3) / 4 * 4 : args.columns;
    args.repeats = args.rows / scale_rows;
    const bool is_ready = !is_bfloat16 && !args.is_transposed && args.stride == args.columns;
    args.out = is_ready ? nullptr : scratch;
    return args;
  }
};

}  // namespace meshserve::fp8
