#include "experts/sm80/launch.cuh"

#include "experts/sm80/stream_run.cuh"

namespace meshserve::experts::sm80 {

template <>
void run_format<Bf16>(const Shapes& shapes, const Call& call, StreamRun& run);
template <>
void run_format<E4m3>(const Shapes& shapes, const Call& call, StreamRun& run);
template <>
void run_format<Int4<32>>(const Shapes& shapes, const Call& call, StreamRun& run);
template <>
void run_format<Int4<128>>(const Shapes& shapes, const Call& call, StreamRun& run);

size_t scratch_bytes(const Shapes& shapes) { return Scratch().carve(shapes, nullptr); }

std::string launch(const Shapes& shapes, const Call& call, cudaStream_t stream) {
  if (shapes.experts > kMaxExperts) return std::to_string(shapes.experts) + " experts of a device are too many";
  StreamRun run(stream);
  with_format(shapes, call, [&](auto format) { run_format<decltype(format)>(shapes, call, run); });
  return run.error();
}

}  // namespace meshserve::experts::sm80
