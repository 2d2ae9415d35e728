// What the XLA FFI calls of Hopper's library share: access to arguments, and results.
#pragma once
#include <string>
#include <type_traits>
#include <utility>

#include "collectives/p2p_host.cuh"
#include "ffi/buffers.cuh"
#include "ffi/matrices.cuh"
#include "layers/step.cuh"

namespace meshserve {
namespace {

template <class W>
ffi::Error result(const Step<W>& step) {
  return result(step.error());
}

// Reads the operands of a call in order. A matrix is one operand, or with quantized weights three: its numbers, its
// scales and its zero points (without zero points: the scales again).
template <class W>
class Operands {
 public:
  explicit Operands(const ffi::RemainingArgs& all) : all_(all) {}

  // Returns an error unless the call has this number of operands, without which nothing may be read.
  ffi::Error check(size_t others, size_t matrices) const {
    const size_t expected = others + matrices * (W::kIsQuantized ? 3 : 1);
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
    if constexpr (W::kIsQuantized) {
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
  int* fields[] = {&t.qkv_splits,       &t.o_splits,         &t.gate_up_splits,     &t.down_splits,
                   &t.attention_splits, &t.blocks_per_stage, &t.pipeline_kilobytes, &t.streams};
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
inline ffi::Error p2p_group(Ints ordinals, Channel channel, size_t num_bytes, P2PGroup* p2p) {
  std::string error = find_p2p_group(ordinals.begin(), static_cast<int>(ordinals.size()), channel, p2p);
  if (error.empty() && num_bytes > kSlotBytes) {
    error = std::to_string(num_bytes) + " bytes are to be sent by P2P; " + std::to_string(kSlotBytes) + " is the limit";
  }
  return error.empty() ? ffi::Error::Success() : ffi::Error(ffi::ErrorCode::kFailedPrecondition, error);
}

}  // namespace
}  // namespace meshserve
