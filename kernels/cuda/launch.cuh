// The host side of a decode step: tensor maps, launch shapes, and the order of its kernels.
#pragma once
#include <math.h>

#include <algorithm>
#include <string>
#include <type_traits>
#include <vector>

#include "attention.cuh"
#include "prepare.cuh"
#include "projection.cuh"
#include "staying_attention.cuh"
#include "tensor_map.cuh"

namespace meshserve {

constexpr int kMultiprocessors = 132;  // of an H100 or H200; only affects launch shapes

// Returns the minimum number of shares of a step's contexts for which attention's clusters of `splits` blocks fill the
// GPU, with two blocks per SM.
inline int fewest_shares(int kv_heads, int splits) {
  return std::max(1, 2 * kMultiprocessors / std::max(1, kv_heads * splits));
}

struct Shapes {
  int layers = 0, batch = 0, embed = 0, kv_heads = 0, group = 0, head_dim = 0, mlp = 0;
  int pages = 0, page_size = 0, max_pages = 0;
  int max_context() const { return max_pages * page_size; }
  int q_columns() const { return kv_heads * group * head_dim; }
  int qkv_rows() const { return kv_heads * (group + 2) * head_dim; }
  int arrivals() const { return kv_heads * kMaxSplits; }  // counters per request
};

template <class W>
struct Weights {  // stacked over layers
  const bf16* input_norm;
  typename W::Matrix qkv;
  const bf16 *q_norm, *k_norm;
  typename W::Matrix o;
  const bf16* post_norm;
  typename W::Matrix gate_up, down;
};

struct Cache {
  void* pages;
  bool is_fp8;  // whether these are e4m3 and not bf16
  const int *page_table, *positions;
};

// Intermediate results of the kernels of one call, all in one buffer.
struct Scratch {
  bf16 *scaled, *q, *attended, *activated;
  float *sums, *cos_sin;
  Unmerged unmerged;
  PlannedPart* plan;
  int* claims;

  static size_t most_clusters_of(const Shapes& s) { return most_clusters(s.batch, fewest_shares(s.kv_heads, 1)); }
  static size_t unmerged_bytes(const Shapes& s) {
    return most_clusters_of(s) * s.kv_heads * s.group * (s.head_dim + 4) * sizeof(float);
  }
  static size_t bytes(const Shapes& s) {
    Scratch none;
    return none.carve(s, nullptr);
  }
  size_t carve(const Shapes& s, uint8_t* buffer) {
    size_t used = 0;
    auto take = [&](size_t bytes) {
      uint8_t* at = buffer + used;
      used += (bytes + 255) / 256 * 256;
      return at;
    };
    size_t b = s.batch;
    scaled = reinterpret_cast<bf16*>(take(activation_bytes(b, s.embed)));
    sums = reinterpret_cast<float*>(take(b * (s.embed / kTileRows) * 4));
    cos_sin = reinterpret_cast<float*>(take(b * s.head_dim * 4));
    q = reinterpret_cast<bf16*>(take(b * s.q_columns() * 2));
    attended = reinterpret_cast<bf16*>(take(activation_bytes(b, s.q_columns())));
    activated = reinterpret_cast<bf16*>(take(activation_bytes(b, s.mlp)));
    unmerged.rows = reinterpret_cast<float*>(take(unmerged_bytes(s)));
    unmerged.num_arrived = reinterpret_cast<int*>(take(b * s.arrivals() * 4));
    plan = reinterpret_cast<PlannedPart*>(take(most_clusters_of(s) * sizeof(PlannedPart)));
    claims = reinterpret_cast<int*>(take(2 * sizeof(int)));
    return used;
  }
};

constexpr int kPreferred = -1;  // launch priority over kernels of other streams, whose priority is 0

// Overrides of the launch shapes, for benchmarks; 0 selects the default.
struct Tuning {
  int qkv_splits = 0, o_splits = 0, gate_up_splits = 0, down_splits = 0, attention_splits = 0;
  int blocks_per_stage = 0, ring_kilobytes = 0;
  int streams = 0;  // 2: the halves of the batch run on two streams
};

// The widest product of a format. An output head is read once by all tokens of a step, whatever their number.
template <Epilogue E, class W>
constexpr int most_width = E == Epilogue::kLogits   ? 64
                           : E == Epilogue::kRouted ? 8
                                                    : W::kMost;

// W: the format of the weights.
template <class W>
class StepOf {
 public:
  using Matrix = typename W::Matrix;

  StepOf(const Shapes& shapes, const Tuning& tuning, cudaStream_t stream)
      : shapes_(shapes), tuning_(tuning), stream_(stream) {}

  Weights<W> weights = {};
  Cache cache = {};
  Scratch scratch = {};
  float epsilon = 0.0f, scale = 0.0f, rotary_scale = 1.0f;
  int product_priority = 0;       // of the launches of projections; a lower number is preferred
  bool has_plain_output = false;  // whether the result of `gate_up` is bf16 even if weights are quantised
  const float* inverse_frequencies = nullptr;
  float* rounded_scales = nullptr;  // of attention's result, with RoundedFp8Weights
  int* cleared = nullptr;           // set to 0 before the first layer
  int num_cleared = 0;
  int norm_tiles = 0;  // sums of squares per token that the next norm adds up; 0: one for each 128 columns

