#include "layers/step.cuh"

#include <math.h>

#include <algorithm>

#include "common/tuning.cuh"

namespace meshserve {
namespace {

constexpr int kMostMultiprocessors = 144;  // a full GH100 has them

int most_clusters_of(const Shapes& shapes) {
  return most_clusters(shapes.batch, fewest_shares(kMostMultiprocessors, shapes.kv_heads, 1));
}

const bf16* layer_gain(const bf16* gains, int layer, int columns) {
  return gains + static_cast<size_t>(layer) * columns;
}

}  // namespace

size_t Scratch::unmerged_bytes(const Shapes& s) {
  return most_clusters_of(s) * s.kv_heads * s.group * (s.head_dim + 4) * sizeof(float);
}

size_t Scratch::carve(const Shapes& s, uint8_t* buffer) {
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
  unmerged.num_arrived = reinterpret_cast<int*>(take(b * arrivals(s) * 4));
  plan = reinterpret_cast<PlannedPart*>(take(most_clusters_of(s) * sizeof(PlannedPart)));
  claims = reinterpret_cast<int*>(take(2 * sizeof(int)));
  return used;
}

template <class W>
void Step<W>::layers(const bf16* x, bf16* out, int first, int num_layers, const P2PGroup* p2p,
                     const std::function<void(int)>& attend) {
  const Scratch& s = scratch;
  is_mesh_ = p2p != nullptr;
  prepare(x, layer_gain(weights.input_norm, first, shapes_.embed), true);
  for (int layer = first; layer < first + num_layers; ++layer) {
    attend ? attend(layer) : attended_heads(layer);
    const bf16* next_gain = layer_gain(weights.post_norm, layer, shapes_.embed);
    if (p2p != nullptr) {
      share("o", layer, weights.o, shapes_.q_columns(), s.attended, tuning_.o_splits, *p2p, 0);
      gather(*p2p, 0, x, out, next_gain);
    } else {
      output(layer, s.attended, x, out, next_gain);
    }
    x = out;
    gate_up(layer, s.activated);
    next_gain = layer + 1 == first + num_layers ? nullptr : layer_gain(weights.input_norm, layer + 1, shapes_.embed);
    if (p2p != nullptr) {
      share("down", layer, weights.down, shapes_.mlp, s.activated, tuning_.down_splits, *p2p, 1);
      gather(*p2p, 1, x, out, next_gain);
    } else {
      down(layer, s.activated, x, out, next_gain);
    }
  }
}

template <class W>
void Step<W>::prepare(const bf16* x, const bf16* gain, bool with_angles) {
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

template <class W>
void Step<W>::prepare_attention(PrepareArgs args) {
  args.num_arrived = scratch.unmerged.num_arrived;
  args.arrivals = Scratch::arrivals(shapes_);
  args.cleared = cleared;
  args.num_cleared = num_cleared;
  const auto attention = decode_attention();
  if (attention.is_persistent()) {
    args.cuts = attention.cuts(1);
    args.plan = scratch.plan;
    args.claims = scratch.claims;
  }
  sequence_.launch("prepare", kernel_of<prepare_kernel<InputFormat<W>>>(), {dim3(shapes_.batch), kPrepareThreads},
                   args);
}

template <class W>
void Step<W>::convert(const bf16* from, bf16* to, int columns) {
  if constexpr (W::kIsQuantized && kHasParts<W>) {
    sequence_.launch("convert", kernel_of<convert_kernel<W>>(), {dim3(shapes_.batch), kPrepareThreads}, from, to,
                     columns);
  }
}

template <class W>
void Step<W>::attended_heads(int layer) {
  if constexpr (kHasMergedHeads<W>) {
    if (const int splits = merged_splits(); splits > 0) {
      return cache.is_fp8 ? merged_heads<Epilogue::kAttendFp8>(layer, splits)
                          : merged_heads<Epilogue::kAttend>(layer, splits);
    }
  }
  qkv(layer, scratch.q);
  attention(layer, scratch.q, scratch.attended);
}

template <class W>
void Step<W>::qkv(int layer, bf16* q) {
  auto args = qkv_args<Arguments>(layer);
  args.q_out = q;
  const int rows = shapes_.qkv_rows(), tiles = (rows + kTileRows - 1) / kTileRows;
  launch_projection<Epilogue::kQkv, QkvFormat<W>>(
      sequence_, projection("qkv", rows, shapes_.embed, tiles, scratch.scaled, tuning_.qkv_splits), weights.qkv, args);
}

// Returns in how many ranges of k a cluster of merged QKV and attention divides its heads, a block each, or 0 if these
// are two kernels: merged, all weights of a block must be on their way before the previous kernel ends.
template <class W>
int Step<W>::merged_splits() const {
  const int heads = shapes_.group + 2, splits = kHeadBlocks / heads;
  const bool is_tuned = tuning_.qkv_splits != 0 || tuning_.attention_splits != 0;
  if (is_mesh_ || is_tuned || shapes_.batch > kHeadTokens || shapes_.head_dim != kHeadDim) return 0;
  if (heads > kHeadSlots || shapes_.batch > heads * splits) return 0;
  const int range_blocks = shapes_.embed / splits / W::kBlockColumns;
  const bool is_even = shapes_.embed % (splits * W::kBlockColumns) == 0;
  return is_even && range_blocks * 2 * kHalfTileBytes <= tuned::kMostMergedBytes ? splits : 0;
}

template <class W>
template <Epilogue E>
void Step<W>::merged_heads(int layer, int splits) {
  auto args = qkv_args<ArgsOf<E, W>>(layer);
  HeadArgs& heads = args.heads;
  if (!map_pages(sequence_, &heads.pages, shapes_, cache, kProductTokens)) return;
  heads.first_row = layer * (shapes_.layer_elements() / kHeadDim);
  heads.attended = scratch.attended;
  heads.blocks = splits * (shapes_.group + 2);
  heads.early_stages = cache.is_fp8 ? 2 : 1;  // which a warp's result fits in
  heads.least_tiles = kHeadWarps;
  heads.scale_log2 = scale * static_cast<float>(M_LOG2E);
  launch_projection<E, W>(
      sequence_, projection("heads", shapes_.qkv_rows(), shapes_.embed, shapes_.kv_heads, scratch.scaled, splits),
      weights.qkv, args);
}

template <class W>
DecodeAttention<InputFormat<W>> Step<W>::decode_attention() const {
  DecodeAttention<InputFormat<W>> attention = {};
  attention.shapes = shapes_;
  attention.cache = cache;
  attention.unmerged = scratch.unmerged;
  attention.plan = scratch.plan;
  attention.claims = scratch.claims;
  attention.scale = scale;
  attention.splits = tuning_.attention_splits;
  attention.is_beside = tuning_.streams == 2;
  return attention;
}

template <class W>
void Step<W>::attention(int layer, const bf16* q, bf16* out) {
  decode_attention().launch(sequence_, layer, q, out);
}

template <class W>
void Step<W>::output(int layer, const bf16* attended, const bf16* residual, bf16* out, const bf16* next_gain) {
  const auto args = residual_args(layer, residual, out, next_gain);
  launch_projection<Epilogue::kResidual, W>(
      sequence_,
      projection("o", shapes_.embed, shapes_.q_columns(), shapes_.embed / kTileRows, attended, tuning_.o_splits),
      weights.o, args);
}

template <class W>
void Step<W>::routed_output(int layer, const bf16* attended, const bf16* residual, bf16* out, const bf16* next_gain,
                            const experts::RouterPart& part) {
  if constexpr (kHasRouter<W>) {
    auto args = residual_args<ArgsOf<Epilogue::kRouted, W>>(layer, residual, out, next_gain);
    args.part = part;
    launch_projection<Epilogue::kRouted, W>(
        sequence_,
        projection("o", shapes_.embed, shapes_.q_columns(), shapes_.embed / kTileRows, attended, tuning_.o_splits),
        weights.o, args);
  } else {
    sequence_.note("o: these weights have no product with a router");
  }
}

template <class W>
void Step<W>::gate_up(int layer, bf16* activated) {
  if constexpr (kHasMlp<W>) {
    auto args = normed();
    if constexpr (W::kIsQuantized) args.has_plain_output = has_plain_output;
    args.row_base = layer * 2 * shapes_.mlp;
    args.tile_step = kTileRows / 2;
    args.second_half = shapes_.mlp;
    args.out = activated;
    args.out_columns = shapes_.mlp;
    launch_projection<Epilogue::kGateUp, W>(
        sequence_,
        projection("gate_up", 2 * shapes_.mlp, shapes_.embed, shapes_.mlp / (kTileRows / 2), scratch.scaled,
                   tuning_.gate_up_splits),
        weights.gate_up, args);
  }
}

template <class W>
void Step<W>::down(int layer, const bf16* activated, const bf16* residual, bf16* out, const bf16* next_gain) {
  const auto args = residual_args(layer, residual, out, next_gain);
  launch_projection<Epilogue::kResidual, W>(
      sequence_,
      projection("down", shapes_.embed, shapes_.mlp, shapes_.embed / kTileRows, activated, tuning_.down_splits),
      weights.down, args);
}

template <class W>
void Step<W>::logits(const Matrix& head, int rows, int columns, const bf16* input, float* out) {
  if constexpr (kHasLogits<W>) {
    auto args = base();
    args.out = reinterpret_cast<bf16*>(out);
    args.out_columns = rows;
    const int tiles = (rows + kTileRows - 1) / kTileRows;
    launch_projection<Epilogue::kLogits, W>(sequence_, projection("head", rows, columns, tiles, input, 0), head, args);
  }
}

template <class W>
void Step<W>::share(const char* name, int layer, const Matrix& matrix, int columns, const bf16* activations, int splits,
                    const P2PGroup& p2p, int round) {
  if constexpr (kHasParts<W>) {
    auto args = base<ArgsOf<Epilogue::kShare, W>>();
    args.row_base = layer * shapes_.embed;
    args.out_columns = shapes_.embed;
    args.p2p = p2p;
    args.round = round;
    launch_projection<Epilogue::kShare, W>(
        sequence_, projection(name, shapes_.embed, columns, shapes_.embed / kTileRows, activations, splits), matrix,
        args);
  }
}

template <class W>
void Step<W>::gather(const P2PGroup& p2p, int round, const bf16* residual, bf16* out, const bf16* next_gain) {
  if constexpr (kHasParts<W>) {
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
    sequence_.launch("gather", kernel_of<gather_kernel<W>>(), {dim3(p2p_blocks(num_warps * 32)), kP2PThreads}, args);
  }
}

template <class W>
Projection Step<W>::projection(const char* name, int rows, int columns, int tiles, const bf16* input,
                               int splits) const {
  Projection projection = {name, shapes_.layers, rows, columns, tiles, input, splits};
  projection.blocks_per_stage = tuning_.blocks_per_stage;
  projection.pipeline_kilobytes = tuning_.pipeline_kilobytes;
  projection.priority = product_priority;
  return projection;
}

template <class W>
template <class Args>
Args Step<W>::base() const {
  Args args = {};
  args.batch = shapes_.batch;
  args.tile_step = kTileRows;
  args.second_half = kTileRows / 2;
  args.epsilon = epsilon;
  return args;
}

template <class W>
template <class Args>
Args Step<W>::normed() const {
  auto args = base<Args>();
  args.sums_in = scratch.sums;
  args.norm_tiles = norm_tiles != 0 ? norm_tiles : shapes_.embed / kTileRows;
  args.inverse_dim = 1.0f / static_cast<float>(shapes_.embed);
  return args;
}

template <class W>
template <class Args>
Args Step<W>::residual_args(int layer, const bf16* residual, bf16* out, const bf16* next_gain) const {
  auto args = base<Args>();
  args.row_base = layer * shapes_.embed;
  args.residual = residual;
  args.out = out;
  args.out_columns = shapes_.embed;
  args.next_gain = next_gain;
  args.scaled_out = scratch.scaled;
  args.sums_out = scratch.sums;
  return args;
}

template <class W>
template <class Args>
Args Step<W>::qkv_args(int layer) const {
  auto args = normed<Args>();
  args.row_base = layer * shapes_.qkv_rows();
  args.q_gain = layer_gain(weights.q_norm, layer, shapes_.head_dim);
  args.k_gain = layer_gain(weights.k_norm, layer, shapes_.head_dim);
  args.cos_sin = scratch.cos_sin;
  args.cache = cache.of_layer(shapes_, layer);
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

template class Step<Bf16Weights>;
template class Step<Fp8Weights>;
template class Step<SplitFp8Weights>;
template class Step<SingleFp8Weights>;
template class Step<RoutedFp8Weights>;
template class Step<RoutedSingleFp8Weights>;
template class Step<OneTokenFp8Weights>;
template class Step<Int4Weights>;
template class Step<IntegerInt4Weights>;

}  // namespace meshserve
