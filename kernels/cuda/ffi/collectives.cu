// The XLA FFI calls of single collectives, and what the host calls to open their P2P groups.
#include "ffi/arguments.cuh"

namespace meshserve {
namespace {

ffi::Error one_shot(cudaStream_t stream, In x, Out out, Ints ordinals, bool is_sum) {
  OneShotArgs args = {};
  ffi::Error error = p2p_group(ordinals, Channel::kOneShot, x.size_bytes(), &args.p2p);
  if (error.failure()) return error;
  if (x.size_bytes() % 8 != 0) return ffi::Error(ffi::ErrorCode::kInvalidArgument, "a multiple of 8 bytes is needed");
  args.in = data<uint2>(x);
  args.out = data<uint2>(out);
  args.num_pairs = static_cast<int>(x.size_bytes() / 8);
  return result(launch_one_shot(args, is_sum, stream));
}

ffi::Error p2p_all_reduce(cudaStream_t stream, In x, Out out, Ints ordinals) {
  if (x.size_bytes() <= kSlotBytes) return one_shot(stream, x, out, ordinals, true);
  P2PGroup p2p = {};
  const ffi::Error error = p2p_group(ordinals, Channel::kTwoShot, 0, &p2p);
  if (error.failure()) return error;
  return result(launch_two_shot(p2p, data<void>(x), data<void>(out), x.size_bytes(), stream));
}

ffi::Error p2p_all_gather(cudaStream_t stream, In x, Out out, Ints ordinals) {
  return one_shot(stream, x, out, ordinals, false);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(meshserve_p2p_all_reduce, p2p_all_reduce,
                              bind(operands<1>, results<1>).Attr<Ints>("ordinals"),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(meshserve_p2p_all_gather, p2p_all_gather,
                              bind(operands<1>, results<1>).Attr<Ints>("ordinals"),
                              {ffi::Traits::kCmdBufferCompatible});

// Opens the P2P group of a mesh, given its CUDA device ordinals by rank. Writes a failure to `error`; returns whether
// opening succeeded.
extern "C" int meshserve_open_p2p_group(const int* ordinals, int num, double patience_seconds, char* error, int size) {
  const std::string text = open_p2p_group(ordinals, num, patience_seconds);
  snprintf(error, size, "%s", text.c_str());
  return text.empty();
}

// Returns 1 + the rank for which `rank` timed out waiting, or 0.
extern "C" int meshserve_stalled_rank(const int* ordinals, int num, int rank) {
  return stalled_rank(ordinals, num, rank);
}

}  // namespace meshserve