  // Returns an empty string or the first error.
  const std::string& error() const { return error_; }
  // Notes the error of work between the kernels of the step, if there is one.
  void note(const std::string& error) {
    if (error_.empty()) error_ = error;
  }

  // Runs `num_layers` layers from `first` on. On a mesh, the P2P all-reduce takes two rounds per layer, so every call
  // begins with round 0.
  void layers(const bf16* x, bf16* out, int first, int num_layers, const P2PGroup* p2p) {
    layers(x, out, first, num_layers, p2p, [&](int layer) { attended_heads(layer); });
  }

  // The same with another attention: `attend(layer)` computes scratch.attended from the normed input and the pages.
  template <class Attend>
  void layers(const bf16* x, bf16* out, int first, int num_layers, const P2PGroup* p2p, const Attend& attend) {
    const Scratch& s = scratch;
    auto gain = [&](const bf16* gains, int layer) { return gains + static_cast<size_t>(layer) * shapes_.embed; };
    is_mesh_ = p2p != nullptr;
    prepare(x, gain(weights.input_norm, first), true);
    for (int layer = first; layer < first + num_layers; ++layer) {
      attend(layer);
      const bf16* next_gain = gain(weights.post_norm, layer);
      if (p2p != nullptr) {
        share_output(layer, s.attended, *p2p, 0);
        gather(*p2p, 0, x, out, next_gain);
      } else {
        output(layer, s.attended, x, out, next_gain);
      }
      x = out;
      gate_up(layer, s.activated);
      next_gain = layer + 1 == first + num_layers ? nullptr : gain(weights.input_norm, layer + 1);
      if (p2p != nullptr) {
        share_down(layer, s.activated, *p2p, 1);
        gather(*p2p, 1, x, out, next_gain);
      } else {
        down(layer, s.activated, x, out, next_gain);
      }
    }
  }

  // Computes x * gain, the sums of squares of x, and, if `with_angles`, the rotary angles.
  void prepare(const bf16* x, const bf16* gain, bool with_angles) {
    PrepareArgs args = {};
    args.x = x;
    args.gain = gain;
    args.scaled = scratch.scaled;
    args.sums = scratch.sums;
    args.columns = shapes_.embed;
    args.positions = with_angles ? cache.positions : nullptr;
    args.inverse_frequencies = inverse_frequencies;
    args.cos_sin = scratch.cos_sin;
    args.rotary_scale = rotary_scale;
    args.head_dim = shapes_.head_dim;
    prepare_attention(args);
  }

  // Clears the counters of attention's parts, and plans where they are if its blocks stay.
  void prepare_attention(PrepareArgs args = {}) {
    args.num_arrived = scratch.unmerged.num_arrived;
    args.arrivals = shapes_.arrivals();
    args.cleared = cleared;
    args.num_cleared = num_cleared;
    if (stays()) {
      args.cuts = context_cuts(1);
      args.plan = scratch.plan;
      args.claims = scratch.claims;
    }
    launch("prepare", prepare_kernel<Taken<W>>, dim3(shapes_.batch), kPrepareThreads, 0, 1, args);
  }

  // Converts activations [batch, columns] to the form that a product with quantised weights needs.
  void convert(const bf16* from, bf16* to, int columns) {
    launch("convert", convert_kernel<W>, dim3(shapes_.batch), kPrepareThreads, 0, 1, from, to, columns);
  }

  // Computes scratch.attended: QKV and attention, in one kernel for few tokens.
  void attended_heads(int layer) {
    if constexpr (W::kFewest <= kHeadTokens && !W::kIsInt4 && !kSplitsInput<W>) {
      if (const int splits = merged_splits(); splits > 0) {
        return cache.is_fp8 ? merged_heads<Epilogue::kAttendFp8>(layer, splits)
                            : merged_heads<Epilogue::kAttend>(layer, splits);
      }
    }
    qkv(layer, scratch.q);
    attention(layer, scratch.q, scratch.attended);
  }

  void qkv(int layer, bf16* q) {
    auto args = qkv_args<Args>(layer);
    args.q_out = q;
    int tiles = (shapes_.qkv_rows() + kTileRows - 1) / kTileRows;
    project<Epilogue::kQkv>("qkv", args, weights.qkv, shapes_.qkv_rows(), shapes_.embed, scratch.scaled, tiles,
                            tuning_.qkv_splits);
  }

  // Returns in how many ranges of k a cluster of merged QKV and attention divides its heads, a block each, or 0 if
  // these are two kernels: merged, all weights of a block must be on their way before the previous kernel ends.
  int merged_splits() const {
    constexpr int kMostRangeBytes = (W::kIsQuantised ? 64 : 128) * 1024;  // quantised weights take longer to multiply
    const int heads = shapes_.group + 2, splits = kHeadBlocks / heads;
    const bool is_tuned = tuning_.qkv_splits != 0 || tuning_.attention_splits != 0;
    if (is_mesh_ || is_tuned || shapes_.batch > kHeadTokens || shapes_.head_dim != kHeadDim) return 0;
    if (heads > kHeadSlots || shapes_.batch > heads * splits) return 0;
    const int range_blocks = shapes_.embed / splits / W::kBlockColumns;
    const bool is_even = shapes_.embed % (splits * W::kBlockColumns) == 0;
    return is_even && range_blocks * 2 * kHalfTileBytes <= kMostRangeBytes ? splits : 0;
  }

