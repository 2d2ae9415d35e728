#include "experts/sm90/launch.cuh"

#include <algorithm>

#include "common/tuning.cuh"
#include "experts/router_parts.cuh"
#include "experts/sm90/fp8_tiles.cuh"
#include "experts/sm90/narrow_tiles.cuh"
#include "experts/sm90/one_token.cuh"
#include "experts/sm90/row_pipelines.cuh"
#include "experts/sm90/wide_tiles.cuh"

namespace meshserve {
namespace experts {

size_t ExpertScratch::carve(const ExpertShapes& s, uint8_t* buffer) {
  size_t used = 0;
  auto take = [&](auto& pointer, size_t elements) {
    pointer = reinterpret_cast<std::decay_t<decltype(pointer)>>(buffer + used);
    used += (elements * sizeof(*pointer) + 255) / 256 * 256;
  };
  const size_t choices = s.choices();
  take(activated, choices * s.mlp);
  take(rows, choices * s.embed);
  take(row_scales, static_cast<size_t>(s.stride()) * (s.embed / 128));
  take(activated_scales, static_cast<size_t>(s.stride()) * (s.mlp / 128));
  take(slots, choices);
  take(counts, static_cast<size_t>(s.chunks()) * kMaxExperts);
  take(first, kMaxExperts + 1);
  take(num_taken, 2);
  take(share_of, choices);
  take(experts, choices);
  take(shares, choices);
  take(sums, static_cast<size_t>(s.tokens) * (s.embed / 16));
  take(published, 2 * kMostChosen);
  take(scores, static_cast<size_t>(std::min(s.tokens, kFewTokens)) * (s.embed / kPartColumns) * kMostRouted);
  return used;
}

namespace {

constexpr int kNormColumns = 128;  // columns of a sum of squares that a projection leaves

template <class W>
constexpr int kFewestRowBlocks =
    W::kIsQuantized ? 2 : 4;  // blocks of a warp's columns that row pipelines have kernels for

template <class W>
int row_blocks_of(const ExpertShapes& shapes) {
  return shapes.embed / (kWarps * W::kBlockColumns);
}

template <class W>
class Launcher {
 public:
  // `combine` adds up a token's experts.
  Launcher(LaunchSequence& sequence, const ExpertShapes& shapes, const ExpertScratch& scratch,
           Kernel<CombineArgs> combine)
      : sequence_(sequence), shapes_(shapes), scratch_(scratch), combine_(combine) {}

  void experts(int layer, int layers, const ExpertCall<W>& call) {
    has_row_pipelines<W>(shapes_) ? few_tokens(layer, layers, call) : many_tokens(layer, layers, call);
  }

  void route(RouterArgs args) {
    if (permutes_itself()) {
      args.normed.rows = scratch_.rows;
      args.normed.scales = scratch_.row_scales;
      args.normed.stride = shapes_.stride();
      args.normed.columns = shapes_.embed;
      args.normed.is_ordered = true;
    }
    const int groups = (args.num_tokens + kRouterTokens - 1) / kRouterTokens;
    sequence_.launch("router", kernel_of<router_kernel<W>>(),
                     {dim3(groups * kRouterBlocks), kThreads, sizeof(RouterMemory), kRouterBlocks}, args);
  }

 private:
  int row_blocks() const { return row_blocks_of<W>(shapes_); }

