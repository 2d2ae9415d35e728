#include "projection/sm90/wide_head_launch.cuh"

#include <algorithm>

#include "common/launch.cuh"
#include "projection/sm90/wide_head_input.cuh"

namespace meshserve {
namespace wide_head {

std::string launch(const Call& call, cudaStream_t stream) {
  const int tokens = call.tokens, rows = call.rows, columns = call.columns;
  LaunchSequence sequence(stream);
  SplitArgs split = {};
  split.x = call.input;
  split.numbers = call.numbers;
  split.scales = call.powers;
  split.columns = columns;
  constexpr int kColumns = kSplitColumns * kSplitThreads;  // a block's
  sequence.launch("split", kernel_of<split_kernel>(),
                  {dim3(tokens, (columns + kColumns - 1) / kColumns), kSplitThreads}, split);

  ProductArgs args = {};
  args.scales = call.weights.scales;
  args.rows = rows;
  args.tiles = (rows + kTileRows - 1) / kTileRows;
  args.blocks = columns / kRowBytes;
  constexpr auto kType = CU_TENSOR_MAP_DATA_TYPE_UINT8;
  CUtensorMap of_weights, of_input;
  const cuuint64_t row_bytes = columns, num_rows = rows, token_bytes = kNumbers * row_bytes;
  const cuuint64_t sizes[3] = {row_bytes, num_rows, 1}, strides[2] = {row_bytes, row_bytes * num_rows};
  const cuuint32_t box[3] = {kRowBytes, kTileRows, 1};
  sequence.encode(&of_weights, call.weights.data, sizes, strides, box, kType);
  for (int first = 0; first < tokens; first += kMostTokens) {
    args.num_tokens = std::min(tokens - first, kMostTokens);
    args.input_scales = split.scales + static_cast<size_t>(first) * args.blocks;
    args.out = call.logits + static_cast<size_t>(first) * rows;
    // Tokens as [blocks of columns and numbers, tokens, 128 bytes].
    const cuuint64_t num_tokens = args.num_tokens;
    const cuuint64_t parts[3] = {kRowBytes, num_tokens, token_bytes / kRowBytes};
    const cuuint64_t part_strides[2] = {token_bytes, kRowBytes};
    const cuuint32_t part_box[3] = {kRowBytes, kMostTokens, 1};
    sequence.encode(&of_input, split.numbers + first * token_bytes, parts, part_strides, part_box, kType);
    sequence.launch("head", kernel_of<product_kernel>(),
                    {dim3(std::min(args.tiles, num_multiprocessors())), kThreads, sizeof(ProductMemory)}, of_weights,
                    of_input, args);
  }
  return sequence.error();
}

}  // namespace wide_head
}  // namespace meshserve