  template <Epilogue E>
  void merged_heads(int layer, int splits) {
    auto args = qkv_args<ArgsOf<E, W>>(layer);
    HeadArgs& heads = args.heads;
    if (!map_pages(&heads.pages, kProductTokens)) return;
    heads.first_row = layer * (layer_elements() / kHeadDim);
    heads.attended = scratch.attended;
    heads.blocks = splits * (shapes_.group + 2);
    heads.early_stages = cache.is_fp8 ? 2 : 1;  // which a warp's result fits in
    heads.least_tiles = kHeadWarps;
    heads.scale_log2 = scale * static_cast<float>(M_LOG2E);
    project_tiled<kHeadTokens, E>("heads", args, weights.qkv, shapes_.qkv_rows(), shapes_.embed, scratch.scaled,
                                  shapes_.kv_heads, splits);
  }

  template <class AnyArgs>
  AnyArgs qkv_args(int layer) const {
    auto args = normed<AnyArgs>();
    args.row_base = layer * shapes_.qkv_rows();
    args.q_gain = weights.q_norm + static_cast<size_t>(layer) * shapes_.head_dim;
    args.k_gain = weights.k_norm + static_cast<size_t>(layer) * shapes_.head_dim;
    args.cos_sin = scratch.cos_sin;
    args.cache = layer_pages(layer);
    args.page_table = cache.page_table;
    args.positions = cache.positions;
    args.max_pages = shapes_.max_pages;
    args.page_size = shapes_.page_size;
    args.kv_heads = shapes_.kv_heads;
    args.group = shapes_.group;
    args.head_dim = shapes_.head_dim;
    args.has_fp8_cache = cache.is_fp8;
    args.holds_back = is_mesh_;
    return args;
  }

  void attention(int layer, const bf16* q, bf16* out) {
    if (stays()) {
      return is_beside() ? staying_attention<kStayingWarps>(layer, q, out, kStayingStages)
                         : staying_attention<kLoneWarps>(layer, q, out, kLoneStages);
    }
    const int splits = tuning_.attention_splits ? tuning_.attention_splits : attention_splits(), h = shapes_.head_dim;
    auto args = attention_args<AttentionArgs>(layer, q, out, splits);
    CUtensorMap pages;
    if (!map_pages(&pages, tile_tokens())) return;
    dim3 grid(splits, shapes_.kv_heads, args.cuts.num_clusters);
    // Limiting the ring to what the longest request needs leaves room for the next kernels' weights.
    const int stage_bytes = 2 * tile_tokens() * h * element_bytes();
    const int warp_tokens = tile_tokens() * kAttentionWarps * splits;
    const int most_tiles = (shapes_.max_context() + warp_tokens - 1) / warp_tokens;
    args.stages = std::min(warp_ring_bytes() / stage_bytes, most_tiles);
    args.stages = std::max(args.stages, cache.is_fp8 ? least_stages<Fp8Cache> : least_stages<Bf16Cache>);
    const size_t ring_bytes = kAttentionWarps * args.stages * (stage_bytes + 8);
    using A = Taken<W>;
    constexpr int kHalf = kIsSingle<A> || std::is_same_v<A, RoundedFp8Weights> ? 128 : 64;  // others are not rounded
    auto kernel = h == 128 ? attention_kernel<128, A> : attention_kernel<kHalf, A>;
    if (cache.is_fp8) kernel = h == 128 ? attention_kernel<128, A, Fp8Cache> : attention_kernel<kHalf, A, Fp8Cache>;
    if (has_long_tiles()) kernel = attention_kernel<128, A, LongFp8Cache>;
    const size_t received_bytes = h == 128 ? sizeof(Received<128>) : sizeof(Received<64>);
    launch("attention", kernel, grid, kAttentionThreads, ring_bytes + received_bytes, splits, pages, args);
  }

  template <class AnyArgs>
  AnyArgs attention_args(int layer, const bf16* q, bf16* out, int splits) const {
    AnyArgs args = {};
    args.q = q;
    args.cache = layer_pages(layer);
    args.page_table = cache.page_table;
    args.cuts = context_cuts(splits);
    args.out = out;
    args.rounded_scales = rounded_scales;
    args.unmerged = scratch.unmerged;
    args.first_row = layer * (layer_elements() / shapes_.head_dim);
    args.max_pages = shapes_.max_pages;
    args.page_size = shapes_.page_size;
    args.kv_heads = shapes_.kv_heads;
    args.group = shapes_.group;
    args.log2_splits = log2_of(splits);
    args.scale_log2 = scale * static_cast<float>(M_LOG2E);
    return args;
  }

  bool is_beside() const { return tuning_.streams == 2; }  // whether another half of the batch runs at the same time

