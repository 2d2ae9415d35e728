// The host side of the experts: which kernels compute a step, and the layers of a decode step with experts.
#pragma once
#include <vector>

#include "expert_fp8_tiles.cuh"
#include "expert_narrow_tiles.cuh"
#include "expert_rings.cuh"
#include "expert_router.cuh"
#include "expert_single.cuh"
#include "expert_tiles.cuh"
#include "launch.cuh"

namespace meshserve {
namespace experts {

struct ExpertShapes {
  int tokens = 0, chosen = 0, experts = 0, embed = 0, mlp = 0;
  int choices() const { return tokens * chosen; }
  int stride() const { return (choices() + 3) / 4 * 4; }  // of scales of a number for each choice
  int chunks() const { return (tokens + kMaxTokens - 1) / kMaxTokens; }
  int most_few_tokens = kFewTokens;  // of a step that is computed by rows of weights
};

// The most tokens that an expert may have on average for narrow tiles.
template <class W>
constexpr int kMostNarrowTokens = W::kIsQuantised ? 48 : 8;
constexpr int kLeastPairTokens = 48;    // of an expert on average, for tiles by pairs of blocks
constexpr int kLeastManyTokens = 2048;  // of a step, for which a warp takes a whole token at the order and the sums

// Intermediate results, all in one buffer.
struct ExpertScratch {
  bf16 *activated, *rows;  // [choices, F], [choices, D]: tokens in order of their experts, then the experts' results
  int *places, *counts, *first, *experts, *num_taken;
  float *share_of, *shares, *sums, *scores;
  int* published;                        // of two layers, in turn
  float *row_scales, *activated_scales;  // of e4m3 `rows` and `activated` [D / 128, stride], [F / 128, stride]

  static size_t bytes(const ExpertShapes& s) {
    ExpertScratch none;
    return none.carve(s, nullptr);
  }
  size_t carve(const ExpertShapes& s, uint8_t* buffer) {
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
    take(places, choices);
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
};

// One layer's operands. W: the format of the weights.
template <class W>
struct ExpertCall {
  const bf16* x;                     // [T, D]: normed, or times the gain of the norm if `sums` is given
  bool is_ordered = false;           // whether x and scaled_out have their columns in the order that the weights need
  typename W::Matrix gate_up, down;  // stacks of all layers
  const int* experts;
  const float* shares;
  const float* scores = nullptr;  // given in place of the choices: see RowsArgs
  const int* positions = nullptr;
  int* chosen = nullptr;
  bool is_normalized = false;
  int *published = nullptr, *unpublished = nullptr;
  const float* sums = nullptr;  // [T, D / 128]
  float epsilon = 0.0f;
  const bf16* residual = nullptr;
  const bf16* next_gain = nullptr;
  bf16* out;
  bf16* scaled_out = nullptr;
  float* sums_out = nullptr;  // [T, D / 16] if computed by rows, else [T, D / 128]
};

// P: the format of the projections, for which the experts leave the inputs of the next layer.
template <class W, class P = W>
class Launcher {
 public:
  Launcher(StepOf<P>& step, const ExpertShapes& shapes, const ExpertScratch& scratch)
      : step_(step), shapes_(shapes), scratch_(scratch) {}

  void experts(int layer, int layers, const ExpertCall<W>& call) {
    has_rings() ? few_tokens(layer, layers, call) : many_tokens(layer, layers, call);
  }

  // Whether the step is computed by rows of weights, for which rows of gate and up must be blocks of 128 bytes, an
  // equal number for each warp.
  bool has_rings() const {
    const int blocks = ring_blocks();
    return shapes_.tokens <= std::min(shapes_.most_few_tokens, kFewTokens) &&
           shapes_.chosen * kFewTokens <= kMostFewChoices && blocks * kWarps * W::kBlockColumns == shapes_.embed &&
           (blocks == kFewestBlocks || blocks == 2 * kFewestBlocks);
  }
  // Scores at most 128 experts, and chooses.
  void route(RouterArgs args) {
    if (has_places()) {
      args.normed.rows = scratch_.rows;
      args.normed.scales = scratch_.row_scales;
      args.normed.stride = shapes_.stride();
      args.normed.columns = shapes_.embed;
      args.normed.is_ordered = true;
    }
    const int groups = (args.num_tokens + kRouterTokens - 1) / kRouterTokens;
    step_.launch("router", router_kernel<W>, dim3(groups * kRouterBlocks), kThreads, sizeof(RouterMemory),
                 kRouterBlocks, args);
  }

