#include "projection/sm80/few_tokens_launch.cuh"

#include "common/kernels.cuh"

namespace meshserve {
namespace portable {
namespace {

template <class F>
std::string launch_form(const ProductArgs& args, cudaStream_t stream) {
  const auto kernel = kernel_of<product_kernel<F>>().function;
  static_assert(F::kSharedBytes <= 48 << 10, "what a block has without asking");
  kernel<<<(args.rows + F::kRows - 1) / F::kRows, kProductThreads, F::kSharedBytes, stream>>>(args);
  const cudaError_t status = cudaGetLastError();
  return status == cudaSuccess ? "" : std::string("launching a product failed: ") + cudaGetErrorString(status);
}

template <class W, int kTokenTiles>
std::string launch_tokens(const ProductArgs& args, cudaStream_t stream) {
  int device = 0, num_multiprocessors = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&num_multiprocessors, cudaDevAttrMultiProcessorCount, device);
  // Twice the rows halve the reads of activations, if blocks enough for all multiprocessors are left.
  if (args.rows >= 32 * num_multiprocessors) return launch_form<ProductForm<W, 2, kTokenTiles>>(args, stream);
  return launch_form<ProductForm<W, 1, kTokenTiles>>(args, stream);
}

template <class W>
std::string launch_weights(const ProductArgs& args, cudaStream_t stream) {
  if (args.num_tokens <= 8) return launch_tokens<W, 1>(args, stream);
  if (args.num_tokens <= 16) return launch_tokens<W, 2>(args, stream);
  if (args.num_tokens <= 32) return launch_tokens<W, 4>(args, stream);
  return launch_tokens<W, 8>(args, stream);
}

}  // namespace

std::string launch_product(const ProductArgs& args, bool is_int4, cudaStream_t stream) {
  if (args.num_tokens > kMaxTokens) return "a product of few tokens has " + std::to_string(args.num_tokens);
  if (!is_int4) return launch_weights<E4m3Chunks>(args, stream);
  constexpr int kChunkLog2 = 7;
  static_assert(1 << kChunkLog2 == Int4Chunks<1>::kColumns);
  return args.scales.columns_log2 >= kChunkLog2 ? launch_weights<Int4Chunks<1>>(args, stream)
                                                : launch_weights<Int4Chunks<4>>(args, stream);
}

}  // namespace portable
}  // namespace meshserve