  // Returns whether attention's blocks stay, because there is enough work for each SM.
  bool stays() const {
    const bool is_fit = std::is_same_v<W, Bf16Weights> && !cache.is_fp8 && shapes_.head_dim == kStayingHead;
    const int fewest = (is_beside() ? 2 : kFewestLoneWorks) * kMultiprocessors;
    return is_fit && tuning_.attention_splits == 0 && shapes_.batch * shapes_.kv_heads >= fewest;
  }

  template <int kWarps>
  void staying_attention(int layer, const bf16* q, bf16* out, int stages) {
    auto args = attention_args<StayingArgs>(layer, q, out, 1);
    args.plan = scratch.plan;
    args.claims = scratch.claims + layer % 2;
    args.next_claims = scratch.claims + (layer + 1) % 2;
    CUtensorMap pages;
    if (!map_pages(&pages, kProductTokens)) return;
    args.stages = stages;
    // With more than half of an SM's shared memory, there is one block of attention, whichever half of a batch it is
    // of.
    const size_t bytes = std::max<size_t>(staying_bytes<kWarps>(args.stages, shapes_.group), kMoreThanHalfBytes);
    launch("attention", staying_attention_kernel<kWarps>, dim3(kMultiprocessors), 32 * kWarps, bytes, 1, pages, args);
  }

  // out = residual (may be null) + attended o^T. If `next_gain` is given, also computes the inputs of the next norm.
  void output(int layer, const bf16* attended, const bf16* residual, bf16* out, const bf16* next_gain) {
    auto args = residual_args(layer, residual, out, next_gain);
    project<Epilogue::kResidual>("o", args, weights.o, shapes_.embed, shapes_.q_columns(), attended,
                                 shapes_.embed / kTileRows, tuning_.o_splits);
  }

  // The same of at most 8 tokens, with a router's scores.
  void routed_output(int layer, const bf16* attended, const bf16* residual, bf16* out, const bf16* next_gain,
                     const experts::RouterPart& part) {
    auto args = residual_args<ArgsOf<Epilogue::kRouted, W>>(layer, residual, out, next_gain);
    args.part = part;
    project<Epilogue::kRouted>("o", args, weights.o, shapes_.embed, shapes_.q_columns(), attended,
                               shapes_.embed / kTileRows, tuning_.o_splits);
  }

  void gate_up(int layer, bf16* activated) {
    auto args = normed();
    if constexpr (W::kIsQuantised) args.has_plain_output = has_plain_output;
    args.row_base = layer * 2 * shapes_.mlp;
    args.tile_step = kTileRows / 2;
    args.second_half = shapes_.mlp;
    args.out = activated;
    args.out_columns = shapes_.mlp;
    project<Epilogue::kGateUp>("gate_up", args, weights.gate_up, 2 * shapes_.mlp, shapes_.embed, scratch.scaled,
                               shapes_.mlp / (kTileRows / 2), tuning_.gate_up_splits);
  }

  void down(int layer, const bf16* activated, const bf16* residual, bf16* out, const bf16* next_gain) {
    auto args = residual_args(layer, residual, out, next_gain);
    project<Epilogue::kResidual>("down", args, weights.down, shapes_.embed, shapes_.mlp, activated,
                                 shapes_.embed / kTileRows, tuning_.down_splits);
  }

  // logits [batch, rows] = input head^T, with a head [rows, columns].
  void logits(const Matrix& head, int rows, int columns, const bf16* input, float* out) {
    Args args = base();
    args.out = reinterpret_cast<bf16*>(out);
    args.out_columns = rows;
    project<Epilogue::kLogits>("head", args, head, rows, columns, input, (rows + kTileRows - 1) / kTileRows, 0);
  }

  // On a mesh: sends this GPU's summand of attended o^T or activated down^T to every GPU; `gather` adds them.
  void share_output(int layer, const bf16* attended, const P2PGroup& p2p, int round) {
    project<Epilogue::kShare>("o", share_args(layer, p2p, round), weights.o, shapes_.embed, shapes_.q_columns(),
                              attended, shapes_.embed / kTileRows, tuning_.o_splits);
  }

  void share_down(int layer, const bf16* activated, const P2PGroup& p2p, int round) {
    project<Epilogue::kShare>("down", share_args(layer, p2p, round), weights.down, shapes_.embed, shapes_.mlp,
                              activated, shapes_.embed / kTileRows, tuning_.down_splits);
  }

  // out = residual + the summands of all GPUs. If `next_gain` is given, also computes the inputs of the next norm.
  void gather(const P2PGroup& p2p, int round, const bf16* residual, bf16* out, const bf16* next_gain) {
    GatherArgs args = {};
    args.p2p = p2p;
    args.round = round;
    args.residual = residual;
    args.out = out;
    args.next_gain = next_gain;
    args.scaled_out = scratch.scaled;
    args.sums_out = scratch.sums;
    args.batch = shapes_.batch;
    args.columns = shapes_.embed;
    const int num_warps = shapes_.batch * (shapes_.embed / kTileRows);
    const int blocks = std::min((num_warps + kP2PThreads / 32 - 1) / (kP2PThreads / 32), kMaxP2PBlocks);
    launch("gather", gather_kernel<W>, dim3(blocks), kP2PThreads, 0, 1, args);
  }

 private:
  size_t layer_elements() const {
    return static_cast<size_t>(shapes_.pages) * shapes_.kv_heads * 2 * shapes_.page_size * shapes_.head_dim;
  }

