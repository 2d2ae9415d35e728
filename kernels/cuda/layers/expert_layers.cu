#include "layers/expert_layers.cuh"

#include "common/tuning.cuh"

namespace meshserve {
namespace {

// P: the format as which the projections' weights are multiplied.
template <class W, class P>
std::string run_as(const ExpertLayers<W>& call, const bf16* x, bf16* out, int first, int num_layers,
                   cudaStream_t stream, size_t* needed) {
  Step<P> step(call.shapes, call.tuning, stream);
  const Weights<W>& w = call.weights;
  step.weights = {w.input_norm, w.qkv, w.q_norm, w.k_norm, w.o, w.post_norm, w.gate_up, w.down};
  step.cache = call.cache;
  step.inverse_frequencies = call.inverse_frequencies;
  step.epsilon = call.epsilon;
  step.scale = call.scale;
  step.rotary_scale = call.rotary_scale;
  *needed = step.scratch.carve(call.shapes, call.scratch);
  if (*needed > call.scratch_bytes) return "";

  const experts::ExpertShapes& shapes = call.expert_shapes;
  experts::ExpertScratch memory = call.expert_scratch;
  const bool has_row_pipelines = experts::has_row_pipelines<W>(shapes);
  const auto gain = [&](const bf16* gains, int layer) { return gains + static_cast<size_t>(layer) * shapes.embed; };
  step.scratch.sums = memory.sums;
  step.cleared = memory.published;
  step.num_cleared = 2 * experts::kMostChosen;
  step.prepare(x, gain(w.input_norm, first), true);
  const Scratch& s = step.scratch;
  for (int layer = first; layer < first + num_layers; ++layer) {
    const bf16* router = call.router + static_cast<size_t>(layer) * shapes.experts * shapes.embed;
    const bf16* post_gain = gain(w.post_norm, layer);
    experts::ExpertCall<W> chosen = {};
    chosen.published = memory.published + layer % 2 * experts::kMostChosen;
    chosen.unpublished = memory.published + (layer + 1) % 2 * experts::kMostChosen;
    step.attended_heads(layer);
    if (has_row_pipelines) {  // whose kernels choose the experts themselves
      step.routed_output(layer, s.attended, x, out, post_gain, {router, memory.scores, shapes.experts});
      chosen.scores = memory.scores;
      chosen.positions = call.cache.positions;
      chosen.chosen = memory.experts;
      chosen.is_normalized = call.is_normalized;
    } else {
      step.output(layer, s.attended, x, out, post_gain);
      experts::RouterArgs args = {};
      args.scaled = s.scaled;
      args.router = router;
      args.sums = memory.sums;
      args.positions = call.cache.positions;
      args.norm_tiles = shapes.embed / kTileRows;
      args.inverse_dim = 1.0f / static_cast<float>(shapes.embed);
      args.epsilon = call.epsilon;
      args.num_tokens = shapes.tokens;
      args.num_experts = shapes.experts;
      args.num_chosen = shapes.chosen;
      args.columns = shapes.embed;
      args.is_normalized = call.is_normalized;
      args.experts = memory.experts;
      args.shares = memory.shares;
      experts::launch_router<W>(step.sequence(), shapes, memory, args);
    }
    x = out;
    chosen.x = s.scaled;
    chosen.is_ordered = true;
    chosen.gate_up = call.expert_gate_up;
    chosen.down = call.expert_down;
    chosen.experts = memory.experts;
    chosen.shares = memory.shares;
    chosen.sums = memory.sums;
    chosen.epsilon = call.epsilon;
    chosen.residual = out;
    chosen.next_gain = layer + 1 == first + num_layers ? nullptr : gain(w.input_norm, layer + 1);
    chosen.out = out;
    chosen.scaled_out = s.scaled;
    chosen.sums_out = memory.sums;
    experts::launch_experts<W, P>(step.sequence(), shapes, memory, layer, call.num_layers, chosen);
    memory.experts += shapes.choices();
    step.norm_tiles = has_row_pipelines ? shapes.embed / 16 : 0;
  }
  return step.error();
}

}  // namespace

template <>
std::string run_expert_layers(const ExpertLayers<Bf16Weights>& call, const bf16* x, bf16* out, int first,
                              int num_layers, cudaStream_t stream, size_t* needed) {
  return run_as<Bf16Weights, Bf16Weights>(call, x, out, first, num_layers, stream, needed);
}

template <>
std::string run_expert_layers(const ExpertLayers<Fp8Weights>& call, const bf16* x, bf16* out, int first, int num_layers,
                              cudaStream_t stream, size_t* needed) {
  const auto run = [&](auto format) {
    return run_as<Fp8Weights, decltype(format)>(call, x, out, first, num_layers, stream, needed);
  };
  // Two products by split activations are faster than a conversion in registers for up to 32 tokens.
  const int tokens = call.shapes.batch;
  if (tokens > experts::kFewTokens && tokens <= tuned::kMostSplitTokens) return run(RoutedFp8Weights());
  // Tokens are the rows of these products, and 16 rows of weights share a scale.
  const auto has_blocks = [](const Scales& s) { return s.rows_each % 16 == 0 && s.columns_log2 >= 7; };
  const bool has_row_blocks = has_blocks(call.weights.qkv.scales) && has_blocks(call.weights.o.scales);
  if (tokens >= tuned::kFewestRoutedSingleTokens && call.shapes.head_dim == 128 && has_row_blocks) {
    return run(RoutedSingleFp8Weights());
  }
  return tokens == 1 ? run(OneTokenFp8Weights()) : run(Fp8Weights());
}

}  // namespace meshserve
