// What the XLA FFI calls of several files share: access to arguments, and results.
#pragma once
#include <string>

#include "launch.cuh"
#include "p2p_host.cuh"
#include "xla/ffi/api/ffi.h"

namespace meshserve {
namespace {

namespace ffi = xla::ffi;
using In = ffi::AnyBuffer;
using Out = ffi::Result<ffi::AnyBuffer>;
using Ints = ffi::Span<const int32_t>;

template <class T>
T* data(const In& buffer) {
  return static_cast<T*>(buffer.untyped_data());
}
template <class T>
T* data(Out& buffer) {
  return static_cast<T*>(buffer->untyped_data());
}
inline int size(const In& buffer, int dimension) { return static_cast<int>(buffer.dimensions()[dimension]); }

// Converts an error text, a step or a status to the result of a call.
inline ffi::Error result(const std::string& error) {
  return error.empty() ? ffi::Error::Success() : ffi::Error(ffi::ErrorCode::kInternal, error);
}
template <class W>
ffi::Error result(const StepOf<W>& step) {
  return result(step.error());
}
inline ffi::Error result(cudaError_t status) {
  return result(std::string(status == cudaSuccess ? "" : cudaGetErrorString(status)));
}

inline bool is_fp8(const In& cache) { return cache.element_type() == ffi::DataType::F8E4M3FN; }
inline bool is_int4(const In& data) { return data.element_type() == ffi::DataType::U8; }

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
  const int columns = columns_of(data) * (is_int4(data) ? 2 : 1);
  s.columns_log2 = 31;  // one group
  if (s.grid_columns > 1) {
    s.columns_log2 = 0;
    while (1 << s.columns_log2 < columns / s.grid_columns) ++s.columns_log2;
  }
  return matrix;
}

// Reads the operands of a call in order. A matrix is one operand, or with quantised weights three: its numbers, its
// scales and its zero points (without zero points: the scales again).
template <class W>
class Operands {
 public:
  explicit Operands(const ffi::RemainingArgs& all) : all_(all) {}

  // Returns an error unless there are so many operands. Nothing may be read otherwise.
  ffi::Error check(size_t others, size_t matrices) const {
    const size_t expected = others + matrices * (W::kIsQuantised ? 3 : 1);
    if (all_.size() == expected) return ffi::Error::Success();
    return ffi::Error(ffi::ErrorCode::kInvalidArgument, std::to_string(all_.size()) + " operands were given; " +
                                                            std::to_string(expected) + " are needed");
  }

  In next() { return *all_.get<In>(next_++); }

  struct Stack {
    In data;
    typename W::Matrix matrix;
  };
  Stack matrix() {
    const In values = next();
    if constexpr (W::kIsQuantised) {
      const In scale = next(), zero = next();
      return {values, matrix_of(values, scale, zero)};
    } else {
      return {values, meshserve::data<bf16>(values)};
    }
  }

 private:
  const ffi::RemainingArgs& all_;
  size_t next_ = 0;
};

inline Tuning tuning_of(Ints values) {
  Tuning t;
  int* fields[] = {&t.qkv_splits,       &t.o_splits,         &t.gate_up_splits, &t.down_splits,
                   &t.attention_splits, &t.blocks_per_stage, &t.ring_kilobytes, &t.streams};
  for (size_t i = 0; i < std::min<size_t>(values.size(), 8); ++i) *fields[i] = values[i];
  return t;
}

inline void add_cache(Shapes& shapes, const In& cache, const In& page_table) {  // [L, P, K, 2, S, H]
  shapes.layers = size(cache, 0);
  shapes.pages = size(cache, 1);
  shapes.kv_heads = size(cache, 2);
  shapes.page_size = size(cache, 4);
  shapes.head_dim = size(cache, 5);
  shapes.max_pages = size(page_table, 1);
}

inline ffi::Error too_small(size_t needed) {
  return ffi::Error(ffi::ErrorCode::kInvalidArgument, "the scratch buffer needs " + std::to_string(needed) + " bytes");
}

// Gets the P2P group from the point of view of the device that the call runs on.
inline ffi::Error find_p2p_group(Ints ordinals, Channel channel, size_t num_bytes, P2PGroup* p2p) {
  std::string error = P2PMeshes::all().group(ordinals.begin(), static_cast<int>(ordinals.size()), channel, p2p);
  if (error.empty() && num_bytes > kSlotBytes) {
    error = std::to_string(num_bytes) + " bytes are to be sent by P2P; " + std::to_string(kSlotBytes) + " is the limit";
  }
  return error.empty() ? ffi::Error::Success() : ffi::Error(ffi::ErrorCode::kFailedPrecondition, error);
}

using Stream = ffi::PlatformStream<cudaStream_t>;

}  // namespace
}  // namespace meshserve