  using Args = ArgsOf<Epilogue::kResidual, W>;  // of all projections but those that send

  template <class AnyArgs = Args>
  AnyArgs base() const {
    AnyArgs args = {};
    args.batch = shapes_.batch;
    args.tile_step = kTileRows;
    args.second_half = kTileRows / 2;
    args.epsilon = epsilon;
    return args;
  }

  template <class AnyArgs = Args>
  AnyArgs normed() const {
    auto args = base<AnyArgs>();
    args.sums_in = scratch.sums;
    args.norm_tiles = norm_tiles != 0 ? norm_tiles : shapes_.embed / kTileRows;
    args.inverse_dim = 1.0f / static_cast<float>(shapes_.embed);
    return args;
  }

  ArgsOf<Epilogue::kShare, W> share_args(int layer, const P2PGroup& p2p, int round) const {
    auto args = base<ArgsOf<Epilogue::kShare, W>>();
    args.row_base = layer * shapes_.embed;
    args.out_columns = shapes_.embed;
    args.p2p = p2p;
    args.round = round;
    return args;
  }

  template <class AnyArgs = Args>
  AnyArgs residual_args(int layer, const bf16* residual, bf16* out, const bf16* next_gain) const {
    auto args = base<AnyArgs>();
    args.row_base = layer * shapes_.embed;
    args.residual = residual;
    args.out = out;
    args.out_columns = shapes_.embed;
    args.next_gain = next_gain;
    args.scaled_out = scratch.scaled;
    args.sums_out = scratch.sums;
    return args;
  }

  // Merging a cluster takes as long as 4 tiles of a warp. Longer contexts are split until every SM has a block.
  int attention_splits() const {
    const int pairs = shapes_.batch * shapes_.kv_heads, context = shapes_.max_context();
    const int round_tokens = kAttentionWarps * kProductTokens;
    if (context <= 4 * round_tokens) return 1;
    int splits = 1;
    while (splits < kMaxSplits && 2 * splits * pairs <= kMultiprocessors && context >= 2 * splits * round_tokens) {
      splits *= 2;
    }
    return splits;
  }

  ContextCuts context_cuts(int splits) const {
    ContextCuts cuts = {};
    cuts.positions = cache.positions;
    cuts.batch = shapes_.batch;
    cuts.fewest_shares = fewest_shares(shapes_.kv_heads, splits);
    cuts.least_share = kLeastShareTokens * splits;
    // For blocks that stay in halves of a batch, a share is a quarter of the work of an SM, or more.
    if (is_beside() && stays()) cuts.most_shares = 2 * cuts.fewest_shares;
    cuts.num_clusters = most_clusters(cuts.batch, cuts.fewest_shares, cuts.least_share, shapes_.max_context());
    return cuts;
  }

  template <Epilogue E>
  void project(const char* name, ArgsOf<E, W> args, const Matrix& matrix, int rows, int columns, const bf16* input,
               int tiles, int splits) {
    const auto run = [&](auto width) {
      constexpr int N = decltype(width)::value;
      if constexpr (W::kFewest <= N && N <= most_width<E, W>) {
        project_tiled<N, E>(name, args, matrix, rows, columns, input, tiles, splits);
      } else if (error_.empty()) {
        error_ = std::string(name) + ": these weights are not multiplied with " + std::to_string(N) + " tokens";
      }
    };
    switch (width_of(args.batch)) {
      case 8: return run(std::integral_constant<int, 8>());
      case 16: return run(std::integral_constant<int, 16>());
      case 32: return run(std::integral_constant<int, 32>());
      default: return run(std::integral_constant<int, 64>());
    }
  }

  static int log2_of(int power) { return power <= 1 ? 0 : 1 + log2_of(power / 2); }

  // Chooses the number of ranges of k, tuned on H200s for the shapes of Qwen3 and their shards. Two blocks fit on an
  // SM. Filling about three quarters of these places leaves room for the next kernel's weights, so the number of ranges
  // is chosen to fill that many, with at least 8 blocks of k per range, or more if the ranges are uneven. Too few
  // blocks for the GPU are worse than ranges of 4; with 64 tokens, whose sums take longer, 64 blocks are enough.
  // `tiles` counts a tile once for each group of N tokens, and `tokens` is the kernel's N.
  static int choose_splits(int tiles, int k_blocks, int tokens) {
    constexpr int kFewestBlocks = 120, kMostBlocks = 224, kMostUnevenBlocks = 208, kPlaces = 2 * kMultiprocessors;
    const bool is_narrow = tokens <= 16;
    const int fewest = tokens < 64 ? kFewestBlocks : 64;
    const int uneven_range = is_narrow ? 24 : 12, short_range = is_narrow ? 16 : tokens == 32 ? 20 : 24;
    int splits = 1;
    for (int s = 2; s <= kMaxSplits; ++s) {
      const int range = k_blocks / s;
      const bool fits = k_blocks % s == 0 ? tiles * s <= kMostBlocks && range >= 8
                                          : tiles * s <= kMostUnevenBlocks && range >= uneven_range &&
                                                (is_narrow || tiles * s > kMultiprocessors);
      const bool is_power = (s & (s - 1)) == 0, is_needed = tiles * splits < fewest && is_power && range >= 4;
      if (fits || is_needed) splits = s;
    }
    auto blocks = [&] { return tiles * splits; };
    auto halved_range = [&] { return 2 * splits > kMaxSplits ? 0 : k_blocks / (2 * splits); };
    // From 32 tokens on, uneven ranges are faster than a single block on each SM.
    const bool is_one_each = blocks() > kFewestBlocks && blocks() <= kMultiprocessors;
    if (!is_narrow && is_one_each && splits < kMaxSplits && k_blocks / (splits + 1) >= 3) ++splits;
    // Exceed the blocks that run at once if ranges stay long, or if they are not short and fill the SMs more evenly.
    if (blocks() > kMultiprocessors && blocks() < kPlaces) {
      const bool is_evener = evenness(2 * blocks()) > evenness(blocks()) + 0.1;
      if (halved_range() >= 40 || (halved_range() >= short_range && is_evener)) splits *= 2;
    }
    // With several waves, the last one ends sooner if blocks are short. Blocks of 8-bit weights already are.
    if (tokens == 32 && blocks() >= kPlaces && halved_range() >= (W::kIsSplit ? 24 : 16)) splits *= 2;
    return splits;
  }