  void few_tokens(int layer, int layers, const ExpertCall<W>& call) {
    RowsArgs gate_up = {};
    gate_up.input = call.x;
    gate_up.is_ordered = call.is_ordered;
    gate_up.first_row = layer * 2 * shapes_.experts * shapes_.mlp;
    if constexpr (W::kIsQuantized) gate_up.scales = call.gate_up.scales;
    gate_up.experts = call.experts;
    gate_up.shares = call.shares;
    gate_up.sums = call.sums;
    gate_up.norm_tiles = shapes_.embed / kNormColumns;
    gate_up.inverse_dim = 1.0f / static_cast<float>(shapes_.embed);
    gate_up.epsilon = call.epsilon;
    gate_up.out = scratch_.activated;
    gate_up.num_tokens = shapes_.tokens;
    gate_up.num_chosen = shapes_.chosen;
    gate_up.num_experts = shapes_.experts;
    gate_up.rows = shapes_.mlp;
    gate_up.columns = shapes_.embed;
    gate_up.scores = call.scores;
    gate_up.num_parts = shapes_.embed / kPartColumns;
    gate_up.positions = call.positions;
    gate_up.chosen = call.chosen;
    gate_up.is_normalized = call.is_normalized;
    gate_up.published = call.published;
    gate_up.unpublished = call.unpublished;
    RowsArgs down = gate_up;
    down.input = scratch_.activated;
    down.first_row = layer * shapes_.experts * shapes_.embed;
    if constexpr (W::kIsQuantized) down.scales = call.down.scales;
    down.rows = shapes_.embed;
    down.columns = shapes_.mlp;
    down.out = call.out;
    down.residual = call.residual;
    down.next_gain = call.next_gain;
    down.scaled_out = call.scaled_out;
    down.sums_out = call.sums_out;
    const int most_experts = std::min(shapes_.experts, shapes_.choices());
    CUtensorMap gate_up_map, down_map;
    if (!encode_rows(&gate_up_map, call.gate_up, gate_up.columns, layers * 2 * shapes_.experts * shapes_.mlp) ||
        !encode_rows(&down_map, call.down, down.columns, layers * shapes_.experts * shapes_.embed)) {
      return;
    }
    constexpr int kFewest = kFewestRowBlocks<W>;
    const dim3 grid(std::min(num_multiprocessors(), most_experts * (shapes_.mlp / kPipelineRows)));
    if constexpr (W::kIsQuantized) {
      if (shapes_.tokens == 1) {
        return row_blocks() == kFewest ? one_token<kFewest>(grid, gate_up_map, down_map, gate_up, down)
                                       : one_token<2 * kFewest>(grid, gate_up_map, down_map, gate_up, down);
      }
    }
    const auto kernel = row_blocks() == kFewest ? kernel_of<gate_up_rows_kernel<W, kFewest>>()
                                                : kernel_of<gate_up_rows_kernel<W, 2 * kFewest>>();
    sequence_.launch("expert gate_up", kernel, {grid, kThreads, sizeof(GateUpRowsMemory)}, gate_up_map, gate_up);
    sequence_.launch("expert down", kernel_of<down_rows_kernel<W>>(),
                     {dim3(shapes_.embed / kPipelineRows), kThreads, sizeof(DownRowsMemory)}, down_map, down);
  }

  template <int kBlocks>
  void one_token(dim3 grid, const CUtensorMap& gate_up_map, const CUtensorMap& down_map, const RowsArgs& gate_up,
                 const RowsArgs& down) {
    const bool chooses = gate_up.scores != nullptr;
    const auto first = chooses ? kernel_of<one_token_gate_up_kernel<W, kBlocks, true>>()
                               : kernel_of<one_token_gate_up_kernel<W, kBlocks, false>>();
    const auto second =
        chooses ? kernel_of<one_token_down_kernel<W, true>>() : kernel_of<one_token_down_kernel<W, false>>();
    sequence_.launch("expert gate_up", first,
                     {grid, kThreads, std::max(kMostOfAnSm, sizeof(OneTokenGateUpMemory<kBlocks>))}, gate_up_map,
                     gate_up);
    sequence_.launch("expert down", second, {dim3(shapes_.embed / kPipelineRows), kThreads, sizeof(OneTokenDownMemory)},
                     down_map, down);
  }

  // Encodes a stack of matrices for copies of 128 bytes of each of `box_rows` rows.
  bool encode_rows(CUtensorMap* map, const typename W::Matrix& matrix, int columns, int rows,
                   cuuint32_t box_rows = kPipelineRows) {
    const cuuint64_t row_bytes = static_cast<cuuint64_t>(columns) * 128 / W::kBlockColumns, all_rows = rows;
    const cuuint64_t sizes[3] = {static_cast<cuuint64_t>(columns), all_rows, 1};
    const cuuint64_t strides[2] = {row_bytes, row_bytes * all_rows};
    const cuuint32_t box[3] = {W::kBlockColumns, box_rows, 1};
    if constexpr (W::kIsQuantized) {
      return sequence_.encode(map, matrix.data, sizes, strides, box, CU_TENSOR_MAP_DATA_TYPE_UINT8);
    } else {
      return sequence_.encode(map, matrix, sizes, strides, box);
    }
  }

