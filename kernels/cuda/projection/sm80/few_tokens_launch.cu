#include "projection/sm80/few_tokens_launch.cuh"

#include "common/kernels.cuh"

namespace meshserve {
namespace portable {
namespace {

template <class W, int kRowTiles, int kTokenTiles, int kBlocks>
std::string launch_form(const ProductArgs& args, cudaStream_t stream) {
  using F = ProductForm<W, kRowTiles, kTokenTiles, kBlocks>;
  const auto kernel = kernel_of<product_kernel<F>>().function;
  static_assert(F::kSharedBytes <= 48 << 10, "what a block has without asking");
  kernel<<<(args.rows + F::kRows - 1) / F::kRows, kProductThreads, F::kSharedBytes, stream>>>(args);
  const cudaError_t status = cudaGetLastError();
  return status == cudaSuccess ? "" : std::string("launching a product failed: ") + cudaGetErrorString(status);
}

// Twice the rows in a block halve the reads of activations, but need so many registers that fewer blocks hide each
// other's waits. Which is faster was measured with the projections of an 8B model on an H200 (docs/log/gpus.md).
template <class W>
std::string launch_weights(const ProductArgs& args, cudaStream_t stream) {
  int device = 0, num_multiprocessors = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&num_multiprocessors, cudaDevAttrMultiProcessorCount, device);
  const bool is_tall = args.rows >= 64 * num_multiprocessors;
  if (args.num_tokens <= 8) {
    if constexpr (W::kHasZeros) {
      return is_tall ? launch_form<W, 2, 1, 2>(args, stream) : launch_form<W, 1, 1, 3>(args, stream);
    } else {
      return launch_form<W, 1, 1, 4>(args, stream);
    }
  }
  if (args.num_tokens <= 16) {
    return is_tall ? launch_form<W, 2, 2, 2>(args, stream) : launch_form<W, 1, 2, 3>(args, stream);
  }
  constexpr bool kHasRoom = W::kGroups == 1;  // for twice the rows in the registers of a thread
  if (args.num_tokens <= 32) {
    if constexpr (W::kHasZeros && kHasRoom) {
      return launch_form<W, 2, 4, 1>(args, stream);
    } else {
      return launch_form<W, 1, 4, kHasRoom ? 2 : 1>(args, stream);
    }
  }
  return launch_form<W, kHasRoom ? 2 : 1, 8, 1>(args, stream);
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