  // Returns the mean number of blocks per SM divided by the maximum.
  static double evenness(int blocks) {
    return static_cast<double>(blocks) / kMultiprocessors / ((blocks + kMultiprocessors - 1) / kMultiprocessors);
  }

  template <int N, Epilogue E>
  void project_tiled(const char* name, ArgsOf<E, W>& args, const Matrix& matrix, int rows, int columns,
                     const bf16* input, int tiles, int splits) {
    constexpr int kInputTiles = W::kBlockColumns / kBlockK;
    args.k_blocks = (columns + W::kBlockColumns - 1) / W::kBlockColumns;
    const int groups = (args.batch + N - 1) / N;
    // Quantised weights are split like bf16 ones, which were tuned: what a short range costs is not its bytes.
    if (splits == 0) splits = std::min(choose_splits(tiles * groups, columns / kBlockK, N), args.k_blocks);
    args.splits = splits;
    if (splits > std::min(kMaxSplits, args.k_blocks)) {
      if (error_.empty()) {
        error_ = std::string(name) + ": at most one range for each " + std::to_string(W::kBlockColumns) +
                 " columns, and at most 8";
      }
      return;
    }
    // The ring leaves room for two blocks on an SM: of this kernel, or of the next one, which already prefetches. A
    // range that fits is a single stage with one wait. Otherwise a stage has two blocks of k if all ranges are even.
    const int split_blocks = (args.k_blocks + splits - 1) / splits;
    const int resident_bytes = split_blocks * kInputTiles * N * kBlockK * 2;
    const bool is_resident = kIsNarrow<N> && (resident_bytes <= kMaxResidentBytes || kSplitsInput<W>);
    const int block_bytes = 2 * kHalfTileBytes + (is_resident ? 0 : kTilesPerBlock<W> * N * kBlockK * 2);
    const int kilobytes = kAttends<E> ? kMaxSharedBytes / 1024 : tuning_.ring_kilobytes ? tuning_.ring_kilobytes : 112;
    int blocks = splits, sum_bytes = kIsNarrow<N> ? splits * split_tokens(N, splits) * kSumStride * 4 : 0;
    if constexpr (kAttends<E>) {
      blocks = args.heads.blocks;
      sum_bytes = blocks * kSumStride * 4 + sizeof(HeadMemory);
    }
    int table_bytes = 0, exponent_bytes = 0;
    if constexpr (W::kIsQuantised) {
      const Scales& s = matrix.scales;
      const int num_groups = scale_groups(split_blocks, W::kBlockColumns, s.columns_log2);
      table_bytes = num_groups * scale_entries(s.rows_each) * 4;
      if (W::kIsSplit) exponent_bytes = (split_blocks * kInputTiles * N + 15) / 16 * 16;
    }
    const int round_bytes = kHeadWarps * 2 * kProductTokens * kHeadDim * element_bytes();  // a tile for each warp
    int page_bytes = 0;
    if constexpr (kAttends<E>) page_bytes = args.heads.early_stages * round_bytes;
    const int ring_bytes = 1024 * kilobytes - kOtherBytes<N> - sum_bytes - (is_resident ? resident_bytes : 0) -
                           table_bytes - exponent_bytes - page_bytes;
    args.resident_input = is_resident ? input : nullptr;
    args.blocks_per_stage = 1;
    if (kIsNarrow<N> && !W::kIsQuantised && args.k_blocks % splits == 0) {
      const int wanted = tuning_.blocks_per_stage ? tuning_.blocks_per_stage : 2;
      if (split_blocks * block_bytes <= ring_bytes) {
        args.blocks_per_stage = split_blocks;
      } else if (split_blocks % wanted == 0 && 2 * wanted * block_bytes <= ring_bytes) {
        args.blocks_per_stage = wanted;
      }
    }
    const int stage_bytes = args.blocks_per_stage * block_bytes;
    args.stages = std::min({kMaxStages, ring_bytes / stage_bytes, split_blocks / args.blocks_per_stage});
    if (args.stages < 1) {
      if (error_.empty()) error_ = std::string(name) + ": the scales of a range of columns leave no memory for weights";
      return;
    }
    int loaded_bytes = args.stages * stage_bytes + (is_resident ? resident_bytes : 0);
    if constexpr (kAttends<E>) {
      const int late_stages = args.stages * stage_bytes / round_bytes;
      args.heads.stages = std::min(args.heads.early_stages + late_stages, kMaxHeadStages);
      args.heads.page_offset = std::max(loaded_bytes, args.stages * stage_bytes + kHeadPartsBytes);
      loaded_bytes = args.heads.page_offset + page_bytes;
    }
    if constexpr (W::kIsQuantised) {
      args.scales = matrix.scales;
      args.table_offset = loaded_bytes;
      args.input_tiles = columns / kBlockK;
    }
    if constexpr (W::kIsSplit) {
      args.exponents = exponents_of(input, shapes_.batch, columns);
      args.exponent_offset = loaded_bytes + table_bytes;
    }
    args.ring_bytes = std::max(loaded_bytes + table_bytes + exponent_bytes, kIsNarrow<N> ? 0 : N * kSumStride * 4);
    CUtensorMap weights_map, input_map;
    size_t all_rows = static_cast<size_t>(shapes_.layers) * rows;
    if (!map_weights(&weights_map, matrix, all_rows, columns, args.blocks_per_stage) ||
        !map_matrix(&input_map, input, shapes_.batch, columns, N, args.blocks_per_stage * kTilesPerBlock<W>,
                    kIsSingle<W> ? 2 : 1)) {
      return;
    }
    dim3 grid(blocks, groups, tiles);
    launch_at(product_priority, name, projection_kernel<N, E, W>, grid, kProjectionThreads,
              args.ring_bytes + kOtherBytes<N> + sum_bytes, blocks, weights_map, input_map, args);
  }