  bool is_permuted() const { return shapes_.chunks() > 1; }  // by a kernel of its own, before the tokens are copied
  int mean_tokens() const { return (shapes_.choices() + shapes_.experts - 1) / shapes_.experts; }
  // Whether the kernels of a decode step compute the permutation themselves.
  bool permutes_itself() const {
    constexpr int kMost = W::kIsQuantized ? tuned::kMostPermutingFp8Tokens : tuned::kMostPermutingTokens;
    return shapes_.chunks() == 1 && mean_tokens() <= kMost && shapes_.mlp % W::kBlockColumns == 0;
  }

  void many_tokens(int layer, int layers, const ExpertCall<W>& call) {
    const int mean = mean_tokens();
    const bool finds = call.sums != nullptr && permutes_itself();  // a decode step, whose router has left normed tokens
    if (!finds) put_in_order(call);
    // A tile has twice the tokens that an expert has on average, as long as the weights are what takes time. Narrow
    // tiles need whole boxes.
    if (mean > (W::kIsQuantized ? tuned::kMostNarrowFp8Tokens : tuned::kMostNarrowTokens) ||
        shapes_.mlp % W::kBlockColumns != 0) {
      wide_tiles(layer, layers, call);
    } else if (mean <= 8) {
      finds ? narrow_tiles<16, true>(layer, layers, call) : narrow_tiles<16>(layer, layers, call);
    } else if constexpr (W::kIsQuantized) {
      if (mean > 16) {
        narrow_tiles<64>(layer, layers, call);
      } else {
        finds ? narrow_tiles<32, true>(layer, layers, call) : narrow_tiles<32>(layer, layers, call);
      }
    }
    combine(call, finds ? call.shares : nullptr);
  }

  NarrowTilesArgs gate_up_args(int layer, const ExpertCall<W>& call) {
    NarrowTilesArgs args = {};
    args.first = scratch_.first;
    args.share_of = scratch_.share_of;
    args.out = scratch_.activated;
    args.out_scales = scratch_.activated_scales;
    if constexpr (W::kIsQuantized) args.scales = call.gate_up.scales;
    args.rows = shapes_.mlp;
    args.columns = shapes_.embed;
    args.first_row = layer * 2 * shapes_.experts * shapes_.mlp;
    args.stride = shapes_.stride();
    args.experts = call.experts;
    args.tokens = scratch_.rows;
    args.token_scales = scratch_.row_scales;
    args.slots = scratch_.slots;
    args.num_tokens = shapes_.tokens;
    args.num_chosen = shapes_.chosen;
    args.num_experts = shapes_.experts;
    return args;
  }
  NarrowTilesArgs down_args(int layer, const ExpertCall<W>& call) {
    NarrowTilesArgs args = gate_up_args(layer, call);
    args.out = scratch_.rows;  // the tokens are not needed any more
    if constexpr (W::kIsQuantized) args.scales = call.down.scales;
    args.rows = shapes_.embed;
    args.columns = shapes_.mlp;
    args.first_row = layer * shapes_.experts * shapes_.embed;
    return args;
  }
  int gate_up_rows(int layers) const { return 2 * layers * shapes_.experts * shapes_.mlp; }
  int down_rows(int layers) const { return layers * shapes_.experts * shapes_.embed; }

  // Encodes scales [columns / 128, slots], of which `tokens` are copied at a time.
  bool encode_scales(CUtensorMap* map, const float* scales, int columns, int tokens) {
    const cuuint64_t slots = shapes_.stride(), groups = columns / 128;
    const cuuint64_t sizes[3] = {slots, groups, 1}, strides[2] = {4 * slots, 4 * slots * groups};
    const cuuint32_t box[3] = {static_cast<cuuint32_t>(tokens), 1, 1};
    return sequence_.encode(map, scales, sizes, strides, box, CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
                            CU_TENSOR_MAP_SWIZZLE_NONE);
  }
  static const void* data_of(const bf16* matrix) { return matrix; }
  static const void* data_of(const ScaledMatrix& matrix) { return matrix.data; }

