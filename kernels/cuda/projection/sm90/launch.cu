#include "projection/sm90/launch.cuh"

#include <algorithm>

#include "common/tuning.cuh"

namespace meshserve {
namespace {

// Returns the mean number of blocks per SM divided by the maximum.
double evenness(int blocks, int multiprocessors) {
  return static_cast<double>(blocks) / multiprocessors / ((blocks + multiprocessors - 1) / multiprocessors);
}

}  // namespace

// Two blocks fit on an SM. Filling about three quarters of these slots leaves room for the next kernel's weights, so
// the number of ranges is chosen to fill that many, with ranges of a minimal length, or longer ones if they are uneven.
// Too few blocks for the GPU are worse than short ranges; with 64 tokens, whose sums take longer, fewer blocks are
// enough.
int choose_splits(int tiles, int k_blocks, int width, bool has_short_blocks) {
  const int multiprocessors = num_multiprocessors(), slots = 2 * multiprocessors;
  const auto here = [&](int blocks) { return multiprocessors * blocks / tuned::kMeasuredMultiprocessors; };
  const int fewest_blocks = here(tuned::kFewestBlocks);
  const bool is_narrow = width <= 16;
  const int fewest = width < 64 ? fewest_blocks : here(tuned::kFewestBlocksOf64Tokens);
  const int uneven_range = is_narrow ? tuned::kShortestUnevenNarrowRange : tuned::kShortestUnevenRange;
  const int short_range = is_narrow     ? tuned::kHalvedNarrowRange
                          : width == 32 ? tuned::kHalvedRangeOf32Tokens
                                        : tuned::kHalvedRangeOf64Tokens;
  int splits = 1;
  for (int s = 2; s <= kMaxSplits; ++s) {
    const int range = k_blocks / s;
    const bool fits = k_blocks % s == 0 ? tiles * s <= here(tuned::kMostBlocks) && range >= tuned::kShortestRange
                                        : tiles * s <= here(tuned::kMostUnevenBlocks) && range >= uneven_range &&
                                              (is_narrow || tiles * s > multiprocessors);
    const bool is_power = (s & (s - 1)) == 0,
               is_needed = tiles * splits < fewest && is_power && range >= tuned::kShortestNeededRange;
    if (fits || is_needed) splits = s;
  }
  auto blocks = [&] { return tiles * splits; };
  auto halved_range = [&] { return 2 * splits > kMaxSplits ? 0 : k_blocks / (2 * splits); };
  // From 32 tokens on, uneven ranges are faster than a single block on each SM.
  const bool is_one_each = blocks() > fewest_blocks && blocks() <= multiprocessors;
  if (!is_narrow && is_one_each && splits < kMaxSplits && k_blocks / (splits + 1) >= 3) ++splits;
  // Exceed the blocks that run at once if ranges stay long, or if they are not short and fill the SMs more evenly.
  if (blocks() > multiprocessors && blocks() < slots) {
    const bool is_evener = evenness(2 * blocks(), multiprocessors) > evenness(blocks(), multiprocessors) + 0.1;
    if (halved_range() >= tuned::kLongHalvedRange || (halved_range() >= short_range && is_evener)) splits *= 2;
  }
  // With several waves, the last one ends sooner if blocks are short. Blocks of 8-bit weights already are.
  if (width == 32 && blocks() >= slots &&
      halved_range() >= (has_short_blocks ? tuned::kLastWaveRangeOfSplitFp8 : tuned::kLastWaveRange))
    splits *= 2;
  return splits;
}

ProjectionPlan plan_projection(const ProjectionShape& shape, std::string* error) {
  ProjectionPlan plan = {};
  const int n = shape.width, tile_bytes = n * kBlockK * 2;
  const bool is_narrow = n <= 16, attends = shape.head_blocks > 0;
  plan.k_blocks = (shape.columns + shape.block_columns - 1) / shape.block_columns;
  if (shape.splits > std::min(kMaxSplits, plan.k_blocks)) {
    *error = "at most one range for each " + std::to_string(shape.block_columns) + " columns, and at most " +
             std::to_string(kMaxSplits);
    return plan;
  }
  // The pipeline leaves room for two blocks on an SM: of this kernel, or of the next one, which already prefetches. A
  // range that fits is a single stage with one wait. Otherwise a stage has two blocks of k if all ranges are even.
  const int split_blocks = (plan.k_blocks + shape.splits - 1) / shape.splits;
  const int input_tiles = split_blocks * (shape.block_columns / kBlockK);
  const int resident_bytes = input_tiles * tile_bytes;
  plan.is_resident = is_narrow && (resident_bytes <= kMaxResidentBytes || shape.splits_input);
  const int kept_bytes = plan.is_resident ? resident_bytes : 0;
  const int block_bytes = 2 * kHalfTileBytes + (plan.is_resident ? 0 : shape.input_tiles_each * tile_bytes);
  const int kilobytes = attends                         ? 227
                        : shape.pipeline_kilobytes != 0 ? shape.pipeline_kilobytes
                                                        : tuned::kPipelineKilobytes;
  const int sum_bytes = attends     ? shape.head_blocks * kSumStride * 4 + static_cast<int>(sizeof(HeadMemory))
                        : is_narrow ? shape.splits * split_tokens(n, shape.splits) * kSumStride * 4
                                    : 0;
  const int table_bytes =
      shape.is_quantized
          ? scale_groups(split_blocks, shape.block_columns, shape.table_columns_log2) * shape.table_entries * 4
          : 0;
  const int exponent_bytes = shape.has_exponents ? (input_tiles * n + 15) / 16 * 16 : 0;
  const int page_bytes = shape.head_early_stages * shape.head_round_bytes;
  const int other_bytes = other_bytes_of(n);
  const int pipeline_bytes =
      1024 * kilobytes - other_bytes - sum_bytes - kept_bytes - table_bytes - exponent_bytes - page_bytes;
  plan.blocks_per_stage = 1;
  if (is_narrow && !shape.is_quantized && plan.k_blocks % shape.splits == 0) {
    const int wanted = shape.blocks_per_stage != 0 ? shape.blocks_per_stage : tuned::kBlocksPerStage;
    if (split_blocks * block_bytes <= pipeline_bytes) {
      plan.blocks_per_stage = split_blocks;
    } else if (split_blocks % wanted == 0 && 2 * wanted * block_bytes <= pipeline_bytes) {
      plan.blocks_per_stage = wanted;
    }
  }
  const int stage_bytes = plan.blocks_per_stage * block_bytes;
  plan.stages = std::min({kMaxStages, pipeline_bytes / stage_bytes, split_blocks / plan.blocks_per_stage});
  if (plan.stages < 1) {
    *error = "the scales of a range of columns leave no memory for weights";
    return plan;
  }
  int loaded_bytes = plan.stages * stage_bytes + kept_bytes;
  if (attends) {
    const int late_stages = plan.stages * stage_bytes / shape.head_round_bytes;
    plan.head_stages = std::min(shape.head_early_stages + late_stages, kMaxHeadStages);
    plan.head_page_offset = std::max(loaded_bytes, plan.stages * stage_bytes + kHeadPartsBytes);
    loaded_bytes = plan.head_page_offset + page_bytes;
  }
  plan.table_offset = loaded_bytes;
  plan.exponent_offset = loaded_bytes + table_bytes;
  plan.pipeline_bytes = std::max(loaded_bytes + table_bytes + exponent_bytes, is_narrow ? 0 : n * kSumStride * 4);
  plan.shared_bytes = plan.pipeline_bytes + other_bytes + sum_bytes;
  return plan;
}

}  // namespace meshserve