 private:
  static constexpr int kFewestBlocks = W::kIsQuantised ? 2 : 4;
  int ring_blocks() const { return shapes_.embed / (kWarps * W::kBlockColumns); }

  void few_tokens(int layer, int layers, const ExpertCall<W>& call) {
    RowsArgs gate_up = {};
    gate_up.input = call.x;
    gate_up.is_ordered = call.is_ordered;
    gate_up.first_row = layer * 2 * shapes_.experts * shapes_.mlp;
    if constexpr (W::kIsQuantised) gate_up.scales = call.gate_up.scales;
    gate_up.experts = call.experts;
    gate_up.shares = call.shares;
    gate_up.sums = call.sums;
    gate_up.norm_tiles = shapes_.embed / kTileRows;
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
    if constexpr (W::kIsQuantised) down.scales = call.down.scales;
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
    constexpr int kFewest = kFewestBlocks;
    const dim3 grid(std::min(kMultiprocessors, most_experts * (shapes_.mlp / kRingRows)));
    if constexpr (W::kIsQuantised) {
      if (shapes_.tokens == 1) {
        return ring_blocks() == kFewest ? one_token<kFewest>(grid, gate_up_map, down_map, gate_up, down)
                                        : one_token<2 * kFewest>(grid, gate_up_map, down_map, gate_up, down);
      }
    }
    auto* kernel = ring_blocks() == kFewest ? gate_up_rings_kernel<W, kFewest> : gate_up_rings_kernel<W, 2 * kFewest>;
    step_.launch("expert gate_up", kernel, grid, kThreads, sizeof(GateUpRingsMemory), 1, gate_up_map, gate_up);
    step_.launch("expert down", down_rings_kernel<W>, dim3(shapes_.embed / kRingRows), kThreads,
                 sizeof(DownRingsMemory), 1, down_map, down);
  }

  template <int kBlocks>
  void one_token(dim3 grid, const CUtensorMap& gate_up_map, const CUtensorMap& down_map, const RowsArgs& gate_up,
                 const RowsArgs& down) {
    const bool chooses = gate_up.scores != nullptr;
    auto* first = chooses ? single_gate_up_kernel<W, kBlocks, true> : single_gate_up_kernel<W, kBlocks, false>;
    auto* second = chooses ? single_down_kernel<W, true> : single_down_kernel<W, false>;
    step_.launch("expert gate_up", first, grid, kThreads, std::max(kMostOfAnSm, sizeof(SingleGateUpMemory<kBlocks>)), 1,
                 gate_up_map, gate_up);
    step_.launch("expert down", second, dim3(shapes_.embed / kRingRows), kThreads, sizeof(SingleDownMemory), 1,
                 down_map, down);
  }

  // Encodes a stack of matrices for copies of 128 bytes of each of `box_rows` rows.
  bool encode_rows(CUtensorMap* map, const typename W::Matrix& matrix, int columns, int rows,
                   cuuint32_t box_rows = kRingRows) {
    const cuuint64_t row_bytes = static_cast<cuuint64_t>(columns) * 128 / W::kBlockColumns, all_rows = rows;
    const cuuint64_t sizes[3] = {static_cast<cuuint64_t>(columns), all_rows, 1};
    const cuuint64_t strides[2] = {row_bytes, row_bytes * all_rows};
    const cuuint32_t box[3] = {W::kBlockColumns, box_rows, 1};
    if constexpr (W::kIsQuantised) {
      return step_.encode(map, matrix.data, sizes, strides, box, CU_TENSOR_MAP_DATA_TYPE_UINT8);
    } else {
      return step_.encode(map, matrix, sizes, strides, box);
    }
  }

  bool is_placed() const { return shapes_.chunks() > 1; }  // by a kernel of its own, before the tokens are copied
  int mean_tokens() const { return (shapes_.choices() + shapes_.experts - 1) / shapes_.experts; }
  // Whether the kernels of a decode step find the places of the choices by themselves.
  bool has_places() const {
    constexpr int kMost = W::kIsQuantised ? 16 : 8;  // of an expert
    return shapes_.chunks() == 1 && mean_tokens() <= kMost && shapes_.mlp % W::kBlockColumns == 0;
  }