  // Encodes [rows, columns] for copies of kGroups times 128 bytes of each of `box_rows` rows.
  bool encode_groups(CUtensorMap* map, const void* data, int rows, int columns, int box_rows) {
    const cuuint64_t row_bytes = static_cast<cuuint64_t>(columns) * 128 / W::kBlockColumns;
    const cuuint64_t sizes[3] = {W::kBlockColumns, static_cast<cuuint64_t>(rows), row_bytes / 128};
    const cuuint64_t strides[2] = {row_bytes, 128};
    const cuuint32_t box[3] = {W::kBlockColumns, static_cast<cuuint32_t>(box_rows), kGroups};
    const auto type = W::kIsQuantized ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    return sequence_.encode(map, data, sizes, strides, box, type);
  }

  template <bool kIsDown, int N, bool kPermutes>
  void narrow_tiles(const NarrowTilesArgs& args, const void* weights, int rows, const void* input,
                    const float* input_scales) {
    CUtensorMap weights_map, input_map, scales_map = {};
    if (!encode_groups(&weights_map, weights, rows, args.columns, kUnitRows) ||
        !encode_groups(&input_map, input, shapes_.choices(), args.columns, N) ||
        (W::kIsQuantized && !encode_scales(&scales_map, input_scales, args.columns, N + kMoreScales))) {
      return;
    }
    sequence_.launch(kIsDown ? "expert down" : "expert gate_up",
                     kernel_of<narrow_tiles_kernel<kIsDown, N, W, kPermutes>>(),
                     {dim3(num_multiprocessors()), narrow_threads(kPermutes),
                      kPermutes ? sizeof(PermutingMemory<N>) : sizeof(NarrowTilesMemory<N>)},
                     weights_map, input_map, scales_map, args);
  }
  template <int N, bool kPermutes = false>
  void narrow_tiles(int layer, int layers, const ExpertCall<W>& call) {
    narrow_tiles<false, N, kPermutes>(gate_up_args(layer, call), data_of(call.gate_up), gate_up_rows(layers),
                                      scratch_.rows, scratch_.row_scales);
    narrow_tiles<true, N, kPermutes>(down_args(layer, call), data_of(call.down), down_rows(layers), scratch_.activated,
                                     scratch_.activated_scales);
  }

  template <bool kIsDown>
  void wide_tiles(const NarrowTilesArgs& args, const ScaledMatrix& weights, int rows, const void* input,
                  const float* input_scales) {
    CUtensorMap weights_map, input_map, scales_map;
    if (!encode_rows(&weights_map, weights, args.columns, rows, kFp8BoxRows) ||
        !encode_rows(&input_map, {input}, args.columns, shapes_.choices(), kFp8BoxRows) ||
        !encode_scales(&scales_map, input_scales, args.columns, kFp8TileTokens + kMoreScales)) {
      return;
    }
    sequence_.launch(kIsDown ? "expert down" : "expert gate_up", kernel_of<fp8_tiles_kernel<kIsDown>>(),
                     {dim3(num_multiprocessors()), kFp8TileThreads, sizeof(Fp8TilesMemory)}, weights_map, input_map,
                     scales_map, args);
  }

