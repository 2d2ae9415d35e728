// Launches projections with weights of one format. Included by the file of each format, which says which it has.
#pragma once
#include <algorithm>
#include <type_traits>

#include "projection/sm90/launch.cuh"
#include "projection/sm90/projection.cuh"

namespace meshserve {

// The widths of products, in tokens, that a projection has kernels for: powers of two, as bits.
template <Epilogue E, class W>
constexpr int kWidths = 0;

// Maps a row-major [rows, columns] matrix as [columns / 64, rows, 64], fetched in boxes of [blocks, tile_rows, 64].
inline bool map_tiles(LaunchSequence& sequence, CUtensorMap* map, const bf16* matrix, size_t rows, int columns,
                      int tile_rows, int blocks, int step = 1) {
  const cuuint64_t sizes[3] = {kBlockK, rows, static_cast<cuuint64_t>(columns / kBlockK / step)};
  const cuuint64_t strides[2] = {static_cast<cuuint64_t>(columns) * 2, static_cast<cuuint64_t>(kBlockK * 2 * step)};
  const cuuint32_t box[3] = {kBlockK, static_cast<cuuint32_t>(tile_rows), static_cast<cuuint32_t>(blocks)};
  return sequence.encode(map, matrix, sizes, strides, box);
}

template <class W>
bool map_weights(LaunchSequence& sequence, CUtensorMap* map, const typename W::Matrix& matrix, size_t rows, int columns,
                 int blocks) {
  if constexpr (W::kIsQuantized) {  // as [rows, bytes], in boxes of [64, 128]: the last box of a row may exceed it
    const cuuint64_t row_bytes = static_cast<cuuint64_t>(columns) * 128 / W::kBlockColumns;
    const cuuint64_t sizes[3] = {row_bytes, rows, 1}, strides[2] = {row_bytes, row_bytes * rows};
    const cuuint32_t box[3] = {128, 64, 1};
    return sequence.encode(map, matrix.data, sizes, strides, box, CU_TENSOR_MAP_DATA_TYPE_UINT8);
  } else {
    return map_tiles(sequence, map, matrix, rows, columns, 64, blocks);
  }
}

template <int N, Epilogue E, class W>
void launch_width(LaunchSequence& sequence, const Projection& projection, const typename W::Matrix& matrix,
                  ArgsOf<E, W>& args) {
  ProjectionShape shape = {};
  shape.width = N;
  shape.columns = projection.columns;
  shape.block_columns = W::kBlockColumns;
  shape.is_quantized = W::kIsQuantized;
  shape.has_exponents = W::kIsSplit;
  shape.splits_input = kSplitsInput<W>;
  shape.input_tiles_each = kTilesPerBlock<W>;
  shape.blocks_per_stage = projection.blocks_per_stage;
  shape.pipeline_kilobytes = projection.pipeline_kilobytes;
  const int groups = (args.batch + N - 1) / N;
  const int all_blocks = (projection.columns + W::kBlockColumns - 1) / W::kBlockColumns;
  // Quantized weights are split like bf16 ones, which were tuned: what a short range costs is not its bytes.
  shape.splits = projection.splits != 0
                     ? projection.splits
                     : std::min(choose_splits(projection.tiles * groups, projection.columns / kBlockK, N, W::kIsSplit),
                                all_blocks);
  if constexpr (kAttends<E>) {
    shape.head_blocks = args.heads.blocks;
    shape.head_early_stages = args.heads.early_stages;
    shape.head_round_bytes = kHeadWarps * 2 * kProductTokens * kHeadDim * sizeof(typename CacheOf<E>::Element);
  }
  if constexpr (W::kIsQuantized) {
    shape.table_columns_log2 = matrix.scales.columns_log2;
    shape.table_entries = scale_entries(matrix.scales.rows_each);
  }
  std::string error;
  const ProjectionPlan plan = plan_projection(shape, &error);
  if (!error.empty()) return sequence.note(std::string(projection.name) + ": " + error);

  args.splits = shape.splits;
  args.k_blocks = plan.k_blocks;
  args.stages = plan.stages;
  args.blocks_per_stage = plan.blocks_per_stage;
  args.pipeline_bytes = plan.pipeline_bytes;
  args.resident_input = plan.is_resident ? projection.input : nullptr;
  if constexpr (kAttends<E>) {
    args.heads.stages = plan.head_stages;
    args.heads.page_offset = plan.head_page_offset;
  }
  if constexpr (W::kIsQuantized) {
    args.scales = matrix.scales;
    args.table_offset = plan.table_offset;
    args.input_tiles = projection.columns / kBlockK;
  }
  if constexpr (W::kIsSplit) {
    args.exponents = exponents_of(projection.input, args.batch, projection.columns);
    args.exponent_offset = plan.exponent_offset;
  }
  CUtensorMap weights_map, input_map;
  const size_t all_rows = static_cast<size_t>(projection.layers) * projection.rows;
  if (!map_weights<W>(sequence, &weights_map, matrix, all_rows, projection.columns, plan.blocks_per_stage) ||
      !map_tiles(sequence, &input_map, projection.input, args.batch, projection.columns, N,
                 plan.blocks_per_stage * kTilesPerBlock<W>, kIsSingle<W> ? 2 : 1)) {
    return;
  }
  const int blocks = kAttends<E> ? shape.head_blocks : shape.splits;
  LaunchShape launch = {dim3(blocks, groups, projection.tiles), kProjectionThreads};
  launch.shared_bytes = plan.shared_bytes;
  launch.cluster = blocks;
  launch.priority = projection.priority;
  sequence.launch(projection.name, kernel_of<projection_kernel<N, E, W>>(), launch, weights_map, input_map, args);
}

template <Epilogue E, class W>
void launch_projection(LaunchSequence& sequence, const Projection& projection, const typename W::Matrix& matrix,
                       ArgsOf<E, W> args) {
  const auto run = [&](auto width) {
    constexpr int N = decltype(width)::value;
    if constexpr ((kWidths<E, W> & N) != 0) {
      launch_width<N, E, W>(sequence, projection, matrix, args);
    } else {
      sequence.note(std::string(projection.name) + ": these weights are not multiplied with " + std::to_string(N) +
                    " tokens");
    }
  };
  switch (width_of(args.batch)) {
    case 8: return run(std::integral_constant<int, 8>());
    case 16: return run(std::integral_constant<int, 16>());
    case 32: return run(std::integral_constant<int, 32>());
    default: return run(std::integral_constant<int, 64>());
  }
}

// Instantiates the launch of a projection with products of some widths. Used by the files of formats.
#define MESHSERVE_PROJECTION(epilogue, format, widths)         \
  template <>                                                  \
  constexpr int kWidths<Epilogue::epilogue, format> = widths;  \
  template void launch_projection<Epilogue::epilogue, format>( \
      LaunchSequence&, const Projection&, const format::Matrix&, ArgsOf<Epilogue::epilogue, format>)

}  // namespace meshserve
