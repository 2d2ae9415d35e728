#include "projection/quantize_launch.cuh"

#include <algorithm>

namespace meshserve::fp8 {
namespace {

struct Launch {
  Kernel<QuantizeArgs> kernel;
  LaunchShape shape;
};

template <Before kBefore, bool kPerToken>
Kernel<QuantizeArgs> row_kernel_for(int num_vectors) {
  return num_vectors <= 1   ? kernel_of<quantize_row_kernel<kBefore, kPerToken, 1>>()
         : num_vectors <= 2 ? kernel_of<quantize_row_kernel<kBefore, kPerToken, 2>>()
         : num_vectors <= 4 ? kernel_of<quantize_row_kernel<kBefore, kPerToken, 4>>()
                            : kernel_of<quantize_row_kernel<kBefore, kPerToken, 8>>();
}

// `num_vectors` is the number for each thread.
Kernel<QuantizeArgs> row_kernel_for(Before before, bool per_token, int num_vectors) {
  if (!per_token) return row_kernel_for<Before::kRmsNorm, false>(num_vectors);
  return before == Before::kRmsNorm       ? row_kernel_for<Before::kRmsNorm, true>(num_vectors)
         : before == Before::kSiluProduct ? row_kernel_for<Before::kSiluProduct, true>(num_vectors)
                                          : row_kernel_for<Before::kNothing, true>(num_vectors);
}

Kernel<QuantizeArgs> chunk_kernel_for(Before before) {
  return before == Before::kSiluProduct ? kernel_of<quantize_chunk_kernel<Before::kSiluProduct>>()
                                        : kernel_of<quantize_chunk_kernel<Before::kNothing>>();
}

Launch launch_of(const QuantizeArgs& args, Before before, bool per_token) {
  const int num_vectors = args.columns / kWidth;
  const auto whole_warps = [](int threads) { return (threads + 31) / 32 * 32; };
  int num_arranging = 0;
  for (const ScaleArgs& weights : args.weights) num_arranging += weights.num_threads();
  const auto rows_of_blocks = [&](int chunks, int threads) {
    return args.rows + (num_arranging + chunks * threads - 1) / (chunks * threads);
  };
  if (!per_token && before != Before::kRmsNorm) {
    const int threads = std::min(kChunkThreads, whole_warps(num_vectors)),
              chunks = (num_vectors + threads - 1) / threads;
    return {chunk_kernel_for(before), {dim3(rows_of_blocks(chunks, threads), chunks), threads}};
  }
  const int most = args.rows <= kFewRows ? kMaxThreads : kManyRowsThreads;
  int share = 1;
  while (share < 8 && share * most < num_vectors) share *= 2;
  const int threads = whole_warps((num_vectors + share - 1) / share);
  constexpr size_t kSharedBytes = 2 * kMaxThreads / 32 * sizeof(float);
  return {row_kernel_for(before, per_token, share), {dim3(rows_of_blocks(1, threads)), threads, kSharedBytes}};
}

}  // namespace

cudaError_t launch(const QuantizeArgs& args, Before before, bool per_token, cudaStream_t stream) {
  const Launch chosen = launch_of(args, before, per_token);
  const LaunchShape& shape = chosen.shape;
  chosen.kernel.function<<<shape.grid, shape.threads, shape.shared_bytes, stream>>>(args);
  return cudaGetLastError();
}

void launch(const QuantizeArgs& args, Before before, LaunchSequence& sequence) {
  const Launch chosen = launch_of(args, before, false);
  sequence.launch("quantize", chosen.kernel, chosen.shape, args);
}

}  // namespace meshserve::fp8