  void wide_tiles(int layer, int layers, const ExpertCall<W>& call) {
    if constexpr (W::kIsQuantized) {
      NarrowTilesArgs gate_up = gate_up_args(layer, call);
      gate_up.is_permuted = is_permuted();
      wide_tiles<false>(gate_up, call.gate_up, gate_up_rows(layers), scratch_.rows, scratch_.row_scales);
      wide_tiles<true>(down_args(layer, call), call.down, down_rows(layers), scratch_.activated,
                       scratch_.activated_scales);
    } else {
      TilesArgs args = {};
      args.first = scratch_.first;
      args.share_of = scratch_.share_of;
      args.out = scratch_.activated;
      args.num_taken = scratch_.num_taken;
      args.rows = shapes_.mlp;
      args.columns = shapes_.embed;
      // Small boxes where experts have few tokens: otherwise most of what is fetched is not theirs.
      args.box_tokens = shapes_.choices() < tuned::kFewestLargeBoxTokens * shapes_.experts ? 16 : kHalfTokens;
      args.first_matrix = layer * 2 * shapes_.experts;
      args.is_permuted = is_permuted();
      const int matrices = layers * shapes_.experts;
      const bool has_pairs = mean_tokens() >= tuned::kFewestPairTokens;
      has_pairs ? tiles<false, kPair>("expert gate_up", scratch_.rows, call.gate_up, 2 * matrices, args)
                : tiles<false, 1>("expert gate_up", scratch_.rows, call.gate_up, 2 * matrices, args);
      args.out = scratch_.rows;  // the tokens are not needed any more
      args.num_taken = scratch_.num_taken + 1;
      args.rows = shapes_.embed;
      args.columns = shapes_.mlp;
      args.first_matrix = layer * shapes_.experts;
      has_pairs ? tiles<true, kPair>("expert down", scratch_.activated, call.down, matrices, args)
                : tiles<true, 1>("expert down", scratch_.activated, call.down, matrices, args);
    }
  }

  // Copies the tokens in order of their experts.
  void put_in_order(const ExpertCall<W>& call) {
    ArrangeArgs arrange = {};
    arrange.experts = call.experts;
    arrange.shares = call.shares;
    arrange.counts = scratch_.counts;
    arrange.first = scratch_.first;
    arrange.slots = scratch_.slots;
    arrange.share_of = scratch_.share_of;
    arrange.num_taken = scratch_.num_taken;
    arrange.num_tokens = shapes_.tokens;
    arrange.num_chosen = shapes_.chosen;
    arrange.num_experts = shapes_.experts;
    GatherRowsArgs gather = {};
    gather.x = call.x;
    gather.is_ordered = call.is_ordered;
    gather.slots = scratch_.slots;
    gather.rows = scratch_.rows;
    gather.scales = scratch_.row_scales;
    gather.stride = shapes_.stride();
    gather.sums = call.sums;
    gather.norm_tiles = shapes_.embed / kNormColumns;
    gather.inverse_dim = 1.0f / static_cast<float>(shapes_.embed);
    gather.epsilon = call.epsilon;
    gather.num_tokens = shapes_.tokens;
    gather.num_chosen = shapes_.chosen;
    gather.columns = shapes_.embed;
    const dim3 chunks(shapes_.chunks());
    if (chunks.x == 1) {
      sequence_.launch("expert place", kernel_of<permute_kernel<W>>(),
                       {dim3(shapes_.tokens), kThreads, sizeof(Choices)}, arrange, gather);
      return;
    }
    sequence_.launch("expert count", kernel_of<count_kernel<W>>(), {chunks, kThreads, sizeof(Choices)}, arrange);
    sequence_.launch("expert place", kernel_of<assign_slots_kernel<W>>(), {chunks, kThreads, sizeof(Choices)}, arrange);
    gather.token_warps = shapes_.tokens >= tuned::kFewestManyTokens ? 1 : kWarps;
    const int warps = shapes_.tokens * gather.token_warps;
    sequence_.launch("expert scatter", kernel_of<scatter_rows_kernel<W>>(),
                     {dim3((warps + kWarps - 1) / kWarps), kThreads}, gather);
  }

  template <bool kIsDown, int kBlocks>
  void tiles(const char* name, const bf16* input, const bf16* weights, int matrices, const TilesArgs& args) {
    const cuuint64_t row_bytes = static_cast<cuuint64_t>(args.columns) * sizeof(bf16);
    const cuuint64_t columns = args.columns, slots = shapes_.choices(), rows = args.rows;
    const cuuint64_t input_sizes[3] = {columns, slots, 1}, input_strides[2] = {row_bytes, slots * row_bytes};
    const cuuint64_t sizes[3] = {columns, rows, static_cast<cuuint64_t>(matrices)};
    const cuuint64_t strides[2] = {row_bytes, rows * row_bytes};
    const cuuint32_t token_box[3] = {kTileColumns, static_cast<cuuint32_t>(args.box_tokens), 1};
    const cuuint32_t box[3] = {kTileColumns, kTileWeights / 2, 1};
    CUtensorMap input_map, weights_map;
    if (!sequence_.encode(&input_map, input, input_sizes, input_strides, token_box) ||
        !sequence_.encode(&weights_map, weights, sizes, strides, box)) {
      return;
    }
    sequence_.launch(name, kernel_of<wide_tiles_kernel<kIsDown, kBlocks>>(),
                     {dim3(num_multiprocessors()), kTileThreads, sizeof(TilesMemory), kBlocks}, input_map, weights_map,
                     args);
  }