  bool map_weights(CUtensorMap* map, const bf16* matrix, size_t rows, int columns, int blocks) {
    return map_matrix(map, matrix, rows, columns, 64, blocks);
  }
  // Maps a quantised matrix as [rows, bytes], fetched in boxes of [64, 128]: the last box of a row may exceed it.
  bool map_weights(CUtensorMap* map, const ScaledMatrix& matrix, size_t rows, int columns, int) {
    const cuuint64_t row_bytes = static_cast<cuuint64_t>(columns) * 128 / W::kBlockColumns;
    cuuint64_t sizes[3] = {row_bytes, rows, 1}, strides[2] = {row_bytes, row_bytes * rows};
    cuuint32_t box[3] = {128, 64, 1};
    return encode(map, matrix.data, sizes, strides, box, CU_TENSOR_MAP_DATA_TYPE_UINT8);
  }

  // Maps a row-major [rows, columns] matrix as [columns / 64, rows, 64], fetched in boxes of [blocks, tile_rows, 64].
  bool map_matrix(CUtensorMap* map, const bf16* matrix, size_t rows, int columns, int tile_rows, int blocks,
                  int step = 1) {
    cuuint64_t sizes[3] = {kBlockK, rows, static_cast<cuuint64_t>(columns / kBlockK / step)};
    cuuint64_t strides[2] = {static_cast<cuuint64_t>(columns) * 2, static_cast<cuuint64_t>(kBlockK * 2 * step)};
    cuuint32_t box[3] = {kBlockK, static_cast<cuuint32_t>(tile_rows), static_cast<cuuint32_t>(blocks)};
    return encode(map, matrix, sizes, strides, box);
  }

  int element_bytes() const { return cache.is_fp8 ? 1 : 2; }

  // With one request, each warp has too few tiles for longer ones.
  bool has_long_tiles() const {
    constexpr int kFewestRequests = 8;
    const bool fits = shapes_.page_size % kTileTokens<LongFp8Cache> == 0 && shapes_.head_dim == 128;
    return cache.is_fp8 && fits && shapes_.batch >= kFewestRequests;
  }
  int tile_tokens() const { return has_long_tiles() ? kTileTokens<LongFp8Cache> : kTileTokens<Bf16Cache>; }
  // Blocks that end and begin leave the memory idle. With more than two rounds of two blocks per SM, three with shorter
  // rings lose less of it, and so they do if they all run at once, measured for an 8-bit cache.
  int warp_ring_bytes() const {
    const int blocks = shapes_.batch * shapes_.kv_heads;
    const bool is_one_round = 2 * kMultiprocessors < blocks && blocks <= 3 * kMultiprocessors;
    const bool is_short = is_one_round || blocks > 4 * kMultiprocessors;
    return has_long_tiles() && is_short ? kShortWarpRingBytes : kMaxWarpRingBytes;
  }
  // Maps the whole cache as rows of one token each, split into halves of 128 bytes: tiles [H / 64, 16 tokens, 64]; in 8
  // bits [1, tile_tokens, H].
  bool map_pages(CUtensorMap* map, int tokens) {
    const int h = shapes_.head_dim, row = cache.is_fp8 ? h : 64;
    cuuint64_t sizes[3] = {static_cast<cuuint64_t>(row), shapes_.layers * (layer_elements() / h),
                           static_cast<cuuint64_t>(h / row)};
    cuuint64_t strides[2] = {static_cast<cuuint64_t>(h) * element_bytes(), 128};
    const cuuint32_t box[3] = {static_cast<cuuint32_t>(row), static_cast<cuuint32_t>(tokens),
                               static_cast<cuuint32_t>(h / row)};
    const auto type = cache.is_fp8 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    // In a wider swizzle the copy engine would place each row in bytes of its own.
    const auto swizzle = row * element_bytes() == 64 ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_128B;
    return encode(map, cache.pages, sizes, strides, box, type, swizzle);
  }

