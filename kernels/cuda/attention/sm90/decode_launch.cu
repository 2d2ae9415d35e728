#include "attention/sm90/decode_launch.cuh"

#include <math.h>

#include <algorithm>
#include <type_traits>

#include "attention/sm90/persistent_attention.cuh"
#include "common/tuning.cuh"

namespace meshserve {

constexpr int kMaxAttentionSplits = 8;                // blocks of a cluster that every Hopper GPU supports
constexpr int kMoreThanHalfBytes = 113 * 1024 + 512;  // an SM has 228 KB, and each block takes 1 KB more

int fewest_shares(int multiprocessors, int kv_heads, int splits) {
  return std::max(1, 2 * multiprocessors / std::max(1, kv_heads * splits));
}

bool map_pages(LaunchSequence& sequence, CUtensorMap* map, const Shapes& shapes, const Cache& cache, int tokens) {
  const int h = shapes.head_dim, row = cache.is_fp8 ? h : 64;
  const cuuint64_t sizes[3] = {static_cast<cuuint64_t>(row), shapes.layers * (shapes.layer_elements() / h),
                               static_cast<cuuint64_t>(h / row)};
  const cuuint64_t strides[2] = {static_cast<cuuint64_t>(h) * cache.element_bytes(), 128};
  const cuuint32_t box[3] = {static_cast<cuuint32_t>(row), static_cast<cuuint32_t>(tokens),
                             static_cast<cuuint32_t>(h / row)};
  const auto type = cache.is_fp8 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  // In a wider swizzle the copy engine would place each row in bytes of its own.
  const auto swizzle = row * cache.element_bytes() == 64 ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_128B;
  return sequence.encode(map, cache.pages, sizes, strides, box, type, swizzle);
}

template <class Output>
bool DecodeAttention<Output>::is_persistent() const {
  const bool is_fit = std::is_same_v<Output, Bf16Weights> && !cache.is_fp8 && shapes.head_dim == kPersistentHeadDim;
  const int fewest = (is_beside ? tuned::kFewestItemsBeside : tuned::kFewestLoneItems) * num_multiprocessors();
  return is_fit && splits == 0 && shapes.batch * shapes.kv_heads >= fewest;
}

template <class Output>
ContextCuts DecodeAttention<Output>::cuts(int splits) const {
  ContextCuts cuts = {};
  cuts.positions = cache.positions;
  cuts.batch = shapes.batch;
  cuts.fewest_shares = fewest_shares(num_multiprocessors(), shapes.kv_heads, splits);
  cuts.least_share = tuned::kLeastShareTokens * splits;
  // For persistent blocks of halves of a batch, a share is a quarter of the work of an SM, or more.
  if (is_beside && is_persistent()) cuts.most_shares = 2 * cuts.fewest_shares;
  cuts.num_clusters = most_clusters(cuts.batch, cuts.fewest_shares, cuts.least_share, shapes.max_context());
  return cuts;
}

// Merging a cluster takes as long as 4 tiles of a warp. Longer contexts are split until every SM has a block.
template <class Output>
int DecodeAttention<Output>::choose_splits() const {
  const int pairs = shapes.batch * shapes.kv_heads, context = shapes.max_context();
  const int round_tokens = kAttentionWarps * kProductTokens;
  if (context <= tuned::kFewestSplitRounds * round_tokens) return 1;
  int chosen = 1;
  while (chosen < kMaxAttentionSplits && 2 * chosen * pairs <= num_multiprocessors() &&
         context >= 2 * chosen * round_tokens) {
    chosen *= 2;
  }
  return chosen;
}

// With one request, each warp has too few tiles for longer ones.
template <class Output>
bool DecodeAttention<Output>::has_long_tiles() const {
  const bool fits = shapes.page_size % kTileTokens<LongFp8Cache> == 0 && shapes.head_dim == 128;
  return cache.is_fp8 && fits && shapes.batch >= tuned::kFewestLongTileRequests;
}

// Blocks that end and begin leave the memory idle. With more than two rounds of two blocks per SM, three with shorter
// pipelines lose less of it, and so they do if they all run at once, measured for an 8-bit cache.
template <class Output>
int DecodeAttention<Output>::warp_pipeline_bytes() const {
  const int blocks = shapes.batch * shapes.kv_heads, multiprocessors = num_multiprocessors();
  const bool is_one_round = 2 * multiprocessors < blocks && blocks <= 3 * multiprocessors;
  const bool is_short = is_one_round || blocks > 4 * multiprocessors;
  return has_long_tiles() && is_short ? tuned::kShortWarpPipelineBytes : tuned::kWarpPipelineBytes;
}

template <class Output>
template <class Arguments>
Arguments DecodeAttention<Output>::arguments(int layer, const bf16* q, bf16* out, int splits) const {
  int log2_splits = 0;
  while (1 << log2_splits < splits) ++log2_splits;
  Arguments args = {};
  args.q = q;
  args.cache = cache.of_layer(shapes, layer);
  args.page_table = cache.page_table;
  args.cuts = cuts(splits);
  args.out = out;
  args.rounded_scales = rounded_scales;
  args.unmerged = unmerged;
  args.first_row = layer * (shapes.layer_elements() / shapes.head_dim);
  args.max_pages = shapes.max_pages;
  args.page_size = shapes.page_size;
  args.kv_heads = shapes.kv_heads;
  args.group = shapes.group;
  args.log2_splits = log2_splits;
  args.scale_log2 = scale * static_cast<float>(M_LOG2E);
  return args;
}

template <class Output>
void DecodeAttention<Output>::launch(LaunchSequence& sequence, int layer, const bf16* q, bf16* out) const {
  if constexpr (std::is_same_v<Output, Bf16Weights>) {
    if (is_persistent()) {
      return is_beside ? launch_persistent<tuned::kPersistentWarps>(sequence, layer, q, out, tuned::kPersistentStages)
                       : launch_persistent<tuned::kLonePersistentWarps>(sequence, layer, q, out,
                                                                        tuned::kLonePersistentStages);
    }
  }
  const int chosen = splits != 0 ? splits : choose_splits(), h = shapes.head_dim;
  const int tile_tokens = has_long_tiles() ? kTileTokens<LongFp8Cache> : kTileTokens<Bf16Cache>;
  auto args = arguments<AttentionArgs>(layer, q, out, chosen);
  CUtensorMap pages;
  if (!map_pages(sequence, &pages, shapes, cache, tile_tokens)) return;
  // Limiting the pipeline to what the longest request needs leaves room for the next kernels' weights.
  const int stage_bytes = 2 * tile_tokens * h * cache.element_bytes();
  const int warp_tokens = tile_tokens * kAttentionWarps * chosen;
  const int most_tiles = (shapes.max_context() + warp_tokens - 1) / warp_tokens;
  args.stages = std::min(warp_pipeline_bytes() / stage_bytes, most_tiles);
  args.stages = std::max(args.stages, cache.is_fp8 ? least_stages<Fp8Cache> : least_stages<Bf16Cache>);
  const size_t pipeline_bytes = kAttentionWarps * args.stages * (stage_bytes + 8);
  // Results that are rounded to e4m3 have heads of 128 elements.
  constexpr int kHalf = kIsSingle<Output> || std::is_same_v<Output, RoundedFp8Weights> ? 128 : 64;
  auto kernel = h == 128 ? kernel_of<attention_kernel<128, Output, Bf16Cache>>()
                         : kernel_of<attention_kernel<kHalf, Output, Bf16Cache>>();
  if (cache.is_fp8) {
    kernel = h == 128 ? kernel_of<attention_kernel<128, Output, Fp8Cache>>()
                      : kernel_of<attention_kernel<kHalf, Output, Fp8Cache>>();
  }
  if (has_long_tiles()) kernel = kernel_of<attention_kernel<128, Output, LongFp8Cache>>();
  const size_t received_bytes = h == 128 ? sizeof(Received<128>) : sizeof(Received<64>);
  const dim3 grid(chosen, shapes.kv_heads, args.cuts.num_clusters);
  sequence.launch("attention", kernel, {grid, kAttentionThreads, pipeline_bytes + received_bytes, chosen}, pages, args);
}

template <class Output>
template <int kWarps>
void DecodeAttention<Output>::launch_persistent(LaunchSequence& sequence, int layer, const bf16* q, bf16* out,
                                                int stages) const {
  auto args = arguments<PersistentArgs>(layer, q, out, 1);
  args.plan = plan;
  args.claims = claims + layer % 2;
  args.next_claims = claims + (layer + 1) % 2;
  CUtensorMap pages;
  if (!map_pages(sequence, &pages, shapes, cache, kProductTokens)) return;
  args.stages = stages;
  // With more than half of an SM's shared memory, there is one block of attention, whichever half of a batch it is of.
  const size_t bytes = std::max<size_t>(persistent_bytes<kWarps>(args.stages, shapes.group), kMoreThanHalfBytes);
  sequence.launch("attention", kernel_of<persistent_attention_kernel<kWarps>>(),
                  {dim3(num_multiprocessors()), 32 * kWarps, bytes}, pages, args);
}

template struct DecodeAttention<Bf16Weights>;
template struct DecodeAttention<Fp8Weights>;
template struct DecodeAttention<SplitFp8Weights>;
template struct DecodeAttention<SingleFp8Weights>;
template struct DecodeAttention<RoundedFp8Weights>;
template struct DecodeAttention<Int4Weights>;
template struct DecodeAttention<IntegerInt4Weights>;

}  // namespace meshserve
