// The XLA FFI call output_head_wide: logits by an FP8 output head, in one pass over it (wide_head.cuh).
#include "wide_head.cuh"

#include "ffi_arguments.cuh"

namespace meshserve {
namespace wide_head {

constexpr int kSplitThreads = 128, kSplitColumns = 8;  // of a thread

struct SplitArgs {
  const bf16* x;     // [tokens, columns]
  uint8_t* numbers;  // [tokens, columns / 128, kNumbers, 128] e4m3
  float* scales;     // [tokens / kMostTokens, columns / 128, kMostTokens]
  int columns;
};

// Splits each element into two e4m3 numbers, whose powers of two scale the largest element of 128 columns to 128 and
// more, below 256. Grid: tokens, groups of 8 columns for each thread.
__global__ void __launch_bounds__(kSplitThreads) split_kernel(const __grid_constant__ SplitArgs args) {
  const int token = blockIdx.x, column = (blockIdx.y * kSplitThreads + threadIdx.x) * kSplitColumns;
  if (threadIdx.x == 0) let_next_kernel_start();
  if (column >= args.columns) return;  // the 16 lanes of 128 columns together
  const size_t row = static_cast<size_t>(token) * args.columns;
  const uint4 packed = __ldcg(reinterpret_cast<const uint4*>(args.x + row + column));
  const float4 low = unpack_bf16(make_uint2(packed.x, packed.y)), high = unpack_bf16(make_uint2(packed.z, packed.w));
  const float v[kSplitColumns] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
  float highest = 0.0f;
#pragma unroll
  for (int i = 0; i < kSplitColumns; ++i) highest = fmaxf(highest, fabsf(v[i]));
  constexpr uint32_t kLargest = 7;
  const uint32_t exponent = max(__float_as_uint(largest_of_16_lanes(highest)) >> 23, kLargest);
  const float factor = power_of(254 + kLargest - exponent);
  alignas(8) uint16_t first[kSplitColumns / 2], second[kSplitColumns / 2];
#pragma unroll
  for (int i = 0; i < kSplitColumns / 2; ++i) {
    const E4m3Pair pair = split_e4m3(v[2 * i] * factor, v[2 * i + 1] * factor);
    first[i] = pair.first, second[i] = pair.second;
  }
  const int block = column / kRowBytes, place = column % kRowBytes;
  uint8_t* to = args.numbers + kNumbers * (row + block * kRowBytes) + place;
  *reinterpret_cast<uint2*>(to) = *reinterpret_cast<const uint2*>(first);
  *reinterpret_cast<uint2*>(to + kRowBytes) = *reinterpret_cast<const uint2*>(second);
  // Infinity stays infinite, and NaN is a number of e4m3.
  if (place == 0) {
    const int group = token / kMostTokens * (args.columns / kRowBytes) + block;
    args.scales[group * kMostTokens + token % kMostTokens] = power_of(exponent == 255 ? 255 : exponent - kLargest);
  }
}

}  // namespace wide_head

namespace {

// logits = input weights^T, in float32, of FP8 weights with a scale for each row.
ffi::Error output_head_wide(cudaStream_t stream, In input, In weights, In scales, Out logits, Out numbers, Out powers) {
  const int tokens = size(input, 0), columns = size(input, 1), rows = size(weights, 0);
  Shapes shapes;
  shapes.layers = 1;
  StepOf<Bf16Weights> step(shapes, {}, stream);
  wide_head::SplitArgs split = {};
  split.x = data<bf16>(input);
  split.numbers = data<uint8_t>(numbers);
  split.scales = data<float>(powers);
  split.columns = columns;
  constexpr int kColumns = wide_head::kSplitColumns * wide_head::kSplitThreads;  // of a block
  step.launch("split", wide_head::split_kernel, dim3(tokens, (columns + kColumns - 1) / kColumns),
              wide_head::kSplitThreads, 0, 1, split);

  wide_head::ProductArgs args = {};
  args.scales = matrix_of(weights, scales, scales).scales;
  args.rows = rows;
  args.tiles = (rows + wide_head::kTileRows - 1) / wide_head::kTileRows;
  args.blocks = columns / wide_head::kRowBytes;
  constexpr auto kType = CU_TENSOR_MAP_DATA_TYPE_UINT8;
  CUtensorMap of_weights, of_input;
  const cuuint64_t row_bytes = columns, num_rows = rows, token_bytes = wide_head::kNumbers * row_bytes;
  const cuuint64_t sizes[3] = {row_bytes, num_rows, 1}, strides[2] = {row_bytes, row_bytes * num_rows};
  const cuuint32_t box[3] = {wide_head::kRowBytes, wide_head::kTileRows, 1};
  step.encode(&of_weights, weights.untyped_data(), sizes, strides, box, kType);
  for (int first = 0; first < tokens; first += wide_head::kMostTokens) {
    args.num_tokens = std::min(tokens - first, wide_head::kMostTokens);
    args.input_scales = split.scales + static_cast<size_t>(first) * args.blocks;
    args.out = data<float>(logits) + static_cast<size_t>(first) * rows;
    // Tokens as [blocks of columns and numbers, tokens, 128 bytes].
    const cuuint64_t num_tokens = args.num_tokens;
    const cuuint64_t parts[3] = {wide_head::kRowBytes, num_tokens, token_bytes / wide_head::kRowBytes};
    const cuuint64_t part_strides[2] = {token_bytes, wide_head::kRowBytes};
    const cuuint32_t part_box[3] = {wide_head::kRowBytes, wide_head::kMostTokens, 1};
    step.encode(&of_input, split.numbers + first * token_bytes, parts, part_strides, part_box, kType);
    step.launch("head", wide_head::product_kernel, dim3(std::min(args.tiles, kMultiprocessors)), wide_head::kThreads,
                sizeof(wide_head::ProductMemory), 1, of_weights, of_input, args);
  }
  return result(step);
}

}  // namespace

std::vector<const void*> wide_head_kernels() {
  return {reinterpret_cast<const void*>(wide_head::split_kernel),
          reinterpret_cast<const void*>(wide_head::product_kernel)};
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(meshserve_output_head_wide, output_head_wide,
                              ffi::Ffi::Bind()
                                  .Ctx<Stream>()
                                  .Arg<In>()   // input
                                  .Arg<In>()   // weights
                                  .Arg<In>()   // scales
                                  .Ret<In>()   // logits
                                  .Ret<In>()   // input as e4m3 numbers
                                  .Ret<In>(),  // their scales
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace meshserve
