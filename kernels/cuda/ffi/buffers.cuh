// What the XLA FFI calls of all libraries share: access to buffers, and results.
#pragma once
#include <cuda_runtime.h>

#include <string>
#include <type_traits>
#include <utility>

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

// Converts an error text or a status to the result of a call.
inline ffi::Error result(const std::string& error) {
  return error.empty() ? ffi::Error::Success() : ffi::Error(ffi::ErrorCode::kInternal, error);
}
inline ffi::Error result(cudaError_t status) {
  return result(std::string(status == cudaSuccess ? "" : cudaGetErrorString(status)));
}

inline bool is_fp8(const In& cache) { return cache.element_type() == ffi::DataType::F8E4M3FN; }

using Stream = ffi::PlatformStream<cudaStream_t>;

// The number of operands and results of a call, whose function names them.
template <int kCount>
constexpr std::integral_constant<int, kCount> operands = {};
template <int kCount>
constexpr std::integral_constant<int, kCount> results = {};

template <int kOperands, int kResults, class Binding>
auto with_buffers(Binding&& binding) {
  if constexpr (kOperands > 0) {
    return with_buffers<kOperands - 1, kResults>(std::move(binding).template Arg<In>());
  } else if constexpr (kResults > 1) {
    return with_buffers<0, kResults - 1>(std::move(binding).template Ret<In>());
  } else {
    return std::move(binding).template Ret<In>();
  }
}

// Returns the binding of a call on XLA's stream.
template <int kOperands, int kResults>
auto bind(std::integral_constant<int, kOperands>, std::integral_constant<int, kResults>) {
  return with_buffers<kOperands, kResults>(ffi::Ffi::Bind().Ctx<Stream>());
}
// The same with any number of operands, which the function reads in order.
template <int kResults>
auto bind(std::integral_constant<int, kResults>) {
  return with_buffers<0, kResults>(ffi::Ffi::Bind().Ctx<Stream>().RemainingArgs());
}

}  // namespace
}  // namespace meshserve