  void combine(const ExpertCall<W>& call, const float* shares) {
    CombineArgs args = {};
    args.rows = scratch_.rows;
    args.shares = shares;
    args.slots = scratch_.slots;
    args.residual = call.residual;
    args.next_gain = call.next_gain;
    args.out = call.out;
    args.scaled_out = call.scaled_out;
    args.sums_out = call.sums_out;
    args.num_tokens = shapes_.tokens;
    args.num_chosen = shapes_.chosen;
    args.columns = shapes_.embed;
    if (shapes_.tokens >= tuned::kFewestManyTokens && shares == nullptr && call.next_gain == nullptr) {
      sequence_.launch("expert sums", kernel_of<sum_rows_kernel<W>>(),
                       {dim3((shapes_.tokens + kWarps - 1) / kWarps), kThreads}, args);
      return;
    }
    const int warps = shapes_.tokens * (shapes_.embed / 128);
    sequence_.launch("expert sums", combine_, {dim3((warps + kWarps - 1) / kWarps), kThreads}, args);
  }

  LaunchSequence& sequence_;
  const ExpertShapes shapes_;
  const ExpertScratch scratch_;
  const Kernel<CombineArgs> combine_;
};

}  // namespace

template <class W>
bool has_row_pipelines(const ExpertShapes& shapes) {
  constexpr int kFewest = kFewestRowBlocks<W>;
  const int blocks = row_blocks_of<W>(shapes);
  return shapes.tokens <= std::min(shapes.most_few_tokens, kFewTokens) &&
         shapes.chosen * kFewTokens <= kMostFewChoices && blocks * kWarps * W::kBlockColumns == shapes.embed &&
         (blocks == kFewest || blocks == 2 * kFewest);
}

template <class W>
void launch_router(LaunchSequence& sequence, const ExpertShapes& shapes, const ExpertScratch& scratch,
                   RouterArgs args) {
  Launcher<W>(sequence, shapes, scratch, {}).route(args);
}

template <class W, class P>
void launch_experts(LaunchSequence& sequence, const ExpertShapes& shapes, const ExpertScratch& scratch, int layer,
                    int layers, const ExpertCall<W>& call) {
  Launcher<W>(sequence, shapes, scratch, kernel_of<combine_kernel<InputFormat<P>>>()).experts(layer, layers, call);
}

#define MESHSERVE_EXPERTS(format)                               \
  template bool has_row_pipelines<format>(const ExpertShapes&); \
  template void launch_router<format>(LaunchSequence&, const ExpertShapes&, const ExpertScratch&, RouterArgs)
#define MESHSERVE_EXPERTS_BEFORE(format, projections)                                                                \
  template void launch_experts<format, projections>(LaunchSequence&, const ExpertShapes&, const ExpertScratch&, int, \
                                                    int, const ExpertCall<format>&)

MESHSERVE_EXPERTS(Bf16Weights);
MESHSERVE_EXPERTS_BEFORE(Bf16Weights, Bf16Weights);
MESHSERVE_EXPERTS(Fp8Weights);
MESHSERVE_EXPERTS_BEFORE(Fp8Weights, Fp8Weights);
MESHSERVE_EXPERTS_BEFORE(Fp8Weights, RoutedFp8Weights);
MESHSERVE_EXPERTS_BEFORE(Fp8Weights, RoutedSingleFp8Weights);
MESHSERVE_EXPERTS_BEFORE(Fp8Weights, OneTokenFp8Weights);

}  // namespace experts
}  // namespace meshserve