 public:
  void* layer_pages(int layer) const {
    return static_cast<uint8_t*>(cache.pages) + layer * layer_elements() * element_bytes();
  }

  bool encode(CUtensorMap* map, const void* data, const cuuint64_t* sizes, const cuuint64_t* strides,
              const cuuint32_t* box, CUtensorMapDataType type = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
              CUtensorMapSwizzle swizzle = CU_TENSOR_MAP_SWIZZLE_128B) {
    if (!error_.empty()) return false;
    EncodeTiled function = encode_tiled();
    cuuint32_t steps[3] = {1, 1, 1};
    CUresult result = CUDA_ERROR_NOT_FOUND;
    if (function != nullptr) {  // a promotion to 256 bytes in the L2 costs 5 % of the bandwidth
      result =
          function(map, type, 3, const_cast<void*>(data), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                   swizzle, CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    }
    if (result != CUDA_SUCCESS) error_ = "cuTensorMapEncodeTiled failed with CUresult " + std::to_string(result);
    return result == CUDA_SUCCESS;
  }

  // The first kernel waits for all earlier work of the stream; each later one may start when its predecessor has.
  template <class... Parameters, class... Arguments>
  void launch(const char* name, void (*kernel)(Parameters...), dim3 grid, int threads, size_t shared_bytes, int cluster,
              const Arguments&... arguments) {
    launch_at(0, name, kernel, grid, threads, shared_bytes, cluster, arguments...);
  }
  // The same with a priority over kernels of other streams, which is 0 or negative.
  template <class... Parameters, class... Arguments>
  void launch_at(int priority, const char* name, void (*kernel)(Parameters...), dim3 grid, int threads,
                 size_t shared_bytes, int cluster, const Arguments&... arguments) {
    if (!error_.empty()) return;
    const void* function = reinterpret_cast<const void*>(kernel);
    // Always sets the maximum, whatever this launch needs: o and down share a kernel, and a captured launch of one must
    // not see a limit set for the other.
    check(name, cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, kMaxSharedBytes));
    // All kernels use the same split of L1 and shared memory, because an SM must be idle to change it.
    check(name, cudaFuncSetAttribute(function, cudaFuncAttributePreferredSharedMemoryCarveout,
                                     cudaSharedmemCarveoutMaxShared));
    cudaLaunchAttribute attributes[3] = {};
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim.x = cluster;
    attributes[0].val.clusterDim.y = 1;
    attributes[0].val.clusterDim.z = 1;
    attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[1].val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream_;
    attributes[2].id = cudaLaunchAttributePriority;
    attributes[2].val.priority = priority;
    if (is_first_) attributes[1] = attributes[2];
    config.attrs = attributes;
    config.numAttrs = (is_first_ ? 1 : 2) + (priority != 0);
    is_first_ = false;
    check(name, cudaLaunchKernelEx(&config, kernel, arguments...));
  }

 private:
  void check(const char* name, cudaError_t status) {
    if (status != cudaSuccess && error_.empty()) {
      error_ = std::string("the ") + name + " kernel could not be launched: " + cudaGetErrorString(status);
    }
  }

  static constexpr int kMaxSharedBytes = 227 * 1024;  // per block; none of the kernels has static shared memory
  static constexpr int kMoreThanHalfBytes = 113 * 1024 + 512;  // of an SM's 228 KB, of which each block takes 1 KB more

  Shapes shapes_;
  Tuning tuning_;
  cudaStream_t stream_;
  bool is_first_ = true, is_mesh_ = false;
  std::string error_;
};

using Step = StepOf<Bf16Weights>;

template <Epilogue E, class W, int N = W::kFewest>
void add_projections_of(std::vector<const void*>& kernels) {
  kernels.push_back(reinterpret_cast<const void*>(projection_kernel<N, E, W>));
  if constexpr (N < most_width<E, W>) add_projections_of<E, W, 2 * N>(kernels);
}

template <class W>
void add_projections(std::vector<const void*>& kernels) {
  add_projections_of<Epilogue::kQkv, W>(kernels);
  add_projections_of<Epilogue::kResidual, W>(kernels);
  add_projections_of<Epilogue::kGateUp, W>(kernels);
  add_projections_of<Epilogue::kShare, W>(kernels);
  if constexpr (W::kFewest <= kHeadTokens && !W::kIsInt4) {
    kernels.push_back(reinterpret_cast<const void*>(projection_kernel<kHeadTokens, Epilogue::kAttend, W>));
    kernels.push_back(reinterpret_cast<const void*>(projection_kernel<kHeadTokens, Epilogue::kAttendFp8, W>));
  }
}

}  // namespace meshserve