  void many_tokens(int layer, int layers, const ExpertCall<W>& call) {
    const int mean = mean_tokens();
    const bool finds = call.sums != nullptr && has_places();  // a decode step, whose router has left normed tokens
    if (!finds) put_in_order(call);
    // Of a tile: twice the tokens that an expert has on average, as long as the weights are what takes time. Narrow
    // tiles need whole boxes.
    if (mean > kMostNarrowTokens<W> || shapes_.mlp % W::kBlockColumns != 0) {
      wide_tiles(layer, layers, call);
    } else if (mean <= 8) {
      finds ? narrow_tiles<16, true>(layer, layers, call) : narrow_tiles<16>(layer, layers, call);
    } else if constexpr (W::kIsQuantised) {
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
    if constexpr (W::kIsQuantised) args.scales = call.gate_up.scales;
    args.rows = shapes_.mlp;
    args.columns = shapes_.embed;
    args.first_row = layer * 2 * shapes_.experts * shapes_.mlp;
    args.stride = shapes_.stride();
    args.experts = call.experts;
    args.tokens = scratch_.rows;
    args.token_scales = scratch_.row_scales;
    args.places = scratch_.places;
    args.num_tokens = shapes_.tokens;
    args.num_chosen = shapes_.chosen;
    args.num_experts = shapes_.experts;
    return args;
  }
  NarrowTilesArgs down_args(int layer, const ExpertCall<W>& call) {
    NarrowTilesArgs args = gate_up_args(layer, call);
    args.out = scratch_.rows;  // the tokens are not needed any more
    if constexpr (W::kIsQuantised) args.scales = call.down.scales;
    args.rows = shapes_.embed;
    args.columns = shapes_.mlp;
    args.first_row = layer * shapes_.experts * shapes_.embed;
    return args;
  }
  int gate_up_rows(int layers) const { return 2 * layers * shapes_.experts * shapes_.mlp; }
  int down_rows(int layers) const { return layers * shapes_.experts * shapes_.embed; }

  // Encodes scales [columns / 128, places], of which `tokens` are copied at a time.
  bool encode_scales(CUtensorMap* map, const float* scales, int columns, int tokens) {
    const cuuint64_t places = shapes_.stride(), groups = columns / 128;
    const cuuint64_t sizes[3] = {places, groups, 1}, strides[2] = {4 * places, 4 * places * groups};
    const cuuint32_t box[3] = {static_cast<cuuint32_t>(tokens), 1, 1};
    return step_.encode(map, scales, sizes, strides, box, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, CU_TENSOR_MAP_SWIZZLE_NONE);
  }
  static const void* data_of(const bf16* matrix) { return matrix; }
  static const void* data_of(const ScaledMatrix& matrix) { return matrix.data; }

  // Encodes [rows, columns] for copies of kGroups times 128 bytes of each of `box_rows` rows.
  bool encode_groups(CUtensorMap* map, const void* data, int rows, int columns, int box_rows) {
    const cuuint64_t row_bytes = static_cast<cuuint64_t>(columns) * 128 / W::kBlockColumns;
    const cuuint64_t sizes[3] = {W::kBlockColumns, static_cast<cuuint64_t>(rows), row_bytes / 128};
    const cuuint64_t strides[2] = {row_bytes, 128};
    const cuuint32_t box[3] = {W::kBlockColumns, static_cast<cuuint32_t>(box_rows), kGroups};
    const auto type = W::kIsQuantised ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    return step_.encode(map, data, sizes, strides, box, type);
  }

  template <bool kIsDown, int N, bool kPlaces>
  void narrow_tiles(const NarrowTilesArgs& args, const void* weights, int rows, const void* input,
                    const float* input_scales) {
    CUtensorMap weights_map, input_map, scales_map = {};
    if (!encode_groups(&weights_map, weights, rows, args.columns, kUnitRows) ||
        !encode_groups(&input_map, input, shapes_.choices(), args.columns, N) ||
        (W::kIsQuantised && !encode_scales(&scales_map, input_scales, args.columns, N + kMoreScales))) {
      return;
    }
    step_.launch(kIsDown ? "expert down" : "expert gate_up", narrow_tiles_kernel<kIsDown, N, W, kPlaces>,
                 dim3(kMultiprocessors), narrow_threads(kPlaces),
                 kPlaces ? sizeof(PlacesMemory<N>) : sizeof(NarrowTilesMemory<N>), 1, weights_map, input_map,
                 scales_map, args);
  }
  template <int N, bool kPlaces = false>
  void narrow_tiles(int layer, int layers, const ExpertCall<W>& call) {
    narrow_tiles<false, N, kPlaces>(gate_up_args(layer, call), data_of(call.gate_up), gate_up_rows(layers),
                                    scratch_.rows, scratch_.row_scales);
    narrow_tiles<true, N, kPlaces>(down_args(layer, call), data_of(call.down), down_rows(layers), scratch_.activated,
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
    step_.launch(kIsDown ? "expert down" : "expert gate_up", fp8_tiles_kernel<kIsDown>, dim3(kMultiprocessors),
                 kFp8TileThreads, sizeof(Fp8TilesMemory), 1, weights_map, input_map, scales_map, args);
  }

  void wide_tiles(int layer, int layers, const ExpertCall<W>& call) {
    if constexpr (W::kIsQuantised) {
      NarrowTilesArgs gate_up = gate_up_args(layer, call);
      gate_up.is_placed = is_placed();
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
      args.box_tokens = shapes_.choices() < 32 * shapes_.experts ? 16 : kHalfTokens;
      args.first_matrix = layer * 2 * shapes_.experts;
      args.is_placed = is_placed();
      const int matrices = layers * shapes_.experts;
      const bool has_pairs = mean_tokens() >= kLeastPairTokens;
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
    arrange.places = scratch_.places;
    arrange.share_of = scratch_.share_of;
    arrange.num_taken = scratch_.num_taken;
    arrange.num_tokens = shapes_.tokens;
    arrange.num_chosen = shapes_.chosen;
    arrange.num_experts = shapes_.experts;
    GatherRowsArgs gather = {};
    gather.x = call.x;
    gather.is_ordered = call.is_ordered;
    gather.places = scratch_.places;
    gather.rows = scratch_.rows;
    gather.scales = scratch_.row_scales;
    gather.stride = shapes_.stride();
    gather.sums = call.sums;
    gather.norm_tiles = shapes_.embed / kTileRows;
    gather.inverse_dim = 1.0f / static_cast<float>(shapes_.embed);
    gather.epsilon = call.epsilon;
    gather.num_tokens = shapes_.tokens;
    gather.num_chosen = shapes_.chosen;
    gather.columns = shapes_.embed;
    const dim3 chunks(shapes_.chunks());
    if (chunks.x == 1) {
      step_.launch("expert place", place_and_gather_kernel<W>, dim3(shapes_.tokens), kThreads, sizeof(Choices), 1,
                   arrange, gather);
      return;
    }
    step_.launch("expert count", count_kernel<W>, chunks, kThreads, sizeof(Choices), 1, arrange);
    step_.launch("expert place", place_kernel<W>, chunks, kThreads, sizeof(Choices), 1, arrange);
    gather.token_warps = shapes_.tokens >= kLeastManyTokens ? 1 : kWarps;
    const int warps = shapes_.tokens * gather.token_warps;
    step_.launch("expert scatter", scatter_rows_kernel<W>, dim3((warps + kWarps - 1) / kWarps), kThreads, 0, 1, gather);
  }

  template <bool kIsDown, int kBlocks>
  void tiles(const char* name, const bf16* input, const bf16* weights, int matrices, const TilesArgs& args) {
    const cuuint64_t row_bytes = static_cast<cuuint64_t>(args.columns) * sizeof(bf16);
    const cuuint64_t columns = args.columns, places = shapes_.choices(), rows = args.rows;
    const cuuint64_t input_sizes[3] = {columns, places, 1}, input_strides[2] = {row_bytes, places * row_bytes};
    const cuuint64_t sizes[3] = {columns, rows, static_cast<cuuint64_t>(matrices)};
    const cuuint64_t strides[2] = {row_bytes, rows * row_bytes};
    const cuuint32_t token_box[3] = {kTileColumns, static_cast<cuuint32_t>(args.box_tokens), 1};
    const cuuint32_t box[3] = {kTileColumns, kTileWeights / 2, 1};
    CUtensorMap input_map, weights_map;
    if (!step_.encode(&input_map, input, input_sizes, input_strides, token_box) ||
        !step_.encode(&weights_map, weights, sizes, strides, box)) {
      return;
    }
    step_.launch(name, tiles_kernel<kIsDown, kBlocks>, dim3(kMultiprocessors), kTileThreads, sizeof(TilesMemory),
                 kBlocks, input_map, weights_map, args);
  }

  void combine(const ExpertCall<W>& call, const float* shares) {
    CombineArgs args = {};
    args.rows = scratch_.rows;
    args.shares = shares;
    args.places = scratch_.places;
    args.residual = call.residual;
    args.next_gain = call.next_gain;
    args.out = call.out;
    args.scaled_out = call.scaled_out;
    args.sums_out = call.sums_out;
    args.num_tokens = shapes_.tokens;
    args.num_chosen = shapes_.chosen;
    args.columns = shapes_.embed;
    if (shapes_.tokens >= kLeastManyTokens && shares == nullptr && call.next_gain == nullptr) {
      step_.launch("expert sums", sum_rows_kernel<W>, dim3((shapes_.tokens + kWarps - 1) / kWarps), kThreads, 0, 1,
                   args);
      return;
    }
    const int warps = shapes_.tokens * (shapes_.embed / 128);
    step_.launch("expert sums", combine_kernel<Taken<P>>, dim3((warps + kWarps - 1) / kWarps), kThreads, 0, 1, args);
  }

  StepOf<P>& step_;
  const ExpertShapes shapes_;
  const ExpertScratch scratch_;
};

// Whether FP8 projections of a step with FP8 experts take split activations: a product of its own for each of two
// numbers is faster than conversion in registers for up to 32 tokens.
inline bool splits_activations(const ExpertShapes& shapes) {
  return shapes.tokens > kFewTokens && shapes.tokens <= SplitFp8Weights::kMost;
}

template <class W>
struct ExpertStacks {
  const bf16* router;
  typename W::Matrix gate_up, down;
};

// Runs some of `layers` layers with experts, on one GPU: those of Step, with a router and experts in place of the MLP.
// Each layer's choices are left in `scratch.experts`, [num_layers, T, k].
template <class W, class P>
void run_layers(StepOf<P>& step, const ExpertShapes& shapes, ExpertScratch scratch, const ExpertStacks<W>& stacks,
                const int* positions, bool is_normalized, int layers, const bf16* x, bf16* out, int first,
                int num_layers) {
  const Scratch& s = step.scratch;
  Launcher<W, P> launcher(step, shapes, scratch);
  auto gain = [&](const bf16* gains, int layer) { return gains + static_cast<size_t>(layer) * shapes.embed; };
  step.scratch.sums = scratch.sums;
  step.norm_tiles = 0;
  step.cleared = scratch.published;
  step.num_cleared = 2 * kMostChosen;
  step.prepare(x, gain(step.weights.input_norm, first), true);
  for (int layer = first; layer < first + num_layers; ++layer) {
    const bf16* router = stacks.router + static_cast<size_t>(layer) * shapes.experts * shapes.embed;
    const bf16* post_gain = gain(step.weights.post_norm, layer);
    ExpertCall<W> call = {};
    call.published = scratch.published + layer % 2 * kMostChosen;
    call.unpublished = scratch.published + (layer + 1) % 2 * kMostChosen;
    step.attended_heads(layer);
    if (launcher.has_rings()) {  // whose kernels choose the experts themselves
      step.routed_output(layer, s.attended, x, out, post_gain, {router, scratch.scores, shapes.experts});
      call.scores = scratch.scores;
      call.positions = positions;
      call.chosen = scratch.experts;
      call.is_normalized = is_normalized;
    } else {
      step.output(layer, s.attended, x, out, post_gain);
      RouterArgs args = {};
      args.scaled = s.scaled;
      args.router = router;
      args.sums = scratch.sums;
      args.positions = positions;
      args.norm_tiles = shapes.embed / kTileRows;
      args.inverse_dim = 1.0f / static_cast<float>(shapes.embed);
      args.epsilon = step.epsilon;
      args.num_tokens = shapes.tokens;
      args.num_experts = shapes.experts;
      args.num_chosen = shapes.chosen;
      args.columns = shapes.embed;
      args.is_normalized = is_normalized;
      args.experts = scratch.experts;
      args.shares = scratch.shares;
      launcher.route(args);
    }
    x = out;
    call.x = s.scaled;
    call.is_ordered = true;
    call.gate_up = stacks.gate_up;
    call.down = stacks.down;
    call.experts = scratch.experts;
    call.shares = scratch.shares;
    call.sums = scratch.sums;
    call.epsilon = step.epsilon;
    call.residual = out;
    call.next_gain = layer + 1 == first + num_layers ? nullptr : gain(step.weights.input_norm, layer + 1);
    call.out = out;
    call.scaled_out = s.scaled;
    call.sums_out = scratch.sums;
    launcher.experts(layer, layers, call);
    scratch.experts += shapes.choices();
    step.norm_tiles = launcher.has_rings() ? shapes.embed / 16 : 0;
  }
}

// Returns the kernels for weights of a format.
template <class W>
std::vector<const void*> kernels_of() {
  std::vector<const void*> kernels;
  auto add = [&](auto* kernel) { kernels.push_back(reinterpret_cast<const void*>(kernel)); };
  add(gate_up_rings_kernel < W, W::kIsQuantised ? 2 : 4 >);
  add(gate_up_rings_kernel < W, W::kIsQuantised ? 4 : 8 >);
  add(down_rings_kernel<W>);
  add(narrow_tiles_kernel<false, 16, W>);
  add(narrow_tiles_kernel<true, 16, W>);
  add(narrow_tiles_kernel<false, 16, W, true>);
  add(narrow_tiles_kernel<true, 16, W, true>);
  if constexpr (W::kIsQuantised) {
    add(narrow_tiles_kernel<false, 32, W>);
    add(narrow_tiles_kernel<true, 32, W>);
    add(narrow_tiles_kernel<false, 32, W, true>);
    add(narrow_tiles_kernel<true, 32, W, true>);
    add(narrow_tiles_kernel<false, 64, W>);
    add(narrow_tiles_kernel<true, 64, W>);
    add(fp8_tiles_kernel<false>);
    add(fp8_tiles_kernel<true>);
    add(single_gate_up_kernel<W, 2, true>);
    add(single_gate_up_kernel<W, 2, false>);
    add(single_gate_up_kernel<W, 4, true>);
    add(single_gate_up_kernel<W, 4, false>);
    add(single_down_kernel<W, true>);
    add(single_down_kernel<W, false>);
    add(combine_kernel<SplitFp8Weights>);
    add_projections_of<Epilogue::kQkv, OneTokenFp8Weights>(kernels);
    add_projections_of<Epilogue::kResidual, OneTokenFp8Weights>(kernels);
    add_projections_of<Epilogue::kRouted, OneTokenFp8Weights>(kernels);
    add_projections_of<Epilogue::kQkv, RoutedFp8Weights>(kernels);
    add_projections_of<Epilogue::kResidual, RoutedFp8Weights>(kernels);
    add_projections_of<Epilogue::kQkv, RoutedSingleFp8Weights>(kernels);
    add_projections_of<Epilogue::kResidual, RoutedSingleFp8Weights>(kernels);
    add(combine_kernel<SingleFp8Weights>);
  } else {
    add(tiles_kernel<false, 1>);
    add(tiles_kernel<true, 1>);
    add(tiles_kernel<false, kPair>);
    add(tiles_kernel<true, kPair>);
  }
  add(count_kernel<W>);
  add(place_kernel<W>);
  add(scatter_rows_kernel<W>);
  add(place_and_gather_kernel<W>);
  add(combine_kernel<W>);
  add(sum_rows_kernel<W>);
  add(router_kernel<W>);
  add(projection_kernel<width_of(kFewTokens), Epilogue::kRouted, W>);
  return kernels;
}

}  // namespace experts
}  // namespace meshserve
