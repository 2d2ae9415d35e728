// Quantized matrices among the operands of XLA FFI calls.
#pragma once
#include "common/weight_formats.cuh"
#include "ffi/buffers.cuh"

namespace meshserve {
namespace {

// Formats of quantized weights (kernels/linear/formats). The element type tells them apart; a second format in bytes
// needs an attribute of the calls.
enum class Format { kFp8, kInt4 };
inline Format format_of(const In& data) {
  return data.element_type() == ffi::DataType::U8 ? Format::kInt4 : Format::kFp8;
}
// Numbers in an element of the data.
inline int num_packed(Format format) { return format == Format::kInt4 ? 2 : 1; }

// Returns a stacked matrix. A scale's rows and columns follow from the shapes.
inline ScaledMatrix matrix_of(const In& data, const In& scale, const In& zero) {
  auto rows_of = [](const In& buffer) {
    size_t rows = 1;
    for (size_t i = 0; i + 1 < buffer.dimensions().size(); ++i) rows *= buffer.dimensions()[i];
    return static_cast<int>(rows);
  };
  auto columns_of = [](const In& buffer) { return static_cast<int>(buffer.dimensions().back()); };
  ScaledMatrix matrix = {data.untyped_data(), {}};
  Scales& s = matrix.scales;
  s.values = scale.untyped_data();
  s.zero = zero.element_type() == ffi::DataType::U8 ? meshserve::data<uint8_t>(zero) : nullptr;
  s.type = scale.element_type() == ffi::DataType::BF16  ? kBfloat16Scale
           : scale.element_type() == ffi::DataType::F16 ? kFloat16Scale
                                                        : kFloat32Scale;
  s.grid_rows = rows_of(scale);
  s.grid_columns = columns_of(scale);
  s.rows_each = rows_of(data) / s.grid_rows;
  const int columns = columns_of(data) * num_packed(format_of(data));
  s.columns_log2 = 31;  // one group
  if (s.grid_columns > 1) {
    s.columns_log2 = 0;
    while (1 << s.columns_log2 < columns / s.grid_columns) ++s.columns_log2;
  }
  return matrix;
}

}  // namespace
}  // namespace meshserve
